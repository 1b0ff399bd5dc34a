"""What the built-in data sets and models agree on: the fields of a sample and their meaning.

T: steps of an action chunk, A: action dimensions, D: state dimensions. A sample holds

    image   (3, H, W)  uint8    RGB
    state   (D,)       float32  normalised to [-1, 1]
    task    ()         int64    index into `DataMeta.instructions`
    action  (T, A)     float32  normalised to [-1, 1]; beyond the episode's end its last action
    mask    (T,)       bool     False beyond the episode's end
    index   ()         int64    the sample's number
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from trainer.components import Batch, Sample
from trainer.data.normalize import MinMax


@dataclass(frozen=True)
class DataMeta:
    """The shapes and statistics that a model must know to be built for a data set.

    `instructions[task]` is what the robot was asked to do; `state` and `action` are the ranges that
    the samples were normalised with.
    """

    image_shape: tuple[int, int, int]
    chunk: int
    fps: float
    instructions: tuple[str, ...]
    state: MinMax
    action: MinMax

    @property
    def state_dim(self) -> int:
        return len(self.state.low)

    @property
    def action_dim(self) -> int:
        return len(self.action.low)


@runtime_checkable
class HoldsOut(Protocol):
    """A data set that keeps samples out of the training data, for a model to be judged on."""

    meta: DataMeta
    #: How many samples are held out; may be 0.
    held_out: int
    #: (tasks, A) float32: each task's mean normalised action over the training data.
    task_mean_action: np.ndarray

    def held_out_sample(self, number: int) -> Sample:
        """Held-out sample `number`, of 0 to held_out - 1."""
        ...


def stack(samples: Sequence[Sample]) -> Batch:
    """Samples of equal fields and shapes to one batch; the first dimension is the sample."""
    return {
        name: torch.from_numpy(np.stack([sample[name] for sample in samples]))
        for name in samples[0]
    }
