"""Keyed randomness: every draw a function of its key alone, and no two keys the same."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch

from trainer.data.keyed import SampleRandom, keyed_generator
from trainer.data.loader import reseed


def first(*key: int | str) -> int:
    return int(keyed_generator(*key).integers(2**63))


def test_the_same_key_gives_the_same_draws() -> None:
    one, same = (keyed_generator(1, "noise", 2).standard_normal((3, 4)) for _ in range(2))
    np.testing.assert_array_equal(one, same)


def test_keys_do_not_collide() -> None:
    keys: list[tuple[int | str, ...]] = [
        ("a", 1),
        ("a1",),
        ("a", "1"),
        ("1", "a"),
        ("1",),
        (1,),
        (-1,),
        (11,),
        (1, 1),
        ("",),
        ("", ""),
        (),
        (0,),
        ("0",),
        (1, "s"),
        ("i1",),
        ("\x00",),
        ("ä",),
        (2**64 + 1,),
        (2**32 + 1,),
    ]
    assert len({first(*key) for key in keys}) == len(keys)


def test_bools_and_numpy_integers_are_the_integers_they_equal() -> None:
    assert first(np.int64(7), True) == first(7, 1)


def test_every_part_of_a_samples_key_counts() -> None:
    base = {"seed": 1, "epoch": 2, "sample": 3}
    draws = {
        int(SampleRandom(**{**base, **change}).generator(purpose, repeat).integers(2**63))
        for change, purpose, repeat in itertools.product(
            [{}, {"seed": 2}, {"epoch": 3}, {"sample": 4}, {"epoch": 3, "sample": 2}],
            ["noise", "timestep"],
            [0, 1, 2],
        )
    }
    assert len(draws) == 5 * 2 * 3


def test_draws_of_neighbouring_samples_are_independent() -> None:
    rows = np.stack(
        [SampleRandom(0, 0, i).generator("noise").standard_normal(500) for i in range(20)]
    )
    correlations = np.corrcoef(rows)[np.triu_indices(20, 1)]
    # A standard deviation is 1 / sqrt(500); 190 pairs, so five of them.
    assert np.abs(correlations).max() < 5 / np.sqrt(500)
    assert abs(rows.mean()) < 0.05
    assert abs(rows.std() - 1) < 0.05


def test_streams_are_what_they_were() -> None:
    """A numpy that draws otherwise changes what a resumed run trains; then this must be said."""
    rng = SampleRandom(seed=42, epoch=3, sample=1234)
    noise = rng.generator("noise", 1).standard_normal(3, dtype=np.float32)
    assert noise.tolist() == [-0.11655083298683167, -1.3456323146820068, -1.1740107536315918]
    assert rng.generator("timestep").integers(100, size=5).tolist() == [93, 35, 6, 44, 0]
    weights = keyed_generator(42, "weights", "head.output.weight")
    assert weights.integers(2**63) == 5393339501804437005


def test_reseed_sets_all_three_global_generators() -> None:
    def draws() -> tuple[object, ...]:
        return (
            torch.rand(2).tolist(),
            np.random.rand(2).tolist(),
            random.random(),
            torch.rand(1).item(),
        )

    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        reseed(5, "micro-batch", 1, 0, 0)
        one = draws()
        reseed(5, "micro-batch", 1, 0, 0)
        assert draws() == one
        for other in [(6, "micro-batch", 1, 0, 0), (5, "micro-batch", 1, 0, 1), (5, "x", 1, 0, 0)]:
            reseed(*other)
            assert all(a != b for a, b in zip(draws(), one, strict=True))
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
