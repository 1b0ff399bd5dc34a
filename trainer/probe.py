"""The probe: opens data set and model as a run would, before anything is submitted."""

from __future__ import annotations

import json
import sys
import traceback
from typing import TextIO

import numpy as np
import torch
from pydantic import ValidationError

from trainer.components import (
    BUILT_IN_MODELS,
    ModelContext,
    resolve,
)
from trainer.data.keyed import SampleRandom
from trainer.spec.errors import VitraError
from trainer.spec.run import RunSpec
from trainer.worker import build_data


def probe(spec_json: bytes, out: TextIO) -> int:
    """Check the components of a spec; writes one JSON document and returns 0, or the error's exit code.

    On success: {"n_samples", "n_parameters", "versions"}. Else: {"error": class, "message", "hint"}.
    """
    try:
        spec = RunSpec.model_validate_json(spec_json)
        data = build_data(spec)
        factory = resolve(spec.model.kind, BUILT_IN_MODELS, "model.kind")
        # On the meta device options and shapes are checked and nothing is allocated.
        with torch.device("meta"):
            model = factory(spec.model.options, ModelContext(data.meta, spec.train.repeated_diffusion_steps))
        data.sample(0, SampleRandom(spec.seed, 0, 0))
        result = {
            "n_samples": len(data),
            "n_parameters": sum(p.numel() for p in model.parameters()),
            "versions": {"torch": torch.__version__, "numpy": np.__version__, "python": sys.version.split()[0]},
        }
        code = 0
    except VitraError as err:
        result = {"error": type(err).__name__, "message": err.message, "hint": err.hint}
        code = err.exit_code
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(map(str, first["loc"]))
        result = {"error": "SpecError", "message": f"options: {where}: {first['msg']}", "hint": None}
        code = 2
    except Exception as err:  # noqa: BLE001 - whatever a component of the user's raises is a fault of the spec
        traceback.print_exc()
        result = {"error": type(err).__name__, "message": f"{type(err).__name__}: {err}", "hint": None}
        code = 2
    out.write(json.dumps(result) + "\n")
    return code
