"""The promise for every strategy: killed and resumed equals undisturbed, bit for bit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Run, spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: How often each cell of the matrix is tried; CI has time for one world, once.
ROUNDS = int(os.environ.get("VITRA_TORTURE_ROUNDS", "1"))
WORLDS = (2, 4) if "VITRA_TORTURE_ROUNDS" in os.environ else (2,)
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp-grad": {"strategy": "fsdp-grad"},
    "fsdp-full": {"strategy": "fsdp-full"},
}
MATRIX = [(name, world) for world in WORLDS for name in STRATEGIES]
if 4 in WORLDS:
    STRATEGIES["hybrid"] = {"strategy": "fsdp-full", "replicate": 2}
    MATRIX.append(("hybrid", 4))

Windows = tuple[tuple[int, int], ...]
#: All within the first epoch of 40 steps, and each long enough after the last resume.
WITHIN_AN_EPOCH = ((4, 7), (17, 20), (29, 34))
#: Step 40 is the epoch's last and a checkpoint: before, during and after its save.
BOUNDARY = ((39, 41),)
CASES = [(*cell, windows) for cell in MATRIX for windows in (WITHIN_AN_EPOCH, BOUNDARY)]
if WORLDS == (2,):
    CASES.remove(("ddp", 2, WITHIN_AN_EPOCH))  # test_resume_equal does this many times over

Whole = Callable[[str, int], dict[str, Any]]


def started(root: Path, name: str, world: int) -> Run:
    return Run(root, spec(world, train=STRATEGIES[name]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Results of the undisturbed runs, each trained once."""
    known: dict[tuple[str, int], dict[str, Any]] = {}

    def results(name: str, world: int) -> dict[str, Any]:
        if (name, world) not in known:
            run = started(tmp_path_factory.mktemp(f"{name}-{world}"), name, world)
            run.finish()
            known[name, world] = run.results()
        return known[name, world]

    return results


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize(
    ("name", "world", "windows"),
    CASES,
    ids=lambda value: f"{len(value)} kills" if isinstance(value, tuple) else str(value),
)
def test_killed_equals_whole(
    name: str,
    world: int,
    windows: Windows,
    number: int,
    whole: Whole,
    tmp_path: Path,
) -> None:
    chance = random.Random(f"{name} {world} {windows} {number}")
    run = started(tmp_path, name, world)
    for low, high in windows:
        run.kill_at(chance.randint(low, high), chance)
    run.finish()
    results, expected = run.results(), whole(name, world)

    assert results["step"] == 60
    assert [m["step"] for m in results["metrics"]] == list(range(1, 61))
    assert results["metrics"] == expected["metrics"]
    assert results["samples"] == expected["samples"]
    assert results["state"] == expected["state"]
    resumes = [event["resume_step"] for event in run.events("attempt")]
    assert len(resumes) == len(windows) + 1
    # Each kill costs an interval of four steps at most, but for one before the first save.
    assert all((r or 0) >= low - 4 for r, (low, _) in zip(resumes[1:], windows, strict=True))


@pytest.mark.parametrize("world", WORLDS)
def test_strategies_train_the_same_samples_to_the_same_losses(world: int, whole: Whole) -> None:
    """Dropout included: what a model draws by itself depends on the rank, not on the strategy."""
    expected = whole("ddp", world)
    for name in ("fsdp-grad", "fsdp-full"):
        results = whole(name, world)
        assert results["samples"] == expected["samples"]
        for ours, theirs in zip(results["metrics"][:20], expected["metrics"][:20], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["lr"] == theirs["lr"]


def test_a_run_goes_on_with_another_strategy_when_told_to(whole: Whole, tmp_path: Path) -> None:
    run = started(tmp_path, "ddp", 2)
    run.kill_at(9, random.Random(3))
    run.finish(more=["-o", "train.strategy=fsdp-full"])
    assert "train.strategy: ddp -> fsdp-full" in run.terminal()
    results, expected = run.results(), whole("ddp", 2)
    assert results["samples"] == expected["samples"]
    for ours, theirs in zip(results["metrics"][:20], expected["metrics"][:20], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
