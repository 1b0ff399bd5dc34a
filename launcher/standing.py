"""Where a run stands: what has been recorded of it, and, on Slurm, what its job is doing.

The controller is believed about jobs that it knows. The accounting is asked only about one that it
has forgotten. A run is completed, failed or cancelled when that was recorded, and its job is
gone; where nobody was left to record anything and nothing is known, it is unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from launcher.jobs import current_job, effective, job_comment, known_jobs, submissions
from launcher.lock import lock_holder
from launcher.registry import RunRecord, read_record
from launcher.slurm import Slurm
from launcher.slurm_answers import Job, PastLife
from launcher.status import FINAL_STATES, Standing, is_finished, local_standing
from trainer.spec.errors import SchedulerError
from trainer.spec.outcome import RunState
from trainer.spec.rundir import RunDir, read_lines

#: How far the clocks of two hosts may differ.
_CLOCKS_S = 60.0
#: An event so shortly before the queue was looked at may be of a job that was not in it yet.
_JUST_NOW_S = 10.0
_SUBMITTED = ("submitting", "queued")
_JOB_EVENTS = (*_SUBMITTED, "finished", "ended", "attempt")
#: Between two looks into Slurm's queue, which many may look into.
_LOOK_S = 5.0
#: When a run's end was recorded, its job leaves soon.
_LEAVING_LOOK_S = 0.7
#: A job that is still there so long after its run was over hangs in its end.
_LEAVES_WITHIN_S = 120.0

_WHY_WAITING = {
    "None": "Slurm has not looked at it yet",
    "Priority": "others are before it",
    "Resources": "it is next, once enough nodes are free",
    "BeginTime": "it may not start yet; Slurm holds a requeued job back for up to two minutes",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "it waits for a job that will never end as it should",
    "JobHeldUser": "it is held; `scontrol release JOB` lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionTimeLimit": "it asks for more time than its partition allows",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionConfig": "its partition does not allow what it asks for",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "Licenses": "it waits for a license",
    "BadConstraints": "no node has the features that it asks for",
    "AccountNotAllowed": "its partition does not allow its account",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "JobLaunchFailure": "it could not be started on a node",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        "nodes that it needs are down, drained or reserved"
    ),
    "launch failed requeued held": (
        "it could not be started on a node, and is held; `scontrol release JOB` tries again"
    ),
    "job requeued in held state": "it was requeued and held; `scontrol release JOB` lets it go",
}


def scheduler_of(record: RunRecord, events: Sequence[Mapping[str, Any]]) -> str:
    """Where the run was started last: "local" or "slurm"."""
    for event in reversed(effective(events)):
        if event.get("event") == "resumed" and "scheduler" in event:
            return str(event["scheduler"])
    return record.scheduler


class JobBook:
    """What Slurm knows of the jobs of some runs, asked for once, when it is first needed.

    Args:
        slurm: the commands.
        run_dirs: the runs, whose owners' jobs are asked for.
    """

    def __init__(self, slurm: Slurm, run_dirs: Collection[RunDir]) -> None:
        self._slurm = slurm
        self._run_dirs = run_dirs
        self._jobs: list[Job] = []
        self._problem: SchedulerError | None = None
        self._has_history = True
        #: When the queue was last asked for (seconds since the epoch); 0: never.
        self.asked_at = 0.0

    def jobs(self) -> list[Job]:
        """Raises SchedulerError: it cannot be known; not asked for again until `refresh`."""
        if not self.asked_at:
            self.refresh()
        if self._problem is not None:
            raise self._problem
        return self._jobs

    def refresh(self) -> None:
        """Ask Slurm once more; what goes wrong is raised by `jobs`."""
        self.asked_at, self._problem = time.time(), None
        owners = sorted({owner_of(run_dir) for run_dir in self._run_dirs})
        try:
            self._jobs = self._slurm.jobs(*owners)
        except SchedulerError as err:
            self._problem = err

    def last_life(self, record: RunRecord, job_id: str) -> PastLife | None:
        """The newest life in the accounting of a job of this run; None where it knows none."""
        try:
            lives = self._slurm.history(job_id) if self._has_history else []
        except SchedulerError:
            # Each further question could take as long to remain without an answer.
            self._has_history = False
            return None
        ours = [life for life in lives if life.name == record.name and _since(record, life)]
        return ours[-1] if ours else None


def owner_of(run_dir: RunDir) -> int:
    """The uid of whose run it is. Other than a name in the record, nobody mistypes it."""
    try:
        return run_dir.record.stat().st_uid
    except OSError:
        return os.getuid()


def standing(
    run_dir: RunDir, record: RunRecord, book: JobBook, *, submitting: bool = False
) -> Standing:
    """Where a run stands. `submitting`: it is the caller who holds the run's lock."""
    if scheduler_of(record, list(read_lines(run_dir.events))) != "slurm":
        return local_standing(run_dir)
    stands = _on_slurm(run_dir, record, book)
    if stands.alive or stands.state in FINAL_STATES or submitting:
        return stands
    if (submitter := lock_holder(run_dir.lock)) is None:
        return stands
    return replace(
        stands, state=RunState.QUEUED, reason=f"{submitter} is submitting it", alive=True
    )


