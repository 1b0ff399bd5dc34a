"""Initial weights, the same whoever holds which part of them.

Each parameter is filled from a generator of its own, keyed by (seed, name): what it holds depends
neither on the order of parameters nor on the number of ranks. A sharded one is drawn whole, one at
a time, and each rank keeps its part: no rank ever holds the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.keyed import keyed_generator

_WRAPPER_PREFIX = "_checkpoint_wrapped_module."


def author_name(name: str) -> str:
    """A parameter's name as the model's author wrote it, whatever wraps the modules."""
    return name.replace(_WRAPPER_PREFIX, "")


def materialize(model: Any, seed: int, device: torch.device) -> None:
    """Give a model (trainer.components.Model) on the meta device memory on `device`, and fill it.

    Of a sharded model each rank allocates its part alone, and for a moment one whole parameter.
    """
    ties = _ties(model)
    model.to_empty(device=device)
    _tie(model, ties)
    generator = torch.Generator()
    with torch.no_grad():
        for wrapped_name, parameter in model.named_parameters():
            name = author_name(wrapped_name)
            own_seed = keyed_generator(seed, "weights", name).integers(0, 2**63)
            full = torch.empty(parameter.shape, dtype=parameter.dtype)
            model.init_parameter(name, full, generator.manual_seed(int(own_seed)))
            copy_whole(parameter, full)
        model.init_buffers()


@torch.no_grad()
def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Fill `target` from the whole tensor, or this rank's part of it where `target` is sharded.

    Every rank passes the same `whole`; nothing is communicated.
    """
    # Half a second to load, and whoever has sharded a tensor has loaded it.
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(target, DTensor):
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(whole)


def _ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    """Make one parameter of those that were one; torch moves each name to new memory by itself."""
    for first, *others in ties:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parameter)
