"""Weights to start from: `checkpoint.init_from`."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.agree import Agreement
from trainer.checkpoint.codec import index_file, load_tensors, parse_index, tensor_shapes
from trainer.spec.errors import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NotFound,
    StorageError,
    UsageError,
)
from trainer.spec.ranks import RankInfo
from trainer.store.manifest import MANIFEST_NAME, CheckpointManifest, Digest, FileEntry
from trainer.store.source import Source, find_source
from trainer.store.storage import Storage
from trainer.weights import copy_whole

if TYPE_CHECKING:
    from trainer.strategies.base import TrainingStrategy

#: Files that torch wrote; every other one is taken for safetensors.
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")
#: Keys under which others keep the weights in such a file, and what they put before each name.
_TORCH_KEYS = ("model", "state_dict")
_WRAPPERS = ("module.", "model.")


def load_initial_weights(
    source: str,
    strategy: TrainingStrategy,
    ranks: RankInfo,
    agree: Agreement,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Fill the model from one checkpoint's directory (`.../step-00001000`) or from a file.

    `source` is a path or a URL; a file is safetensors, or one that torch wrote and that holds
    nothing but tensors (`weights.pt`). Only weights are taken; optimizer, schedule and position
    start afresh. Collective: the ranks share the checking of a checkpoint's files, and each reads
    what it needs by itself. A file behind a URL passes through the rank's temporary directory.

    Raises:
        NotFound: there is nothing there. CorruptCheckpoint: it cannot be read, or is damaged.
        IncompatibleCheckpoint: names or shapes differ from the model's.
    """
    wanted = strategy.named_state()
    try:
        found = find_source(source, storage_options)
        if found is None:
            raise FileNotFoundError(source)
        if found.file is None:
            _load_directory(found.storage, wanted, ranks, agree)
        else:
            with _on_disk(found) as path:
                load = _load_torch if path.suffix in _TORCH_SUFFIXES else _load_safetensors
                load(path, wanted)
    except FileNotFoundError:
        raise NotFound(
            f"checkpoint.init_from={source}: neither a file with weights nor a checkpoint "
            f"directory with a {MANIFEST_NAME}"
        ) from None
    except OSError as err:
        raise CorruptCheckpoint(f"checkpoint.init_from={source}: {err}") from err
    except (CorruptCheckpoint, IncompatibleCheckpoint, StorageError, UsageError) as err:
        raise type(err)(f"checkpoint.init_from={source}: {err.message}", err.hint) from err


@contextmanager
def _on_disk(source: Source) -> Iterator[Path]:
    """A file's path; of one that is elsewhere that of a copy, which is gone afterwards."""
    if source.path is not None:
        yield source.path
        return
    assert source.file is not None
    with tempfile.TemporaryDirectory(prefix="vitra-weights-") as directory:
        path = Path(directory) / source.file
        with path.open("wb") as file:
            for chunk in source.chunks():
                file.write(chunk)
        yield path


def _load_directory(
    storage: Storage, wanted: dict[str, Tensor], ranks: RankInfo, agree: Agreement
) -> None:
    manifest = CheckpointManifest.from_bytes(storage.read(MANIFEST_NAME))
    mine = manifest.files[ranks.rank :: ranks.world_size]
    damage = [one for entry in mine if (one := _wrong(storage, entry))]
    if problems := [one for of_rank in agree.gather(damage) for one in of_rank]:
        raise CorruptCheckpoint("; ".join(problems))
    files = {entry.name: entry.size_bytes for entry in manifest.files}
    index, _ = parse_index(storage.read(index_file(files)), files)
    shapes = {
        name.removeprefix("model."): s
        for name, s in tensor_shapes(index).items()
        if name.startswith("model.")
    }
    _check({n: shape for n, (shape, _) in shapes.items()}, wanted)
    load_tensors(
        {f"model.{n}": t for n, t in wanted.items()}, index, read=storage.read_into, group=None
    )


def _wrong(storage: Storage, entry: FileEntry) -> str | None:
    """What is wrong with one file of a checkpoint, in words; reads it to the end."""
    digest = Digest()
    try:
        for chunk in storage.stream(entry.name):
            digest.update(chunk)
    except FileNotFoundError:
        return f"{entry.name} is missing"
    except StorageError as err:
        return f"{entry.name}: {err.message}"
    return None if digest.text == entry.digest else f"{entry.name} differs from its digest"


def _load_safetensors(path: Path, wanted: dict[str, Tensor]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            _check({n: torch.Size(file.get_slice(n).get_shape()) for n in names}, wanted)
            for name, tensor in wanted.items():
                copy_whole(tensor, file.get_tensor(name))
    except SafetensorError as err:
        raise CorruptCheckpoint(f"no safetensors file: {err}") from err


def _load_torch(path: Path, wanted: dict[str, Tensor]) -> None:
    try:
        # Nothing is unpickled but tensors, and those are mapped, not read.
        document = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as err:
        text = " ".join(str(err).split())[:200]
        raise CorruptCheckpoint(f"not a file of torch's with tensors alone: {text}") from err
    for key in _TORCH_KEYS:
        if isinstance(document, dict) and isinstance(document.get(key), dict):
            document = document[key]
    found = _flat(document)
    for prefix in _WRAPPERS:
        if found and not found.keys() & wanted.keys():
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    _check({name: tensor.shape for name, tensor in found.items()}, wanted)
    for name, tensor in wanted.items():
        copy_whole(tensor, found[name])


def _flat(tree: Any, above: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts, by names joined with dots."""
    if isinstance(tree, Tensor):
        return {above: tree}
    if not isinstance(tree, dict):
        return {}
    return {
        name: tensor
        for key, value in tree.items()
        for name, tensor in _flat(value, f"{above}.{key}" if above else str(key)).items()
    }


def _check(found: dict[str, torch.Size], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise IncompatibleCheckpoint(f"{name!r} is missing")
        if found[name] != tensor.shape:
            raise IncompatibleCheckpoint(
                f"{name!r} is {tuple(found[name])}, the model has {tuple(tensor.shape)}"
            )