class Over:
    """Whether a run is in a final state, and nobody is about to take it up again.

    May be asked many times a second: Slurm's queue is looked at every few seconds.

    Raises, when called:
        NotFound: no such run. StorageError: its record is damaged.
    """

    def __init__(self, run_dir: RunDir, slurm: Slurm) -> None:
        self._run_dir = run_dir
        self._slurm = slurm
        self._looked_at = 0.0
        self._stands: Standing | None = None

    @property
    def alive(self) -> bool:
        """Whether, as of the last call, something of the run runs or waits in the queue."""
        return self._stands is not None and self._stands.alive

    def __call__(self) -> bool:
        """Whether the run is over, and nothing of it is left that could still write."""
        record = read_record(self._run_dir)
        events = list(read_lines(self._run_dir.events))
        if scheduler_of(record, events) != "slurm":
            self._stands = local_standing(self._run_dir)
        else:
            pause_s = _LEAVING_LOOK_S if is_finished(effective(events)) else _LOOK_S
            if self._stands is None or time.monotonic() - self._looked_at >= pause_s:
                self._looked_at = time.monotonic()
                book = JobBook(self._slurm, [self._run_dir])
                self._stands = standing(self._run_dir, record, book)
        return not self._stands.alive and self._stands.state in FINAL_STATES


def _on_slurm(run_dir: RunDir, record: RunRecord, book: JobBook) -> Standing:
    for last_look in (False, True):
        try:
            jobs = book.jobs()
        except SchedulerError as err:
            events = list(read_lines(run_dir.events))
            problem = f"Slurm cannot be asked: {err.message}"
            job_id = current_job(run_dir, events)
            return _without_a_job(run_dir, events, problem, asked=False, job_id=job_id)
        # Read after the queue, in which a job stays until its supervisor has recorded the end.
        events = list(read_lines(run_dir.events))
        ours = jobs_of_run(jobs, record, known_jobs(run_dir, events))
        current = current_job(run_dir, events)
        if living := [job for job in ours if job.is_live]:
            job = next((job for job in living if job.job_id == current), living[0])
            return _with_a_job(job, events, cancelled=run_dir.cancel.exists())
        changed = max((_at(event) for event in events), default=0.0)
        if is_finished(effective(events)) or changed < book.asked_at - _JUST_NOW_S:
            break
        if last_look and _last_of(events, _JOB_EVENTS) in _SUBMITTED and changed > book.asked_at:
            return Standing(RunState.QUEUED, "it has just been submitted", True, current)
        if not last_look:
            book.refresh()
    job_id = current or (ours[-1].job_id if ours else None)
    gone: Job | PastLife | None = next((job for job in ours if job.job_id == job_id), None)
    if gone is None and job_id is not None and not is_finished(effective(events)):
        gone = book.last_life(record, job_id)
    if job_id is None:
        what = "Slurm has no job of it" if submissions(events) else "it was never submitted"
    elif gone is None:
        what = f"job {job_id} is gone, and Slurm no longer knows what became of it"
    else:
        what = f"job {job_id} is gone ({gone.state})"
    return _without_a_job(run_dir, events, what, asked=True, job_id=job_id, gone=gone)


