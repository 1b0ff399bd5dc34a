"""A process of its own that saves or loads a large state, and measures its memory.

    python -m tests.s3.load_child save|load URI

`load` verifies every byte and fills tensors that are there, as a resume does, and prints by how
many bytes this process grew meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.unit.store_helpers import manifest_of
from trainer.checkpoint.codec import index_file, load_tensors, parse_index, save_tensors
from trainer.store.checkpoints import CheckpointStore
from trainer.store.manifest import index_name, shard_name
from trainer.store.storage import open_storage

#: 16 tensors of 32 MiB, a quarter of which lie in memory otherwise than in the file.
ROWS, COLUMNS = 2048, 4096
PLAIN, TURNED = 12, 4


def state(value: float) -> dict[str, Tensor]:
    """The tensors, every page of them in use."""
    plain = {f"plain{n}": torch.full((ROWS, COLUMNS), value + n) for n in range(PLAIN)}
    turned = {f"turned{n}": torch.full((COLUMNS, ROWS), value - n).t() for n in range(TURNED)}
    return plain | turned


def save(store: CheckpointStore) -> None:
    store.own()
    store.claim_next(None, None)
    written = save_tensors(
        state(1.0),
        shard_name=shard_name(1, 0),
        create=lambda name, parts: store.create_file(1, name, parts),
        group=None,
    )
    assert written is not None
    index, entries = written
    index_entry = store.create_file(1, index_name(1), [json.dumps(index).encode()])
    store.commit(manifest_of(1, 1, (*entries, index_entry), store.run_id))


def load(store: CheckpointStore) -> None:
    tensors = state(0.0)
    ref = store.survey().newest
    assert ref is not None
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    assert store.verify(ref) == []
    sizes = {entry.name: entry.size_bytes for entry in ref.manifest.files}
    index, _ = parse_index(store.storage.read(ref.path(index_file(sizes))), sizes)
    load_tensors(
        tensors,
        index,
        read=lambda name, start, target: store.storage.read_into(ref.path(name), start, target),
        group=None,
    )
    grown = memory("VmHWM") - before
    expected = state(1.0)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    os.write(1, json.dumps(grown).encode())


def memory(what: str) -> int:
    """A figure of this process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(what)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"save": save, "load": load}[sys.argv[1]](CheckpointStore(open_storage(sys.argv[2]), "run-1"))
