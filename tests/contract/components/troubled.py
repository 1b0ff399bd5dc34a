"""A data set of a user's own that makes trouble after some samples, in the way its options say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.components import Sample
from trainer.data.keyed import SampleRandom
from trainer.data.synthetic import SyntheticData
from trainer.spec.errors import DataError
from trainer.spec.options import SyntheticOptions

#: Samples that each process delivers before the trouble begins: six steps of four each.
_GOOD = 24


def build(options: Mapping[str, Any], seed: int) -> Troubled:
    """`trouble` is what happens; `counter` a file, by its relative path, that counts how often."""
    own = dict(options)
    trouble, counter = own.pop("trouble"), Path(own.pop("counter"))
    assert counter.exists(), f"no {counter} in {Path.cwd()}"
    return Troubled(SyntheticOptions.model_validate(own), seed, trouble, counter)


class Troubled(SyntheticData):
    def __init__(self, options: SyntheticOptions, seed: int, trouble: str, counter: Path) -> None:
        super().__init__(options, seed)
        self._trouble = trouble
        self._counter = counter
        self._delivered = 0

    def sample(self, index: int, rng: SampleRandom) -> Sample:
        sample = super().sample(index, rng)
        self._delivered += 1
        if self._delivered <= _GOOD or os.environ.get("RANK") != "1":
            return sample
        with self._counter.open("a") as file:
            file.write("x")
        match self._trouble:
            case "raise":
                raise DataError(f"sample {index} cannot be read")
            case "raise once":
                if self._counter.stat().st_size == 1:
                    raise ValueError("only this once\nwith a second line")
            case "exit 0":
                os._exit(0)
            case "exit 3":
                os._exit(3)
            case "no memory":
                np.empty(1 << 60, dtype=np.uint8)
            case "not finite":
                return {
                    name: np.full_like(value, np.nan) if value.dtype.kind == "f" else value
                    for name, value in sample.items()
                }
            case _:
                raise AssertionError(self._trouble)
        return sample
