"""A model and a data set of a user's own whose pace, and whose troubles, a test sets as it goes.

The file `pace` in the working directory says how many seconds a forward pass and a save take at
least ({"forward": 0.05, "save": 0}), in all attempts or in one ("forward 2"); it is looked at again
all the time, so that a test can hold a run where it wants it, and then let it go. What is computed
does not depend on any of this.

The file `trouble`, where there is one, says what rank 1 does at its next sample after the first 24
of an attempt.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trainer.components import Batch, ModelContext, Sample
from trainer.data.keyed import SampleRandom
from trainer.data.samples import DataMeta
from trainer.data.synthetic import SyntheticData
from trainer.models.vla import Vla
from trainer.spec.options import SyntheticOptions, VlaOptions

_PACE = Path("pace")
_TROUBLE = Path("trouble")
_GOOD_SAMPLES = 24


def hold(what: str) -> None:
    """Return once `what` has taken as long as the file says, which may change meanwhile."""
    began = time.monotonic()
    while time.monotonic() - began < _seconds(what):
        time.sleep(0.01)


def _seconds(what: str) -> float:
    try:
        pace = json.loads(_PACE.read_text())
    except OSError:
        # No run, but the probe at submit.
        return 0.0
    return float(pace.get(f"{what} {os.environ.get('VITRA_ATTEMPT')}", pace.get(what, 0.0)))


def build_data(options: Mapping[str, Any], seed: int) -> TroubledData:
    return TroubledData(SyntheticOptions.model_validate(options), seed)


def build_model(options: Mapping[str, Any], context: ModelContext) -> PacedModel:
    assert isinstance(context.data_meta, DataMeta)
    return PacedModel(
        VlaOptions.model_validate(options), context.data_meta, context.repeated_diffusion_steps
    )


class TroubledData(SyntheticData):
    def __init__(self, options: SyntheticOptions, seed: int) -> None:
        super().__init__(options, seed)
        self._delivered = 0

    def sample(self, index: int, rng: SampleRandom) -> Sample:
        self._delivered += 1
        if self._delivered > _GOOD_SAMPLES and os.environ.get("RANK") == "1" and _TROUBLE.exists():
            begin(_TROUBLE.read_text())
        return super().sample(index, rng)


def begin(trouble: str) -> None:
    match trouble:
        case "exit 0":
            os._exit(0)
        case "exit 3":
            os._exit(3)
        case "take all memory":
            # As where a batch system limits what its jobs may take.
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = used + (64 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            hog = [np.ones(1 << 20) for _ in range(1 << 10)]
            raise AssertionError(f"the limit let {len(hog)} arrays through")
        case "raise once":
            _TROUBLE.unlink()
            raise ValueError("only this once")
        case _:
            raise AssertionError(trouble)


class PacedModel(Vla):
    def forward(self, batch: Batch) -> Tensor:
        hold("forward")
        return super().forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if kwargs.get("keep_vars"):  # as a save asks for it, and DDP does not
            hold("save")
        return super().state_dict(*args, **kwargs)
