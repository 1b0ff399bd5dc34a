"""torch state <-> the files of a checkpoint.

torch.distributed.checkpoint plans who writes and reads what, so a checkpoint reshards to any world
size and strategy. Its own metadata is a pickle; ours is JSON (`index-a<attempt>.json`): for each
tensor its dtype, shape and chunks, for each chunk the file and the byte range. A rank's chunks lie
one after the other in its shard file. Nothing in a checkpoint is ever unpickled.
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trainer.spec.errors import CheckpointError, CorruptCheckpoint, StorageError, VitraError
from trainer.store.manifest import FileEntry

T = TypeVar("T")

INDEX_VERSION = 1
#: How many threads a load has, and how much memory it needs beside the tensors at most, or that of
#: one chunk.
_READERS = 4
_EXTRA_BYTES = 96 << 20
#: Chunks begin at multiples of this many bytes, so that a mapped file gives aligned tensors.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Chunk:
    """Where one chunk of a tensor lies: `length` bytes of `file` from `start`."""

    file: str
    start: int
    length: int


#: Writes a new file of the checkpoint from its parts; returns what the manifest says of it.
CreateFile = Callable[[str, Iterable[memoryview]], FileEntry]
#: (file, start, target) -> how many bytes of `target` could be filled; called by several threads.
ReadInto = Callable[[str, int, memoryview], int]


def save_tensors(
    tensors: dict[str, Tensor],
    *,
    shard_name: str,
    create: CreateFile,
    group: dist.ProcessGroup | None,
    written: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], list[FileEntry]] | None:
    """Write `tensors`, each byte once however many ranks hold it.

    Collective over `group`; every rank passes the same names. On rank 0 returns the index (a JSON
    object; its key "state" is the caller's to fill) and the entries of all shard files, elsewhere
    None. Nothing is committed: the shards count only once a manifest lists them. `written` is
    called on each rank when its own shard is written, before it waits for the others'.

    Raises:
        StorageError (or the VitraError that a rank met): on every rank, if one could not write.
    """
    writer = _ShardWriter(shard_name, create, written)
    # The state is flat already, so the planner must not rename anything.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _in_group(group) as arguments:
        save(tensors, storage_writer=writer, planner=planner, **arguments)
    return None if writer.index is None else (writer.index, writer.entries)


@dataclass(frozen=True)
class StagedShard:
    """A rank's shard in host memory, before it is written.

    Attributes:
        name: what its file is to be called.
        data: its content; None where this rank has nothing to write.
        index: on rank 0 the index, which takes the files to be called as they are to be.
    """

    name: str
    data: memoryview | None
    index: dict[str, Any] | None

    def index_of(self, written: Mapping[str, str]) -> dict[str, Any]:
        """The index, with the names that the files got in the end; on rank 0."""
        assert self.index is not None
        tensors = {
            name: {
                **tensor,
                "chunks": [{**one, "file": written[one["file"]]} for one in tensor["chunks"]],
            }
            for name, tensor in self.index["tensors"].items()
        }
        return {**self.index, "tensors": tensors}


def stage_tensors(
    tensors: dict[str, Tensor],
    *,
    shard_name: str,
    buffer: HostBuffer,
    group: dist.ProcessGroup | None,
) -> StagedShard:
    """Copy what this rank is to write of `tensors` into `buffer`, laid out as in its file.

    Collective over `group`, as `save_tensors`. The tensors may change once this returns; the buffer
    must not be used again before the shard is written.
    """
    writer = _ShardStager(shard_name, buffer)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _in_group(group) as arguments:
        save(tensors, storage_writer=writer, planner=planner, **arguments)
    return StagedShard(shard_name, writer.data, writer.index)


def load_tensors(
    tensors: dict[str, Tensor],
    index: Metadata,
    *,
    read: ReadInto,
    group: dist.ProcessGroup | None,
    skip: Container[str] = (),
) -> None:
    """Fill `tensors` in place from a checkpoint, each rank reading only what it needs.

    Collective over `group`. Every name must be in the index, with the same global shape: check that
    first (`tensor_shapes`). Every rank passes the same names; those that it has in `skip` it leaves
    as they are.
    """
    reader = _ShardReader(index, read)
    planner = _PartialLoadPlanner(skip)
    with _in_group(group) as arguments:
        load(tensors, storage_reader=reader, planner=planner, **arguments)


def index_file(names: Iterable[str]) -> str:
    """The name of the index among the files of a checkpoint. Raises CorruptCheckpoint."""
    for name in names:
        if name.startswith("index-"):
            return name
    raise CorruptCheckpoint("the manifest lists no index file")


def parse_index(data: bytes, files: Mapping[str, int]) -> tuple[Metadata, dict[str, Any]]:
    """Read an index file: the tensors' places, and its "state".

    `files` gives the sizes in bytes of the checkpoint's files, as its manifest has them. Nothing is
    read or allocated that they do not hold.

    Raises:
        CorruptCheckpoint: it is not an index that this version wrote for these files.
    """
    try:
        document = json.loads(data)
        if document["version"] != INDEX_VERSION:
            raise CorruptCheckpoint(f"index version {document['version']!r} is not {INDEX_VERSION}")
        state = dict(document["state"])
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, Chunk] = {}
        for name, entry in document["tensors"].items():
            chunks = []
            for number, chunk in enumerate(entry["chunks"]):
                offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
                chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
                place = Chunk(str(chunk["file"]), int(chunk["start"]), int(chunk["length"]))
                places[MetadataIndex(name, offsets, number)] = place
            tensors[name] = info = TensorStorageMetadata(
                properties=TensorProperties(dtype=_dtype(entry["dtype"])),
                size=torch.Size(entry["shape"]),
                chunks=chunks,
            )
            _check_places(name, info, places, files)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as err:
        raise CorruptCheckpoint(f"unreadable index: {type(err).__name__}: {err}") from err
    except RecursionError:
        raise CorruptCheckpoint("unreadable index: nested too deeply") from None
    return Metadata(state_dict_metadata=tensors, storage_data=places), state


def tensor_shapes(index: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Global shape and dtype of each tensor in a checkpoint."""
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


@contextmanager
def _in_group(group: dist.ProcessGroup | None) -> Iterator[dict[str, Any]]:
    """How torch is told who takes part; what fails in there is raised as one of our errors."""
    alone = not dist.is_initialized() or dist.get_world_size(group) == 1
    with warnings.catch_warnings():
        # One process alone is no mistake here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield {"process_group": None if alone else group, "no_dist": alone}
        except CheckpointException as err:
            raise _first_failure(err) from err


class HostBuffer:
    """Host memory that is used again and again: new memory costs several times a copy.

    Args:
        pinned: so that a GPU copies into it by itself.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._held = torch.empty(0, dtype=torch.uint8)

    def warm(self, size_bytes: int) -> None:
        """Have so many bytes ready, so that not even the first taker waits for them."""
        self.take(size_bytes).zero_()

    def take(self, size_bytes: int) -> Tensor:
        """So many bytes; what the last taker had is no longer its own."""
        if self._held.numel() < size_bytes:
            self._held = torch.empty(0, dtype=torch.uint8)  # before there are two
            self._held = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        return self._held[:size_bytes]


class _IndexWriter(StorageWriter):
    """Puts the index together on rank 0; what becomes of the chunks is for `write_data`."""

    def __init__(self, shard_name: str) -> None:
        self._shard_name = shard_name
        self.index: dict[str, Any] | None = None
        self.entries: list[FileEntry] = []

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places: dict[MetadataIndex, Chunk] = {}
        entries: dict[str, FileEntry] = {}
        for result in (result for of_rank in results for result in of_rank):
            chunk, entry = result.storage_data
            places[result.index] = chunk
            if entry is not None:
                entries[entry.name] = entry
        tensors = {}
        for name, info in metadata.state_dict_metadata.items():
            assert isinstance(info, TensorStorageMetadata), (
                f"{name}: only tensors go into a checkpoint"
            )
            tensors[name] = {
                "dtype": str(info.properties.dtype).removeprefix("torch."),
                "shape": list(info.size),
                "chunks": [
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        **vars(places[MetadataIndex(name, chunk.offsets)]),
                    }
                    for chunk in info.chunks
                ],
            }
        self.index = {"version": INDEX_VERSION, "state": {}, "tensors": tensors}
        self.entries = [entries[name] for name in sorted(entries)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003 - the base class's signature
        return False  # a checkpoint is never named by path here


def _laid_out(plan: SavePlan, planner: SavePlanner) -> Iterator[tuple[WriteItem, Tensor, int]]:
    """What a rank is to write, with where each tensor begins in its shard; one after the other."""
    end = 0
    for item in plan.items:
        assert item.type != WriteItemType.BYTE_IO, (
            f"{item.index.fqn}: only tensors go into a checkpoint"
        )
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        yield item, tensor, start
        end = start + tensor.nbytes


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


class _ShardStager(_IndexWriter):
    """Copies one rank's chunks into host memory."""

    def __init__(self, shard_name: str, buffer: HostBuffer) -> None:
        super().__init__(shard_name)
        self._buffer = buffer
        self.data: memoryview | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        copies: list[tuple[int, Tensor]] = []
        for item, tensor, start in _laid_out(plan, planner):
            copies.append((start, tensor))
            chunk = Chunk(self._shard_name, start, tensor.nbytes)
            results.append(WriteResult(item.index, tensor.nbytes, (chunk, None)))
        if copies:
            self.data = self._copied(copies)
        return _done(results)

    def _copied(self, copies: list[tuple[int, Tensor]]) -> memoryview:
        last_start, last = copies[-1]
        buffer = self._buffer.take(last_start + last.nbytes)
        filled = 0
        for start, tensor in copies:
            buffer[filled:start] = 0
            filled = start + tensor.nbytes
            if tensor.numel():
                # Views of the buffer in the tensor's own dtype: it is aligned for each.
                target = buffer[start:filled].view(tensor.dtype).reshape(tensor.shape)
                target.copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for _, tensor in copies):
            torch.cuda.synchronize()
        return memoryview(buffer.numpy().data)


