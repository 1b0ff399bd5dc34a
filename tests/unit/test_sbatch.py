"""Submitting: one job comes of it, whatever sbatch says; and what is used of submitit is there."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from launcher.jobs import begin_submission, job_comment, note_job
from launcher.schedulers import sbatch
from launcher.schedulers.sbatch import Unclear, queue
from tests.unit.fake_slurm import FakeSlurm, queue_line
from trainer.spec.errors import SchedulerRejected
from trainer.spec.rundir import RunDir, read_lines

RUN = "tiny-20261202-045218-abcd"
SCRIPT = "#!/bin/bash\n#SBATCH --comment='täst' \\\n echo %j \n".encode()
OURS = job_comment(RUN)
TAKEN = {"out": "Submitted batch job 17\n"}
TIMED_OUT = {
    "rc": 1,
    "err": "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n",
}
REFUSED = {
    "rc": 1,
    "err": "sbatch: error: Batch job submission failed: Invalid qos specification\n",
}


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    directory = tmp_path / "bin"
    directory.mkdir()
    return FakeSlurm(directory)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same waits in the same order, only shorter."""
    monkeypatch.setattr(sbatch, "_PAUSES_S", (0.01, 0.02))
    monkeypatch.setattr(sbatch, "_LOOKS_S", (0.01, 0.01, 0.02))
    monkeypatch.setattr(sbatch, "_OUT_OF_REACH_S", 0.2)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    path = tmp_path / RUN
    path.mkdir()
    return RunDir(path)


def submit(run_dir: RunDir, fake: FakeSlurm, sbatch_s: float = 20.0, **more: str) -> str:
    return queue(
        run_dir,
        SCRIPT,
        RUN,
        fake.slurm(**more),
        cwd=run_dir.path.parent,
        say=lambda _text: None,
        sbatch_s=sbatch_s,
    )


def events(run_dir: RunDir) -> list[str]:
    return [event["event"] for event in read_lines(run_dir.events)]


def test_the_file_in_the_run_directory_is_what_sbatch_gets(
    fake: FakeSlurm, run_dir: RunDir
) -> None:
    fake.play("sbatch", TAKEN)
    assert submit(run_dir, fake) == "17"
    (call,) = fake.calls("sbatch")
    assert call.argv == [str(run_dir.script)]
    assert call.cwd == str(run_dir.path.parent)
    assert run_dir.script.read_bytes() == SCRIPT
    assert events(run_dir) == ["submitting", "queued"]
    assert {p.name for p in run_dir.path.iterdir()} == {"submit.sbatch", "events.jsonl"}


