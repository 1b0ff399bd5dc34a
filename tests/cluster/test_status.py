"""Status, cancel and logs of runs on a real cluster: nothing is claimed that is not so."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.runs import SlurmVitra
from tests.conftest import VitraServer


@pytest.fixture
def vitra(cluster: ClusterHandle, vitra_server: VitraServer) -> SlurmVitra:
    return SlurmVitra(cluster, vitra_server)


def test_while_it_waits(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    """Queued, with why; cancelled by scancel, and by vitra; unknown without Slurm."""
    preemptor = cluster.preempt(4)
    runs = [vitra.submit() for _ in range(2)]
    first, second = runs
    status = first.status()
    assert (status["state"], status["attempt"], status["attempts"]) == ("queued", 0, [])
    assert status["job_id"] == str(first.jobs()[0].id)
    assert "waits:" in status["reason"]
    rows = {row["run_id"]: row for row in vitra("ps", "--json").json["runs"]}
    assert {rows[run.id]["state"] for run in runs} == {"queued"}
    assert {rows[run.id]["job_id"] for run in runs} == {str(run.job) for run in runs}

    cluster.scancel(first.job)
    assert first.state() == "cancelled"
    assert "cancelled" in vitra("ps").stdout
    cancelled = vitra("cancel", second.id, "--json").json
    assert (cancelled["was"], cancelled["state"], cancelled["stopped"]) == (
        "queued",
        "cancelled",
        True,
    )
    assert cluster.jobs() == [preemptor]
    assert vitra("cancel", second.id, "--json").json["was"] == "cancelled"
    assert vitra("watch", "--once", "--json").json["runs"][0]["action"] == "cancelled"
    assert vitra("watch", "--once", "--json").json["runs"] == []

    third = vitra.submit()
    job = third.job
    # Another job is in the queue, and none of them is mistaken for the run's.
    other = cluster.sbatch("true", "--job-name=tiny", "--comment=vitra:tiny-other")
    assert third.state() == "queued"
    cluster.down("slurmctld")
    status = third.status()
    assert (status["state"], status["job_id"]) == ("unknown", str(job))
    assert "Slurm cannot be asked" in status["reason"]
    assert "cannot be asked" in vitra("cancel", third.id, code=3).stderr
    cluster.up("slurmctld")
    # The marker that was left takes the job out of the queue.
    vitra("watch", "--once")
    cluster.wait_for("the job to be cancelled", lambda: cluster.jobs() == [preemptor, other])
    third.wait_for_state("cancelled")


def test_followed_through_a_requeue_and_cancelled(
    vitra: SlurmVitra, cluster: ClusterHandle
) -> None:
    run = vitra.submit(train__max_steps=100_000, checkpoint__save_interval=10)
    logs = vitra.start("logs", run.id, "-f")
    run.wait_for_event("saved")
    status = run.status()
    assert (status["state"], status["attempts"][0]["verdict"]) == ("running", None)
    assert status["attempts"][0]["job_id"] == status["job_id"]
    job = run.job
    cluster.scontrol("requeue", str(job))
    seen: set[str] = set()

    def goes_on() -> bool:
        seen.add(run.state())
        return len(run.events("started")) == 2

    cluster.wait_for("the second attempt", goes_on)
    assert seen <= {"running", "requeued"}
    assert "requeued" in seen
    assert run.job == job
    assert logs.poll() is None
    cancelled = vitra("cancel", run.id, "--json").json
    assert (cancelled["was"], cancelled["state"]) == ("running", "cancelled")
    assert cancelled["stopped"]
    assert logs.wait(timeout=60) == 0
    assert "[2/0]" in vitra.terminal()
    status = run.status()
    assert status["state"] == "cancelled"
    assert [attempt["verdict"] for attempt in status["attempts"]][1] == "cancelled"
    # It saved first.
    assert status["last_checkpoint_step"] == status["attempts"][1]["last_step"]
    assert cluster.jobs() == []


def test_ctrl_c_ends_only_the_following(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    preemptor = cluster.preempt(4)
    vitra.submit()
    run = vitra.only_run()
    vitra("cancel", run.id)
    process = vitra.start("resume", run.id, "--wait")
    cluster.wait_for("the following", lambda: "queued: job" in vitra.terminal())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert f"job {run.job} goes on" in vitra.terminal()
    assert run.state() == "queued"
    # One that waits for a run that somebody cancels fails with it.
    vitra("cancel", run.id)
    process = vitra.start("resume", run.id, "--wait")
    run.wait_for_event("queued", 3)
    cluster.scancel(run.job)
    assert process.wait(timeout=60) == 5
    assert cluster.jobs() == [preemptor]
