"""The ledger of a run's time: measured by one clock, nothing counted twice, nothing forgotten."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from launcher.goodput import Timekeeper, goodput
from trainer.spec.pulse import Phase, Place
from trainer.spec.rundir import RunDir

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
PARTS = ("queued_s", "starting_s", "restoring_s", "training_s", "saving_s", "lost_s", "other_s")


class Timeline:
    """A run whose hours a test writes; its clock moves only when told to."""

    def __init__(self, path: Path) -> None:
        self.dir = RunDir(path)
        self.dir.attempts.mkdir(parents=True)
        self.now_s = 0.0

    def event(self, name: str, **details: Any) -> None:
        at = (BEGAN + timedelta(seconds=self.now_s)).isoformat(timespec="milliseconds")
        with self.dir.events.open("a") as file:
            file.write(json.dumps({"at": at, "event": name, **details}) + "\n")

    def attempt(
        self,
        number: int,
        phases: Sequence[tuple[Phase, int, float]],
        *,
        resumes_from: int | None = None,
        steps: Sequence[tuple[int, float]] = (),
        killed: bool = False,
    ) -> None:
        """An attempt that spends so many seconds in each phase, at that step, from its first beat.

        `steps`: what each logged step took. `killed`: together with its supervisor.
        """
        files = self.dir.attempt(number)
        files.path.mkdir()
        self.event("attempt", attempt=number, resume_step=resumes_from)
        keeper = Timekeeper(files, lambda: self.now_s, restores=resumes_from is not None)
        for phase, step, seconds in phases:
            if phase is Phase.LOADING and not any(
                e.get("event") == "started" and e.get("attempt") == number for e in self.events()
            ):
                self.event("started", attempt=number, step=resumes_from or 0)
            keeper.look({0: Place(step, phase), 1: Place(0, Phase.STARTING)})
            self.now_s += seconds
        with files.metrics.open("w") as file:
            for step, seconds in steps:
                file.write(json.dumps({"step": step, "step_time_s": seconds}) + "\n")
        if not killed:
            keeper.close()
            self.event("ended", attempt=number, verdict="preempted", reason="")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.dir.events.read_text().splitlines()]

    def goodput(self, **options: Any) -> dict[str, Any]:
        now = BEGAN + timedelta(seconds=self.now_s)
        found = goodput(
            self.dir, self.events(), alive=options.pop("alive", False), now=now, **options
        )
        assert sum(found[part] or 0.0 for part in PARTS) == pytest.approx(found["wall_s"], abs=0.01)
        return found


@pytest.fixture
def run(tmp_path: Path) -> Timeline:
    return Timeline(tmp_path / "run")


def test_every_second_of_a_preempted_run_is_somewhere(run: Timeline) -> None:
    run.event("submitted")
    run.now_s += 100
    run.event("allocated", queued_s=98.0)
    run.attempt(
        1,
        [
            (Phase.STARTING, 0, 20),
            (Phase.JOINING, 0, 5),
            (Phase.PREPARING, 0, 5),
            (Phase.LOADING, 0, 1),
            (Phase.COMPUTING, 0, 39),
            (Phase.SAVING, 4, 3),
            (Phase.LOADING, 4, 25),  # of which the last five are a step that is not finished
            (Phase.DONE, 6, 2),
        ],
        steps=[(step, 10.0) for step in range(1, 7)],
    )
    run.event("requeued")
    run.now_s += 50
    run.event("allocated", queued_s=45.0)
    run.attempt(
        2,
        [
            (Phase.STARTING, 0, 20),
            (Phase.PREPARING, 0, 7),
            (Phase.LOADING, 4, 40),
            (Phase.SAVING, 8, 3),
            (Phase.EVALUATING, 8, 6),
        ],
        resumes_from=4,
        steps=[(step, 10.0) for step in range(5, 9)],
    )
    run.event("finished", state="completed")
    assert run.goodput() == {
        "wall_s": 326.0,
        "queued_s": 143.0,
        "starting_s": 50.0,
        "restoring_s": 7.0,
        "training_s": 80.0,
        "saving_s": 6.0,
        "lost_s": 25.0,
        "other_s": 15.0,
        "ratio": pytest.approx(80 / (326 - 143), abs=1e-4),
    }


def test_a_hang_is_lost(run: Timeline) -> None:
    run.event("submitted")
    phases = [(Phase.STARTING, 0, 10.0), (Phase.LOADING, 0, 20.0), (Phase.COMPUTING, 2, 1800.0)]
    run.attempt(1, phases, steps=[(1, 10.0), (2, 10.0)])
    found = run.goodput()
    assert (found["training_s"], found["lost_s"]) == (20.0, 1800.0)


def test_a_supervisor_that_is_killed_takes_seconds_with_it(run: Timeline) -> None:
    run.event("submitted")
    phases = [(Phase.STARTING, 0, 8.0), *((Phase.LOADING, 0, 1.0) for _ in range(97))]
    run.attempt(1, phases, steps=[(1, 90.0)], killed=True)
    run.event("requeued")
    found = run.goodput()
    assert found["starting_s"] == 8.0
    assert 82.0 <= found["training_s"] <= 97.0
    assert found["wall_s"] == 105.0
    run.now_s += 1000.0
    assert run.goodput()["wall_s"] == 105.0  # nobody works on it
    assert run.goodput(alive=True, waiting_s=900.0)["queued_s"] == 900.0


def test_what_was_not_logged_counts_like_what_was(run: Timeline) -> None:
    run.event("submitted")
    run.attempt(1, [(Phase.LOADING, 0, 100.0)], steps=[(1, 10.0), (5, 10.0), (10, 10.0)])
    run.attempt(2, [(Phase.LOADING, 8, 20.0)], resumes_from=8, steps=[(9, 10.0), (10, 10.0)])
    found = run.goodput()
    assert (found["training_s"], found["lost_s"]) == (100.0, 20.0)


def test_without_heartbeats_the_ranks_clocks_count(run: Timeline) -> None:
    run.event("submitted")
    run.attempt(1, [(Phase.STARTING, 0, 50.0)], steps=[(1, 20.0), (2, 20.0)])
    found = run.goodput()
    assert (found["starting_s"], found["training_s"], found["lost_s"]) == (10.0, 40.0, 0.0)


def test_days_between_an_end_and_a_resume_are_no_part_of_it(run: Timeline) -> None:
    run.event("submitted")
    run.attempt(1, [(Phase.LOADING, 0, 100.0)], steps=[(1, 100.0)])
    run.event("finished", state="cancelled")
    run.now_s += 1e6
    run.event("resumed")
    run.attempt(2, [(Phase.LOADING, 1, 100.0)], resumes_from=1, steps=[(2, 100.0)], killed=True)
    run.event("signal")
    run.now_s += 1e6
    run.event("resumed")
    run.attempt(3, [(Phase.LOADING, 2, 100.0)], resumes_from=2, steps=[(3, 100.0)])
    run.event("finished", state="completed")
    assert run.goodput()["wall_s"] == 300.0


def test_a_run_that_waits(run: Timeline) -> None:
    run.event("submitted")
    run.now_s += 60.0
    found = run.goodput(alive=True, waiting_s=59.0)
    assert (found["wall_s"], found["queued_s"], found["other_s"]) == (60.0, 59.0, 1.0)
    assert found["ratio"] == 0.0


def test_damaged_notes_are_time_not_accounted_for(run: Timeline) -> None:
    run.event("submitted")
    run.attempt(1, [(Phase.LOADING, 0, 100.0)], steps=[(1, 100.0)])
    run.dir.attempt(1).seconds.write_text('{"training_s": ')
    found = run.goodput()
    assert (found["training_s"], found["other_s"]) == (0.0, 100.0)
