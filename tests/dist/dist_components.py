"""Data sets of a user's own, named in specs as `dist_components:<factory>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.components import Sample
from trainer.data.keyed import SampleRandom
from trainer.data.synthetic import SyntheticData
from trainer.spec.errors import DataError
from trainer.spec.options import SyntheticOptions


class Spoiled(SyntheticData):
    """Synthetic data in which one sample is not what it should be."""

    def __init__(self, options: Mapping[str, Any], seed: int) -> None:
        self._bad = int(options["bad"])
        self._how = options["how"]
        super().__init__(SyntheticOptions(samples=int(options["samples"])), seed)

    def sample(self, index: int, rng: SampleRandom) -> Sample:
        sample = super().sample(index, rng)
        if index != self._bad:
            return sample
        if self._how == "unreadable":
            raise DataError(f"sample {index} is unreadable", "restore it")
        return {**sample, "action": np.full_like(sample["action"], np.inf)}


def spoiled(options: Mapping[str, Any], seed: int) -> Spoiled:
    return Spoiled(options, seed)
