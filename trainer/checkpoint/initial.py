"""Weights to start from: `checkpoint.init_from`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from trainer.agree import Agreement
from trainer.checkpoint.codec import (
    index_file,
    load_tensors,
    parse_index,
    read_file_range,
    tensor_shapes,
)
from trainer.spec.errors import CorruptCheckpoint, IncompatibleCheckpoint, NotFound
from trainer.spec.ranks import RankInfo
from trainer.store.manifest import MANIFEST_NAME, CheckpointManifest, Digest, FileEntry
from trainer.weights import copy_whole

if TYPE_CHECKING:
    from trainer.strategies.base import TrainingStrategy

_READ_BYTES = 8 << 20


def load_initial_weights(
    source: str, strategy: TrainingStrategy, ranks: RankInfo, agree: Agreement
) -> None:
    """Fill the model from a safetensors file or one checkpoint's directory (`.../step-00001000`).

    Only weights are taken; optimizer, schedule and position start afresh. Collective: the ranks
    share the checking of a checkpoint's files, and each reads what it needs by itself.

    Raises:
        NotFound: there is nothing there. CorruptCheckpoint: it cannot be read, or is damaged.
        IncompatibleCheckpoint: names or shapes differ from the model's.
    """
    path = Path(source)
    wanted = strategy.named_state()
    try:
        if path.is_file():
            _load_safetensors(path, wanted)
        else:
            _load_directory(path, wanted, ranks, agree)
    except FileNotFoundError:
        raise NotFound(
            f"checkpoint.init_from={source}: neither a safetensors file nor a checkpoint directory "
            f"with a {MANIFEST_NAME}"
        ) from None
    except OSError as err:
        raise CorruptCheckpoint(f"checkpoint.init_from={source}: {err}") from err
    except (CorruptCheckpoint, IncompatibleCheckpoint) as err:
        raise type(err)(f"checkpoint.init_from={source}: {err.message}", err.hint) from err


def _load_directory(
    path: Path, wanted: dict[str, torch.Tensor], ranks: RankInfo, agree: Agreement
) -> None:
    manifest = CheckpointManifest.from_bytes((path / MANIFEST_NAME).read_bytes())
    mine = manifest.files[ranks.rank :: ranks.world_size]
    damage = [one for entry in mine if (one := _wrong(path / entry.name, entry))]
    if problems := [one for of_rank in agree.gather(damage) for one in of_rank]:
        raise CorruptCheckpoint("; ".join(problems))
    files = {entry.name: entry.size_bytes for entry in manifest.files}
    index, _ = parse_index((path / index_file(files)).read_bytes(), files)
    shapes = {
        name.removeprefix("model."): s
        for name, s in tensor_shapes(index).items()
        if name.startswith("model.")
    }
    _check({n: shape for n, (shape, _) in shapes.items()}, wanted)
    load_tensors(
        {f"model.{n}": t for n, t in wanted.items()}, index, read=read_file_range(path), group=None
    )


def _wrong(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with one file of a checkpoint, in words; reads it to the end."""
    digest = Digest()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    except OSError as err:
        return f"{entry.name}: {err.strerror}"
    return None if digest.text == entry.digest else f"{entry.name} differs from its digest"


def _load_safetensors(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            _check({n: torch.Size(file.get_slice(n).get_shape()) for n in names}, wanted)
            for name, tensor in wanted.items():
                copy_whole(tensor, file.get_tensor(name))
    except SafetensorError as err:
        raise CorruptCheckpoint(f"no safetensors file: {err}") from err


def _check(found: dict[str, torch.Size], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise IncompatibleCheckpoint(f"{name!r} is missing")
        if found[name] != tensor.shape:
            raise IncompatibleCheckpoint(
                f"{name!r} is {tuple(found[name])}, the model has {tuple(tensor.shape)}"
            )