def test_the_job_inherits_the_shell_but_not_another_job(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.play("sbatch", TAKEN)
    leaks = {"SLURM_JOB_ID": "3", "SLURM_MEM_PER_NODE": "4", "SBATCH_TIMELIMIT": "1", "RANK": "2"}
    leaks |= {"MASTER_ADDR": "x", "SRUN_CPUS_PER_TASK": "2", "LOCAL_RANK": "0"}
    kept = {"SLURM_CONF": "/etc/x.conf", "WANDB_API_KEY": "k", "LC_ALL": "C.UTF-8"}
    submit(run_dir, fake, **leaks, **kept)
    environ = fake.calls("sbatch")[0].environ
    assert not leaks.keys() & environ.keys()
    assert kept.items() <= environ.items()


def test_a_refusal_is_final(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.play("sbatch", REFUSED)
    with pytest.raises(SchedulerRejected, match="Invalid qos"):
        submit(run_dir, fake)
    assert len(fake.calls("sbatch")) == 1


@pytest.mark.parametrize("answer", [TIMED_OUT, REFUSED, {"rc": 1}, {"out": "Hello\n"}])
def test_a_job_that_was_taken_all_the_same(
    fake: FakeSlurm, run_dir: RunDir, answer: dict[str, object]
) -> None:
    other = queue_line("16", comment=job_comment("tiny-another")) + queue_line("15")
    found = {"squeue": [{"out": other + queue_line("17", comment=OURS)}]}
    fake.play("sbatch", {**answer, "then": found})
    assert submit(run_dir, fake) == "17"
    assert len(fake.calls("sbatch")) == 1
    assert events(run_dir) == ["submitting", "queued"]


def test_an_sbatch_that_hangs(fake: FakeSlurm, run_dir: RunDir) -> None:
    found = {"squeue": [{"out": ""}, {"out": queue_line("17", "RUNNING", comment=OURS)}]}
    fake.play("sbatch", {"hang": 600, "then": found})
    assert submit(run_dir, fake, sbatch_s=1.0) == "17"


def test_tried_again_once_there_is_no_job(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.play("sbatch", TIMED_OUT, TAKEN)
    assert submit(run_dir, fake) == "17"
    assert len(fake.calls("sbatch")) == 2
    # Looked for before it was tried again, and once more after.
    assert len(fake.calls("squeue")) == 4


def test_a_request_that_was_carried_out_late(fake: FakeSlurm, run_dir: RunDir) -> None:
    """Two jobs then: one of them is kept."""
    both = queue_line("17", comment=OURS) + queue_line("18", comment=OURS)
    fake.play("sbatch", TIMED_OUT, {**TAKEN, "then": {"squeue": [{"out": both}]}})
    assert submit(run_dir, fake) == "17"
    assert [call.argv for call in fake.calls("scancel")] == [["--state=PENDING", "18"]]


def test_a_job_of_an_earlier_submission_is_not_taken_for_the_new_one(
    fake: FakeSlurm, run_dir: RunDir
) -> None:
    begin_submission(run_dir)
    note_job(run_dir, "9")
    fake.play("sbatch", TIMED_OUT, TAKEN)
    fake.play("squeue", {"out": queue_line("9", "COMPLETING", comment=OURS)})
    assert submit(run_dir, fake) == "17"


@pytest.mark.parametrize("answer", [TIMED_OUT, {"rc": -9}])
def test_it_stays_unclear(fake: FakeSlurm, run_dir: RunDir, answer: dict[str, object]) -> None:
    fake.play("sbatch", answer)
    gone = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    fake.play("squeue", {"rc": 1, "err": gone})
    with pytest.raises(Unclear, match="Unable to contact"):
        submit(run_dir, fake)
    assert events(run_dir) == ["submitting"]
    assert len(fake.calls("sbatch")) == 1


def test_never_an_answer_and_never_a_job(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.play("sbatch", TIMED_OUT)
    with pytest.raises(Unclear, match="Socket timed out"):
        submit(run_dir, fake)
    assert len(fake.calls("sbatch")) == 3


def test_no_sbatch_at_all(fake: FakeSlurm, run_dir: RunDir) -> None:
    (fake.directory / "sbatch").unlink()
    with pytest.raises(SchedulerRejected, match="sbatch cannot be run"):
        submit(run_dir, fake, PATH=str(fake.directory))


def test_what_is_used_of_submitit() -> None:
    """Private methods: this fails when a version outside the pinned range has changed them."""
    from submitit.slurm.slurm import SlurmExecutor, SlurmJob

    named = SlurmExecutor._get_job_id_from_submission_command
    assert (
        named("Submitted batch job 17\n") == named(b"Submitted batch job 17 on cluster x") == "17"
    )
    assert list(inspect.signature(SlurmExecutor._submit_command).parameters) == ["self", "command"]
    assert list(inspect.signature(SlurmExecutor._num_tasks).parameters) == ["self"]
    assert SlurmExecutor.job_class is SlurmJob
    assert inspect.signature(SlurmExecutor.affinity).parameters == {}
    assert os.fspath(Path("/a b")) in SlurmExecutor._make_submission_command(
        SlurmExecutor.__new__(SlurmExecutor), Path("/a b")
    )