def jobs_of_run(jobs: Sequence[Job], record: RunRecord, known: Collection[str]) -> list[Job]:
    """Those of `jobs` that are the run's, oldest first.

    A number alone proves nothing, since numbers come again. Where a site has replaced the comment,
    it takes number, name and a time of submission that fits.
    """
    found = [
        job
        for job in jobs
        if job.comment == job_comment(record.run_id)
        or (
            job.job_id in known
            and not job.comment.startswith(job_comment(""))
            and job.name == record.name
            and _since(record, job)
        )
    ]
    return sorted(found, key=lambda job: int(job.job_id) if job.job_id.isdigit() else 0)


def waits_for(job: Job) -> str:
    """Why a job waits, in plain words, with Slurm's own in parentheses."""
    reason = job.reason or "None"
    # Newer versions write blanks as underscores, and name what is missing after a comma.
    words = _WHY_WAITING.get(reason) or _WHY_WAITING.get(reason.replace("_", " "))
    words = words or _WHY_WAITING.get(reason.split(",")[0])
    if words is None and reason.startswith(("QOS", "Assoc")):
        words = "it is over a limit of its account or QOS"
    if words is None:
        return f"it waits: {reason}"
    words = words.replace("JOB", job.job_id)
    return words if job.reason is None else f"{words} ({reason})"


def _with_a_job(job: Job, events: list[dict[str, Any]], *, cancelled: bool) -> Standing:
    counting = effective(events)
    over = is_finished(counting)
    began = any(event.get("event") == "attempt" for event in events)
    requeued = _last_of(counting, ("ended", "requeued", "attempt", "resumed", "finished"))
    if over and not job.is_waiting and time.time() - _at(counting[-1]) > _LEAVES_WITHIN_S:
        return Standing(*_recorded(counting), True, job.job_id, job)
    if job.is_waiting:
        state = RunState.REQUEUED if began else RunState.QUEUED
        reason = f"job {job.job_id} waits: {waits_for(job)}"
        if job.start_time is not None:
            reason += f"; it may start at {job.start_time:%Y-%m-%d %H:%M}"
        if over:
            reason = f"it is {_recorded(counting)[0]}, but its job {job.job_id} is queued again"
    elif job.state == "COMPLETING" and requeued in ("ended", "requeued"):
        state = RunState.REQUEUED
        reason = f"job {job.job_id} is about to be queued again"
    else:
        state = RunState.RUNNING
        where = f" on {job.nodes}" if job.nodes else ""
        reason = f"job {job.job_id} is {job.state.lower()}{where}"
        if over:
            reason = f"{_recorded(counting)[1]}; job {job.job_id} is just leaving"
    if cancelled and not over:
        reason += "; it has been told to stop for good"
    return Standing(state, reason, True, job.job_id, job)


def _without_a_job(
    run_dir: RunDir,
    events: list[dict[str, Any]],
    what: str,
    *,
    asked: bool,
    job_id: str | None = None,
    gone: Job | PastLife | None = None,
) -> Standing:
    counting = effective(events)
    if is_finished(counting):
        state, reason = _recorded(counting)
    elif gone is not None and gone.state == "CANCELLED":
        by = f" by uid {gone.by}" if isinstance(gone, PastLife) and gone.by else ""
        state, reason = RunState.CANCELLED, f"job {job_id} was cancelled{by}"
    elif asked and run_dir.cancel.exists():
        state, reason = RunState.CANCELLED, f"cancelled; {what}"
    else:
        state = RunState.UNKNOWN
        reason = f"{what}; `vitra watch` finds out more, and goes on with the run"
    return Standing(state, reason, False, job_id, None, gone, known=asked)


def _last_of(events: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    return next((e["event"] for e in reversed(events) if e.get("event") in names), None)


def _recorded(events: Sequence[Mapping[str, Any]]) -> tuple[RunState, str]:
    """How a run that is finished ended."""
    event = next(e for e in reversed(events) if e.get("event") == "finished")
    return RunState(event["state"]), str(event["reason"])


def _since(record: RunRecord, job: Job | PastLife) -> bool:
    """Whether a job was submitted after the run was made."""
    submitted = job.submit_time if isinstance(job, Job) else _moment(job.submitted_at)
    if submitted is None:
        return False
    made = datetime.fromisoformat(record.created_at)
    return submitted.timestamp() >= made.timestamp() - _CLOCKS_S


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _at(event: Mapping[str, Any]) -> float:
    try:
        return datetime.fromisoformat(str(event["at"])).astimezone(UTC).timestamp()
    except (KeyError, ValueError):
        return 0.0
