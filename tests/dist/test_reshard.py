"""Checkpoints between worlds of other sizes and layouts: each byte once, each value the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from trainer.checkpoint.codec import (
    load_tensors,
    parse_index,
    save_tensors,
    tensor_shapes,
)
from trainer.checkpoint.spread import load_spread
from trainer.spec.errors import StorageError
from trainer.store.manifest import Digest, FileEntry
from trainer.store.storage import LocalStorage

pytestmark = pytest.mark.timeout(120)


def expected() -> dict[str, Tensor]:
    """The same on every rank: twelve matrices, and some of the odd kinds."""
    generator = torch.Generator().manual_seed(1)
    tensors = {f"layer{i}.weight": torch.randn(40, 25, generator=generator) for i in range(12)}
    return tensors | {
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "counter": torch.tensor(7.0),
        "ids": torch.arange(5),
        "empty": torch.empty(0, 3),
    }


class Model(nn.Module):
    """Its first dimensions are no multiples of two, so shards are unequal."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(6, 7) for _ in range(3))
        self.register_buffer("steps", torch.tensor(3.0))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def state(*, sharded: bool) -> dict[str, Tensor]:
    model = Model()
    if sharded:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model.state_dict()


def save_in(directory: str, rank: int, tensors: dict[str, Tensor]) -> None:
    def create(name: str, parts: Iterable[memoryview]) -> FileEntry:
        digest = Digest()
        with Path(directory, name).open("xb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
        return FileEntry(name=name, size_bytes=digest.size_bytes, digest=digest.text)

    group = dist.group.WORLD if dist.is_initialized() else None
    written = save_tensors(tensors, shard_name=f"shard-{rank}.bin", create=create, group=group)
    assert (written is not None) == (rank == 0)
    if written is not None:
        index, entries = written
        Path(directory, "index.json").write_text(json.dumps(index))
        files = {entry.name: entry.size_bytes for entry in entries}
        Path(directory, "files.json").write_text(json.dumps(files))


def load_from(directory: str, tensors: dict[str, Tensor]) -> None:
    files = json.loads(Path(directory, "files.json").read_bytes())
    index, _ = parse_index(Path(directory, "index.json").read_bytes(), files)
    assert tensor_shapes(index) == {n: (t.shape, t.dtype) for n, t in tensors.items()}
    group = dist.group.WORLD if dist.is_initialized() else None
    load_tensors(tensors, index, read=LocalStorage(Path(directory)).read_into, group=group)


# -- What the ranks do -------------------------------------------------------------------------


def save_replicated(rank: int, directory: str) -> None:
    save_in(directory, rank, expected())


def load_replicated(rank: int, directory: str) -> bool:
    del rank
    tensors = {name: torch.full_like(tensor, 9) for name, tensor in expected().items()}
    load_from(directory, tensors)
    return all(torch.equal(tensors[name], tensor) for name, tensor in expected().items())


def load_spread_out(rank: int, directory: str) -> tuple[bool, int]:
    """Whether all is there, and how many bytes this rank has read itself."""
    del rank
    files = json.loads(Path(directory, "files.json").read_bytes())
    index, _ = parse_index(Path(directory, "index.json").read_bytes(), files)
    tensors = {name: torch.full_like(tensor, 9) for name, tensor in expected().items()}
    taken: list[int] = []  # by several threads
    from_file = LocalStorage(Path(directory)).read_into

    def read(name: str, start: int, target: memoryview) -> int:
        taken.append(len(target))
        return from_file(name, start, target)

    group = dist.group.WORLD if dist.is_initialized() else None
    load_spread(tensors, index, read=read, group=group)
    return all(torch.equal(tensors[n], tensor) for n, tensor in expected().items()), sum(taken)


def save_sharded(rank: int, directory: str) -> None:
    save_in(directory, rank, state(sharded=True))


def save_plain(rank: int, directory: str) -> None:
    save_in(directory, rank, state(sharded=False))


def load_model(rank: int, directory: str, sharded: bool) -> bool:
    del rank
    tensors = state(sharded=sharded)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    load_from(directory, tensors)
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
    return all(torch.equal(whole[name], tensor) for name, tensor in state(sharded=False).items())


def save_on_a_full_disk(rank: int, directory: str) -> str:
    def create(name: str, parts: Iterable[memoryview]) -> FileEntry:
        if rank == 1:
            raise OSError(28, "No space left on device", name)
        data = b"".join(parts)
        return FileEntry(name=name, size_bytes=len(data), digest=Digest([data]).text)

    del directory
    try:
        save_tensors(
            expected(), shard_name=f"shard-{rank}.bin", create=create, group=dist.group.WORLD
        )
    except StorageError as err:
        return str(err)
    return "saved"


# -- The tests ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (2, 1), (4, 2)]
)
def test_replicated_tensors_between_worlds(tmp_path: Path, before: int, after: int) -> None:
    on_ranks(before, save_replicated, str(tmp_path))
    assert all(on_ranks(after, load_replicated, str(tmp_path)))


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_share_the_reading_and_each_byte_is_read_once(tmp_path: Path, world: int) -> None:
    on_ranks(world, save_replicated, str(tmp_path))
    answers = on_ranks(world, load_spread_out, str(tmp_path))
    assert all(good for good, _ in answers)
    total = sum(tensor.nbytes for tensor in expected().values())
    assert sum(taken for _, taken in answers) == total
    assert max(taken for _, taken in answers) <= 1.1 * total / world


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_writing_and_each_byte_is_written_once(tmp_path: Path, world: int) -> None:
    on_ranks(world, save_replicated, str(tmp_path))
    index: dict[str, Any] = json.loads((tmp_path / "index.json").read_bytes())
    taken = {f"shard-{rank}.bin": 0 for rank in range(world)}
    for name, tensor in expected().items():
        (chunk,) = index["tensors"][name]["chunks"]
        assert chunk["length"] == tensor.nbytes
        taken[chunk["file"]] += chunk["length"]
    total = sum(tensor.nbytes for tensor in expected().values())
    assert sum(taken.values()) == total
    for name, size in taken.items():
        assert abs(size - total / world) < 0.25 * total / world, taken
        # The file has room for nothing that another one holds.
        assert size <= (tmp_path / name).stat().st_size < size + 64 * len(expected())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, True), (1, False)), ((1, False), (2, True)), ((2, True), (2, False))],
    ids=["sharded to one", "one to sharded", "sharded to replicated"],
)
def test_between_sharded_and_plain(
    tmp_path: Path, before: tuple[int, bool], after: tuple[int, bool]
) -> None:
    (world, sharded), (next_world, next_sharded) = before, after
    on_ranks(world, save_sharded if sharded else save_plain, str(tmp_path))
    index: dict[str, Any] = json.loads((tmp_path / "index.json").read_bytes())
    sizes = [chunk["sizes"] for chunk in index["tensors"]["layers.0.weight"]["chunks"]]
    assert sizes == ([[4, 6], [3, 6]] if sharded else [[7, 6]])
    assert all(on_ranks(next_world, load_model, str(tmp_path), next_sharded))


@pytest.mark.slow
def test_from_four_shards_to_two(tmp_path: Path) -> None:
    on_ranks(4, save_sharded, str(tmp_path))
    assert all(on_ranks(2, load_model, str(tmp_path), True))


def test_a_rank_that_cannot_write_fails_all_of_them(tmp_path: Path) -> None:
    answers = on_ranks(2, save_on_a_full_disk, str(tmp_path))
    assert len(set(answers)) == 1
    assert answers[0].startswith("rank 1: [Errno 28] No space left on device")
