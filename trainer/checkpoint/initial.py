"""Weights to start from: `checkpoint.init_from`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from trainer.checkpoint.codec import (
    index_file,
    load_tensors,
    parse_index,
    read_file_range,
    tensor_shapes,
)
from trainer.spec.errors import CorruptCheckpoint, IncompatibleCheckpoint, NotFound
from trainer.store.manifest import MANIFEST_NAME, CheckpointManifest
from trainer.weights import copy_whole

if TYPE_CHECKING:
    from trainer.strategies.base import TrainingStrategy


def load_initial_weights(source: str, strategy: TrainingStrategy) -> None:
    """Fill the model from a safetensors file or one checkpoint's directory (`.../step-00001000`).

    Only weights are taken; optimizer, schedule and position start afresh. Every rank reads what it
    needs by itself.

    Raises:
        NotFound: there is nothing there. CorruptCheckpoint: it cannot be read.
        IncompatibleCheckpoint: names or shapes differ from the model's.
    """
    path = Path(source)
    wanted = strategy.named_state()
    if path.is_file():
        _load_safetensors(path, wanted)
        return
    try:
        manifest = CheckpointManifest.from_bytes((path / MANIFEST_NAME).read_bytes())
    except FileNotFoundError:
        raise NotFound(
            f"checkpoint.init_from={source}: neither a safetensors file nor a checkpoint directory "
            f"with a {MANIFEST_NAME}"
        ) from None
    except OSError as err:
        raise CorruptCheckpoint(f"checkpoint.init_from={source}: {err}") from err
    files = {entry.name: entry.size_bytes for entry in manifest.files}
    try:
        document = (path / index_file(files)).read_bytes()
    except OSError as err:
        raise CorruptCheckpoint(f"checkpoint.init_from={source}: {err}") from err
    index, _ = parse_index(document, files)
    shapes = {
        name.removeprefix("model."): s
        for name, s in tensor_shapes(index).items()
        if name.startswith("model.")
    }
    _check(source, {n: shape for n, (shape, _) in shapes.items()}, wanted)
    load_tensors(
        {f"model.{n}": t for n, t in wanted.items()}, index, read=read_file_range(path), group=None
    )


def _load_safetensors(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            _check(str(path), {n: torch.Size(file.get_slice(n).get_shape()) for n in names}, wanted)
            for name, tensor in wanted.items():
                copy_whole(tensor, file.get_tensor(name))
    except (SafetensorError, OSError) as err:
        raise CorruptCheckpoint(f"checkpoint.init_from={path}: {err}") from err


def _check(source: str, found: dict[str, torch.Size], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise IncompatibleCheckpoint(f"checkpoint.init_from={source}: {name!r} is missing")
        if found[name] != tensor.shape:
            raise IncompatibleCheckpoint(
                f"checkpoint.init_from={source}: {name!r} is {tuple(found[name])}, "
                f"the model has {tuple(tensor.shape)}"
            )
