"""Checks that components keep to the protocols of trainer.components; the probe makes them.

Every fault is a UsageError that names the component, the member, and what it has to be.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.components import Batch, Dataset, DrawsPerSample, Evaluates, Model, Sample
from trainer.data.keyed import SampleRandom
from trainer.spec.errors import UsageError
from trainer.spec.run import RunSpec

_CALLS = {
    "sample": ("index", "rng"),
    "collate": ("samples",),
    "forward": ("batch",),
    "loss_count": ("batch",),
    "init_parameter": ("name", "tensor", "generator"),
    "init_buffers": (),
    "draws": ("sample", "rng"),
    "evaluate": ("data", "seed", "rank", "world_size"),
    "summarize_evaluation": ("sums",),
}
_TRIAL_SAMPLES = 2


class Checked:
    """What a factory made, under the name that faults give it."""

    def __init__(self, field: str, kind: str, made: object) -> None:
        self._name = f"{field}: {kind!r}"
        self._class = type(made).__name__
        self._made = made

    def members(self, protocol: type) -> None:
        """All members are there, and methods take what the trainer passes.

        Raises:
            UsageError: lists all that are missing, or all that take something else.
        """
        names = [*protocol.__annotations__, *(name for name in vars(protocol) if name[0] != "_")]
        names += [name for name in ("__len__",) if name in vars(protocol)]
        missing = [name for name in names if not _has(self._made, name)]
        if missing:
            raise UsageError(
                f"{self._name} gave {_one(self._class)} without {', '.join(missing)}",
                f"the members that it needs are those of {protocol.__module__}.{protocol.__name__}",
            )
        wrong = [
            fault
            for name in names
            if name in _CALLS and (fault := _call_fault(name, getattr(self._made, name)))
        ]
        if wrong:
            raise self.fault("; ".join(wrong))

    def fault(self, problem: str, hint: str | None = None) -> UsageError:
        """The error that names this component."""
        return UsageError(f"{self._name}: {self._class}.{problem}", hint)


def check_factory(field: str, kind: str, factory: Callable[..., Any], takes: Sequence[str]) -> None:
    """A factory can be called with as many arguments as it will get.

    Raises:
        UsageError: it cannot.
    """
    if fault := _call_fault(kind.partition(":")[2], factory, takes):
        raise UsageError(f"{field}: {kind!r}: {fault}")


def check_dataset(kind: str, data: object) -> None:
    """The members of `Dataset`, before any is used."""
    Checked("data.kind", kind, data).members(Dataset)


def check_model(kind: str, model: object) -> None:
    """The members of `Model`, and of the optional protocols as far as one is begun."""
    checked = Checked("model.kind", kind, model)
    checked.members(Model)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model.kind: {kind!r} gave {_a(model)}, which is no torch.nn.Module")
    if isinstance(model, DrawsPerSample):
        checked.members(DrawsPerSample)
    if hasattr(model, "evaluate"):
        checked.members(Evaluates)
    names = [name for name, _ in model.named_parameters()]
    if not names:
        raise checked.fault("parameters() is empty: there is nothing to train")
    prefixes: Any = model.backbone_prefixes
    if not isinstance(prefixes, (tuple, list)) or not all(isinstance(p, str) for p in prefixes):
        raise checked.fault(f"backbone_prefixes is {prefixes!r}, not a tuple of strings")
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise checked.fault(
                f"backbone_prefixes: no parameter's name begins with {prefix!r}",
                f"names are such as {', '.join(names[:3])}; without a backbone write ()",
            )
    for attribute in ("shard_classes", "checkpoint_classes"):
        classes: Any = getattr(model, attribute)
        if not isinstance(classes, (tuple, list)) or not all(
            isinstance(c, type) and issubclass(c, nn.Module) for c in classes
        ):
            raise checked.fault(f"{attribute} is {classes!r}, not a tuple of nn.Module classes")


def trial_batch(spec: RunSpec, data: Dataset, model: object) -> Batch:
    """The data set's first samples as one batch, with what the model draws for each.

    Raises:
        UsageError: a sample or the batch is not what the protocol says.
    """
    checked = Checked("data.kind", spec.data.kind, data)
    samples: list[Sample] = []
    for index in range(min(_TRIAL_SAMPLES, len(data))):
        rng = SampleRandom(spec.seed, 0, index)
        sample: Any = data.sample(index, rng)
        _check_sample(checked, "sample(index, rng)", sample)
        if isinstance(model, DrawsPerSample):
            sample = model.draws(sample, rng)
            _check_sample(Checked("model.kind", spec.model.kind, model), "draws", sample)
        samples.append(sample)
    batch: Any = data.collate(samples)
    if not isinstance(batch, Mapping) or not batch:
        raise checked.fault(f"collate(samples) gave {_a(batch)}, not a dict of tensors by name")
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise checked.fault(f"collate(samples)[{name!r}] is {_a(value)}, not a tensor")
        if value.shape[:1] != (len(samples),):
            raise checked.fault(
                f"collate(samples)[{name!r}] has the shape {tuple(value.shape)} for "
                f"{len(samples)} samples; the first dimension must be the sample"
            )
    return dict(batch)


def check_initialization(
    kind: str, build: Callable[[], nn.Module], disturb: Callable[[int], None]
) -> nn.Module:
    """Weights and buffers are all filled, and the same each time. Returns the model.

    `build` makes the model with its initial weights, in memory that is not zero to begin with;
    `disturb` seeds the global generators, each time in another way.

    Raises:
        UsageError: names the parameter or buffer.
    """
    disturb(1)
    model = build()
    checked = Checked("model.kind", kind, model)
    buffers = {name for name, _ in model.named_buffers()}
    first = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in first.items():
        if _unfilled(tensor):
            method = "init_buffers()" if name in buffers else "init_parameter(...)"
            raise checked.fault(f"{method} leaves {name!r} unfilled, in whole or in part, or nan")
    disturb(2)
    again = build()
    for name, tensor in [*again.named_parameters(), *again.named_buffers()]:
        if not torch.equal(tensor, first[name]):
            method = "init_buffers()" if name in buffers else "init_parameter(...)"
            raise checked.fault(
                f"{method} fills {name!r} with other values each time",
                "ranks and resumed runs could differ: draw from the generator that is passed",
            )
    return model


def check_training(spec: RunSpec, model: Any, batch: Batch) -> None:
    """One forward pass gives a loss that can be trained on.

    Raises:
        UsageError: names what `forward` or `loss_count` gave.
    """
    checked = Checked("model.kind", spec.model.kind, model)
    count = model.loss_count(batch)
    if isinstance(count, bool) or not isinstance(count, int):
        raise checked.fault(f"loss_count(batch) gave {_a(count)}, not an int")
    if count < 0:
        raise checked.fault(f"loss_count(batch) gave {count}, not a number of elements")
    model.train()
    with torch.autocast(
        "cpu",
        dtype=getattr(torch, spec.train.mixed_precision_dtype),
        enabled=spec.train.enable_mixed_precision_training,
    ):
        loss: Any = model(batch)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise checked.fault(
            f"forward(batch) gave {_a(loss)}, not a scalar",
            "return the sum of the loss over all valid elements: .sum()",
        )
    if loss.dtype != torch.float32:
        raise checked.fault(f"forward(batch) gave {_a(loss)}, not float32", "add .float()")
    if not loss.requires_grad:
        raise checked.fault("forward(batch) gave a loss that depends on no parameter")
    if not torch.isfinite(loss):
        raise checked.fault(f"forward(batch) gave {loss.item()} for the first samples")


def _has(made: object, name: str) -> bool:
    # What nn.Module has under this name only raises.
    inherited = name == "forward" and getattr(type(made), name, None) is nn.Module.forward
    return hasattr(made, name) and not inherited


def _call_fault(name: str, call: Any, takes: Sequence[str] | None = None) -> str | None:
    """What is wrong with something that will be called with the positional arguments `takes`."""
    takes = _CALLS[name] if takes is None else takes
    if not callable(call):
        return f"{name} is {_a(call)}, not a method"
    try:
        signature = inspect.signature(call)
    except (ValueError, TypeError):
        # Not written in Python: it will show when it is called.
        return None
    try:
        signature.bind(*takes)
    except TypeError:
        found = [str(p.replace(annotation=p.empty)) for p in signature.parameters.values()]
        return f"{name}({', '.join(found)}) must take ({', '.join(takes)})"
    return None


def _check_sample(checked: Checked, call: str, sample: object) -> None:
    if not isinstance(sample, dict) or not all(isinstance(name, str) for name in sample):
        raise checked.fault(f"{call} gave {_a(sample)}, not a dict of arrays by name")
    for name, value in sample.items():
        if not isinstance(value, (np.ndarray, np.generic)):
            raise checked.fault(
                f"{call}[{name!r}] is {_a(value)}, not a numpy array", "np.asarray(value)"
            )


def _unfilled(tensor: Tensor) -> bool:
    """Whether a tensor still holds what torch, asked to be deterministic, puts into new memory."""
    if not tensor.numel() or tensor.dtype is torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())


def _a(value: object) -> str:
    """A value as an error names it."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return _one(type(value).__name__)


def _one(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
