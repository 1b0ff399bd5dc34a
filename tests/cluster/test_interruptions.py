"""The promise on a real cluster: whatever takes the nodes away, the run finishes all the same.

All runs are of one spec, on two nodes with two processes each, and are compared bit for bit with
one that nothing happened to.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.runs import Run, SlurmVitra
from tests.conftest import VitraServer
from tests.e2e import runs as local

pytestmark = pytest.mark.timeout(600)

WORLD = 4
STEPS = 150
EPOCH = 120
SAVE_INTERVAL = 10


def document(**resources: Any) -> dict[str, Any]:
    """Some seconds of training, longer than one epoch."""
    return local.spec(
        WORLD,
        data={"options": {"samples": 4 * WORLD * EPOCH}},
        train={"max_steps": STEPS},
        checkpoint={"save_interval": SAVE_INTERVAL},
        resources={
            "nodes": 2,
            "tasks_per_node": 2,
            "time": 30,
            "cpus_per_task": 1,
            "signal_lead_s": 60,
            # Runs at the same time do not share a node, which is to be lost by one of them.
            "additional_parameters": {"exclusive": True},
            **resources,
        },
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """Results of the run that nothing happened to; trained once, on this machine alone."""
    known: list[Any] = []

    def results() -> Any:
        if not known:
            run = local.Run(tmp_path_factory.mktemp("undisturbed"), document())
            run.finish()
            known.append(run.results())
        return known[0]

    return results


@pytest.fixture
def vitra(cluster: ClusterHandle, vitra_server: VitraServer) -> SlurmVitra:
    return SlurmVitra(cluster, vitra_server)


def finished(run: Run, expected: Callable[[], Any]) -> None:
    """The run completes, and is equal."""
    run.wait_for_event("finished")
    assert run.events("finished")[-1]["state"] == "completed", run.batch_log()
    results, undisturbed = local.results_of(run.dir.path), expected()
    assert [m["step"] for m in results["metrics"]] == list(range(1, STEPS + 1))
    assert results["metrics"] == undisturbed["metrics"]
    assert results["samples"] == undisturbed["samples"]
    assert results["state"] == undisturbed["state"]


def lost_steps(run: Run) -> list[int]:
    """How many steps each attempt had to train again."""
    last: dict[int, int] = {a["attempt"]: a["last_step"] or 0 for a in run.attempts()}
    started = {e["attempt"]: e["step"] for e in run.events("started")}
    return [max(0, last[a] - started[a + 1]) for a in last if a + 1 in started]


def nodes_of(job: dict[str, str]) -> list[str]:
    """The two neighbouring nodes in a list such as node[1-2]."""
    return [f"node{number}" for number in re.findall(r"\d+", job["NodeList"])]


def preempted(run: Run, cluster: ClusterHandle, step: int, attempt: int) -> None:
    """Take the run's nodes once an attempt has come so far, and give them back."""
    run.wait_for_step(step, attempt)
    taken = cluster.preempt(4)
    cluster.scancel(taken)


def test_preempted_three_times_in_one_epoch(
    vitra: SlurmVitra, cluster: ClusterHandle, expected: Callable[[], Any]
) -> None:
    run = vitra.submit_document(document(partition="low"))
    for attempt, step in enumerate((15, 45, 75), start=1):
        preempted(run, cluster, step, attempt)
    finished(run, expected)
    assert run.verdicts() == ["preempted"] * 3 + ["completed"]
    # There was time to save.
    assert lost_steps(run) == [0, 0, 0]
    assert len({attempt["job_id"] for attempt in run.attempts()}) == 1
    assert run.attempts()[0]["reason"].startswith("preempted by a job with more priority")


@pytest.mark.parametrize("partition", ["scav", "nograce"])
def test_preempted_where_slurm_would_not_bring_it_back_or_leaves_no_time(
    partition: str, vitra: SlurmVitra, cluster: ClusterHandle, expected: Callable[[], Any]
) -> None:
    run = vitra.submit_document(document(partition=partition))
    preempted(run, cluster, 30, 1)
    finished(run, expected)
    assert run.verdicts() == ["preempted", "completed"]
    assert lost_steps(run)[0] <= (0 if partition == "scav" else SAVE_INTERVAL)


def test_time_limit_twice(
    vitra: SlurmVitra, cluster: ClusterHandle, expected: Callable[[], Any]
) -> None:
    """Also where the site, by JobRequeue=0, has no job come back."""
    cluster.set_conf("JobRequeue=0")
    # Much of the time is taken before training begins, so that the rest is not enough.
    run = vitra.submit_document(document(time=1, signal_lead_s=20, setup=["sleep 22"]))
    run.wait_for_event("requeued", 2)
    # From now on there is time enough; a limit can be lowered by all and raised by an operator.
    cluster.scontrol("update", f"JobId={run.job}", "TimeLimit=30")
    finished(run, expected)
    verdicts = run.verdicts()
    assert verdicts[:2] == ["time_limit"] * 2
    assert set(verdicts[2:-1]) <= {"time_limit"}
    assert verdicts[-1] == "completed"
    assert max(lost_steps(run)) <= SAVE_INTERVAL


def test_nodes_that_crash(
    vitra: SlurmVitra, cluster: ClusterHandle, expected: Callable[[], Any]
) -> None:
    """One loses a node, the other the node that its supervisor runs on."""
    runs = [vitra.submit_document(document()) for _ in range(2)]
    for run in runs:
        run.wait_for_step(15)
    first, second = (cluster.show(run.job) for run in runs)
    (worker,) = {*nodes_of(first)} - {first["BatchHost"]}
    lost = (worker, second["BatchHost"])
    for node in lost:
        cluster.crash(node)
    for run in runs:
        cluster.wait_for(f"{run.job} to be requeued", lambda r=run: cluster.restarts(r.job) > 0)
    for node in lost:
        cluster.boot(node)
    for run in runs:
        finished(run, expected)
        assert run.verdicts() == ["node_failure", "completed"], run.attempts()
        assert lost_steps(run)[0] <= SAVE_INTERVAL


def test_a_node_that_is_cut_off_and_a_supervisor_that_is_killed(
    vitra: SlurmVitra, cluster: ClusterHandle, expected: Callable[[], Any]
) -> None:
    """What a zombie still commits counts for nothing; a killed supervisor's job is requeued."""
    zombie, killed = (vitra.submit_document(document()) for _ in range(2))
    for run in (zombie, killed):
        run.wait_for_step(15)
    batch = cluster.show(zombie.job)["BatchHost"]
    cluster.cut(batch)
    (supervisor,) = (p for p in killed.processes() if "launcher.job" in p.argv)
    os.kill(supervisor.pid, signal.SIGKILL)
    cluster.wait_for("the requeues", lambda: cluster.restarts(zombie.job) > 0)
    finished(killed, expected)
    assert killed.verdicts() == ["node_failure", "completed"]
    assert "requeue 1 of 2" in killed.batch_log()
    finished(zombie, expected)
    cluster.heal(batch)
    assert zombie.verdicts()[-1] == "completed"
    assert zombie.verdicts()[0] == "node_failure"
    # Nothing that the cut-off side wrote afterwards is taken for the run's end.
    assert [e["state"] for e in zombie.events("finished")] == ["completed"]
    assert local.results_of(zombie.dir.path) == expected()
