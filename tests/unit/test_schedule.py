"""Learning rates by hand: every kind of schedule, at every boundary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.optim import LearningRates
from trainer.spec.schedule import ACTION_MODEL, BACKBONE, Schedule

COSINE = "linear-warmup+cosine-decay"
WARMUP = "linear-warmup+constant"
FREEZE = "backbone-freeze-warmup"


def factors(kind: str, total: int, steps: list[int], role: str = BACKBONE, **more: Any) -> Any:
    schedule = Schedule(kind, total, **more)
    return pytest.approx([schedule.factor(step, role) for step in steps], abs=1e-12)


@pytest.mark.parametrize("role", [BACKBONE, ACTION_MODEL])
def test_cosine(role: str) -> None:
    """T = 10, w = 2, floor 0.1: an eighth, a quarter, a half, three quarters of the way down."""
    found = factors(COSINE, 10, [1, 2, 3, 4, 6, 8, 10], role, warmup_ratio=0.2, min_lr_ratio=0.1)
    assert found == [
        0.5,
        1.0,
        0.9657457896300791,
        0.8681980515339464,
        0.55,
        0.2318019484660536,
        0.1,
    ]


def test_cosine_without_a_warm_up_starts_below_the_peak() -> None:
    assert factors(COSINE, 4, [1, 2, 3, 4]) == [0.8535533905932737, 0.5, 0.14644660940672624, 0.0]


def test_cosine_that_only_warms_up() -> None:
    assert factors(COSINE, 4, [1, 2, 3, 4], warmup_ratio=1.0, min_lr_ratio=0.5) == [
        0.25,
        0.5,
        0.75,
        1,
    ]


def test_cosine_stays_on_its_floor_beyond_the_total() -> None:
    assert factors(COSINE, 4, [5, 9, 10**6], min_lr_ratio=0.1) == [0.1] * 3
    assert factors(COSINE, 4, [5, 8], warmup_ratio=1.0, min_lr_ratio=0.1) == [0.1] * 2


def test_cosine_with_a_floor_at_the_peak_is_constant() -> None:
    assert factors(COSINE, 6, [1, 3, 6, 9], min_lr_ratio=1.0) == [1.0] * 4


@pytest.mark.parametrize("role", [BACKBONE, ACTION_MODEL])
def test_warmup_constant(role: str) -> None:
    found = factors(WARMUP, 10, [1, 2, 3, 4, 5, 10, 11], role, warmup_ratio=0.4)
    assert found == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("ratio", "total", "warmup"), [(0.03, 99, 2), (0.03, 33, 0), (0.03, 34, 1), (0.0, 10, 0)]
)
def test_the_warm_up_is_rounded_down(ratio: float, total: int, warmup: int) -> None:
    schedule = Schedule(WARMUP, total, warmup_ratio=ratio)
    below = [k for k in range(1, total + 1) if schedule.factor(k, BACKBONE) < 1.0]
    assert below == list(range(1, warmup))


def test_constant() -> None:
    assert factors("constant", 10, [1, 5, 10, 11], warmup_ratio=0.5) == [1.0] * 4


def test_freezing_lasts_exactly_the_steps_asked_for() -> None:
    schedule = Schedule(FREEZE, 10, freeze_steps=3, warmup_ratio=0.5)
    steps = range(1, 12)
    assert [k for k in steps if schedule.freezes(k)] == [1, 2, 3]
    assert [schedule.factor(k, BACKBONE) for k in steps] == [0.0] * 3 + [1.0] * 8
    assert [schedule.factor(k, ACTION_MODEL) for k in steps] == [1.0] * 11
    unfrozen = Schedule(FREEZE, 10)
    assert not any(unfrozen.freezes(k) for k in steps)


@pytest.mark.parametrize("kind", [COSINE, WARMUP, "constant"])
def test_other_kinds_never_freeze(kind: str) -> None:
    assert not Schedule(kind, 10, freeze_steps=3).freezes(1)


# -- LearningRates -----------------------------------------------------------------------------


def optimizer(backbone_lr: float = 0.5, action_lr: float = 2.0) -> torch.optim.SGD:
    groups = [
        {"params": [torch.zeros(1)], "role": role, "peak_lr": lr}
        for role, lr in (
            (BACKBONE, backbone_lr),
            (BACKBONE, backbone_lr),
            (ACTION_MODEL, action_lr),
        )
    ]
    return torch.optim.SGD(groups, lr=0.0)


def rates_of(used: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in used.param_groups]


def test_rates_are_set_for_the_step_that_follows() -> None:
    used = optimizer()
    rates = LearningRates(used, Schedule(WARMUP, 10, warmup_ratio=0.4))
    assert rates.begin_step() == {BACKBONE: 0.125, ACTION_MODEL: 0.5}
    assert rates_of(used) == [0.125, 0.125, 0.5]
    assert rates.begin_step() == {BACKBONE: 0.25, ACTION_MODEL: 1.0}
    assert rates_of(used) == [0.25, 0.25, 1.0]
    assert rates.last_step == 2


def test_a_resumed_schedule_goes_on_where_it_was() -> None:
    whole = LearningRates(optimizer(), Schedule(COSINE, 9, warmup_ratio=0.3, min_lr_ratio=0.1))
    expected = [whole.begin_step() for _ in range(9)]
    first = LearningRates(optimizer(), whole.schedule)
    found = [first.begin_step() for _ in range(4)]
    second = LearningRates(optimizer(), whole.schedule)
    second.load_state_dict(first.state_dict())
    found += [second.begin_step() for _ in range(5)]
    assert found == expected


def test_a_resume_with_another_total_or_peak_follows_the_new_schedule() -> None:
    first = LearningRates(optimizer(), Schedule(COSINE, 4))
    for _ in range(2):
        first.begin_step()
    second = LearningRates(optimizer(action_lr=8.0), Schedule(COSINE, 6))
    second.load_state_dict(first.state_dict())
    # Step 3 of 6 is half the way down.
    assert second.begin_step() == pytest.approx({BACKBONE: 0.25, ACTION_MODEL: 4.0})
