"""The ranks of a step: what is known of their ends, and whose step it is to end."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from launcher import shell
from launcher.planner import plan
from launcher.schedulers import slurm as module
from launcher.schedulers.slurm import SlurmRanks
from launcher.slurm_env import BatchJob
from tests.unit.fake_slurm import FakeSlurm
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir

JOB = "JobId=30 JobState=RUNNING Requeue=1 Restarts={restarts} NodeList=node[1-2]\n"
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
        spec = RunSpec.model_validate(
            {
                "name": "a",
                "model": {"kind": "vla"},
                "data": {"kind": "synthetic"},
                "train": {"global_batch_size": 8, "max_steps": 10},
                "resources": {"nodes": 2},
            }
        )
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


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    for name in ("_KILL_S", "_SEEN_WITHIN_S", "_INSIST_S", "_AGAIN_S"):
        monkeypatch.setattr(module, name, 0.2)
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
    step.ranks.ask_to_stop()
    assert step.srun.wait(timeout=30) == -signal.SIGUSR2
    step.ranks.ask_to_stop()
