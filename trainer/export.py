"""A checkpoint's weights as one safetensors file, whatever world wrote the checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, TextIO

import torch

from trainer.answer import answer
from trainer.checkpoint.codec import (
    bytes_of,
    index_file,
    load_tensors,
    parse_index,
    tensor_shapes,
)
from trainer.spec.errors import IncompatibleCheckpoint, StorageError
from trainer.store.checkpoints import CheckpointRef
from trainer.store.manifest import CheckpointManifest
from trainer.store.storage import Storage, open_storage

_MODEL = "model."

#: The names that safetensors files give to dtypes.
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


def export(request_json: bytes, out: TextIO) -> int:
    """Carry out one export; writes one JSON document. Returns 0 or the error's exit code.

    The request is {"uri", "storage_options", "manifest" (the file's content), "file"}; `file` must
    not exist. On success {"tensors", "size_bytes"}, else {"error": class, "message", "hint"}.
    """

    def carry_out() -> dict[str, Any]:
        request = json.loads(request_json)
        storage = open_storage(request["uri"], request["storage_options"])
        ref = CheckpointRef(CheckpointManifest.from_bytes(request["manifest"].encode()))
        return write_weights(storage, ref, request["file"])

    return answer(out, carry_out)


def write_weights(storage: Storage, ref: CheckpointRef, file: str) -> dict[str, Any]:
    """Write parameters and buffers of `ref` to the new file `file`, durably.

    Names are those of the model's own state dict, values and dtypes those of the checkpoint.
    Memory: the largest tensor, twice. What is left after an error is for the caller to remove.

    Raises:
        StorageError: the checkpoint was deleted meanwhile, or the file cannot be written.
        CorruptCheckpoint: the index is not one. IncompatibleCheckpoint: a dtype has no name there.
    """

    def read(name: str, start: int, target: memoryview) -> int:
        try:
            return storage.read_into(ref.path(name), start, target)
        except FileNotFoundError as err:
            raise _vanished(storage, ref) from err

    sizes = {entry.name: entry.size_bytes for entry in ref.manifest.files}
    name = index_file(sizes)
    try:
        document = storage.read(ref.path(name))
    except FileNotFoundError as err:
        raise _vanished(storage, ref) from err
    index, _ = parse_index(document, sizes)
    shapes = {
        name.removeprefix(_MODEL): shape
        for name, shape in tensor_shapes(index).items()
        if name.startswith(_MODEL)
    }
    # Widest first: then every tensor lies at a multiple of its own width, however odd the shapes.
    order = sorted(shapes, key=lambda name: (-shapes[name][1].itemsize, name))
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(_header(shapes, order))
            for name in order:
                shape, dtype = shapes[name]
                tensor = torch.empty(shape, dtype=dtype)
                load_tensors({_MODEL + name: tensor}, index, read=read, group=None)
                stream.write(bytes_of(tensor))
            stream.flush()
            os.fsync(stream.fileno())
            size_bytes = stream.tell()
    except OSError as err:
        raise StorageError(f"cannot write {file}: {err.strerror}") from err
    return {"tensors": len(order), "size_bytes": size_bytes}


def _header(shapes: Shapes, order: list[str]) -> bytes:
    """What a safetensors file begins with: the length of a JSON table of tensors, and the table."""
    # "pt" tells other readers that the tensors are laid out as torch's; nothing of the run is told.
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        shape, dtype = shapes[name]
        if dtype not in _CODES:
            raise IncompatibleCheckpoint(f"{name} is {dtype}, which no safetensors file can hold")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _vanished(storage: Storage, ref: CheckpointRef) -> StorageError:
    return StorageError(
        f"{storage.uri}: step {ref.step} was deleted while it was read",
        "the run goes on saving: try again",
    )
