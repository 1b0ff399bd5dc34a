"""S3 as a place for checkpoints: what the store relies on, and what a user is told."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.conftest import run_python
from tests.s3.fixtures import look_at, running_server
from tests.s3.server import S3Server
from trainer.spec.errors import StorageError, UsageError
from trainer.store.s3 import S3Storage, part_bytes
from trainer.store.s3_client import S3Client

pytestmark = pytest.mark.slow

#: Enough for an upload in parts.
LARGE = 11 << 20


def large(seed: int = 0) -> bytes:
    return (seed.to_bytes(8, "big") + bytes(range(256)) * 4096)[: 1 << 20] * (LARGE >> 20)


def open_uploads(place: S3Storage) -> list[str]:
    """The keys of uploads under a place that are neither completed nor aborted."""
    return [upload["Key"] for upload in place._uploads()]


def test_ten_thousand_parts_are_the_largest_object_that_there_may_be() -> None:
    sizes = [part_bytes(number) for number in range(1, 10_001)]
    assert sum(sizes) >= 5 << 40
    assert max(sizes) <= 5 << 30
    assert min(sizes) >= 5 << 20


def test_small_and_large_files(s3_place: S3Storage) -> None:
    data = large()
    contents = {"step-1/empty": b"", "step-1/small.bin": b"abc", "step-1/large.bin": data}
    for name, content in contents.items():
        view = memoryview(content)
        s3_place.create(name, [view[:1], b"", view[1:1000], view[1000:]])
        assert s3_place.size(name) == len(content)
        assert s3_place.read(name) == content
        assert s3_place.read_range(name, 1, 1) == content[1:2]
        assert s3_place.read_range(name, 1000, len(content)) == content[1000:]
        assert s3_place.read_range(name, len(content), 5) == b""
    assert s3_place.names("step-1") == ["empty", "large.bin", "small.bin"]
    assert s3_place.names() == ["step-1/"]
    assert open_uploads(s3_place) == []


def test_sixty_megabytes_in_a_dozen_parts(s3_place: S3Storage) -> None:
    data = os.urandom(60 << 20)
    s3_place.create("step-1/large.bin", [memoryview(data)])
    assert s3_place.size("step-1/large.bin") == len(data)
    target = bytearray(len(data) + 1)
    assert s3_place.read_into("step-1/large.bin", 0, memoryview(target)) == len(data)
    assert target[:-1] == data
    assert b"".join(map(bytes, s3_place.stream("step-1/large.bin"))) == data
    assert open_uploads(s3_place) == []


def test_what_is_not_there_is_an_answer(s3_place: S3Storage) -> None:
    assert s3_place.names() == s3_place.names("step-1") == []
    assert s3_place.size("a") is None
    assert not s3_place.remove("a")
    assert not s3_place.replace("a", b"new", expected=b"old")
    for read in (lambda: s3_place.read("a"), lambda: s3_place.read_range("a", 0, 1)):
        with pytest.raises(FileNotFoundError):
            read()


def test_a_neighbour_whose_name_begins_alike_is_another_place(s3_uri: str) -> None:
    one, ten = S3Storage(f"{s3_uri}/run-1"), S3Storage(f"{s3_uri}/run-10/")
    ten.claim("owner.json", b"{}")
    ten.create("step-1/a", [b"x"])
    assert one.names() == []
    assert one.size("owner.json") is None
    assert ten.uri == f"{s3_uri}/run-10"


def test_an_error_amid_the_content_leaves_nothing(s3_place: S3Storage) -> None:
    def content() -> Iterator[bytes]:
        yield large()
        raise OSError("the disk that it comes from")

    for stop in (content, lambda: (part for part in [b"a", 1 / 0])):
        with pytest.raises((OSError, ZeroDivisionError)):
            s3_place.create("step-1/a", stop())
    assert s3_place.names("step-1") == []
    assert open_uploads(s3_place) == []


def test_a_name_that_is_taken_costs_no_chunk(s3_place: S3Storage) -> None:
    s3_place.claim("a", b"x")
    chunks = iter([b"y"])
    with pytest.raises(FileExistsError):
        s3_place.create("a", chunks)
    assert next(chunks) == b"y"
    assert s3_place.read("a") == b"x"


def test_a_name_taken_during_the_upload_is_not_replaced(s3_place: S3Storage) -> None:
    def content() -> Iterator[bytes]:
        yield large()
        assert s3_place.claim("a", b"theirs")
        yield b"more"

    with pytest.raises(StorageError, match="another process has just written it"):
        s3_place.create("a", content())
    assert s3_place.read("a") == b"theirs"
    assert open_uploads(s3_place) == []


def test_one_of_many_wins(s3_uri: str) -> None:
    def race(numbers: range, act: Callable[[S3Storage, bytes], bool]) -> bytes:
        won: list[bytes] = []

        def run(word: bytes) -> None:
            if act(S3Storage(s3_uri), word):
                won.append(word)

        threads = [threading.Thread(target=run, args=(b"%d" % n,)) for n in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        (winner,) = won
        assert S3Storage(s3_uri).read("a") == winner
        return winner

    first = race(range(8), lambda place, word: place.claim("a", word))
    race(range(8, 16), lambda place, word: place.replace("a", word, expected=first))


def test_uploads_of_the_killed_are_aborted_and_no_others(s3_place: S3Storage, s3_uri: str) -> None:
    client = S3Client(s3_uri, {}, 30)
    bucket, _, prefix = s3_uri.removeprefix("s3://").partition("/")
    for key in ("step-1/shard-a1-r0.bin", "step-1/shard-a2-r0.bin", "notes.bin"):
        client.call("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{key}")
    client.call("create_multipart_upload", Bucket=bucket, Key=f"{prefix}0/step-1/shard-a1-r0.bin")
    assert s3_place.abort_uploads(lambda name: "a1" in name) == 1
    left = [f"{prefix}/notes.bin", f"{prefix}/step-1/shard-a2-r0.bin"]
    assert sorted(open_uploads(s3_place)) == left
    assert len(open_uploads(S3Storage(f"{s3_uri}0"))) == 1


def test_a_forked_child_has_its_own_connection(s3_place: S3Storage) -> None:
    s3_place.claim("parent", b"")
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if s3_place.claim("child", b"") and s3_place.read("parent") == b"" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert s3_place.names() == ["child", "parent"]


@pytest.mark.timeout(240)
def test_data_workers_are_forked_while_a_save_goes_on(s3_place: S3Storage, s3_uri: str) -> None:
    """Fifty times, from a process with connections, a loop and threads of its own: none hangs."""
    for number in range(4):
        s3_place.claim(f"sample-{number}", bytes([number]))
    over = threading.Event()

    def save() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            S3Storage(s3_uri, piece_bytes=5 << 20).create(f"shard-{number}", [bytes(6 << 20)])
            s3_place.remove(f"shard-{number}")

    class Samples:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return s3_place.read(f"sample-{index}")[0]

    saving = threading.Thread(target=save)
    saving.start()
    try:
        for _ in range(50):
            loader = DataLoader(Samples(), num_workers=2, timeout=60)  # pyright: ignore[reportArgumentType]
            assert [int(sample) for sample in loader] == [0, 1, 2, 3]
    finally:
        over.set()
        saving.join(60)
    assert not saving.is_alive()


def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies travel in another form then, and the server's certificate is looked at."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    words = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", "rsa:2048"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*words, *names, *files], check=True, capture_output=True)
    data = large()
    with running_server(S3Server(tmp_path / "s3", tls=(certificate, key))) as server:
        look_at(server, monkeypatch)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.tls_endpoint)
        uri = f"s3://{server.bucket}/place"
        with pytest.raises(StorageError, match="SSL"):
            S3Storage(uri, patience_s=2).probe()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        place = S3Storage(uri, piece_bytes=5 << 20)
        place.probe()
        place.create("step-1/large.bin", [data])
        assert place.read("step-1/large.bin") == data
        target = bytearray(len(data) - 1000)
        assert place.read_into("step-1/large.bin", 1000, memoryview(target)) == len(target)
        assert target == data[1000:]
        assert b"".join(map(bytes, place.stream("step-1/large.bin"))) == data
        assert open_uploads(place) == []


# -- The probe ---------------------------------------------------------------------------------


def test_the_probe_leaves_the_place_as_it_was(s3_place: S3Storage) -> None:
    s3_place.claim("notes", b"mine")
    s3_place.probe()
    assert s3_place.names() == ["notes"]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


#: What is wrong with the environment -> what the user is told.
FAULTS: dict[str, tuple[dict[str, str | None], str]] = {
    "wrong secret": ({"AWS_SECRET_ACCESS_KEY": "nonsense-marker"}, "secret does not belong to"),
    "unknown key": ({"AWS_ACCESS_KEY_ID": "nobody"}, "InvalidAccessKeyId: .*server does not know"),
    "no keys": (
        {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
        "Unable to locate credentials; set AWS_ACCESS_KEY_ID",
    ),
    "no profile": ({"AWS_PROFILE": "absent"}, "absent.*; set AWS_ACCESS_KEY_ID"),
    "reader": (
        {"AWS_ACCESS_KEY_ID": S3Server.reader[0], "AWS_SECRET_ACCESS_KEY": S3Server.reader[1]},
        "AccessDenied: .*; the key needs to read, write, list and delete",
    ),
    "nobody there": (
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:CLOSED"},
        "EndpointConnectionError: .*; see that the server runs.*AWS_ENDPOINT_URL",
    ),
    "not S3's port": (
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:MASTER"},
        "at http.*: NoSuchKey: Not Found",
    ),
    "https of http": ({"AWS_ENDPOINT_URL": "https://127.0.0.1:PORT"}, "SSL"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_place_is_said(
    fault: str, s3: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, message = FAULTS[fault]
    ports = {"CLOSED": closed_port(), "MASTER": s3.port + 1, "PORT": s3.port}
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name)
            continue
        for word, port in ports.items():
            value = value.replace(word, str(port))
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=message) as caught:
        S3Storage(s3_uri, patience_s=2).probe()
    assert str(caught.value).startswith(s3_uri)
    assert "marker" not in str(caught.value)


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_is_not_there_is_said() -> None:
    with pytest.raises(StorageError, match=r"NoSuchBucket: .*; make the bucket, or correct"):
        S3Storage("s3://absent-bucket/x").probe()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonsense": 1}, "checkpoint.storage_options: s3fs cannot use them: .*nonsense"),
        ({"endpoint_url": "host:9000"}, "an endpoint is a URL"),
    ],
)
def test_options_that_s3fs_does_not_take_are_said(
    options: dict[str, Any], message: str, s3_uri: str
) -> None:
    with pytest.raises(UsageError, match=message):
        S3Storage(s3_uri, options, patience_s=2).probe()


def test_an_endpoint_may_be_an_option(
    s3: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    S3Storage(s3_uri, {"endpoint_url": s3.endpoint}).probe()


def test_a_reader_can_read(
    s3: S3Server, s3_place: S3Storage, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_place.create("step-1/a", [b"x"])
    look_at(s3, monkeypatch, s3.reader)
    reader = S3Storage(s3_uri)
    assert reader.names("step-1") == ["a"]
    assert reader.read("step-1/a") == b"x"


def test_importing_the_store_loads_no_s3() -> None:
    """A command that looks at a directory does not wait for a client that it has no use for."""
    heavy = run_python(
        "import trainer.store.checkpoints, sys; print({'s3fs', 'fsspec'} & sys.modules.keys())"
    )
    assert heavy == "set()\n"
