"""Made-up demonstrations that a model can learn, without any file: for tests and benchmarks.

A square is drawn where its centre (u, v) falls on a grey image; the instruction names a direction.
Step t of the chunk is tanh(W[task] (state, u, v)) cos(pi t / T): image, state and instruction are
all needed to tell the action. Every sample is a pure function of (seed, index).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.components import Batch, Sample
from trainer.data.keyed import SampleRandom, keyed_generator
from trainer.data.normalize import MinMax
from trainer.data.samples import DataMeta, stack
from trainer.spec.options import SyntheticOptions

INSTRUCTIONS = ("push the block left", "push the block right", "lift the block", "turn the block")
#: Samples that the mean action of each task is taken over.
_MEAN_SAMPLES = 256
_GREY = 96


def build(options: Mapping[str, Any], seed: int) -> SyntheticData:
    """The data set that `options` (see `SyntheticOptions`) describe."""
    return SyntheticData(SyntheticOptions.model_validate(options), seed)


class SyntheticData:
    """Offers `Dataset` and `HoldsOut`. With `mask` the chunks' valid lengths are unequal."""

    def __init__(self, options: SyntheticOptions, seed: int) -> None:
        self._options = options
        self._seed = seed
        self.held_out = options.holdout
        self.meta = DataMeta(
            image_shape=(3, options.image_size, options.image_size),
            chunk=options.chunk,
            fps=10.0,
            instructions=INSTRUCTIONS,
            state=_unit_range(options.state_dim),
            action=_unit_range(options.action_dim),
        )
        inputs = options.state_dim + 2
        weights = keyed_generator(seed, "synthetic", "weights").standard_normal(
            (len(INSTRUCTIONS), options.action_dim, inputs)
        )
        self._weights = 2.0 * weights / np.sqrt(inputs)
        phase = np.arange(options.chunk) / options.chunk
        self._shape = np.cos(np.pi * phase)[:, None]
        self.task_mean_action = self._mean_actions()

    def __len__(self) -> int:
        return self._options.samples

    def sample(self, index: int, rng: SampleRandom) -> Sample:  # noqa: ARG002 - fixed samples
        return self._at(index)

    def held_out_sample(self, number: int) -> Sample:
        return self._at(len(self) + number)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        return stack(samples)

    def _at(self, index: int) -> Sample:
        generator = keyed_generator(self._seed, "synthetic", index)
        task = index % len(INSTRUCTIONS)
        inputs = generator.uniform(-1.0, 1.0, self._options.state_dim + 2)
        chunk = self._options.chunk
        valid = int(generator.integers(1, chunk + 1)) if self._options.mask else chunk
        return {
            "image": self._draw(inputs[-2], inputs[-1]),
            "state": inputs[:-2].astype(np.float32),
            "task": np.asarray(task, dtype=np.int64),
            "action": self._action(task, inputs),
            "mask": np.arange(chunk) < valid,
            "index": np.asarray(index, dtype=np.int64),
        }

    def _action(self, task: int, inputs: np.ndarray) -> np.ndarray:
        direction = np.tanh((self._weights[task] * inputs).sum(axis=1))
        return (direction * self._shape).astype(np.float32)

    def _draw(self, u: float, v: float) -> np.ndarray:
        """A bright square of a quarter of the image's side, its centre at (u, v) in [-1, 1]."""
        size = self._options.image_size
        side = max(1, size // 4)
        top, left = (round((1 + centre) / 2 * (size - side)) for centre in (v, u))
        image = np.full((3, size, size), _GREY, dtype=np.uint8)
        image[:, top : top + side, left : left + side] = np.array([230, 60, 40])[:, None, None]
        return image

    def _mean_actions(self) -> np.ndarray:
        tasks = len(INSTRUCTIONS)
        sums = np.zeros((tasks, self._options.action_dim))
        drawn = keyed_generator(self._seed, "synthetic", "mean").uniform(
            -1.0, 1.0, (_MEAN_SAMPLES, self._options.state_dim + 2)
        )
        for task in range(tasks):
            actions = np.stack([self._action(task, inputs) for inputs in drawn])
            sums[task] = actions.mean(axis=(0, 1))
        return sums.astype(np.float32)


def _unit_range(dim: int) -> MinMax:
    return MinMax((-1.0,) * dim, (1.0,) * dim)
