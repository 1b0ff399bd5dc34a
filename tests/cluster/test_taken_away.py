"""Runs whose nodes Slurm takes away for others, or at their time limit: each goes on, and the
results are those of a run that was left alone, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import ALONE, SAVE_INTERVAL, Paced, SharedServer, SideBySide

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def runs(
    undisturbed: dict[int, Any], module_cluster: ClusterHandle, shared_server: SharedServer
) -> Iterator[SideBySide]:
    """Each scenario's run, by name, once it has ended."""
    assert undisturbed

    def start(name: str, partition: str, tasks: int = 2, **resources: Any) -> Paced:
        return Paced(
            module_cluster,
            shared_server,
            name,
            tasks=tasks,
            resources={"partition": partition, **ALONE, **resources},
        )

    def preempted(partition: str, *steps: int) -> Paced:
        run = start(partition, partition)
        for attempt, step in enumerate(steps, 1):
            run.wait_for_attempt(attempt)
            run.wait_for_step(step)
            preempt(run)
        run.wait_until_finished()
        return run

    with SideBySide() as scenarios:
        scenarios.add("low", lambda: preempted("low", 5, 25, 45))
        scenarios.add("scav", lambda: preempted("scav", 25))
        scenarios.add("nograce", lambda: preempted("nograce", 25))
        yield scenarios


def preempt(run: Paced) -> None:
    """Have a job with more priority take all its nodes, for a moment."""
    nodes = run.nodes()
    preemptor = run.cluster.preempt(2, nodes=[nodes])
    run.cluster.scancel(preemptor)


def test_preempted_three_times_in_an_epoch(
    runs: SideBySide, undisturbed: dict[int, dict[str, Any]]
) -> None:
    run: Paced = runs["low"]
    run.assert_equals(undisturbed[4])
    assert run.verdicts() == ["preempted", "preempted", "preempted", "completed"]
    # All saved where they were: with a grace time nothing is done twice.
    assert run.lost_steps() == [0, 0, 0]
    assert [attempt["exit_code"] for attempt in run.attempts()] == [75, 75, 75, 0]
    assert {attempt["job_id"] for attempt in run.attempts()} == {str(run.job_id)}
    assert {metric["epoch"] for metric in undisturbed[4]["metrics"][: run.attempts()[2]["last_step"]]} == {0}


def test_preempted_where_that_cancels_jobs(
    runs: SideBySide, undisturbed: dict[int, dict[str, Any]]
) -> None:
    run: Paced = runs["scav"]
    run.assert_equals(undisturbed[4])
    assert run.verdicts() == ["preempted", "completed"]
    assert run.lost_steps() == [0]


def test_preempted_without_a_grace_time(
    runs: SideBySide, undisturbed: dict[int, dict[str, Any]]
) -> None:
    run: Paced = runs["nograce"]
    run.assert_equals(undisturbed[4])
    assert run.verdicts() == ["preempted", "completed"]
    assert 0 <= run.lost_steps()[0] <= SAVE_INTERVAL
