"""The ranks of a step: how they are started, what is known of their ends, whose it is to end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from launcher import shell
from launcher.planner import plan
from launcher.schedulers import slurm as module
from launcher.schedulers.slurm import SlurmLauncher, SlurmRanks
from launcher.slurm_env import BatchJob
from tests.conftest import wait_until
from tests.unit.fake_slurm import Call, FakeSlurm
from trainer.spec.errors import SchedulerUnavailable
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir
from trainer.spec.snapshot import Snapshot

JOB = "JobId=30 JobState=RUNNING Requeue=1 Restarts={restarts} NodeList=node[1-2]\n"
SPEC: dict[str, object] = {
    "name": "a",
    "model": {"kind": "vla"},
    "data": {"kind": "synthetic"},
    "train": {"global_batch_size": 40, "max_steps": 10},
}
GONE = {"rc": 1, "err": "slurm_load_jobs error: Unable to contact slurm controller\n"}


class Step:
    """A step of two ranks on two nodes, of the first life of job 30; srun is a `sleep`."""

    def __init__(self, directory: Path) -> None:
        (directory / "bin").mkdir()
        self.fake = FakeSlurm(directory / "bin")
        self.fake.play("scontrol", {"out": JOB.format(restarts=0)})
        self.fake.play("squeue", {"out": "30.0\n30.batch\n"})
        run_dir = RunDir(directory)
        self.files = run_dir.attempt(1)
        self.files.logs.mkdir(parents=True)
        spec = RunSpec.model_validate({**SPEC, "resources": {"nodes": 2}})
        self.srun = shell.start(
            [sys.executable, "-c", "import time; time.sleep(300)"],
            log=self.files.logs / "srun.log",
            env={},
            cwd=directory,
        )
        self.ranks = SlurmRanks(
            self.fake.slurm(),
            BatchJob("30", 0, "node[1-2]", "node1"),
            self.srun,
            self.files,
            plan(spec, run_id="a-1", run_dir=str(directory)),
            ["node1", "node2"],
        )

    def ends(self, rank: int, code: int = 0) -> None:
        record = {"rank": rank, "node": f"node{rank + 1}", "exit_code": code, "ended_at": 1.0}
        self.files.exit(rank).write_text(json.dumps(record))


def launch(directory: Path, attempt: int = 1, **resources: object) -> Call:
    """How srun is called in job 30, which has four nodes, and variables of all sorts around it."""
    (directory / "bin").mkdir(parents=True)
    fake = FakeSlurm(directory / "bin")
    fake.play("scontrol", {"out": "node1\nnode2\nnode3\nnode4\n"})
    run_dir = RunDir(directory)
    run_dir.attempt(attempt).logs.mkdir(parents=True)
    run_dir.code.mkdir()
    (run_dir.code / "snapshot.json").write_text(Snapshot().model_dump_json())
    spec = RunSpec.model_validate({**SPEC, "resources": resources})
    around = {"SLURM_CPUS_PER_TASK": "1", "SRUN_CPUS_PER_TASK": "1", "SLURM_MEM_PER_NODE": "1"}
    around |= {"MASTER_ADDR": "login", "MASTER_PORT": "29500", "RANK": "7", "WORLD_SIZE": "9"}
    around |= {"SLURM_CONF": "/etc/slurm.conf", "MINE": "a b"}
    launcher = SlurmLauncher(
        fake.slurm(),
        BatchJob("30", 0, "node[1-4]", "node1"),
        {"PATH": f"{fake.directory}:{os.environ['PATH']}", **around},
        directory,
    )
    planned = plan(spec, run_id="a-1", run_dir=str(directory))
    group = launcher.start(run_dir, planned, attempt, {})
    wait_until(lambda: len(group.poll()) == planned.world_size, "the end of srun")
    (call,) = fake.calls("srun")
    return call


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_KILL_S", "_SEEN_WITHIN_S", "_INSIST_S", "_AGAIN_S"):
        monkeypatch.setattr(module, name, 0.2)


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return Step(tmp_path)


def test_each_rank_is_known_by_its_record_and_lost_without_one(step: Step) -> None:
    assert step.ranks.poll() == {}
    step.ends(1, code=3)
    assert {rank: end.exit_code for rank, end in step.ranks.poll().items()} == {1: 3}
    step.ranks.kill()
    ends = step.ranks.poll()
    assert (ends[0].is_lost, ends[0].signal, ends[0].node) == (True, signal.SIGKILL, "node1")
    assert not ends[1].is_lost
    assert [call.argv for call in step.fake.calls("scancel")] == [["--signal=KILL", "30.0"]]
    assert step.srun.poll() is not None


def test_what_was_said_of_tasks_that_did_not_start(step: Step) -> None:
    step.files.log(1).touch()
    (step.files.logs / "srun.log").write_text(
        "ch-run[7]: error: can't find image: /images/a\nsrun: error: node1: task 0: Exited\n\n"
    )
    step.ranks.kill()
    ends = step.ranks.poll()
    assert ends[0].not_started == "ch-run[7]: error: can't find image: /images/a"
    assert (ends[1].is_lost, ends[1].not_started) == (True, None)


def test_the_next_life_s_step_is_not_touched(step: Step) -> None:
    step.fake.play("scontrol", {"out": JOB.format(restarts=1)})
    step.ranks.ask_for_stacks()
    step.ranks.kill()
    assert step.fake.calls("scancel") == []
    # Its own srun, which would have that step ended, is gone.
    assert step.srun.poll() == -signal.SIGKILL
    assert all(end.is_lost for end in step.ranks.poll().values())


def test_the_controller_is_asked_again_while_ranks_run(step: Step) -> None:
    step.fake.play("scontrol", GONE, {"out": JOB.format(restarts=0)})
    step.ranks.kill()
    assert len(step.fake.calls("scancel")) == 1
    assert "Unable to contact" in (step.files.logs / "srun.log").read_text()


def test_and_not_for_ever(step: Step) -> None:
    step.fake.play("scontrol", GONE)
    step.ranks.kill()
    assert step.fake.calls("scancel") == []
    assert step.srun.poll() == -signal.SIGKILL


def test_a_stop_is_passed_on_by_srun_never_term(step: Step) -> None:
    for rank in range(2):
        step.files.log(rank).touch()
    step.ranks.ask_to_stop()
    assert step.srun.wait(timeout=30) == -signal.SIGUSR2
    step.ranks.ask_to_stop()


def test_a_stop_is_kept_until_every_task_hears_it(step: Step) -> None:
    step.ranks.ask_to_stop()
    step.files.log(1).touch()
    step.ranks.poll()
    assert step.srun.poll() is None
    step.files.log(0).touch()
    step.ranks.poll()
    assert step.srun.wait(timeout=30) == -signal.SIGUSR2


def test_and_does_not_wait_for_ever(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STOP_EVERY_S", 0.2)
    step.ranks.ask_to_stop()
    wait_until(lambda: step.ranks.poll() or step.srun.poll() is not None, "srun to be told")
    assert step.srun.wait(timeout=30) == -signal.SIGUSR2


def test_srun_is_told_everything_and_inherits_nothing(tmp_path: Path) -> None:
    call = launch(tmp_path, nodes=2, tasks_per_node=2, gpus_per_node="a100:2", cpus_per_task=3)
    assert {
        *("--jobid=30", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--kill-on-bad-exit=1"),
        *("--cpus-per-task=3", "--gpus-per-node=a100:2"),
        # The other two stay idle.
        "--nodelist=node1,node2",
    } <= set(call.argv)
    slurms = {name for name in call.environ if name.startswith(("SLURM_", "SRUN_", "SBATCH_"))}
    assert slurms == {"SLURM_CONF"}
    assert not {"RANK", "WORLD_SIZE"} & call.environ.keys()
    assert (call.environ["MASTER_ADDR"], call.environ["MINE"]) == ("node1", "a b")


def test_each_attempt_has_a_port_of_its_own(tmp_path: Path) -> None:
    calls = [launch(tmp_path / str(attempt), attempt) for attempt in (1, 2, 3)]
    ports = {call.environ["MASTER_PORT"] for call in calls}
    assert len(ports) == 3
    assert "29500" not in ports


def test_a_job_with_fewer_nodes_than_planned(tmp_path: Path) -> None:
    with pytest.raises(SchedulerUnavailable, match="the job has 4 nodes, the plan 5"):
        launch(tmp_path, nodes=5)
