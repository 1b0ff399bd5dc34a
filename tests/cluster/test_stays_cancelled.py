"""A run that a person cancels stays cancelled, whenever that comes, and does not come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import ALONE, HELD_S, SAVE_INTERVAL, Paced, SharedServer, SideBySide

pytestmark = pytest.mark.timeout(600)


def by_scancel(run: Paced) -> None:
    run.cluster.scancel(run.job_id)


def by_vitra(run: Paced) -> None:
    run.vitra("cancel", run.id)


def running(run: Paced, cancel: Callable[[Paced], None]) -> None:
    run.wait_for_step(run.step() + 3)
    cancel(run)


def saving(run: Paced, cancel: Callable[[Paced], None]) -> None:
    run.pace(save=HELD_S)
    run.wait_for_step(run.step() // SAVE_INTERVAL * SAVE_INTERVAL + SAVE_INTERVAL)
    # Long enough for the signal to come, and short enough for the save.
    run.pace(save=1.0)
    cancel(run)
    run.pace(save=0.0)


def pending_after_a_requeue(run: Paced, cancel: Callable[[Paced], None]) -> None:
    run.wait_for_step(run.step() + 3)
    run.cluster.scontrol("requeue", str(run.job_id))
    run.wait_until(lambda: run.cluster.state(run.job_id) == "PENDING", "its job to wait")
    cancel(run)


def in_the_grace_time(run: Paced, cancel: Callable[[Paced], None]) -> None:
    """Of a preemption, while its ranks are in a step that is longer than that."""
    run.wait_for_step(run.step() + 3)
    run.pace(forward=HELD_S)
    preemptor = run.cluster.sbatch(
        "exec sleep 1",
        *("--partition=high", "--exclusive", "--time=1", "--output=/dev/null"),
        f"--nodelist={run.nodes()}",
    )
    run.wait_until(
        lambda: run.cluster.show(run.job_id).get("PreemptTime", "None") != "None", "preemption"
    )
    cancel(run)
    run.cluster.wait_until_over(preemptor)
    run.pace(forward=0.05)


MOMENTS = {
    "running": running,
    "saving": saving,
    "pending after a requeue": pending_after_a_requeue,
    "in the grace time": in_the_grace_time,
}
MEANS = {"scancel": by_scancel, "vitra": by_vitra}


@pytest.fixture(scope="module")
def cancelled(module_cluster: ClusterHandle, shared_server: SharedServer) -> Iterator[SideBySide]:
    """For each means, by its name: where the run stood after each moment."""

    def all_moments(name: str) -> dict[str, dict[str, Any]]:
        run = Paced(module_cluster, shared_server, name, nodes=1, resources=ALONE)
        found: dict[str, dict[str, Any]] = {}
        for moment, come in MOMENTS.items():
            if not found:
                run.wait_for_attempt(1)
            come(run, MEANS[name])
            run.wait_until(lambda: not run.jobs(), "the end of its job")
            found[moment] = {
                **run.status(),
                "finished": len(run.events("finished")),
                "left": run.processes(),
                "slurm": run.cluster.state(run.job_id),
            }
            attempt = run.attempt()
            run.resume()
            run.wait_for_attempt(attempt + 1)
        by_vitra(run)
        return found

    with SideBySide() as scenarios:
        for name in MEANS:
            scenarios.add(name, partial(all_moments, name))
        yield scenarios


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("means", MEANS)
def test_stays_cancelled(means: str, moment: str, cancelled: SideBySide) -> None:
    status = cancelled[means][moment]
    assert status["state"] == "cancelled", status["reason"]
    assert status["left"] == []
    assert status["slurm"] not in ("PENDING", "RUNNING", "REQUEUED")
    if moment in ("running", "saving"):
        # With a last checkpoint, since there was time.
        assert status["attempts"][-1]["verdict"] == "cancelled"
        assert status["attempts"][-1]["last_step"] == status["last_checkpoint_step"]
