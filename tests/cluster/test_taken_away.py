"""Runs whose nodes Slurm takes away for others, or at their time limit: each goes on, and the
results are those of a run that was left alone, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from tests.cluster.handle import SLURM_PATIENCE_S, ClusterHandle
from tests.cluster.paced import (
    ALONE,
    FORWARD_S,
    SAVE_INTERVAL,
    Paced,
    SharedServer,
    SideBySide,
)
from tests.e2e.runs import results

pytestmark = pytest.mark.timeout(600)

#: So slow that two lives of a minute are not enough, each of which may last two: Slurm looks at
#: time limits every half minute or so.
ONE_MINUTE: dict[str, Any] = {
    "nodes": 1,
    "tasks": 2,
    "forward_s": 1.0,
    "resources": {"time": 1, "signal_lead_s": 10, **ALONE},
}


SHARDED = {"strategy": "fsdp-full"}


@pytest.fixture(scope="module")
def runs(
    undisturbed: dict[int, Any], module_cluster: ClusterHandle, shared_server: SharedServer
) -> Iterator[SideBySide]:
    """Each scenario's run, by name, once it has ended."""
    assert undisturbed

    start = partial(Paced, module_cluster, shared_server)

    def preempted(
        partition: str, steps: Sequence[int], name: str | None = None, **more: Any
    ) -> Paced:
        resources = {"partition": partition, **ALONE}
        run = start(name or partition, tasks=2, resources=resources, **more)
        for attempt, step in enumerate(steps, 1):
            run.wait_for_attempt(attempt)
            run.wait_for_step(step)
            preempt(run)
        run.wait_until_finished()
        return run

    with SideBySide() as scenarios:
        # Beside the others, which have the other nodes, since it mostly waits.
        scenarios.add("limit", lambda: out_of_time(start("limit", **ONE_MINUTE)))
        scenarios.add("low", lambda: preempted("low", (5, 25, 45)))
        scenarios.add("scav", lambda: preempted("scav", (25,)))
        scenarios.add("nograce", lambda: preempted("nograce", (25,)))
        scenarios.add("sharded", lambda: preempted("low", (25,), "sharded", train=SHARDED))
        scenarios.add(
            "sharded, undisturbed",
            lambda: undisturbed_run(start("whole-sharded", tasks=2, forward_s=0, train=SHARDED)),
        )
        yield scenarios


def undisturbed_run(run: Paced) -> dict[str, Any]:
    run.wait_until_finished()
    assert run.verdicts() == ["completed"]
    return results(run.dir.path)


def out_of_time(run: Paced) -> Paced:
    """Reach the time limit twice; the second time Slurm has been told not to requeue the job."""
    for life in (1, 2):
        # Whether it trains before the warning depends on how busy the machine is.
        run.wait_for("attempt", life)
        if life == 2:
            run.cluster.scontrol("update", f"JobId={run.job_id}", "Requeue=0")
        run.wait_for("requeued", life, within_s=2 * SLURM_PATIENCE_S)
    # Slurm warns up to half a minute early, which on a busy machine leaves the ranks no time.
    run.cluster.scontrol("update", f"JobId={run.job_id}", "TimeLimit=30")
    run.pace(forward=FORWARD_S)
    run.wait_until_finished()
    return run


def preempt(run: Paced) -> None:
    """Have a job with more priority take all its nodes, for a moment."""
    preemptor = run.cluster.preempt(2, nodes=[run.nodes()])
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
    third = run.attempts()[2]["last_step"]
    assert {metric["epoch"] for metric in undisturbed[4]["metrics"][:third]} == {0}
    # What each life had to say is kept.
    assert run.batch_log().count("vitra: requeued: preempted") == 3
    for attempt in range(1, 5):
        logs = run.dir.attempt(attempt).logs
        assert {f"rank_{rank}.log" for rank in range(4)} <= {log.name for log in logs.iterdir()}


def test_where_the_time_of_a_preempted_run_went(runs: SideBySide) -> None:
    run: Paced = runs["low"]
    spent = run.status()["goodput"]
    wall_s, ratio = spent.pop("wall_s"), spent.pop("ratio")
    assert sum(spent.values()) == pytest.approx(wall_s, rel=0.01)
    assert all(seconds >= 0 for seconds in spent.values()), spent
    # It waited for the preemptor's end each time, was started four times, and restored three times.
    lives = run.events("allocated")
    assert [life["restarts"] for life in lives] == [0, 1, 2, 3]
    assert spent["queued_s"] == sum(life["queued_s"] for life in lives) > 0
    assert min(spent["starting_s"], spent["restoring_s"], spent["saving_s"]) > 0
    assert spent["training_s"] > 80 * 2 * FORWARD_S * 0.9
    assert 0 < ratio < 1


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


def test_preempted_with_everything_sharded(runs: SideBySide) -> None:
    run: Paced = runs["sharded"]
    run.assert_equals(runs["sharded, undisturbed"])
    assert run.verdicts() == ["preempted", "completed"]
    assert run.lost_steps() == [0]


def test_the_time_limit_is_reached_twice(
    runs: SideBySide, undisturbed: dict[int, dict[str, Any]]
) -> None:
    run: Paced = runs["limit"]
    run.assert_equals(undisturbed[2])
    assert run.verdicts() == ["time_limit", "time_limit", "completed"]
    assert run.lost_steps() == [0, 0]
    assert {attempt["job_id"] for attempt in run.attempts()} == {str(run.job_id)}
    assert run.cluster.restarts(run.job_id) == 2
