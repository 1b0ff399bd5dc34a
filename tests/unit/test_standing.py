"""Where a run on Slurm stands: never over while it is in the queue, unknown when it is unknown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from launcher.jobs import begin_submission, effective, job_comment, known_jobs, note_job
from launcher.registry import RunRecord
from launcher.slurm_answers import Job
from launcher.standing import JobBook, scheduler_of, standing, waits_for
from launcher.status import Standing, run_status
from tests.unit.fake_slurm import FakeSlurm, queue_line
from trainer.spec.outcome import RunState
from trainer.spec.rundir import RunDir, append_event, json_line, read_lines, write_atomic

RUN = "tiny-20261202-045218-abcd"
OURS = job_comment(RUN)
MADE = datetime.now(UTC) - timedelta(hours=1)
RECORD = RunRecord(
    run_id=RUN,
    name="tiny",
    scheduler="slurm",
    created_at=MADE.isoformat().replace("+00:00", "Z"),
    user="u",
    host="h",
    python="/p",
    working_dir="/",
    versions={},
    spec_digest="d",
)
LATER = (MADE + timedelta(minutes=5)).astimezone().strftime("%Y-%m-%dT%H:%M:%S")
BEFORE = (MADE - timedelta(days=30)).astimezone().strftime("%Y-%m-%dT%H:%M:%S")
NO_CONTROLLER = {"rc": 1, "err": "slurm_load_jobs error: Unable to contact slurm controller\n"}
NO_ACCOUNTING = {"rc": 1, "err": "sacct: error: Slurm accounting storage is disabled\n"}


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    directory = tmp_path / "bin"
    directory.mkdir()
    return FakeSlurm(directory)


class Run:
    """A run directory with a record, of which a test says what has happened."""

    def __init__(self, path: Path, fake: FakeSlurm) -> None:
        path.mkdir()
        self.dir = RunDir(path)
        self.fake = fake
        write_atomic(self.dir.record, RECORD.model_dump_json().encode())

    def happened(self, *names: str, ago_s: float = 600.0, **details: object) -> None:
        at = (datetime.now(UTC) - timedelta(seconds=ago_s)).isoformat().replace("+00:00", "Z")
        with self.dir.events.open("ab") as file:
            for name in names:
                file.write(json_line({"at": at, "event": name, **details}))

    def queued(self, job_id: str = "17") -> None:
        self.happened("submitted", "submitting")
        self.happened("queued", job_id=job_id)

    def began(self) -> None:
        self.happened("attempt", attempt=1, job_id="17")
        self.dir.attempt(1).path.mkdir(parents=True)
        write_atomic(self.dir.attempt(1).plan, b"{}")

    def finished(self, state: str = "completed", ago_s: float = 600.0) -> None:
        self.happened("ended", ago_s=ago_s, attempt=1, verdict=state)
        self.happened("finished", ago_s=ago_s, state=state, verdict=state, reason="so it is")

    def stands(self) -> Standing:
        return standing(self.dir, RECORD, JobBook(self.fake.slurm(), [self.dir]))


@pytest.fixture
def run(tmp_path: Path, fake: FakeSlurm) -> Run:
    return Run(tmp_path / RUN, fake)


def test_queued_and_why(run: Run, fake: FakeSlurm) -> None:
    run.queued()
    fake.play("squeue", {"out": queue_line("17", comment=OURS, start="2026-12-02T07:01:00")})
    stands = run.stands()
    assert (stands.state, stands.job_id, stands.alive) == (RunState.QUEUED, "17", True)
    assert "others are before it (Priority)" in stands.reason
    assert "may start at 2026-12-02 07:01" in stands.reason


def test_running_then_requeued(run: Run, fake: FakeSlurm) -> None:
    run.queued()
    fake.play("squeue", {"out": queue_line("17", "RUNNING", comment=OURS, nodes="node[1-2]")})
    assert run.stands().state is RunState.RUNNING
    run.began()
    facts = run_status(run.dir, run.stands())
    assert facts["attempts"][0]["verdict"] is None
    assert facts["attempts"][0]["job_id"] == "17"
    run.happened("ended", "requeued", attempt=1, verdict="preempted", reason="x")
    fake.play("squeue", {"out": queue_line("17", "COMPLETING", comment=OURS)})
    assert run.stands().state is RunState.REQUEUED
    fake.play("squeue", {"out": queue_line("17", comment=OURS, reason="BeginTime")})
    assert run.stands().state is RunState.REQUEUED


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING"])
def test_never_over_while_it_is_in_the_queue(run: Run, fake: FakeSlurm, state: str) -> None:
    run.queued()
    run.finished(ago_s=3.0)
    fake.play("squeue", {"out": queue_line("17", state, comment=OURS)})
    stands = run.stands()
    assert stands.alive
    assert stands.state in (RunState.RUNNING, RunState.QUEUED, RunState.REQUEUED)
    fake.play("squeue", {"out": queue_line("17", "COMPLETED", comment=OURS)})
    assert run.stands().state is RunState.COMPLETED


def test_a_job_that_hangs_in_its_end_hides_nothing(run: Run, fake: FakeSlurm) -> None:
    run.queued()
    run.finished()
    fake.play("squeue", {"out": queue_line("17", "COMPLETING", comment=OURS)})
    assert run.stands().state is RunState.COMPLETED


def test_over_without_slurm(run: Run, fake: FakeSlurm) -> None:
    run.queued()
    run.finished("failed")
    fake.play("squeue", NO_CONTROLLER)
    stands = run.stands()
    assert (stands.state, stands.reason, stands.alive) == (RunState.FAILED, "so it is", False)
    assert fake.calls("sacct") == []


def test_nothing_is_concluded_from_no_answer(run: Run, fake: FakeSlurm) -> None:
    run.queued()
    run.began()
    fake.play("squeue", NO_CONTROLLER)
    stands = run.stands()
    assert stands.state is RunState.UNKNOWN
    assert not stands.known
    assert "Unable to contact" in stands.reason
    assert run_status(run.dir, stands)["attempts"][0]["verdict"] is None


@pytest.mark.parametrize("state", ["FAILED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "COMPLETED"])
def test_gone_and_not_over(run: Run, fake: FakeSlurm, state: str) -> None:
    """By the controller's word, then by the accounting's: the run is not over either way."""
    run.queued()
    fake.play("squeue", {"out": queue_line("17", state, comment=OURS)})
    assert run.stands().state is RunState.UNKNOWN
    fake.play("squeue", {})
    fake.play("sacct", {"out": f"17|{state}|1:0|{LATER}|{LATER}|node1|tiny\n"})
    stands = run.stands()
    assert stands.state is RunState.UNKNOWN
    assert state in stands.reason


def test_cancelled_by_hand_while_it_waited(run: Run, fake: FakeSlurm) -> None:
    run.queued()
    fake.play("squeue", {"out": queue_line("17", "CANCELLED", comment=OURS)})
    assert run.stands().state is RunState.CANCELLED
    fake.play("squeue", {})
    fake.play("sacct", {"out": f"17|CANCELLED by 1000|0:0|{LATER}|{LATER}|None|tiny\n"})
    stands = run.stands()
    assert stands.state is RunState.CANCELLED
    assert "uid 1000" in stands.reason
    fake.play("sacct", NO_ACCOUNTING)
    stands = run.stands()
    assert stands.state is RunState.UNKNOWN
    assert "no longer knows" in stands.reason


def test_a_life_that_was_followed_by_another_decides_nothing(run: Run, fake: FakeSlurm) -> None:
    run.queued()
    lives = [f"17|{s}|0:0|{LATER}|{LATER}|node1|tiny\n" for s in ("CANCELLED", "NODE_FAIL")]
    fake.play("sacct", {"out": "".join(lives)})
    assert run.stands().state is RunState.UNKNOWN


FOREIGN = {
    "another run's": queue_line("17", "RUNNING", comment="vitra:tiny-x", submitted=LATER),
    "another name": queue_line("17", "RUNNING", name="other", submitted=LATER),
    "older than the run": queue_line("17", "RUNNING", submitted=BEFORE),
}


@pytest.mark.parametrize("line", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_number_that_came_again(run: Run, fake: FakeSlurm, line: str) -> None:
    run.queued()
    fake.play("squeue", {"out": line})
    fake.play("sacct", {"out": f"17|RUNNING|0:0|{BEFORE}|Unknown|node1|tiny\n"})
    stands = run.stands()
    assert stands.state is RunState.UNKNOWN
    assert stands.job is None
    assert stands.gone is None


def test_a_site_that_writes_comments_of_its_own(run: Run, fake: FakeSlurm) -> None:
    run.queued()
    line = queue_line("17", "RUNNING", comment="billed to x", submitted=LATER)
    fake.play("squeue", {"out": line})
    assert run.stands().state is RunState.RUNNING


def test_a_job_whose_number_was_never_noted(run: Run, fake: FakeSlurm) -> None:
    run.happened("submitted", "submitting")
    fake.play("squeue", {"out": queue_line("23", "RUNNING", comment=OURS)})
    assert (run.stands().state, run.stands().job_id) == (RunState.RUNNING, "23")


def test_submitted_while_the_queue_was_read(run: Run, fake: FakeSlurm) -> None:
    """The queue had been asked for before the job was in it: it is asked again."""
    run.happened("submitted", "submitting", ago_s=1.0)
    run.happened("queued", ago_s=1.0, job_id="17")
    fake.play("squeue", {}, {"out": queue_line("17", comment=OURS)})
    assert run.stands().state is RunState.QUEUED


def test_cancel_marker(run: Run, fake: FakeSlurm) -> None:
    run.queued()
    write_atomic(run.dir.cancel, b"{}")
    fake.play("squeue", {"out": queue_line("17", "RUNNING", comment=OURS)})
    assert run.stands().state is RunState.RUNNING
    fake.play("squeue", {})
    assert run.stands().state is RunState.CANCELLED
    fake.play("squeue", NO_CONTROLLER)
    assert run.stands().state is RunState.UNKNOWN


def test_many_runs_cost_one_question(run: Run, fake: FakeSlurm) -> None:
    run.queued()
    fake.play("squeue", {"out": queue_line("17", comment=OURS)})
    fake.play("sacct", {"hang": 60})
    book = JobBook(fake.slurm(), [run.dir] * 3)
    for _ in range(3):
        standing(run.dir, RECORD, book)
    assert len(fake.calls("squeue")) == 1
    assert fake.calls("sacct") == []


def test_a_resume_that_slurm_refused_never_was(run: Run) -> None:
    run.queued()
    run.finished()
    before = list(read_lines(run.dir.events))
    append_event(run.dir, "resumed", scheduler="local")
    assert scheduler_of(RECORD, list(read_lines(run.dir.events))) == "local"
    begin_submission(run.dir)
    append_event(run.dir, "withdrawn")
    events = list(read_lines(run.dir.events))
    assert effective(events) == before
    assert scheduler_of(RECORD, events) == "slurm"
    # Numbers of submissions are never used again.
    assert begin_submission(run.dir) == 3
    note_job(run.dir, "18")
    assert known_jobs(run.dir, list(read_lines(run.dir.events))) == ["17", "18"]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "free (Resources)"),
        ("ReqNodeNotAvail, UnavailableNodes:node3", "down, drained or reserved"),
        ("QOSMaxJobsPerUserLimit", "limit of its account or QOS (QOSMaxJobsPerUserLimit)"),
        ("JobHeldUser", "`scontrol release 17`"),
        ("launch failed requeued held", "`scontrol release 17`"),
        ("SomethingNew", "SomethingNew"),
        (None, "not looked at it yet"),
    ],
)
def test_reasons_in_plain_words(reason: str | None, words: str) -> None:
    assert words in waits_for(Job("17", "PENDING", reason=reason))
