"""Min-max scaling of vectors to [-1, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: A dimension whose span is below this part of its magnitude is float noise around a constant.
_CONSTANT_SPAN = 1e-6


@dataclass(frozen=True)
class MinMax:
    """The range of each dimension, in the unit of the data.

    A dimension that never changes is normalised to 0 and restored to its constant.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high):
            raise ValueError(f"{len(self.low)} lower but {len(self.high)} upper bounds")
        for low, high in zip(self.low, self.high, strict=True):
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ValueError(f"[{low}, {high}] is no range")

    @classmethod
    def of(cls, low: Sequence[float], high: Sequence[float]) -> MinMax:
        """Bounds given as any numbers.

        Raises:
            ValueError, TypeError: not the same number of finite bounds, lower ones first.
        """
        return cls(tuple(float(x) for x in low), tuple(float(x) for x in high))

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """(..., D) in the data's unit to (..., D) float32; what lies in range lands in [-1, 1]."""
        middle, half, varies = self._affine()
        scaled = (values.astype(np.float64) - middle) / np.where(varies, half, 1.0)
        return np.where(varies, scaled, 0.0).astype(np.float32)

    def restore(self, values: np.ndarray) -> np.ndarray:
        """The inverse of `normalize`: (..., D) float32 in the data's unit."""
        middle, half, varies = self._affine()
        return np.where(varies, values.astype(np.float64) * half + middle, middle).astype(
            np.float32
        )

    def _affine(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        low, high = np.array(self.low), np.array(self.high)
        magnitude = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
        varies = high - low > _CONSTANT_SPAN * magnitude
        return (low + high) / 2, (high - low) / 2, varies
