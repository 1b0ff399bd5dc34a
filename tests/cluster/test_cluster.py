"""The cluster behaves as real ones do, where vitra relies on it."""

from __future__ import annotations

import os
import signal
import time

from tests.cluster.handle import ClusterHandle
from tests.cluster.witness import submit_witness


def test_lost_nodes(cluster: ClusterHandle) -> None:
    """A crashed and a cut node: both jobs are requeued, and the cut one's old rank runs on."""
    crashed = submit_witness(cluster, "--nodes=2", "--nodelist=node1,node2")
    cut = submit_witness(cluster, "--nodes=2", "--nodelist=node3,node4")
    (zombie,) = [p.pid for p in cluster.processes("node4") if p.argv[-1] == "rank"]
    cluster.crash("node2")
    cluster.cut("node4")
    for job in (crashed, cut):
        cluster.wait_for(f"job {job} to be requeued", lambda job=job: cluster.restarts(job) == 1)
    assert zombie in [p.pid for p in cluster.processes("node4")]
    cluster.boot("node2")
    cluster.heal("node4")
    for job in (crashed, cut):
        cluster.wait_for_output(job, "life 1 rank up")
        assert cluster.sacct(job)[0]["State"] == "NODE_FAIL"
    assert zombie not in [p.pid for p in cluster.processes("node4")]


def test_an_unprivileged_user(cluster: ClusterHandle) -> None:
    """Submits, gets the GPUs asked for by index, and has vitra on the host and on the nodes."""
    said = "whoami; hostname; echo gpus=$CUDA_VISIBLE_DEVICES; echo count=${SLURM_RESTART_COUNT-no}"
    python = cluster.user_venv / "bin" / "python"
    job = cluster.sbatch(
        f"srun bash -c '{said}'\n"
        f"srun -N1 -n1 {python} -P -m launcher.cli --help >help-$SLURM_JOB_ID",
        *("--nodes=2", "--gpus-per-node=2", "--time=5"),
        user=cluster.user,
    )
    cluster.wait_until_over(job)
    output = cluster.output(job)
    assert cluster.state(job) == "COMPLETED", output
    for word in (cluster.user, "gpus=0,1", "count=no"):
        assert output.splitlines().count(word) == 2, output
    assert {"node1", "node2"} <= set(output.splitlines())
    here = cluster.run(["vitra", "--help"], user=cluster.user, environ={"COLUMNS": "80"}).stdout
    assert "Usage: vitra" in here
    assert "Commands" in (cluster.share / f"help-{job}").read_text()


def test_without_accounting(cluster: ClusterHandle) -> None:
    job = cluster.sbatch("sleep 60")
    cluster.wait_for_state(job, "RUNNING")
    cluster.down("slurmdbd")
    assert cluster.run(["sacct", "-j", str(job)], code=None).code == 1
    assert cluster.state(job) == "RUNNING"
    cluster.up("slurmdbd")
    cluster.wait_for("the accounting to know the job", lambda: cluster.sacct(job))


def test_settings_change_until_cleared(cluster: ClusterHandle) -> None:
    cluster.set_conf("SlurmctldParameters=preempt_send_user_signal")
    job = submit_witness(cluster, "--signal=USR2@10", "--partition=nograce", "--nodelist=node1")
    preemptor = cluster.preempt(1, nodes=["node1"])
    assert "rank SIGUSR2" in cluster.output(job)
    cluster.scancel(preemptor)
    cluster.clear()
    assert "preempt_send_user_signal" not in cluster.scontrol("show", "config")


def test_clear_leaves_nothing(cluster: ClusterHandle) -> None:
    """Jobs that do not want to go, a process that has left its job, broken nodes."""
    stubborn = submit_witness(cluster, "--nodelist=node1")
    waiting = cluster.sbatch("true", "--begin=now+1hour")
    stray = cluster.popen(["sleep", "4711"], node="node3")
    cluster.wait_for("the stray process", lambda: cluster.processes("node3"))
    cluster.crash("node2")
    cluster.cut("node4")
    began = time.monotonic()
    cluster.clear()
    assert time.monotonic() - began < 60
    assert stray.communicate(timeout=10) == ("", "")
    assert cluster.jobs() == []
    assert cluster.processes() == []
    assert {cluster.state(job) for job in (stubborn, waiting)} <= {"CANCELLED", "FAILED"}
    states = cluster.run(["sinfo", "-h", "-N", "-p", "high", "-o", "%N %t"]).stdout
    assert states.splitlines() == [f"{node} idle" for node in cluster.nodes]


def test_a_rank_can_be_killed_alone(cluster: ClusterHandle) -> None:
    """The others go on: Slurm does not end a step because one of its tasks died."""
    job = submit_witness(cluster, "--nodes=2")
    ranks = {p.node: p.pid for p in cluster.processes() if p.argv[-1] == "rank"}
    first, second = cluster.show(job)["BatchHost"], set(ranks) - {cluster.show(job)["BatchHost"]}
    (other,) = second
    os.kill(ranks[other], signal.SIGKILL)
    cluster.wait_for("the rank to be gone", lambda: cluster.processes(other) == [])
    assert ranks[first] in [p.pid for p in cluster.processes(first)]
    assert cluster.state(job) == "RUNNING"
