"""`vitra watch` on a real cluster: runs that were left alone go on, as one job, not for ever."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.runs import Run, SlurmVitra
from tests.conftest import PATIENCE_S, VitraServer


@pytest.fixture
def vitra(cluster: ClusterHandle, vitra_server: VitraServer) -> SlurmVitra:
    return SlurmVitra(cluster, vitra_server)


def watch(vitra: SlurmVitra) -> dict[str, str]:
    """What one look has done, by run."""
    rows = vitra("watch", "--once", "--json").json["runs"]
    return {row["run_id"]: row["action"] for row in rows}


def wait_until_gone(run: Run) -> None:
    run.vitra.cluster.wait_for(f"{run.id} to have no job", lambda: run.jobs() == [])


def test_goes_on_after_its_whole_batch_step_was_killed(
    vitra: SlurmVitra, cluster: ClusterHandle
) -> None:
    """Supervisor and batch script die at once, so that nobody is left to requeue the job."""
    run = vitra.submit(train__max_steps=60, checkpoint__save_interval=5)
    assert watch(vitra) == {run.id: "alive"}
    run.wait_for_event("saved")
    job = run.job
    words = ("slurm_script", "launcher.job")
    for process in cluster.processes():
        if any(word in part for part in process.argv for word in words):
            os.kill(process.pid, signal.SIGKILL)
    wait_until_gone(run)
    assert run.state() == "unknown"
    # By two at once.
    watchers = [vitra.start("watch", "--once") for _ in range(2)]
    assert [watcher.wait(timeout=PATIENCE_S) for watcher in watchers] == [0, 0]
    assert len(run.events("resubmitted")) == 1
    assert run.job > job
    run.wait_for_state("completed")
    status = run.status()
    assert [attempt["verdict"] for attempt in status["attempts"]] == ["node_failure", "completed"]
    assert status["attempts"][1]["first_step"] > 1
    assert watch(vitra) == {}
    assert cluster.jobs() == []


def test_what_fails_before_it_begins_is_given_up(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    run = vitra.submit(
        resources__setup=["echo no module named cuda >&2; exit 3"], retry__max_no_progress=2
    )
    actions: list[str] = []
    for _ in range(3):
        wait_until_gone(run)
        actions += watch(vitra).values()
    assert actions == ["resubmitted", "resubmitted", "failed"]
    status = run.status()
    assert status["state"] == "failed"
    assert "no module named cuda" in status["reason"]
    assert "retry.max_no_progress" in status["reason"]
    assert watch(vitra) == {}
    assert cluster.jobs() == []


def test_what_people_do_is_not_undone(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    """Cancelled by scancel, by vitra, supervised on this machine, or another user's."""
    preemptor = cluster.preempt(4)
    by_scancel, by_vitra, here = vitra.submit(), vitra.submit(), vitra.submit()
    cluster.scancel(by_scancel.job)
    vitra("cancel", by_vitra.id)
    cluster.scancel(here.job)
    local = vitra.start("resume", here.id, "--local", "-o", "train.max_steps=100000")
    here.wait_for_event("attempt")
    others = cluster.share / "theirs"
    others.mkdir()
    others.chmod(0o777)
    (others / "spec.yaml").write_text(vitra.spec().read_text())
    cluster.run(["vitra", "submit", "spec.yaml"], user=cluster.user, cwd=others)
    ((theirs,),) = [[job.id for job in cluster.queue() if job.user == cluster.user]]
    cluster.scancel(theirs)

    assert watch(vitra) == {by_scancel.id: "cancelled"}
    assert watch(vitra) == {}
    looked = vitra("watch", "--once", "--json", "--run-root", others / "runs").json["runs"]
    assert [row["action"] for row in looked] == ["skipped"]
    assert cluster.jobs() == [preemptor]
    assert here.state() == "running"
    vitra("cancel", here.id)
    assert local.wait(timeout=PATIENCE_S) == 5
    assert here.status()["attempts"][0]["job_id"] is None
