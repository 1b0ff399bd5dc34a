"""What the supervisor in a job makes of a signal and of its ranks' end, and what it has done then.

Every row of the decision table, with Slurm's answers as recorded on a cluster; whether it gives
them is for tests/cluster to show.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from launcher.batch import SlurmSurroundings
from launcher.planner import plan
from launcher.schedulers.base import Interruption
from launcher.slurm_env import BatchJob
from tests.unit.fake_slurm import FakeSlurm
from trainer.spec.outcome import Verdict
from trainer.spec.plan import Plan
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir, read_lines

NOW = datetime.now().replace(microsecond=0)
FAR = NOW + timedelta(hours=3)
JOB = (
    "JobId=30 JobName=a UserId=root(0) JobState={state} Reason={reason} Dependency=(null) "
    "Requeue={requeue} Restarts={restarts} BatchFlag=1 ExitCode=0:0 TimeLimit=00:30:00 "
    "StartTime=2026-12-02T05:57:26 EndTime={end} PreemptTime={preempted} NodeList=node[1-2] "
    "BatchHost=node1 NumNodes=2 Comment=vitra:a-1\n"
)


def job(
    state: str = "RUNNING",
    *,
    reason: str = "None",
    requeue: int = 1,
    restarts: int = 0,
    end: datetime = FAR,
    preempted: datetime | None = None,
) -> str:
    return JOB.format(
        state=state,
        reason=reason,
        requeue=requeue,
        restarts=restarts,
        end=end.isoformat(),
        preempted=preempted.isoformat() if preempted else "None",
    )


def life(state: str) -> str:
    """Rows of the accounting: another job has had this one's number before."""
    return (
        "30|COMPLETED|0:0|2026-11-02T05:57:25|2026-11-02T05:57:55|node3|other\n"
        f"30|{state}|0:0|2026-12-02T05:57:25|2026-12-02T05:57:55|node[1-2]|a\n"
    )


class Clock:
    """Hours pass as fast as a test wants."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


class Batch:
    """A supervisor's surroundings in the first life of job 30."""

    def __init__(self, directory: Path) -> None:
        (directory / "bin").mkdir()
        (directory / "run").mkdir()
        self.fake = FakeSlurm(directory / "bin")
        self.run_dir = RunDir(directory / "run")
        self.run_dir.script.write_text("#!/bin/bash\n")
        self.clock = Clock()
        self.spec = {
            "name": "a",
            "model": {"kind": "vla"},
            "data": {"kind": "synthetic"},
            "train": {"global_batch_size": 8, "max_steps": 10},
            "resources": {"nodes": 2, "time": 60},
        }

    @property
    def plan(self) -> Plan:
        spec = RunSpec.model_validate(self.spec)
        return plan(spec, run_id="a-1", run_dir=str(self.run_dir.path))

    def surroundings(self, at_start: str | None = None) -> SlurmSurroundings:
        """As its supervisor makes them when the job starts."""
        self.fake.play("scontrol", {"out": at_start or job()})
        batch = BatchJob("30", 0, "node[1-2]", "node1")
        return SlurmSurroundings(
            self.fake.slurm(), batch, self.run_dir, self.plan, clock=self.clock
        )

    def says(self, text: str, accounting: str | None = None, *then: str) -> None:
        """What scontrol says of the job from now on, and to what is asked of it then."""
        self.fake.play("scontrol", *({"out": answer} for answer in (text, *then)))
        if accounting is None:
            self.fake.play("sacct", {"rc": 1, "err": "sacct: error: accounting is disabled\n"})
        else:
            self.fake.play("sacct", {"out": accounting})

    def asked(self, *words: str) -> int:
        """How often scontrol was called so."""
        return sum(call.argv[: len(words)] == list(words) for call in self.fake.calls("scontrol"))

    def warnings(self) -> list[str]:
        events = read_lines(self.run_dir.events)
        return [event["reason"] for event in events if event["event"] == "warning"]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


@dataclass(frozen=True)
class Heard:
    """A signal in a situation, and what follows. `requeues`: vitra asks for that itself."""

    number: int
    job: str
    accounting: str | None
    verdict: str
    comes_back: bool
    requeues: bool


