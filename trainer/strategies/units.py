"""Which modules of a model are sharded one by one."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from trainer.spec.errors import UsageError
from trainer.weights import author_name

_WRAPPED = "_checkpoint_wrapped_module"


def shard_units(model: Any) -> list[nn.Module]:
    """The modules of `model.shard_classes`, inner ones first; the model itself is not among them.

    A module whose activations are recomputed is taken with what wraps it, so that its parameters
    are gathered once for the recomputation and the gradients together.

    Raises:
        UsageError: a parameter is a scalar, or two units share one.
    """
    classes = tuple(model.shard_classes)
    units: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not name or name.rpartition(".")[2] == _WRAPPED:
            continue
        inner = getattr(module, _WRAPPED) if isinstance(module, CheckpointWrapper) else module
        if isinstance(inner, classes):
            units[name] = module
    _check_parameters(model, list(units))
    return list(reversed(units.values()))


def _check_parameters(model: nn.Module, units: list[str]) -> None:
    owners: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.dim():
            raise UsageError(
                f"the parameter {author_name(name)!r} is a scalar, which cannot be sharded",
                "give it the shape (1,), or use train.strategy ddp",
            )
        holding = [unit for unit in units if name.startswith(f"{unit}.")]
        owner = max(holding, key=len, default="")
        first, first_owner = owners.setdefault(id(parameter), (name, owner))
        if owner != first_owner:
            raise UsageError(
                f"the parameters {author_name(first)!r} and {author_name(name)!r} are one, but "
                "lie in modules that are sharded apart",
                "leave the classes of those modules out of the model's shard_classes",
            )
