"""The probe: opens data set and model as a run would, before anything is submitted."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import numpy as np
import torch

from trainer.components import Dataset, Model
from trainer.data.keyed import SampleRandom
from trainer.spec.errors import UsageError, VitraError
from trainer.spec.run import RunSpec
from trainer.worker import build_data, empty_model

_LONGEST_MESSAGE = 500


def probe(spec_json: bytes, out: TextIO) -> int:
    """Check the components of a spec; writes one JSON document. Returns 0 or the error's exit code.

    On success {"n_samples", "n_parameters", "versions"}, else {"error": class, "message", "hint"}.
    Whatever a component raises that is no VitraError is reported as a UsageError.
    """
    try:
        result = _look(RunSpec.model_validate_json(spec_json))
        code = 0
    except VitraError as err:
        result = {"error": type(err).__name__, "message": err.message, "hint": err.hint}
        code = err.exit_code
    out.write(json.dumps(result) + "\n")
    return code


def _look(spec: RunSpec) -> dict[str, Any]:
    with _blamed_on("data.kind", spec.data.kind):
        data = build_data(spec)
        _check_members("data.kind", spec.data.kind, data, Dataset)
        data.sample(0, SampleRandom(spec.seed, 0, 0))
        n_samples = len(data)
    with _blamed_on("model.kind", spec.model.kind):
        model = empty_model(spec, data)
        _check_members("model.kind", spec.model.kind, model, Model)
        n_parameters = sum(p.numel() for p in model.parameters())
    return {
        "n_samples": n_samples,
        "n_parameters": n_parameters,
        "versions": {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": sys.version.split()[0],
        },
    }


@contextmanager
def _blamed_on(field: str, kind: str) -> Iterator[None]:
    """Turn what a component raises by mistake into one line that names it and the place."""
    try:
        yield
    except VitraError:
        raise
    except (Exception, SystemExit) as err:
        place = traceback.extract_tb(err.__traceback__)[-1]
        text = " ".join(str(err).split())[:_LONGEST_MESSAGE]
        raise UsageError(
            f"{field}: {kind!r} raised {type(err).__name__}: {text}",
            f"raised in {place.filename}, line {place.lineno}",
        ) from err


def _check_members(field: str, kind: str, made: object, protocol: type) -> None:
    names = [*protocol.__annotations__, *(name for name in vars(protocol) if name[0] != "_")]
    missing = [name for name in names if not hasattr(made, name)]
    if missing:
        raise UsageError(
            f"{field}: {kind!r} gave a {type(made).__name__} without {', '.join(missing)}",
            f"the members that it needs are those of {protocol.__module__}.{protocol.__name__}",
        )
