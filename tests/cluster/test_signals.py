"""Signals of every kind at every moment: what they mean, that nothing is lost, and nobody left.

A signal that a person sends stops the run; one run is stopped in all these ways, resumed by hand
each time, and equals in the end one that nobody stopped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import HELD_S, SAVE_INTERVAL, Paced, SharedServer

pytestmark = pytest.mark.timeout(900)


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


#: Sent while it trains.
WHILE_TRAINING: dict[str, Callable[[Paced], None]] = {
    "to one task": to_one_task,
    "to one rank's whole tree": to_one_tree,
    "twice within 100 ms, to the step": twice_to_the_step,
    "to the batch step": to_the_batch_step,
    "a warning, to the step": warning_to_the_step,
    "while it saves": while_it_saves,
    "to srun as well": to_everything,
}


@pytest.fixture(scope="module")
def run(
    undisturbed: dict[int, Any], module_cluster: ClusterHandle, shared_server: SharedServer
) -> Paced:
    assert undisturbed
    return Paced(module_cluster, shared_server, "signals")


@pytest.fixture(scope="module")
def stops(run: Paced) -> dict[str, Stopped]:
    stops: dict[str, Stopped] = {}

    def stopped(name: str) -> None:
        run.wait_until(lambda: not run.jobs(), "the end of its job")
        left = [" ".join(process.argv) for process in run.processes()]
        stops[name] = Stopped(run.status(), run.cluster.restarts(run.job_id), left)
        run.resume()

    # Before Python is up: only the batch script is there to hear it.
    run.wait_until(lambda: run.cluster.state(run.job_id) == "RUNNING", "its job to run")
    to_the_batch_step(run)
    stopped("before Python is up")
    # Trainers are there, and still import torch.
    attempt = run.attempt() + 1
    run.wait_until(lambda: len(run.processes("trainer")) == 2, "its ranks to be started")
    run.cluster.scancel("--signal=TERM", f"{run.job_id}.0")
    stopped("before the first step")
    for name, send in WHILE_TRAINING.items():
        attempt += 1
        run.wait_for_attempt(attempt)
        run.wait_for_step(run.step() + 2)
        send(run)
        stopped(name)
    run.wait_until_finished()
    return stops


@pytest.mark.parametrize("name", ["before Python is up", "before the first step", *WHILE_TRAINING])
def test_stops_the_run(name: str, stops: dict[str, Stopped]) -> None:
    stopped = stops[name]
    assert stopped.status["state"] == "cancelled", stopped.status["reason"]
    assert stopped.left == []
    assert stopped.restarts == 0
    if name != "before Python is up":
        assert stopped.attempt["verdict"] == "cancelled"
    if name in WHILE_TRAINING and name != "to srun as well":
        assert stopped.attempt["exit_code"] == 75
        assert stopped.attempt["last_step"] == stopped.status["last_checkpoint_step"]


def test_srun_that_is_signalled_kills_its_ranks(stops: dict[str, Stopped]) -> None:
    """Which cannot be helped; no more than one interval is lost."""
    stopped = stops["to srun as well"]
    lost = stopped.attempt["last_step"] - stopped.status["last_checkpoint_step"]
    assert 0 <= lost <= SAVE_INTERVAL


def test_nothing_in_the_results_tells(
    run: Paced, stops: dict[str, Stopped], undisturbed: dict[int, dict[str, Any]]
) -> None:
    assert stops
    run.assert_equals(undisturbed[2])
    assert run.verdicts()[-1] == "completed"
    assert run.processes() == []
