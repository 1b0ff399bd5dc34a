"""The probe: opens data set and model as a run would, before anything is submitted."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from trainer.answer import answer
from trainer.checks import check_initialization, check_training, trial_batch
from trainer.components import BUILT_IN_DATA, BUILT_IN_MODELS, Dataset
from trainer.data.keyed import SampleRandom
from trainer.data.loader import reseed
from trainer.factories import build_data, build_model, empty_model
from trainer.snapshot import imported
from trainer.spec.errors import UsageError, VitraError
from trainer.spec.run import RunSpec, is_sharded
from trainer.spec.snapshot import is_installed
from trainer.strategies.units import shard_units

_LONGEST_MESSAGE = 500
#: Larger models are not tried out: a submit host may have little memory.
_TRIED_PARAMETERS = 50_000_000


def probe(spec_json: bytes, out: TextIO) -> int:
    """Check the components of a spec; writes one JSON document. Returns 0 or the error's exit code.

    On success {"n_samples", "n_parameters", "versions", "notes"} and what
    `trainer.snapshot.imported` tells, else {"error": class, "message", "hint"}. Whatever a
    component raises that is no VitraError is reported as a UsageError.
    """
    return answer(out, lambda: _look(RunSpec.model_validate_json(spec_json)))


def _look(spec: RunSpec) -> dict[str, Any]:
    with _blamed_on("data.kind", spec.data.kind):
        data = build_data(spec)
        data.sample(0, SampleRandom(spec.seed, 0, 0))
        n_samples = len(data)
    with _blamed_on("model.kind", spec.model.kind):
        model = empty_model(spec, data)
        if is_sharded(spec.train.strategy):
            shard_units(model)  # refuses what cannot be sharded
        n_parameters = sum(p.numel() for p in model.parameters())
    notes = [] if _both_built_in(spec) else _try_out(spec, data, model, n_parameters)
    return {
        "n_samples": n_samples,
        "n_parameters": n_parameters,
        "versions": {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": sys.version.split()[0],
        },
        "notes": notes,
        **imported(),
    }


def _both_built_in(spec: RunSpec) -> bool:
    return spec.data.kind in BUILT_IN_DATA and spec.model.kind in BUILT_IN_MODELS


def _try_out(spec: RunSpec, data: Dataset, model: Any, n_parameters: int) -> list[str]:
    """Train own components for half a step: a batch, initial weights, one forward pass.

    Returns notes on what could not be tried here.
    """
    with _blamed_on("data.kind", spec.data.kind):
        batch = trial_batch(spec, data, model)
    if n_parameters > _TRIED_PARAMETERS:
        return ["the model is too large to be tried out here: its forward pass was not checked"]
    on_cpu = spec.resources.gpu_count == 0
    with _blamed_on("model.kind", spec.model.kind):
        # As the ranks will; it also fills new memory with nan.
        strict = on_cpu and spec.train.deterministic is not False
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        model = check_initialization(
            spec.model.kind,
            lambda: build_model(spec, data, torch.device("cpu")),
            lambda number: reseed("probe", number),
        )
    try:
        with _blamed_on("model.kind", spec.model.kind, f" on samples of {spec.data.kind!r}"):
            check_training(spec, model, batch)
    except UsageError as err:
        # What it raised by itself may well be for want of a GPU.
        if on_cpu or err.__cause__ is None:
            raise
        return [f"the model's forward pass cannot be tried without a GPU: {err.message}"]
    return []


@contextmanager
def _blamed_on(field: str, kind: str, doing: str = "") -> Iterator[None]:
    """Turn what a component raises by mistake into one line that names it and the place."""
    try:
        yield
    except VitraError:
        raise
    except (Exception, SystemExit) as err:
        text = " ".join(str(err).split())[:_LONGEST_MESSAGE]
        raise UsageError(
            f"{field}: {kind!r}{doing} raised {type(err).__name__}: {text}",
            f"raised in {_place_of(err)}",
        ) from err


def _place_of(error: BaseException) -> str:
    """The innermost place of the user's own code that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parent
    own = [
        frame
        for frame in frames
        if not is_installed(Path(frame.filename)) and ours not in Path(frame.filename).parents
    ]
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"
