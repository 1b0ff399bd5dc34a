"""Signals of every kind at every moment: what they mean, that nothing is lost, and nobody left.

A signal that a person sends stops the run; two runs are stopped in all these ways, resumed by hand
each time, and equal in the end one that nobody stopped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import HELD_S, SAVE_INTERVAL, Paced, SharedServer, SideBySide

pytestmark = pytest.mark.timeout(900)


#: In the batch script.
UNTIL_TOLD = "touch up; until [ -e go ]; do sleep 0.1; done"


@dataclass(frozen=True)
class Stopped:
    """What became of it: its status, how often its job was requeued, what was left running."""

    status: dict[str, Any]
    restarts: int
    left: list[str]

    @property
    def attempt(self) -> dict[str, Any]:
        attempt: dict[str, Any] = self.status["attempts"][-1]
        return attempt


def to_one_task(run: Paced) -> None:
    """As a cluster does that signals only what it has started: of one rank, and its trainer not."""
    os.kill(run.pid("launcher.task", rank=1), signal.SIGTERM)


def to_one_tree(run: Paced) -> None:
    for word in ("launcher.task", "trainer"):
        os.kill(run.pid(word, rank=1), signal.SIGTERM)


def twice_to_the_step(run: Paced) -> None:
    for _ in range(2):
        run.cluster.scancel("--signal=TERM", f"{run.job_id}.0")


def to_the_batch_step(run: Paced) -> None:
    run.cluster.scancel("--signal=TERM", "--batch", run.job_id)


def warning_to_the_step(run: Paced) -> None:
    run.cluster.scancel("--signal=USR2", f"{run.job_id}.0")


def while_it_saves(run: Paced) -> None:
    run.pace(save=HELD_S)
    due = run.step() // SAVE_INTERVAL * SAVE_INTERVAL + SAVE_INTERVAL
    run.wait_for_step(due)
    to_the_batch_step(run)
    run.wait_for("signal", len(run.events("signal")) + 1)
    run.pace(save=0.0)


def to_everything(run: Paced) -> None:
    run.cluster.scancel("--signal=TERM", "--full", run.job_id)


#: By the run that they stop, while it trains.
WHILE_TRAINING: dict[str, dict[str, Callable[[Paced], None]]] = {
    "ranks": {
        "to one task": to_one_task,
        "to one rank's whole tree": to_one_tree,
        "twice within 100 ms, to the step": twice_to_the_step,
    },
    "all": {
        "to the batch step": to_the_batch_step,
        "a warning, to the step": warning_to_the_step,
        "while it saves": while_it_saves,
        "to srun as well": to_everything,
    },
}
EARLY = ("before Python is up", "before the first step")
STOPS = [("ranks", name) for name in EARLY]
STOPS += [(of, name) for of, signals in WHILE_TRAINING.items() for name in signals]


@pytest.fixture(scope="module")
def runs(
    undisturbed: dict[int, Any], module_cluster: ClusterHandle, shared_server: SharedServer
) -> Iterator[SideBySide]:
    """Each run with what its stops came to, once it is completed."""
    assert undisturbed

    def stop_again_and_again(name: str) -> tuple[Paced, dict[str, Stopped]]:
        run = Paced(module_cluster, shared_server, name, resources={"setup": [UNTIL_TOLD]})
        stops: dict[str, Stopped] = {}
        before = 0
        if name == "ranks":
            # Only the batch script is there to hear it.
            run.wait_until((run.vitra.directory / "up").exists, "its job's script to run")
            to_the_batch_step(run)
            (run.vitra.directory / "go").touch()
            stops["before Python is up"] = stopped(run)
            # Trainers are there, and still import torch.
            run.wait_until(lambda: len(run.processes("trainer")) == 2, "its ranks to be started")
            run.cluster.scancel("--signal=TERM", f"{run.job_id}.0")
            stops["before the first step"] = stopped(run)
            before = stops["before the first step"].status["attempt"]
        else:
            (run.vitra.directory / "go").touch()
        for attempt, (what, send) in enumerate(WHILE_TRAINING[name].items(), before + 1):
            run.wait_for_attempt(attempt)
            run.wait_for_step(run.step() + 2)
            send(run)
            stops[what] = stopped(run)
        run.wait_until_finished()
        return run, stops

    with SideBySide() as scenarios:
        for name in WHILE_TRAINING:
            scenarios.add(name, partial(stop_again_and_again, name))
        yield scenarios


def stopped(run: Paced) -> Stopped:
    """What has become of it; it is resumed."""
    run.wait_until(lambda: not run.jobs(), "the end of its job")
    left = [" ".join(process.argv) for process in run.processes()]
    found = Stopped(run.status(), run.cluster.restarts(run.job_id), left)
    run.resume()
    return found


@pytest.mark.parametrize(("of", "name"), STOPS)
def test_stops_the_run(of: str, name: str, runs: SideBySide) -> None:
    stopped = runs[of][1][name]
    assert stopped.status["state"] == "cancelled", stopped.status["reason"]
    assert stopped.left == []
    assert stopped.restarts == 0
    if name != "before Python is up":
        assert stopped.attempt["verdict"] == "cancelled"
    if name not in (*EARLY, "to srun as well"):
        assert stopped.attempt["exit_code"] == 75
        assert stopped.attempt["last_step"] == stopped.status["last_checkpoint_step"]


def test_srun_that_is_signalled_kills_its_ranks(runs: SideBySide) -> None:
    """Which cannot be helped; no more than one interval is lost."""
    stopped = runs["all"][1]["to srun as well"]
    lost = stopped.attempt["last_step"] - stopped.status["last_checkpoint_step"]
    assert 0 <= lost <= SAVE_INTERVAL


@pytest.mark.parametrize("of", WHILE_TRAINING)
def test_nothing_in_the_results_tells(
    of: str, runs: SideBySide, undisturbed: dict[int, dict[str, Any]]
) -> None:
    run, _ = runs[of]
    run.assert_equals(undisturbed[2])
    assert run.verdicts()[-1] == "completed"
    assert run.processes() == []
