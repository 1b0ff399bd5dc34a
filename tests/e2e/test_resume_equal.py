"""The promise: a run that was killed and resumed equals one that never was, bit for bit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Run, spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Rounds of three kills each, alternating 2 and 4 ranks. `make torture` asks for more.
ROUNDS = int(os.environ.get("VITRA_TORTURE_ROUNDS", "5"))
#: Between a resume and the next kill lie at least 10 steps: some differences show only then.
KILL_WINDOWS = ((2, 10), (20, 28), (38, 46))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Results of the undisturbed run, by world size; trained once each."""
    known: dict[int, dict[str, Any]] = {}

    def results(world: int) -> dict[str, Any]:
        if world not in known:
            run = Run(tmp_path_factory.mktemp(f"whole-{world}"), spec(world))
            run.finish()
            known[world] = run.results()
        return known[world]

    return results


@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_three_times_equals_whole(number: int, whole: Any, tmp_path: Path) -> None:
    chance = random.Random(1000 + number)
    world = (2, 4)[number % 2]
    expected = whole(world)
    run = Run(tmp_path, spec(world))
    for low, high in KILL_WINDOWS:
        run.kill_at(chance.randint(low, high), chance)
    run.finish()
    results = run.results()

    assert results["step"] == 60
    assert [m["step"] for m in results["metrics"]] == list(range(1, 61))
    assert results["metrics"] == expected["metrics"]
    assert results["samples"] == expected["samples"]
    assert results["state"] == expected["state"]
    # Any other program may take the chosen port first; then the run starts again by itself.
    no_port = {e["attempt"] for e in run.events("ended") if "EADDRINUSE" in e["reason"]}
    attempts = [e for e in run.events("attempt") if e["attempt"] not in no_port]
    assert len(attempts) == 4
    # The first kill may come before the first checkpoint; later ones cost an interval at most.
    resumes = [e["resume_step"] for e in attempts]
    assert resumes[0] is None
    assert all(r >= low - 4 for r, (low, _) in zip(resumes[2:], KILL_WINDOWS[1:], strict=True))


def test_every_epoch_trains_every_sample_once(whole: Any) -> None:
    lines = [line for file in whole(2)["samples"].values() for line in file]
    first_epoch = [i for line in lines if line["step"] <= 40 for i in line["ids"]]
    assert sorted(first_epoch) == list(range(320))
    second_epoch = [i for line in lines if line["step"] > 40 for i in line["ids"]]
    assert len(set(second_epoch)) == len(second_epoch) == 160


def test_two_runs_of_one_spec_are_equal(whole: Any, tmp_path: Path) -> None:
    run = Run(tmp_path, spec(2))
    run.finish()
    assert run.results() == whole(2)


@pytest.mark.parametrize("forgotten", ["optimizer", "schedule", "position", "reseeding"])
def test_forgetting_any_state_is_seen(forgotten: str, whole: Any, tmp_path: Path) -> None:
    """Negative controls: without one kind of state the resumed run is not equal."""
    run = Run(tmp_path, spec(2))
    run.kill_at(6, random.Random(1))
    forget = Path(__file__).parent / "forget"
    run.finish(env={"FORGET": forgotten, "PYTHONPATH": str(forget)})
    results, expected = run.results(), whole(2)

    assert results["metrics"] != expected["metrics"]
    before = [m for m in results["metrics"] if m["step"] <= run.events("attempt")[1]["resume_step"]]
    assert before == expected["metrics"][: len(before)]
    if forgotten == "position":
        assert results["samples"] != expected["samples"]
    assert results["state"] != expected["state"]
