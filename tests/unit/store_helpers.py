"""What the tests of the checkpoint store share: known content, saves, a hook on system calls."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.store.checkpoints import CheckpointRef, CheckpointStore
from trainer.store.lineage import claimed_attempt
from trainer.store.manifest import CheckpointManifest, FileEntry, index_name, shard_name
from trainer.store.storage import Chunk, Storage, flat

RUN = "quickstart-20260101-000000-abcd"
RANKS = 2


def content(step: int, attempt: int, rank: int, size: int = 3000) -> bytes:
    """The bytes that a rank of an attempt saves at a step; they differ for each of the three."""
    return random.Random(f"{step}/{attempt}/{rank}").randbytes(size)


def write_files(
    store: CheckpointStore, step: int, attempt: int, ranks: int = RANKS, size: int = 3000
) -> list[FileEntry]:
    entries = []
    for rank in range(ranks):
        data = content(step, attempt, rank, size)
        pieces = [data[:1000], memoryview(data)[1000:]]
        entries.append(store.create_file(step, shard_name(attempt, rank), pieces))
    entries.append(store.create_file(step, index_name(attempt), [b'{"step": %d}' % step]))
    return entries


def manifest_of(
    step: int, attempt: int, files: Iterable[FileEntry], run_id: str = RUN
) -> CheckpointManifest:
    return CheckpointManifest(
        run_id=run_id,
        step=step,
        epoch=0,
        samples_seen=8 * step,
        attempt=attempt,
        world_size=RANKS,
        strategy="ddp",
        spec_digest="0" * 32,
        files=tuple(files),
        created_at="2026-01-01T00:00:00+00:00",
    )


def save(
    store: CheckpointStore, step: int, attempt: int, ranks: int = RANKS, size: int = 3000
) -> CheckpointManifest:
    """A whole save: every rank's shard of `size` bytes, the index, the manifest."""
    files = write_files(store, step, attempt, ranks, size)
    manifest = manifest_of(step, attempt, files, store.run_id)
    assert store.commit(manifest) == ()
    return manifest


def holds_its_content(store: CheckpointStore, ref: CheckpointRef, size: int = 3000) -> bool:
    """Whether the shards are, byte for byte, what that attempt saves at that step."""
    shards = [entry.name for entry in ref.manifest.files if entry.name.startswith("shard-")]
    found = [store.storage.read(ref.path(name)) for name in shards]
    return found == [content(ref.step, ref.attempt, rank, size) for rank in range(len(shards))]


def flip_a_byte(store: CheckpointStore, step: int, name: str, at: int = 10) -> None:
    """Damage that leaves the size as it is."""
    path = f"step-{step:08d}/{name}"
    data = bytearray(store.storage.read(path))
    data[at] ^= 1
    store.storage.remove(path)
    store.storage.create(path, [data])


class MemoryStorage:
    """`Storage` as an object store has it: a flat map, no directories, conditional writes."""

    uri = "memory://place"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def names(self, directory: str = "") -> list[str]:
        prefix = f"{directory}/" if directory else ""
        rests = [name[len(prefix) :] for name in self.files if name.startswith(prefix)]
        return sorted({rest.partition("/")[0] + rest.partition("/")[1] for rest in rests})

    def size(self, name: str) -> int | None:
        return len(self.files[name]) if name in self.files else None

    def sizes(self, directory: str, names: Iterable[str]) -> dict[str, int]:
        sizes = {name: self.size(f"{directory}/{name}") for name in names}
        return {name: size for name, size in sizes.items() if size is not None}

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        return self.read(name)[offset : offset + length]

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        data = self.read_range(name, offset, len(target))
        target[: len(data)] = data
        return len(data)

    def stream(self, name: str) -> Iterator[bytes]:
        yield self.read(name)

    def create(self, name: str, chunks: Iterable[Chunk]) -> None:
        if name in self.files:
            raise FileExistsError(name)
        self.files[name] = b"".join(flat(chunk) for chunk in chunks)

    def claim(self, name: str, data: bytes) -> bool:
        if name in self.files:
            return False
        self.files[name] = data
        return True

    def replace(self, name: str, data: bytes, expected: bytes) -> bool:
        if self.files.get(name) != expected:
            return False
        self.files[name] = data
        return True

    def remove(self, name: str) -> bool:
        return self.files.pop(name, None) is not None

    def remove_empty_dir(self, directory: str) -> bool:
        return not self.names(directory)

    def discard_leftovers(self, directory: str = "") -> int:
        del directory  # every write here is whole
        return 0

    def abort_uploads(self, abandoned: Callable[[str], bool]) -> int:
        del abandoned
        return 0

    def probe(self) -> None:
        pass


class CutOff:
    """The place as a cut-off node sees it: claims newer than its own attempt do not reach it."""

    def __init__(self, storage: Storage, attempt: int) -> None:
        self._storage = storage
        self._attempt = attempt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def names(self, directory: str = "") -> list[str]:
        names = self._storage.names(directory)
        return [name for name in names if (claimed_attempt(name) or 0) <= self._attempt]


#: Every call by which the store changes a file system.
CHANGING_CALLS = ("open", "write", "fsync", "link", "replace", "unlink", "mkdir", "rmdir")


@contextmanager
def before_each_change(act: Callable[[int, str, tuple[Any, ...]], None]) -> Iterator[list[str]]:
    """Call `act(n, call, arguments)` before the n-th system call that changes the file system.

    Yields the list of calls made so far. Nothing is written through to the disk (fsync is left
    out), since no power is lost here; calls that `act` makes itself are neither counted nor seen.
    """
    real = {name: getattr(os, name) for name in CHANGING_CALLS}
    calls: list[str] = []
    acting = False

    def hooked(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal acting
            changes = name != "open" or args[1] & os.O_CREAT
            if changes and not acting:
                calls.append(name)
                acting = True
                try:
                    act(len(calls), name, args)
                finally:
                    acting = False
            return None if name == "fsync" else real[name](*args, **kwargs)

        return call

    try:
        for name in CHANGING_CALLS:
            setattr(os, name, hooked(name))
        yield calls
    finally:
        for name, function in real.items():
            setattr(os, name, function)