TERM, USR2 = signal.SIGTERM, signal.SIGUSR2
HEARD = {
    "scancel": Heard(TERM, job("COMPLETING"), life("CANCELLED by 0"), "cancelled", False, False),
    "scancel, without accounting": Heard(TERM, job("COMPLETING"), None, "cancelled", False, False),
    "scancel in the grace time": Heard(
        TERM, job("COMPLETING", preempted=NOW), life("CANCELLED by 0"), "cancelled", False, False
    ),
    "scancel in the second in which the grace time began": Heard(
        TERM,
        job("COMPLETING", end=NOW, preempted=NOW),
        life("CANCELLED by 0"),
        "cancelled",
        False,
        False,
    ),
    "preempted, no grace time left, CANCEL": Heard(
        TERM, job("COMPLETING", end=NOW, preempted=NOW), None, "preempted", True, True
    ),
    "preempted, says only the accounting": Heard(
        TERM, job("COMPLETING"), life("PREEMPTED"), "preempted", True, True
    ),
    "time limit": Heard(
        TERM, job("COMPLETING", reason="TimeLimit", end=NOW), None, "time_limit", True, True
    ),
    "time limit, says only the accounting": Heard(
        TERM, job("COMPLETING"), life("TIMEOUT"), "time_limit", True, True
    ),
    "requeued by a person": Heard(
        TERM, job("COMPLETING", restarts=1), life("REQUEUED"), "preempted", True, False
    ),
    "preempted, REQUEUE": Heard(
        TERM, job("COMPLETING", restarts=1), life("PREEMPTED"), "preempted", True, False
    ),
    "a node failed": Heard(
        TERM, job("COMPLETING", restarts=1), life("NODE_FAIL"), "node_failure", True, False
    ),
    "scancel --signal=TERM --batch": Heard(TERM, job(), None, "cancelled", False, False),
    "warned of the time limit": Heard(
        USR2, job(end=NOW + timedelta(seconds=150)), None, "time_limit", False, False
    ),
    "preemption that sends USR2": Heard(
        USR2, job(end=NOW + timedelta(seconds=20), preempted=NOW), None, "preempted", False, False
    ),
    "scancel --signal=USR2 --batch": Heard(USR2, job(), None, "cancelled", False, False),
}


@pytest.mark.parametrize("heard", HEARD.values(), ids=HEARD.keys())
def test_what_a_signal_means(batch: Batch, heard: Heard) -> None:
    surroundings = batch.surroundings()
    batch.says(heard.job, heard.accounting, "done\n")
    found = surroundings.heed(heard.number)
    assert (found.verdict, found.comes_back) == (heard.verdict, heard.comes_back), found.reason
    assert batch.asked("requeue", "30") == heard.requeues
    surroundings.stay_away()
    # What it had asked for itself, it can take back.
    assert len(batch.fake.calls("scancel")) == heard.requeues


def test_a_signal_while_slurm_cannot_be_asked(batch: Batch) -> None:
    surroundings = batch.surroundings()
    batch.clock.step_s = 5.0
    batch.fake.play("scontrol", {"rc": 1, "err": "Unable to contact slurm controller\n"})
    assert surroundings.heed(TERM).verdict is Verdict.NODE_FAILURE


@pytest.mark.parametrize("cause", ["preemption", "time_limit"])
def test_what_the_run_does_not_start_again_after_is_not_requeued(batch: Batch, cause: str) -> None:
    batch.spec["retry"] = {"restart_on": ["node_failure"]}
    surroundings = batch.surroundings()
    state = "PREEMPTED" if cause == "preemption" else "TIMEOUT"
    batch.says(job("COMPLETING"), life(state), "done\n")
    assert not surroundings.heed(TERM).comes_back
    assert batch.asked("requeue") == 0


def test_a_cancelled_run_is_not_requeued_whatever_ends_its_job(batch: Batch) -> None:
    surroundings = batch.surroundings()
    batch.run_dir.cancel.touch()
    batch.says(job("COMPLETING", end=NOW, preempted=NOW), None, "done\n")
    assert not surroundings.heed(TERM).comes_back
    assert not surroundings.start_again(Verdict.PREEMPTED, None)
    assert batch.asked("requeue") == 0
    assert batch.fake.calls("sbatch") == []


#: name: (what scontrol says, lost ranks, answers of srun, nodes that are down, verdict, requeued)
ENDED = {
    "by themselves": (job(), (), True, "", None, False),
    "preempted, in the grace time": (job(preempted=NOW), (), True, "", "preempted", False),
    "a node is down": (job(), (1,), False, "node2|down*\n", "node_failure", True),
    "killed with their task, on a node that lives": (
        job(),
        (1,),
        True,
        "node2|mixed\n",
        None,
        False,
    ),
    "requeued by Slurm": (job("COMPLETING", restarts=1), (1,), False, "", "preempted", False),
}


@pytest.mark.parametrize(
    ("said", "lost", "answers", "nodes", "verdict", "requeued"), ENDED.values(), ids=ENDED.keys()
)
def test_why_ranks_have_ended(
    batch: Batch,
    said: str,
    lost: Sequence[int],
    answers: bool,
    nodes: str,
    verdict: str | None,
    requeued: bool,
) -> None:
    surroundings = batch.surroundings()
    batch.says(said, life("REQUEUED"), "node1\nnode2\n")
    batch.fake.play("srun", {"rc": 0 if answers else 1})
    batch.fake.play("sinfo", {"out": nodes or "node1|mixed\nnode2|mixed\n"})
    found = surroundings.why_ended(lost, list)
    assert (found.verdict if found else None) == verdict
    assert batch.asked("requeue", "30") == requeued


