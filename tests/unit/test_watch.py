"""What becomes of runs whose job is gone, by what their events and Slurm's words say."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.jobs import job_comment
from launcher.lock import RunLock
from launcher.planner import plan
from launcher.registry import RunRecord
from launcher.watch import Look, watch, watch_facts, watch_lines
from tests.unit.fake_slurm import FakeSlurm, queue_line
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir, append_event, read_lines, write_atomic

LATER = "2100-01-01T00:00:00"


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    directory = tmp_path / "bin"
    directory.mkdir()
    fake = FakeSlurm(directory)
    fake.play("sbatch", {"out": "Submitted batch job 99\n"})
    return fake


class Root:
    """A run root, in which a test makes runs and has them looked after."""

    def __init__(self, path: Path, fake: FakeSlurm) -> None:
        path.mkdir()
        self.path = path
        self.fake = fake

    def run(self, letters: str, **retry: object) -> RunDir:
        """A run that was submitted as job 17."""
        run_dir = RunDir(self.path / f"tiny-20261202-045218-{letters}")
        run_dir.attempts.mkdir(parents=True)
        spec = RunSpec.model_validate(
            {
                "name": "tiny",
                "model": {"kind": "vla"},
                "data": {"kind": "synthetic"},
                "train": {"global_batch_size": 8, "max_steps": 10},
                "retry": retry,
            }
        )
        planned = plan(spec, run_id=run_dir.path.name, run_dir=str(run_dir.path))
        write_atomic(run_dir.plan, planned.model_dump_json().encode())
        record = RunRecord(
            run_id=run_dir.path.name,
            name="tiny",
            scheduler="slurm",
            created_at=datetime.now(UTC).isoformat(),
            user="u",
            host="h",
            python="/p",
            working_dir="/",
            versions={},
            spec_digest="d",
        )
        write_atomic(run_dir.record, record.model_dump_json().encode())
        append_event(run_dir, "submitted", scheduler="slurm")
        append_event(run_dir, "submitting")
        append_event(run_dir, "queued", job_id="17")
        write_atomic(run_dir.script, b"#!/bin/bash\n# as it was sent\n")
        return run_dir

    def look(self) -> list[Look]:
        return watch(self.path, self.fake.slurm(), environ=os.environ, say=lambda _text: None)

    def actions(self) -> list[str]:
        return [look.action for look in self.look()]

    def ended(self, state: str) -> None:
        """How the accounting says that job 17 has ended."""
        self.fake.play("sacct", {"out": f"17|{state}|1:0|{LATER}|{LATER}|node1|tiny\n"})


@pytest.fixture
def root(tmp_path: Path, fake: FakeSlurm) -> Root:
    return Root(tmp_path / "runs", fake)


def begin(run_dir: RunDir, attempt: int = 1) -> None:
    """An attempt that nobody judges."""
    run_dir.attempt(attempt).path.mkdir()
    write_atomic(run_dir.attempt(attempt).plan, run_dir.plan.read_bytes())
    append_event(run_dir, "attempt", attempt=attempt, job_id="17")


def judged(run_dir: RunDir, attempt: int, verdict: str) -> None:
    begin(run_dir, attempt)
    outcome = {"attempt": attempt, "verdict": verdict, "reason": "x"}
    outcome |= {"started_at": "", "ended_at": ""}
    write_atomic(run_dir.attempt(attempt).outcome, json.dumps(outcome).encode())
    append_event(run_dir, "ended", attempt=attempt, verdict=verdict, reason="x")


def events(run_dir: RunDir, name: str) -> list[dict[str, object]]:
    return [event for event in read_lines(run_dir.events) if event["event"] == name]


def test_submitted_again_as_it_was(root: Root, fake: FakeSlurm) -> None:
    run_dir = root.run("aaaa")
    (look,) = root.look()
    assert (look.action, look.job_id) == ("resubmitted", "99")
    assert fake.calls("sbatch")[0].argv == [str(run_dir.script)]
    assert run_dir.script.read_bytes() == b"#!/bin/bash\n# as it was sent\n"
    assert [event["job_id"] for event in events(run_dir, "queued")] == ["17", "99"]
    assert watch_facts(root.path, [look])["runs"][0]["action"] == "resubmitted"
    assert len(watch_lines([look])) == 1


@pytest.mark.parametrize(
    ("word", "verdict"),
    [
        ("PREEMPTED", "preempted"),
        ("TIMEOUT", "time_limit"),
        ("NODE_FAIL", "node_failure"),
        ("FAILED", "node_failure"),
        ("OUT_OF_MEMORY", "out_of_memory"),
    ],
)
def test_slurms_word_for_an_unjudged_attempt(root: Root, word: str, verdict: str) -> None:
    run_dir = root.run("aaaa")
    begin(run_dir)
    root.ended(word)
    (look,) = root.look()
    assert json.loads(run_dir.attempt(1).outcome.read_bytes())["verdict"] == verdict
    # An error of the program is not restarted by default.
    assert look.action == ("failed" if word == "OUT_OF_MEMORY" else "resubmitted")


def test_what_its_supervisor_noted_goes_before(root: Root) -> None:
    run_dir = root.run("aaaa")
    begin(run_dir)
    append_event(run_dir, "signal", attempt=1, verdict="preempted", reason="a person's job")
    root.ended("FAILED")
    assert root.actions() == ["resubmitted"]
    assert json.loads(run_dir.attempt(1).outcome.read_bytes())["verdict"] == "preempted"


def test_policy_and_budgets(root: Root, fake: FakeSlurm) -> None:
    refused = root.run("aaaa", restart_on=["preemption"])
    stuck = root.run("bbbb", max_no_progress=2)
    begin(refused)
    judged(stuck, 1, "time_limit")
    begin(stuck, 2)
    root.ended("TIMEOUT")
    assert root.actions() == ["failed", "failed"]
    assert events(refused, "finished")[0]["verdict"] == "time_limit"
    assert events(stuck, "finished")[0]["verdict"] == "no_progress"
    assert fake.calls("sbatch") == []


def test_a_supervisors_decision_is_not_taken_again(root: Root) -> None:
    run_dir = root.run("aaaa", restart_on=["preemption"])
    judged(run_dir, 1, "error")
    append_event(run_dir, "requeued", verdict="error", reason="port taken")
    assert root.actions() == ["resubmitted"]


@pytest.mark.parametrize(
    ("word", "after", "given_up"),
    [("FAILED", None, True), ("NODE_FAIL", None, False), ("FAILED", "saved", False)],
)
def test_not_for_ever(root: Root, word: str, after: str | None, given_up: bool) -> None:
    run_dir = root.run("aaaa", max_no_progress=3)
    for _ in range(3):
        append_event(run_dir, "resubmitted", job_id="17", cause=None, reason="x")
    if after:
        append_event(run_dir, after, attempt=1, step=5)
    (run_dir.path / "batch-17.log").write_text("one\ntwo\nno such module\n")
    root.ended(word)
    (look,) = root.look()
    assert look.action == ("failed" if given_up else "resubmitted")
    assert ("no such module" in look.reason) == given_up


def running(run_dir: RunDir) -> dict[str, object]:
    return {"out": queue_line("17", "RUNNING", comment=job_comment(run_dir.path.name))}


def test_left_alone(root: Root, fake: FakeSlurm) -> None:
    """With a job, over, local, being submitted, or supervised here."""
    alive = root.run("aaaa")
    over = root.run("bbbb")
    append_event(over, "finished", state="failed", verdict="error", reason="x")
    local = root.run("cccc")
    append_event(local, "resumed", scheduler="local")
    busy, supervised = root.run("dddd"), root.run("eeee")
    fake.play("squeue", running(alive))
    with RunLock(busy.lock), RunLock(supervised.lock):
        looks = {look.run_id[-4:]: look.action for look in root.look()}
    assert looks == {"aaaa": "alive", "dddd": "skipped", "eeee": "skipped"}
    assert fake.calls("sbatch") == []


def test_cancelled(root: Root, fake: FakeSlurm) -> None:
    by_hand, marked = root.run("aaaa"), root.run("bbbb")
    write_atomic(marked.cancel, b"{}")
    root.ended("CANCELLED by 1000")
    assert root.actions() == ["cancelled", "cancelled"]
    for run_dir in (by_hand, marked):
        assert events(run_dir, "finished")[0]["state"] == "cancelled"
    assert root.actions() == []
    assert fake.calls("sbatch") == []


def test_of_two_jobs_one_is_kept(root: Root, fake: FakeSlurm) -> None:
    run_dir = root.run("aaaa")
    append_event(run_dir, "submitting")
    comment = job_comment(run_dir.path.name)
    lines = queue_line("21", comment=comment) + queue_line("20", comment=comment)
    fake.play("squeue", {"out": lines})
    (look,) = root.look()
    assert (look.action, look.job_id) == ("alive", "20")
    assert [call.argv for call in fake.calls("scancel")] == [["--state=PENDING", "21"]]
    assert events(run_dir, "queued")[-1]["job_id"] == "20"


NO_ANSWER: dict[str, Callable[[FakeSlurm], None]] = {
    "squeue": lambda fake: fake.play(
        "squeue", {"rc": 1, "err": "Unable to contact slurm controller\n"}
    ),
    "sbatch": lambda fake: fake.play("sbatch", {"rc": 1, "err": "sbatch: error: Invalid qos\n"}),
}


@pytest.mark.parametrize("fault", NO_ANSWER.values(), ids=NO_ANSWER.keys())
def test_problems_are_said(root: Root, fake: FakeSlurm, fault: Callable[[FakeSlurm], None]) -> None:
    run_dirs = [root.run("aaaa"), root.run("bbbb")]
    fault(fake)
    looks = root.look()
    assert [(look.action, look.exit_code) for look in looks] == [("problem", 3)] * 2
    assert all(not events(run_dir, "finished") for run_dir in run_dirs)


def test_a_damaged_run_keeps_no_other_from_its_turn(root: Root) -> None:
    root.run("aaaa")
    write_atomic(root.run("bbbb").record, b"{")
    assert sorted(root.actions()) == ["problem", "resubmitted"]
