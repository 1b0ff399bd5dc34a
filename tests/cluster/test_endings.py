"""How runs on a cluster end that do not finish: by their own fault, or as somebody wants."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.runs import Run, SlurmVitra
from tests.conftest import VitraServer

pytestmark = pytest.mark.timeout(600)

COMPONENTS = Path(__file__).parents[1] / "contract" / "components"
#: What a rank does to itself, and how that is to be judged: verdict, exit code, words.
TROUBLES = {
    "exit 0": ("error", 0, "left with exit code 0 before the last step"),
    "exit 3": ("error", 3, "exited with code 3"),
    "no memory": ("out_of_memory", 1, "MemoryError"),
}


@pytest.fixture
def vitra(cluster: ClusterHandle, vitra_server: VitraServer) -> SlurmVitra:
    return SlurmVitra(cluster, vitra_server)


def long_run(vitra: SlurmVitra, **spec: Any) -> Run:
    """One that goes on until something happens to it."""
    return vitra.submit(
        train__max_steps=100_000, data__options={"samples": 4096, "holdout": 8}, **spec
    )


def test_ranks_that_fail(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    """Out of the queue at once, the rank and its node named, and not restarted."""
    library = cluster.share / "library"
    library.mkdir()
    # Outside of any work tree, so that only the module is copied.
    shutil.copy(COMPONENTS / "troubled.py", library)
    (cluster.share / "counter").touch()
    two_nodes: dict[str, Any] = {"resources__nodes": 2, "resources__tasks_per_node": 1}
    runs = {
        trouble: vitra.submit(
            data__kind="troubled:build",
            data__options={"samples": 64, "trouble": trouble, "counter": "counter"},
            environ={"PYTHONPATH": str(library)},
            **two_nodes,
        )
        for trouble in TROUBLES
    }
    killed = long_run(vitra, **two_nodes)
    killed.wait_for_step(5)
    victim = next(rank for rank in killed.ranks() if rank.node == "node2")
    os.kill(victim.pid, signal.SIGKILL)
    for trouble, run in {**runs, "kill": killed}.items():
        verdict, code, words = TROUBLES.get(trouble, ("error", 137, "was killed by SIGKILL"))
        run.wait_for_event("finished")
        cluster.wait_until_over(run.job)
        status = run.status()
        assert status["state"] == "failed", run.batch_log()
        (attempt,) = status["attempts"]
        assert (attempt["verdict"], attempt["exit_code"]) == (verdict, code), attempt
        assert (attempt["failed_rank"], attempt["failed_node"]) == (1, "node2"), attempt
        assert words in attempt["reason"]
    assert cluster.processes() == []


def test_restarted_in_place(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    """A rank that hangs, and one that dies where the spec allows for that: the job stays."""
    two_nodes: dict[str, Any] = {"resources__nodes": 2, "resources__tasks_per_node": 1}
    stopped = long_run(vitra, retry__hang_timeout_s=15, **two_nodes)
    killed = long_run(
        vitra,
        retry__restart_on=["error", "preemption"],
        retry__max_error_restarts=1,
        **two_nodes,
    )
    for run, number in ((stopped, signal.SIGSTOP), (killed, signal.SIGKILL)):
        run.wait_for_step(8)
        victim = next(rank for rank in run.ranks() if rank.node == "node2")
        os.kill(victim.pid, number)
    for run in (stopped, killed):
        # Gone on from a checkpoint, and beyond what the first attempt had trained.
        run.wait_for_event("started", 2)
        run.wait_for_step(run.events("started")[1]["step"] + 10, attempt=2)
        assert cluster.restarts(run.job) == 0
        vitra("cancel", run.id)
        (first, last) = run.attempts()
        assert first["job_id"] == last["job_id"] == str(run.job)
        assert (first["failed_rank"], first["failed_node"]) == (1, "node2")
        assert last["verdict"] == "cancelled"
    assert [run.verdicts()[0] for run in (stopped, killed)] == ["hang", "error"]
    logs = stopped.dir.attempt(1).logs
    assert "File" in (logs / "rank_0.stack").read_text()
    assert cluster.processes() == []


def test_cancelled_stays_cancelled(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    """By scancel while it runs, and by both ways while it waits after a preemption."""
    running, signalled = long_run(vitra), long_run(vitra)
    waiting, marked = (long_run(vitra, resources__partition="low") for _ in range(2))
    for run in (running, signalled, waiting, marked):
        run.wait_for_step(3)
    cluster.scancel(running.job)
    # To the ranks alone: a person's wish to save and stop.
    cluster.scancel("--signal=TERM", signalled.job)
    for run in (running, signalled):
        run.wait_for_event("finished")
        cluster.wait_until_over(run.job)
        assert run.state() == "cancelled", run.batch_log()
        assert run.verdicts() == ["cancelled"]
    assert signalled.status()["last_checkpoint_step"] == signalled.status()["step"]

    cluster.preempt(4)
    for run in (waiting, marked):
        run.wait_for_state("requeued")
    cluster.scancel(waiting.job)
    assert vitra("cancel", marked.id, "--json").json["state"] == "cancelled"
    for run in (waiting, marked):
        run.wait_for_state("cancelled")
        assert run.jobs() == []
        assert run.verdicts() == ["preempted"]


def test_of_two_jobs_of_one_run_one_leaves(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    run = long_run(vitra)
    run.wait_for_step(3)
    words = ["sbatch", "--parsable", str(run.dir.script)]
    second = int(cluster.run(words).stdout)
    cluster.wait_until_over(second)
    assert cluster.sacct(second)[-1]["ExitCode"] == "93:0"
    assert "belongs to job" in run.batch_log()
    assert run.state() == "running"
    vitra("cancel", run.id)
    assert run.verdicts() == ["cancelled"]


def test_eight_jobs_on_one_node_meet_at_ports_of_their_own(vitra: SlurmVitra) -> None:
    runs = [vitra.submit(resources__nodelist="node1", train__max_steps=5) for _ in range(8)]
    for run in runs:
        run.wait_for_event("finished")
        assert run.verdicts()[-1] == "completed", run.batch_log()
