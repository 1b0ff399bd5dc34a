"""Tensors to files and back: every byte, nothing pickled, and no damage that goes unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.checkpoint.codec import (
    INDEX_VERSION,
    HostBuffer,
    index_file,
    load_tensors,
    parse_index,
    save_tensors,
    stage_tensors,
    tensor_shapes,
)
from trainer.spec.errors import CorruptCheckpoint, StorageError
from trainer.store.manifest import Digest, FileEntry
from trainer.store.storage import LocalStorage

TENSORS: dict[str, Tensor] = {
    "fp32": torch.randn(5, 7),
    "bf16": torch.randn(3, 3).to(torch.bfloat16),
    "fp16": torch.randn(9).to(torch.float16),
    "fp64": torch.randn(2, 1, 2, dtype=torch.float64),
    "int64": torch.tensor([[-(2**63), 2**63 - 1, 0]]),
    "uint8": torch.arange(11, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "strided": torch.arange(20.0)[::3],
    "a.name.with.dots": torch.ones(1),
}


class Directory:
    """One checkpoint's files, written as the store does it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, int] = {}

    def create(self, name: str, parts: Iterable[memoryview]) -> FileEntry:
        digest = Digest()
        with (self.path / name).open("xb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
        self.files[name] = digest.size_bytes
        return FileEntry(name=name, size_bytes=digest.size_bytes, digest=digest.text)

    def save(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        written = save_tensors(tensors, shard_name="shard.bin", create=self.create, group=None)
        assert written is not None
        index, entries = written
        assert {entry.name: entry.size_bytes for entry in entries} == self.files
        # It goes through a file: what JSON cannot hold would show here.
        return json.loads(json.dumps(index, allow_nan=False))

    def load(self, index: dict[str, Any]) -> dict[str, Tensor]:
        parsed, _ = parse_index(json.dumps(index).encode(), self.files)
        tensors = {
            name: torch.full(shape, 1, dtype=dtype)
            for name, (shape, dtype) in tensor_shapes(parsed).items()
        }
        load_tensors(tensors, parsed, read=LocalStorage(self.path).read_into, group=None)
        return tensors


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    assert_equal(directory.load(directory.save(TENSORS)), TENSORS)


def test_what_is_staged_is_what_would_be_written(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    index = directory.save(TENSORS)
    buffer = HostBuffer(pinned=False)
    buffer.take(1 << 20).fill_(255)
    first = stage_tensors(TENSORS, shard_name="shard.bin", buffer=buffer, group=None)
    assert first.data is not None
    assert bytes(first.data) == (tmp_path / "shard.bin").read_bytes()
    assert first.index_of({"shard.bin": "shard.bin"})["tensors"] == index["tensors"]
    renamed = first.index_of({"shard.bin": "shard-t2.bin"})["tensors"]
    assert {one["file"] for t in renamed.values() for one in t["chunks"]} == {"shard-t2.bin"}
    # The same memory again: it is what the first save is not to be slower for.
    again = stage_tensors(TENSORS, shard_name="shard.bin", buffer=buffer, group=None)
    assert again.data is not None
    assert again.data.tobytes() == first.data.tobytes()
    assert buffer.take(1).data_ptr() == buffer.take(1 << 20).data_ptr()


def test_saving_does_not_touch_the_tensors(tmp_path: Path) -> None:
    tensors = {"live": torch.nn.Parameter(torch.ones(3)), "view": torch.arange(6.0)[::2]}
    before = {name: raw(tensor) for name, tensor in tensors.items()}
    Directory(tmp_path).save(tensors)
    assert {name: raw(tensor) for name, tensor in tensors.items()} == before
    assert tensors["live"].requires_grad


def test_loading_fills_the_tensors_that_are_there(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    index = directory.save({"w": torch.arange(4.0), "other": torch.ones(2)})
    parameter = torch.nn.Parameter(torch.zeros(4))
    parsed, _ = parse_index(json.dumps(index).encode(), directory.files)
    load_tensors({"w": parameter}, parsed, read=LocalStorage(tmp_path).read_into, group=None)
    assert parameter.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert parameter.requires_grad


def test_the_index_says_where_the_plain_bytes_are(tmp_path: Path) -> None:
    """No pickle and no container: JSON, and in the shard a tensor's own bytes, aligned."""
    directory = Directory(tmp_path)
    index = directory.save(TENSORS)
    assert index["version"] == INDEX_VERSION
    assert index["state"] == {}
    shard = (tmp_path / "shard.bin").read_bytes()
    used = 0
    for name, tensor in TENSORS.items():
        entry = index["tensors"][name]
        (chunk,) = entry["chunks"]
        assert entry["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert entry["shape"] == chunk["sizes"] == list(tensor.shape)
        assert chunk["start"] % 64 == 0
        assert shard[chunk["start"] : chunk["start"] + chunk["length"]] == raw(tensor)
        used += chunk["length"]
    assert used <= len(shard) < used + 64 * len(TENSORS)


def test_the_state_travels_with_the_index(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    index = directory.save({"w": torch.ones(1)})
    index["state"] = {"schedule": {"last_step": 3}, "groups": {"a": ["w"]}}
    _, state = parse_index(json.dumps(index).encode(), directory.files)
    assert state == index["state"]


def test_the_index_is_found_by_its_name() -> None:
    assert index_file(["shard-a1-r0.bin", "index-a1.json"]) == "index-a1.json"
    with pytest.raises(CorruptCheckpoint, match="no index file"):
        index_file(["shard-a1-r0.bin"])


# -- Damage ------------------------------------------------------------------------------------

Damage = Callable[[dict[str, Any]], Any]


def _chunk(index: dict[str, Any]) -> dict[str, Any]:
    return index["tensors"]["w"]["chunks"][0]


def _add_overlap(index: dict[str, Any]) -> None:
    chunks = index["tensors"]["w"]["chunks"]
    chunks.append({**chunks[0], "offsets": [2, 0]})


POISON: dict[str, Damage] = {
    "no dtype of torch": lambda i: i["tensors"]["w"].update(dtype="Tensor"),
    "unknown dtype": lambda i: i["tensors"]["w"].update(dtype="float33"),
    "dtype is no text": lambda i: i["tensors"]["w"].update(dtype=32),
    "another dtype": lambda i: i["tensors"]["w"].update(dtype="float64"),
    "huge shape": lambda i: i["tensors"]["w"].update(shape=[10**12, 10**6]),
    "beyond 64 bits": lambda i: i["tensors"]["w"].update(shape=[2**70, 4]),
    "huge chunk": lambda i: _chunk(i).update(sizes=[10**12, 4]),
    "negative shape": lambda i: i["tensors"]["w"].update(shape=[-4, -4]),
    "negative chunk": lambda i: _chunk(i).update(sizes=[-4, -4]),
    "negative offset": lambda i: _chunk(i).update(offsets=[-1, 0]),
    "shape of text": lambda i: i["tensors"]["w"].update(shape=["4", "4"]),
    "fractional shape": lambda i: i["tensors"]["w"].update(shape=[4.5, 4]),
    "other dimensions": lambda i: i["tensors"]["w"].update(shape=[16]),
    "chunk of other dimensions": lambda i: _chunk(i).update(sizes=[16]),
    "chunk outside the tensor": lambda i: _chunk(i).update(offsets=[1, 0]),
    "a smaller chunk": lambda i: _chunk(i).update(sizes=[3, 4], length=48),
    "overlapping chunks": _add_overlap,
    "no chunk": lambda i: i["tensors"]["w"].update(chunks=[]),
    "huge length": lambda i: _chunk(i).update(length=10**15),
    "negative start": lambda i: _chunk(i).update(start=-64),
    "beyond the file": lambda i: _chunk(i).update(start=64),
    "infinite start": lambda i: _chunk(i).update(start=float("inf")),
    "another file": lambda i: _chunk(i).update(file="../../etc/passwd"),
    "no file": lambda i: _chunk(i).pop("file"),
    "no chunks": lambda i: i["tensors"]["w"].pop("chunks"),
    "no shape": lambda i: i["tensors"]["w"].pop("shape"),
    "no tensors": lambda i: i.pop("tensors"),
    "no state": lambda i: i.pop("state"),
    "state is a list": lambda i: i.update(state=[1]),
    "no version": lambda i: i.pop("version"),
    "a newer version": lambda i: i.update(version=INDEX_VERSION + 1),
    "tensors are a list": lambda i: i.update(tensors=[i["tensors"]["w"]]),
    "a tensor is a text": lambda i: i["tensors"].update(w="w"),
}


@pytest.mark.parametrize("damage", POISON.values(), ids=POISON.keys())
def test_a_poisoned_index_is_refused(tmp_path: Path, damage: Damage) -> None:
    directory = Directory(tmp_path)
    index = directory.save({"w": torch.ones(4, 4)})
    parse_index(json.dumps(index).encode(), directory.files)
    damage(index)
    with pytest.raises(CorruptCheckpoint):
        parse_index(json.dumps(index).encode(), directory.files)


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{", b"\xff\xfe", b"[" * 10**5])
def test_what_is_no_index_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        parse_index(data, {})


def test_a_shard_that_is_shorter_than_promised_is_an_error(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    index = directory.save({"w": torch.ones(4, 4)})
    shard = tmp_path / "shard.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpoint, match=r"shard\.bin: w has 63 bytes"):
        directory.load(index)


def test_a_shard_that_is_missing_is_an_error_of_the_storage(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    index = directory.save({"w": torch.ones(4, 4)})
    (tmp_path / "shard.bin").unlink()
    with pytest.raises(StorageError, match=r"rank 0: .*shard\.bin"):
        directory.load(index)


def test_a_write_that_fails_keeps_the_error_that_the_store_raised() -> None:
    def full(name: str, parts: Iterable[memoryview]) -> FileEntry:
        del parts
        raise StorageError(f"{name}: no space left", "make room")

    with pytest.raises(StorageError) as caught:
        save_tensors(TENSORS, shard_name="shard.bin", create=full, group=None)
    assert (caught.value.message, caught.value.hint) == ("shard.bin: no space left", "make room")
