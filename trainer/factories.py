"""What a spec names, made: the data set and the model.

Loads no more of torch than `import torch` does: it is what submitting a run waits for.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.checks import check_dataset, check_factory, check_model
from trainer.components import BUILT_IN_DATA, BUILT_IN_MODELS, Dataset, ModelContext, resolve
from trainer.spec.errors import DataError
from trainer.spec.run import RunSpec
from trainer.weights import materialize


def build_data(spec: RunSpec) -> Dataset:
    """Open the data set that the spec names.

    Raises:
        UsageError: its kind cannot be imported, or gives no data set.
        DataError: it cannot be read, or is empty.
    """
    factory = resolve(spec.data.kind, BUILT_IN_DATA, "data.kind")
    check_factory("data.kind", spec.data.kind, factory, ("options", "seed"))
    data: Dataset = factory(spec.data.options, spec.seed)
    check_dataset(spec.data.kind, data)
    if len(data) < 1:
        raise DataError(f"data: {spec.data.kind} has no samples to train on")
    return data


def empty_model(spec: RunSpec, data: Dataset) -> Any:
    """The model on the meta device: options and shapes are checked, and nothing is allocated.

    Raises:
        UsageError: its kind cannot be imported, gives no model, or does not go with the data.
    """
    factory = resolve(spec.model.kind, BUILT_IN_MODELS, "model.kind")
    check_factory("model.kind", spec.model.kind, factory, ("options", "context"))
    context = ModelContext(data.meta, spec.train.repeated_diffusion_steps)
    with torch.device("meta"):
        model = factory(spec.model.options, context)
    check_model(spec.model.kind, model)
    return model


def build_model(spec: RunSpec, data: Dataset, device: torch.device) -> Any:
    """The model with its initial weights, the same at every world size and strategy."""
    model = empty_model(spec, data)
    materialize(model, spec.seed, device)
    return model
