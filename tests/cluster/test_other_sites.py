"""Clusters that are set up in another way than the one of the other tests."""

from __future__ import annotations

import os

import pytest

from launcher.slurm import Slurm
from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import ALONE, Paced, SharedServer
from tests.cluster.runs import where_requeue_is_refused
from trainer.spec.errors import SchedulerError

pytestmark = pytest.mark.timeout(300)


def test_preemption_tells_the_batch_step_and_a_requeue_is_refused(
    undisturbed: dict[int, dict[str, object]], cluster: ClusterHandle, shared_server: SharedServer
) -> None:
    """By the signal that the job asked for as a warning; another job goes on with the run."""
    cluster.set_conf("SlurmctldParameters=preempt_send_user_signal")
    run = Paced(
        cluster,
        shared_server,
        "other",
        nodes=1,
        tasks=2,
        environ=where_requeue_is_refused(cluster.share / "bin"),
        resources={"partition": "scav", **ALONE},
    )
    run.wait_for_step(25)
    # Nor is there accounting, for now.
    cluster.down("slurmdbd")
    preemptor = cluster.preempt(4)
    waiting = run.status()
    assert (waiting["state"], waiting["job_state"]) == ("requeued", "PENDING"), waiting["reason"]
    cluster.scancel(preemptor)
    run.wait_until_finished()

    run.assert_equals(undisturbed[2])
    assert run.verdicts() == ["preempted", "completed"]
    assert run.lost_steps() == [0]
    (signal,) = run.events("signal")
    assert signal["verdict"] == "preempted"
    assert "presently disabled" in run.events("warning")[0]["reason"]
    first, second = (int(attempt["job_id"]) for attempt in run.attempts())
    assert first == run.job_id != second == run.job
    assert waiting["job_id"] == str(second)
    # One job after the other, each once, and no third.
    assert {job.id for job in run.jobs("-t", "all")} == {first, second}
    assert [cluster.restarts(job) for job in (first, second)] == [0, 0]
    assert cluster.show(first)["EndTime"] <= cluster.show(second)["StartTime"]


LISTS = {
    "gpu[001-003,007],login-2": "gpu001 gpu002 gpu003 gpu007 login-2",
    "rack[0-1]b[2-3]": "rack0b2 rack0b3 rack1b2 rack1b3",
    "n[9-11]": "n9 n10 n11",
    "a,b[001,003],c": "a b001 b003 c",
    "c427-032,c429-002": "c427-032 c429-002",
    "x": "x",
}


def test_lists_of_nodes(cluster: ClusterHandle) -> None:
    slurm = Slurm({**os.environ, "SLURM_CONF": str(cluster.conf)})
    assert {names: " ".join(slurm.host_names(names)) for names in LISTS} == LISTS
    for bad in ("gpu[001", "n[3-1]"):
        with pytest.raises(SchedulerError):
            slurm.host_names(bad)