def test_a_signal_that_came_while_that_was_looked_into(batch: Batch) -> None:
    surroundings = batch.surroundings()
    batch.says(job())
    found = surroundings.why_ended((), lambda: [TERM])
    assert found == Interruption(
        Verdict.CANCELLED, "stopped by a signal from outside (SIGTERM)", comes_back=False
    )


def test_it_looks_at_the_time_itself(batch: Batch) -> None:
    near = job(end=NOW + timedelta(seconds=30))
    surroundings = batch.surroundings(near)
    assert surroundings.look() is None, "it has only just looked"
    batch.clock.now += 10
    found = surroundings.look()
    assert found is not None
    assert found.verdict is Verdict.TIME_LIMIT
    # Somebody has given the job more time.
    surroundings = batch.surroundings(near)
    batch.says(job())
    batch.clock.now += 10
    assert surroundings.look() is None


@pytest.mark.parametrize(
    ("verdict", "end", "in_place"),
    [
        (Verdict.ERROR, FAR, True),
        (Verdict.HANG, FAR, True),
        (Verdict.ERROR, NOW + timedelta(seconds=20), False),
        (Verdict.PREEMPTED, FAR, False),
        (Verdict.TIME_LIMIT, FAR, False),
        (Verdict.NODE_FAILURE, FAR, False),
    ],
)
def test_where_the_next_attempt_begins(
    batch: Batch, verdict: Verdict, end: datetime, in_place: bool
) -> None:
    surroundings = batch.surroundings(job(end=end))
    assert surroundings.start_again(verdict, None) is in_place
    assert batch.asked("requeue", "30") == (not in_place)


def test_what_comes_back_by_itself_is_not_asked_for_again(batch: Batch) -> None:
    surroundings = batch.surroundings()
    back = Interruption(Verdict.PREEMPTED, "preempted", comes_back=True)
    assert not surroundings.start_again(Verdict.PREEMPTED, back)
    assert batch.asked("requeue") == 0


def test_a_job_that_may_not_be_requeued_is_allowed_to(batch: Batch) -> None:
    """At the start (a site's JobRequeue=0), and where somebody forbids it later."""
    surroundings = batch.surroundings(job(requeue=0))
    assert batch.asked("update", "JobId=30", "Requeue=1") == 1
    batch.fake.play("scontrol", {"rc": 1, "err": "Requested operation is presently disabled\n"}, {})
    assert not surroundings.start_again(Verdict.PREEMPTED, None)
    assert batch.asked("update", "JobId=30", "Requeue=1") == 2
    assert batch.asked("requeue", "30") == 2
    assert batch.warnings() == []


def test_where_a_requeue_is_refused_another_job_follows(batch: Batch) -> None:
    surroundings = batch.surroundings()
    refused = {"rc": 1, "err": "Requested operation is presently disabled\n"}
    batch.fake.play("scontrol", refused, {}, refused, {"out": job()})
    batch.fake.play("sbatch", {"out": "31\n"})
    assert not surroundings.start_again(Verdict.PREEMPTED, None)
    (call,) = batch.fake.calls("sbatch")
    assert call.argv == ["--parsable", "--dependency=afterany:30", str(batch.run_dir.script)]
    events = [event["event"] for event in read_lines(batch.run_dir.events)]
    assert events == ["warning", "submitting", "queued"]
    assert "presently disabled" in batch.warnings()[0]


def test_a_requeue_that_slurm_has_seen_to_meanwhile(batch: Batch) -> None:
    """No other job follows: the job itself comes back."""
    surroundings = batch.surroundings()
    refused = {"rc": 1, "err": "Job is pending execution for job 30\n"}
    again = {"out": job("PENDING", reason="BeginTime", restarts=1)}
    batch.fake.play("scontrol", refused, {}, refused, again)
    assert not surroundings.start_again(Verdict.PREEMPTED, None)
    assert batch.asked("requeue", "30") == 2
    assert batch.fake.calls("sbatch") == []
    assert batch.warnings() == []


def test_cancelled_while_it_is_requeued(batch: Batch) -> None:
    """A marker that comes between the look and the requeue is seen after it."""
    surroundings = batch.surroundings()
    marker = batch.run_dir.cancel
    real = batch.fake.directory / "scontrol"
    real.write_text(f"#!/bin/sh\n: >'{marker}'\n")
    assert not surroundings.start_again(Verdict.PREEMPTED, None)
    assert [call.argv for call in batch.fake.calls("scancel")] == [["30"]]
