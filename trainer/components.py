"""Models and data sets: what the trainer asks of them, and how a `kind` becomes an object.

A `kind` is a built-in name or `package.module:factory`. A factory is called as

    data:   factory(options: Mapping[str, Any], seed: int) -> Dataset
    model:  factory(options: Mapping[str, Any], context: ModelContext) -> Model

and what it returns needs nothing but the members of the protocols below; there is no base class to
inherit and nothing to register. A class whose constructor takes these two is a factory as well. The
probe tries own components out before a run is submitted (`trainer.checks`): a batch of two samples,
the initial weights, and one forward pass.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.keyed import SampleRandom
from trainer.spec.errors import UsageError

#: One sample as a data worker holds it: arrays of fixed shape, by name.
Sample = dict[str, np.ndarray]
#: Many samples, stacked: tensors whose first dimension is the sample.
Batch = dict[str, Tensor]

BUILT_IN_DATA = {
    "lerobot": "trainer.data.lerobot:build",
    "synthetic": "trainer.data.synthetic:build",
}
BUILT_IN_MODELS = {"vla": "trainer.models.vla:build"}


@runtime_checkable
class Dataset(Protocol):
    """Training samples, numbered 0 to len - 1. Opened once a process; forked into data workers."""

    #: What a model needs to know of the samples (shapes, statistics); agreed between the two.
    meta: Any

    def __len__(self) -> int:
        """The number of training samples; what is held out for evaluation does not count."""
        ...

    def sample(self, index: int, rng: SampleRandom) -> Sample:
        """Sample `index`. Whatever is random about it must come from `rng`.

        Raises:
            DataError: it cannot be read; names the file and the sample.
        """
        ...

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Stack samples (with what the model's `draws` added to each) into one batch."""
        ...


@dataclass(frozen=True)
class ModelContext:
    """What a model may know of the run that it is built for."""

    data_meta: Any
    repeated_diffusion_steps: int


@runtime_checkable
class Model(Protocol):
    """An nn.Module that offers, beside its parameters, what a run needs to train it exactly.

    It is built on the meta device, where tensors have shapes and no values: values that its
    constructor sets are lost, and come from `init_parameter` and `init_buffers` alone. That is how
    a model larger than one rank's memory can be built sharded.

    `forward(batch)` returns the SUM of the loss over the valid elements, a float32 scalar;
    `loss_count(batch)` how many valid elements there are, from the batch alone. The trainer divides
    the one by the other over the whole global batch, so unequal masks cannot skew the mean.
    """

    #: Prefixes of parameter names that make up the backbone, () for none; all others are the action
    #: model. The two can have learning rates of their own, and the backbone can be frozen.
    backbone_prefixes: tuple[str, ...]
    #: Module classes to shard one by one, and to recompute in the backward pass.
    shard_classes: tuple[type[nn.Module], ...]
    checkpoint_classes: tuple[type[nn.Module], ...]

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch, summed over its valid elements: a float32 scalar."""
        ...

    def loss_count(self, batch: Batch) -> int:
        """How many elements of the batch the loss is summed over."""
        ...

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill one full-sized parameter in place, drawing only from `generator`.

        `name` is the one in `named_parameters`. Called once for each, in any order.
        """
        ...

    def init_buffers(self) -> None:
        """Fill all buffers in place, deterministically."""
        ...


@runtime_checkable
class DrawsPerSample(Protocol):
    """A model whose per-sample draws (noise, timesteps) are made in the data workers.

    `draws` is a small picklable callable without parameters or tensors of the model.
    """

    draws: Callable[[Sample, SampleRandom], Sample]


@runtime_checkable
class Evaluates(Protocol):
    """A model that can judge itself on held-out data at the end of a run.

    `evaluate` is called on every rank with its share of the work (rank, world_size); it returns
    sums that are added up over ranks, and `summarize_evaluation` turns the added-up sums into the
    recorded figures (name -> value).
    """

    def evaluate(self, data: Dataset, seed: int, rank: int, world_size: int) -> Mapping[str, float]:
        """This rank's share of the sums, by name; the same names on every rank."""
        ...

    def summarize_evaluation(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """The figures to record, by name, from the sums over all ranks."""
        ...


def resolve(kind: str, built_in: Mapping[str, str], field: str) -> Callable[..., Any]:
    """The factory that `kind` names.

    Raises:
        UsageError: no such module or attribute; `field` is named.
    """
    target = built_in.get(kind, kind)
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as err:
        raise UsageError(f"{field}: {kind!r} cannot be imported: {err}") from err
    except Exception as err:  # whatever the module does when it is loaded
        place = traceback.extract_tb(err.__traceback__)[-1]
        raise UsageError(
            f"{field}: {kind!r} cannot be imported: {type(err).__name__}: {err}",
            f"raised in {place.filename}, line {place.lineno}",
        ) from err
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{field}: {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{field}: {kind!r} is {type(found).__name__}, not something to call")
    return found
