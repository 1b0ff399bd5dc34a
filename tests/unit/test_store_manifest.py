"""The manifest: exact on the way out and back, and suspicious of everything else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from store_helpers import manifest_of

from trainer.spec.errors import CorruptCheckpoint
from trainer.store.manifest import (
    CheckpointManifest,
    Digest,
    FileEntry,
    attempt_of,
    index_name,
    shard_name,
)

DIGEST = "xxh3_128:" + "0123456789abcdef" * 2
MANIFEST = manifest_of(
    7, 2, [FileEntry(name=shard_name(2, rank), size_bytes=9, digest=DIGEST) for rank in (0, 1)]
)


def resealed(content: dict[str, object]) -> bytes:
    """The content as a writer would store it, with a right digest of itself."""
    content.pop("digest", None)
    body = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**content, "digest": Digest([body]).text}).encode()


def test_a_digest_does_not_depend_on_how_the_bytes_arrive() -> None:
    whole = Digest([bytes(range(200))])
    parts = Digest()
    parts.update(bytearray(range(100)))
    parts.update(b"")
    parts.update(memoryview(bytes(range(100, 200))).cast("B", (10, 10)))
    assert parts.text == whole.text
    assert parts.size_bytes == whole.size_bytes == 200
    # The algorithm's published value for no input: another hash would be another format.
    assert Digest().text == "xxh3_128:99aa06d3014798d86001c324468d497f"


def test_a_manifest_reads_back_equal() -> None:
    data = MANIFEST.to_bytes()
    assert CheckpointManifest.from_bytes(data) == MANIFEST
    assert json.loads(data)["files"][1]["name"] == "shard-a2-r1.bin"
    assert MANIFEST.size_bytes == 18
    assert MANIFEST.entry("shard-a2-r1.bin") is MANIFEST.files[1]
    with pytest.raises(KeyError):
        MANIFEST.entry("manifest.json")


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    good = MANIFEST.to_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = CheckpointManifest.from_bytes(bytes(bad))
    except CorruptCheckpoint:
        return
    assert read == MANIFEST  # white space between the values


@given(st.integers(0, len(MANIFEST.to_bytes()) - 3))
def test_no_beginning_of_a_manifest_is_one(length: int) -> None:
    with pytest.raises(CorruptCheckpoint):
        CheckpointManifest.from_bytes(MANIFEST.to_bytes()[:length])


@given(st.binary(max_size=40))
def test_no_other_file_is_a_manifest(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        CheckpointManifest.from_bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the manifest is empty"),
        (b"\0" * 4096, "the manifest is empty"),
        (b"[1]", "not a JSON object"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "differs from its own digest"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        CheckpointManifest.from_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2, this vitra reads 1; use the vitra that wrote it"),
        ({"step": "7"}, "step: Input should be a valid integer"),
        ({"step": -1}, "step: "),
        ({"attempt": 0}, "attempt: "),
        ({"files": []}, "files: "),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"files": [{"name": "../x", "size_bytes": 1, "digest": DIGEST}]}, r"files\.0\.name"),
        ({"files": [{"name": "a/b", "size_bytes": 1, "digest": DIGEST}]}, r"files\.0\.name"),
        ({"files": [{"name": "a\n", "size_bytes": 1, "digest": DIGEST}]}, r"files\.0\.name"),
        ({"files": [{"name": "a", "size_bytes": 1, "digest": "md5:00"}]}, r"files\.0\.digest"),
    ],
)
def test_a_well_sealed_manifest_of_another_shape_is_refused(
    change: dict[str, object], message: str
) -> None:
    content = {**json.loads(MANIFEST.to_bytes()), **change}
    with pytest.raises(CorruptCheckpoint, match=message):
        CheckpointManifest.from_bytes(resealed(content))


@pytest.mark.parametrize("name", [".", "..", "manifest.json", "", "a b", "a/b", "ä"])
def test_a_file_of_a_checkpoint_has_a_plain_name(name: str) -> None:
    with pytest.raises(ValidationError):
        FileEntry(name=name, size_bytes=0, digest=DIGEST)


def test_no_name_is_listed_twice() -> None:
    entry = FileEntry(name="shard-a1-r0.bin", size_bytes=0, digest=DIGEST)
    with pytest.raises(ValidationError, match="listed twice"):
        manifest_of(1, 1, [entry, entry])


def test_file_names_carry_their_attempt() -> None:
    assert attempt_of(shard_name(12, 3)) == 12
    assert attempt_of(index_name(4)) == attempt_of(index_name(4, 9)) == 4
    assert attempt_of("shard-a3-r0-t2.bin") == 3
    foreign = [
        "shard.bin",
        "shard-a0-r0.bin",
        "shard-a1-r0.bin.bak",
        "notes-a1.json",
        "shard-a٣.bin",
    ]
    assert [attempt_of(name) for name in foreign] == [None] * 5


def test_the_store_loads_nothing_heavy() -> None:
    code = "import sys, trainer.store.checkpoints; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert {"torch", "numpy", "fsspec", "s3fs", "submitit", "wandb"}.isdisjoint(loaded)
