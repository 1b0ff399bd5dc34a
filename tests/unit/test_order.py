"""The order of samples: each epoch a permutation, any position at once, whatever the world."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.data.order import SampleOrder, rank_positions


def epoch(order: SampleOrder, number: int) -> list[int]:
    positions = np.arange(number * order.n, (number + 1) * order.n, dtype=np.int64)
    epochs, indices = order.at(positions)
    assert set(epochs.tolist()) == {number}
    return indices.tolist()


def test_every_epoch_is_a_permutation_at_every_small_size() -> None:
    for n in range(1, 151):
        for seed, number in ((0, n % 4), (n, 1000)):
            assert sorted(epoch(SampleOrder(n, seed), number)) == list(range(n)), (n, seed, number)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 6000), seed=st.integers(0, 2**63), number=st.integers(0, 10**6))
@example(n=4096, seed=0, number=0)
@example(n=4097, seed=0, number=0)
def test_every_epoch_is_a_permutation(n: int, seed: int, number: int) -> None:
    assert sorted(epoch(SampleOrder(n, seed), number)) == list(range(n))


@pytest.mark.parametrize("n", [10**9, 2**40, 2**40 + 1, 2**62 - 1])
def test_huge_sizes(n: int) -> None:
    order = SampleOrder(n, seed=1)
    begin = np.arange(20_000, dtype=np.int64)
    spread = np.linspace(0, n - 1, 20_000, dtype=np.float64).astype(np.int64).clip(0, n - 1)
    positions = np.unique(np.concatenate([begin, spread, [n - 1]]))
    _, indices = order.at(positions)
    assert len(np.unique(indices)) == len(positions)
    assert indices.min() >= 0
    assert indices.max() < n
    # Neighbours land all over the range: a quarter of it each, within five standard deviations.
    quarters = np.bincount(order.at(begin)[1] // -(-n // 4), minlength=4)
    assert np.all(np.abs(quarters - 5000) < 5 * np.sqrt(20_000 * 0.25 * 0.75))


def test_epochs_and_seeds_differ() -> None:
    orders = [
        tuple(epoch(SampleOrder(50, seed), number)) for seed in (0, 1, 2**40) for number in range(8)
    ]
    assert len(set(orders)) == len(orders)
    # Not even half alike: two random orders of 50 agree in one place on average.
    for one, other in itertools.combinations(orders, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


def test_a_position_says_the_same_whatever_else_is_asked() -> None:
    n = 37
    whole_epochs, whole = SampleOrder(n, seed=3).at(np.arange(5 * n, dtype=np.int64))
    order = SampleOrder(n, seed=3)
    for position in (4 * n, 0, 5 * n - 1, n, n - 1, 3 * n + 7):
        one = order.at(np.array([position], dtype=np.int64))
        assert (one[0][0], one[1][0]) == (whole_epochs[position], whole[position])
    shuffled = np.random.default_rng(0).permutation(5 * n).reshape(5, n)
    epochs, indices = order.at(shuffled)
    np.testing.assert_array_equal(indices, whole[shuffled])
    np.testing.assert_array_equal(epochs, shuffled // n)


def test_a_batch_may_span_epochs() -> None:
    order = SampleOrder(10, seed=3)
    epochs, indices = order.at(np.arange(8, 33, dtype=np.int64))
    assert epochs.tolist() == [0] * 2 + [1] * 10 + [2] * 10 + [3] * 3
    expected = epoch(order, 0)[8:] + epoch(order, 1) + epoch(order, 2) + epoch(order, 3)[:3]
    assert indices.tolist() == expected


def test_small_orders_are_all_equally_likely() -> None:
    epochs = 600
    _, indices = SampleOrder(3, seed=8).at(np.arange(3 * epochs, dtype=np.int64))
    orders = [tuple(row) for row in indices.reshape(epochs, 3).tolist()]
    counts = np.array([orders.count(order) for order in itertools.permutations(range(3))])
    chi_square = float(((counts - epochs / 6) ** 2 / (epochs / 6)).sum())
    # 5 degrees of freedom; beyond 20.5 lies a probability of 0.001.
    assert chi_square < 20.5, counts.tolist()


def test_each_sample_comes_first_equally_often() -> None:
    epochs = 500
    firsts = SampleOrder(5, seed=2).at(np.arange(epochs, dtype=np.int64) * 5)[1]
    counts = np.bincount(firsts, minlength=5)
    # 4 degrees of freedom; beyond 18.5 lies a probability of 0.001.
    assert ((counts - epochs / 5) ** 2 / (epochs / 5)).sum() < 18.5, counts.tolist()


def test_the_order_is_the_same_for_ever() -> None:
    """A run that goes on with another version of this project must find its order again."""
    assert epoch(SampleOrder(12, seed=42), 0) == [0, 6, 5, 2, 3, 9, 11, 1, 8, 10, 4, 7]
    assert epoch(SampleOrder(12, seed=42), 7) == [11, 0, 1, 8, 5, 10, 2, 6, 9, 3, 7, 4]
    _, indices = SampleOrder(10**9, seed=0).at(np.array([0, 1, 10**12], dtype=np.int64))
    assert indices.tolist() == [456100846, 942946292, 307845356]


@pytest.mark.parametrize("n", [0, -1, 2**62])
def test_sizes_without_an_order(n: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}"):
        SampleOrder(n, seed=0)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_ranks_and_micro_steps_share_a_step_out(world: int, accumulation: int, step: int) -> None:
    per_device = 3
    batch = per_device * world * accumulation
    parts = [
        rank_positions(step, micro_step, rank, world, batch, per_device).tolist()
        for rank in range(world)
        for micro_step in range(accumulation)
    ]
    assert all(len(part) == per_device for part in parts)
    # In rank order, and within a rank in the order of its micro-steps, they are the stream itself.
    assert [p for part in parts for p in part] == list(range((step - 1) * batch, step * batch))
