"""Runs that lose a node, or their supervisor: each goes on, and nothing in the results tells."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import ALONE, HELD_S, SAVE_INTERVAL, Paced, SharedServer, SideBySide

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def runs(
    undisturbed: dict[int, Any], module_cluster: ClusterHandle, shared_server: SharedServer
) -> Iterator[SideBySide]:
    """Each scenario's run, by name, once it has ended."""
    assert undisturbed
    start = partial(Paced, module_cluster, shared_server)
    # Most of the time each waits for Slurm to notice.
    with SideBySide(4) as scenarios:
        scenarios.add("cut", lambda: cut(start("cut", nodes=1, tasks=2, resources=ALONE)))
        scenarios.add("crash", lambda: crash(start("crash", resources=ALONE), batch=False))
        scenarios.add("killed", lambda: supervisor_killed(start("killed", nodes=1, tasks=2)))
        scenarios.add("always", lambda: always_killed(start("always", nodes=1)))
        scenarios.add("batch", lambda: crash(start("batch", resources=ALONE), batch=True))
        yield scenarios


def crash(run: Paced, *, batch: bool) -> Paced:
    run.wait_for_step(15)
    (node,) = [n for n in run.hosts() if (n == run.batch_node()) == batch]
    run.cluster.crash(node)
    run.wait_for_life(1)
    run.cluster.boot(node)
    run.wait_until_finished()
    return run


def cut(run: Paced) -> Paced:
    """Its whole job, on one node, trains on unheard; its next save ends after another has begun."""
    run.pace(attempt=2, forward=0.5)
    run.wait_for_step(15)
    node = run.batch_node()
    run.pace(attempt=1, save=HELD_S)
    run.cluster.cut(node)
    run.wait_for_attempt(2)
    run.pace(attempt=1, save=0.0)
    run.wait_until(lambda: run.exit_codes(1) == {0: 93, 1: 93}, "the ranks to find out")
    # Not healed yet, so that nobody ends it but itself.
    run.wait_until(lambda: "has a successor" in run.batch_log(), "the supervisor to find out")
    run.pace(attempt=2, forward=0.05)
    run.cluster.heal(node)
    run.wait_until_finished()
    run.wait_until(lambda: not run.processes(), "what runs on the node that was cut off")
    return run


def supervisor_killed(run: Paced) -> Paced:
    for attempt, step in enumerate((15, 45), 1):
        run.wait_for_attempt(attempt)
        run.wait_for_step(step)
        os.kill(run.pid("launcher.job"), signal.SIGKILL)
    run.wait_until_finished()
    return run


def always_killed(run: Paced) -> Paced:
    for life in range(3):
        run.wait_for_life(life)
        run.wait_until(lambda: run.processes("launcher.job"), "the supervisor")
        os.kill(run.pid("launcher.job"), signal.SIGKILL)
    run.wait_until(lambda: not run.jobs(), "the end of its job")
    return run


@pytest.mark.parametrize("name", ["crash", "batch"])
def test_a_node_crashes(
    name: str, runs: SideBySide, undisturbed: dict[int, dict[str, Any]]
) -> None:
    run: Paced = runs[name]
    run.assert_equals(undisturbed[2])
    assert run.verdicts() == ["node_failure", "completed"]
    assert 0 <= run.lost_steps()[0] <= SAVE_INTERVAL


def test_a_node_is_cut_off_and_trains_on(
    runs: SideBySide, undisturbed: dict[int, dict[str, Any]]
) -> None:
    run: Paced = runs["cut"]
    run.assert_equals(undisturbed[2])
    assert run.verdicts() == ["node_failure", "completed"]
    # What the one that was cut off would have saved then counts for nobody.
    saved = [(event["attempt"], event["step"]) for event in run.events("saved")]
    assert saved == [(1, 10), *((2, step) for step in range(20, 90, 10))]
    assert len(run.events("finished")) == 1


def test_the_supervisor_is_killed(runs: SideBySide, undisturbed: dict[int, dict[str, Any]]) -> None:
    run: Paced = runs["killed"]
    run.assert_equals(undisturbed[2])
    assert run.verdicts() == ["node_failure", "node_failure", "completed"]
    assert all(0 <= lost <= SAVE_INTERVAL for lost in run.lost_steps())
    assert run.cluster.restarts(run.job_id) == 2


def test_a_supervisor_that_is_always_killed_is_not_requeued_for_ever(runs: SideBySide) -> None:
    run: Paced = runs["always"]
    assert run.cluster.restarts(run.job_id) == 2
    assert run.state() == "unknown"
    assert set(run.verdicts()) <= {"node_failure"}
    assert run.cluster.processes() == [] or run.jobs() == []