class _ShardWriter(_IndexWriter):
    """Writes one rank's chunks into one new file."""

    def __init__(self, shard_name: str, create: CreateFile, written: Callable[[], None]) -> None:
        super().__init__(shard_name)
        self._create = create
        self._written = written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []

        def parts() -> Iterator[memoryview]:
            end = 0
            for item, tensor, start in _laid_out(plan, planner):
                data = bytes_of(tensor)
                if start > end:
                    yield memoryview(bytes(start - end))
                yield data
                end = start + len(data)
                results.append(
                    WriteResult(item.index, len(data), Chunk(self._shard_name, start, len(data)))
                )

        if plan.items:
            entry = self._create(self._shard_name, parts())
            # The store may have had to take another name, where a failed save left this one behind.
            results = [
                WriteResult(
                    r.index,
                    r.size_in_bytes,
                    (Chunk(entry.name, r.storage_data.start, r.storage_data.length), entry),
                )
                for r in results
            ]
        self._written()
        return _done(results)


class _PartialLoadPlanner(DefaultLoadPlanner):
    """Plans to read all tensors but some."""

    def __init__(self, skip: Container[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._skip = skip

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return replace(
            plan, items=[item for item in plan.items if item.dest_index.fqn not in self._skip]
        )


class _ShardReader(StorageReader):
    """Copies byte ranges of shard files into the tensors that a load plan names."""

    def __init__(self, index: Metadata, read: ReadInto) -> None:
        self._index = index
        self._read = read

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        return self._index

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        running: deque[tuple[int, concurrent.futures.Future[None]]] = deque()
        extra_bytes = 0
        with concurrent.futures.ThreadPoolExecutor(_READERS, "load") as pool:
            try:
                for item in plan.items:
                    assert item.type != LoadItemType.BYTE_IO, "only tensors are in a checkpoint"
                    target = planner.resolve_tensor(item).detach()
                    length = self._index.storage_data[item.storage_index].length
                    extra = 0 if _is_plain(target, length) else length
                    while running and extra and extra_bytes + extra > _EXTRA_BYTES:
                        held, future = running.popleft()
                        future.result()
                        extra_bytes -= held
                    running.append((extra, pool.submit(self._read_item, item, target)))
                    extra_bytes += extra
                for _, future in running:
                    future.result()
            finally:
                for _, future in running:
                    future.cancel()
        for item in plan.items:
            planner.commit_tensor(item, planner.resolve_tensor(item).detach())
        return _done(None)

    def _read_item(self, item: ReadItem, target: Tensor) -> None:
        """Fill `target` with the part that `item` names of one chunk."""
        place = self._index.storage_data[item.storage_index]
        info = self._index.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(info, TensorStorageMetadata)
        dtype = info.properties.dtype
        sizes = next(c.sizes for c in info.chunks if c.offsets == item.storage_index.offset)
        # Into the tensor itself where its memory is laid out as the file is.
        is_direct = _is_plain(target, place.length) and (target.shape, target.dtype) == (
            sizes,
            dtype,
        )
        chunk = target if is_direct else torch.empty(sizes, dtype=dtype)
        view = bytes_of(chunk)
        found = self._read(place.file, place.start, view) if len(view) else 0
        if found != place.length or found != len(view):
            raise CorruptCheckpoint(f"{place.file}: {item.storage_index.fqn} has {found} bytes")
        if not is_direct:
            for dimension, (offset, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                chunk = chunk.narrow(dimension, offset, length)
            target.copy_(chunk)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003 - the base class's signature
        return False


def bytes_of(tensor: Any) -> memoryview:
    """The tensor's elements as bytes, in C order; of a contiguous CPU tensor without a copy."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _is_plain(tensor: Tensor, size_bytes: int) -> bool:
    """Whether the memory of a tensor can be filled with so many bytes in one go."""
    return tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes == size_bytes


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpoint(f"unknown dtype {name!r} in the index")
    return dtype


def _check_places(
    name: str,
    info: TensorStorageMetadata,
    places: Mapping[MetadataIndex, Chunk],
    files: Mapping[str, int],
) -> None:
    """Refuse chunks that lie outside their tensor or their file, or do not make up the tensor.

    What no chunk covers would silently keep the values that were there before the load.
    """
    covered = 0
    for number, chunk in enumerate(info.chunks):
        place = places[MetadataIndex(name, chunk.offsets, number)]
        elements = math.prod(chunk.sizes)
        inside = len(chunk.sizes) == len(chunk.offsets) == len(info.size) and all(
            min(offset, size) >= 0 and offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, info.size, strict=True)
        )
        if not inside or place.length != elements * info.properties.dtype.itemsize:
            raise CorruptCheckpoint(f"the index: a chunk of {name} does not fit into the tensor")
        if place.file not in files:
            raise CorruptCheckpoint(f"the index: {place.file} is not listed in the manifest")
        if place.start < 0 or place.start + place.length > files[place.file]:
            raise CorruptCheckpoint(
                f"the index: {name} lies at bytes {place.start} to {place.start + place.length} of "
                f"{place.file}, which has {files[place.file]}"
            )
        covered += elements
    if covered != math.prod(info.size):
        raise CorruptCheckpoint(f"the index: the chunks of {name} do not make up the whole tensor")


def _first_failure(err: CheckpointException) -> VitraError:
    """The error of the lowest failing rank, as one of ours.

    CheckpointException is no Exception but a BaseException, so it must not travel further.
    """
    rank, (cause, _) = min(err.failures.items())
    if isinstance(cause, VitraError):
        return cause
    if isinstance(cause, OSError):
        return StorageError(f"rank {rank}: {cause}")
    return CheckpointError(f"rank {rank}: {type(cause).__name__}: {cause}")
