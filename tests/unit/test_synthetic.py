"""The synthetic data set: the same samples for ever, and something to learn in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trainer.components import Dataset
from trainer.data.keyed import SampleRandom
from trainer.data.samples import HoldsOut
from trainer.data.synthetic import SyntheticData, build

RNG = SampleRandom(seed=0, epoch=0, sample=0)


def opened(seed: int = 3, **options: Any) -> SyntheticData:
    return build({"samples": 64, "holdout": 8, "mask": False, **options}, seed)


def test_it_offers_the_protocols() -> None:
    data = opened()
    assert isinstance(data, Dataset)
    assert isinstance(data, HoldsOut)
    assert (len(data), data.held_out) == (64, 8)


def test_samples_depend_on_seed_and_index_alone() -> None:
    one, again, other = opened(), opened(), opened(seed=4)
    later = SampleRandom(seed=9, epoch=5, sample=1)
    for index in (7, 0, 63):
        sample, same = one.sample(index, RNG), again.sample(index, later)
        for name, value in sample.items():
            np.testing.assert_array_equal(value, same[name])
        assert not np.array_equal(sample["action"], other.sample(index, RNG)["action"])
    assert one.held_out_sample(2)["index"] == 66


def test_shapes_and_types() -> None:
    data = opened(chunk=5, action_dim=3, state_dim=6, image_size=20)
    assert data.meta.image_shape == (3, 20, 20)
    assert (data.meta.chunk, data.meta.action_dim, data.meta.state_dim) == (5, 3, 6)
    batch = data.collate([data.sample(index, RNG) for index in range(4)])
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "image": ((4, 3, 20, 20), torch.uint8),
        "state": ((4, 6), torch.float32),
        "task": ((4,), torch.int64),
        "action": ((4, 5, 3), torch.float32),
        "mask": ((4, 5), torch.bool),
        "index": ((4,), torch.int64),
    }
    assert batch["index"].tolist() == [0, 1, 2, 3]
    assert batch["action"].abs().max() <= 1


@pytest.mark.parametrize("mask", [False, True])
def test_valid_lengths(mask: bool) -> None:
    data = opened(mask=mask, chunk=8)
    lengths = {int(data.sample(index, RNG)["mask"].sum()) for index in range(64)}
    assert lengths == (set(range(1, 9)) if mask else {8})


def test_image_state_and_instruction_tell_the_action() -> None:
    """A linear fit within one task explains the first action; across tasks it does not."""
    data = opened(samples=400, image_size=48, action_dim=1)
    samples = [data.sample(index, RNG) for index in range(400)]
    square = [np.argwhere(s["image"][0] > 200).mean(axis=0) / 24 - 1 for s in samples]
    inputs = np.array([[*s["state"], *yx, 1.0] for s, yx in zip(samples, square, strict=True)])
    targets = np.arctanh(np.array([s["action"][0] for s in samples], dtype=np.float64))
    tasks = np.array([int(s["task"]) for s in samples])

    def unexplained(rows: np.ndarray, columns: slice) -> float:
        x, y = inputs[rows][:, columns], targets[rows]
        fit = np.linalg.lstsq(x, y, rcond=None)[0]
        return float(((y - x @ fit) ** 2).mean() / y.var())

    assert unexplained(tasks == 1, slice(None)) < 0.01
    assert unexplained(tasks == 1, slice(0, 4)) > 0.05
    assert unexplained(tasks >= 0, slice(None)) > 0.2


def test_task_means() -> None:
    data = opened(samples=400)
    for task in range(4):
        mine = [data.sample(index, RNG)["action"].mean(axis=0) for index in range(task, 400, 4)]
        np.testing.assert_allclose(data.task_mean_action[task], np.mean(mine, axis=0), atol=0.12)
