"""Looking after the runs that nobody looks after any more: `vitra watch`, from cron or by hand.

A run is a supervisor's business as long as its job is in the queue. What is left for others are
runs whose job is gone though nobody recorded an end: their batch node died for good, their
supervisor was killed, their batch script failed, or the answer to sbatch was lost. They are judged
here by the same rules, and submitted again within the same budgets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.budgets import run_history
from launcher.cancel import cancel_run, record_end
from launcher.jobs import current_job, effective, note_job
from launcher.judge import Finding, decide
from launcher.lock import RunLock
from launcher.outcomes import close_unjudged
from launcher.registry import RunRecord, read_plan, read_record, runs
from launcher.schedulers.sbatch import drop_superfluous, jobs_by_comment
from launcher.slurm import Slurm
from launcher.slurm_answers import PastLife
from launcher.standing import JobBook, owner_of, scheduler_of, standing
from launcher.status import Standing, is_finished
from launcher.submission import resubmit
from trainer.spec.errors import (
    SchedulerError,
    SchedulerUnavailable,
    StorageError,
    UsageError,
    VitraError,
)
from trainer.spec.outcome import Outcome, RunState, Verdict
from trainer.spec.rundir import RunDir, append_event, read_lines

#: What Slurm's word for the end of a job says of an attempt that nobody judged.
_VERDICTS = {
    "PREEMPTED": Verdict.PREEMPTED,
    "TIMEOUT": Verdict.TIME_LIMIT,
    "NODE_FAIL": Verdict.NODE_FAILURE,
    "BOOT_FAIL": Verdict.NODE_FAILURE,
    "OUT_OF_MEMORY": Verdict.OUT_OF_MEMORY,
}
#: Ends that are no fault of the run's, however often they come.
_FROM_OUTSIDE = (Verdict.PREEMPTED, Verdict.NODE_FAILURE)
_LOG_LINES = 5
_LOG_BYTES = 2000


@dataclass(frozen=True)
class Look:
    """What was done about a run: alive, resubmitted, failed, cancelled, skipped or problem.

    `exit_code` is the problem's.
    """

    run_id: str
    action: str
    reason: str
    job_id: str | None = None
    exit_code: int = 0


def watch(
    run_root: Path, slurm: Slurm, *, environ: Mapping[str, str], say: Callable[[str], None]
) -> list[Look]:
    """Look once after every run of Slurm's under a root that is not over.

    Safe beside living supervisors, other watchers, and submits. Runs of other users are skipped. A
    run with which something is wrong keeps no other from its turn.

    Raises:
        StorageError: the root is there and cannot be read.
    """
    unfinished = [run_dir for run_dir in map(RunDir, _paths(run_root)) if _concerns(run_dir)]
    mine = [run_dir for run_dir in unfinished if owner_of(run_dir) == os.getuid()]
    book = JobBook(slurm, mine)
    looks: list[Look] = []
    for run_dir in unfinished:
        run_id = run_dir.path.name
        if run_dir not in mine:
            look = Look(run_id, "skipped", "it is another user's run")
        else:
            try:
                look = _look_after(run_dir, slurm, book, environ, say)
            except VitraError as err:
                look = Look(run_id, "problem", str(err), exit_code=err.exit_code)
            except OSError as err:
                text = f"{err.filename or run_id}: {err.strerror}"
                look = Look(run_id, "problem", text, exit_code=StorageError.exit_code)
        looks.append(look)
    return looks


def watch_facts(run_root: Path, looks: Sequence[Look]) -> dict[str, Any]:
    """The facts of `vitra watch --once --json`."""
    rows = [
        {"run_id": o.run_id, "action": o.action, "job_id": o.job_id, "reason": o.reason}
        for o in looks
    ]
    return {"run_root": str(run_root), "runs": rows}


def watch_lines(looks: Sequence[Look]) -> list[str]:
    """`vitra watch`: what was done, and what could not be."""
    return [
        f"{look.run_id}: {look.action}: {look.reason}"
        for look in looks
        if look.action not in ("alive", "skipped")
    ]


def _paths(run_root: Path) -> list[Path]:
    return [run_root / run_id for run_id in runs(run_root)]


def _concerns(run_dir: RunDir) -> bool:
    """Whether a run is Slurm's and not over. One that cannot be read is somebody's to see."""
    try:
        record = read_record(run_dir)
        events = list(read_lines(run_dir.events))
    except (VitraError, OSError):
        return True
    return scheduler_of(record, events) == "slurm" and not is_finished(effective(events))


def _look_after(
    run_dir: RunDir,
    slurm: Slurm,
    book: JobBook,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Look:
    record = read_record(run_dir)
    stands = standing(run_dir, record, book)
    if not stands.known:
        raise SchedulerUnavailable(stands.reason.partition(";")[0])
    if run_dir.cancel.exists():
        facts = cancel_run(run_dir, slurm, wait_s=0, say=say)
        action = "cancelled" if facts["stopped"] else "alive"
        return Look(record.run_id, action, f"it has been cancelled, and is {facts['state']}")
    job_id = stands.job.job_id if stands.job else None
    if job_id is not None and job_id == current_job(run_dir, list(read_lines(run_dir.events))):
        return Look(record.run_id, "alive", stands.reason, job_id)
    try:
        with RunLock(run_dir.lock):
            return _reconcile(run_dir, record, slurm, environ, say)
    except UsageError as err:
        return Look(record.run_id, "skipped", err.message)


def _reconcile(
    run_dir: RunDir,
    record: RunRecord,
    slurm: Slurm,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Look:
    """See to a run that looked as if it had no job; the caller holds the run's lock."""
    run_id = record.run_id
    if not _concerns(run_dir) or run_dir.cancel.exists():
        return Look(run_id, "skipped", "something has become of it meanwhile")
    # Asked again now that nobody else can submit it.
    stands = standing(run_dir, record, JobBook(slurm, [run_dir]), submitting=True)
    if not stands.known:
        raise SchedulerUnavailable(stands.reason.partition(";")[0])
    if stands.job is not None:
        living = jobs_by_comment(slurm, run_id) or [stands.job]
        job = drop_superfluous(run_dir, living, slurm)
        if job.job_id != current_job(run_dir, list(read_lines(run_dir.events))):
            # The answer to its submission was lost.
            note_job(run_dir, job.job_id)
        return Look(run_id, "alive", stands.reason, job.job_id)
    if stands.alive:
        return Look(run_id, "alive", stands.reason, stands.job_id)
    if stands.state is RunState.CANCELLED:
        record_end(run_dir, RunState.CANCELLED, Verdict.CANCELLED, stands.reason)
        return Look(run_id, "cancelled", stands.reason, stands.job_id)
    cause, reason = _why_gone(stands)
    if (end := _end_of(run_dir, cause, reason)) is not None:
        record_end(run_dir, RunState.FAILED, *end)
        return Look(run_id, "failed", end[1], stands.job_id)
    try:
        job_id = resubmit(run_dir, slurm, environ=environ, say=say)
    except SchedulerError as err:
        text = f"{reason}; it was not submitted again: {err}"
        return Look(run_id, "problem", text, exit_code=err.exit_code)
    append_event(run_dir, "resubmitted", job_id=job_id, cause=cause, reason=reason)
    return Look(run_id, "resubmitted", f"as job {job_id}; {reason}", job_id)


def _why_gone(stands: Standing) -> tuple[Verdict | None, str]:
    """What ended a run's job, as far as Slurm has a word for it, and that as a sentence."""
    gone = stands.gone
    if stands.job_id is None:
        return None, "it had no job"
    if gone is None:
        return None, f"job {stands.job_id} was gone"
    said = f", exit code {gone.exit_code}" if isinstance(gone, PastLife) else ""
    return _VERDICTS.get(gone.state), f"job {stands.job_id} had ended ({gone.state}{said})"


def _end_of(run_dir: RunDir, cause: Verdict | None, reason: str) -> tuple[Verdict, str] | None:
    """Judge a run whose job is gone: verdict and reason if it has to be given up, else None."""
    events = effective(read_lines(run_dir.events))
    numbers = run_dir.attempt_numbers()
    if numbers and not run_dir.attempt(numbers[-1]).outcome.exists():
        if cause is not None and not _explained(events, numbers[-1]):
            append_event(run_dir, "signal", attempt=numbers[-1], verdict=cause, reason=reason)
        close_unjudged(run_dir)
        events = effective(read_lines(run_dir.events))
    policy = read_plan(run_dir).spec.retry
    # A `requeued` after it means that its supervisor has decided.
    if _last(events, ("submitting", "ended", "requeued")) == "ended":
        outcome = _outcome(run_dir, numbers[-1])
        if outcome is not None:
            finding = Finding(outcome.verdict, outcome.reason, outcome.exit_code)
            decision = decide(finding, run_history(read_lines(run_dir.events)), policy)
            if not decision.restart:
                return decision.verdict, decision.reason
    in_vain = _resubmissions_in_vain(events)
    if cause not in _FROM_OUTSIDE and in_vain >= policy.max_no_progress:
        log = _end_of_log(run_dir)
        why = (
            f"submitted again {in_vain} times without a new checkpoint (retry.max_no_progress); "
            f"last: {reason}"
        )
        return Verdict.NO_PROGRESS, f"{why}; its batch log ends: {log}" if log else why
    return None


def _resubmissions_in_vain(events: Sequence[Mapping[str, Any]]) -> int:
    """How often the run was submitted again here, for no reason from outside, since it got on."""
    count = 0
    for event in reversed(events):
        match event.get("event"):
            case "saved" | "resumed":
                break
            case "resubmitted":
                count += event.get("cause") not in _FROM_OUTSIDE
            case _:
                pass
    return count


def _explained(events: Sequence[Mapping[str, Any]], attempt: int) -> bool:
    """Whether the attempt's supervisor has noted why its ranks had to leave."""
    return any(e.get("event") == "signal" and e.get("attempt") == attempt for e in events)


def _last(events: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    return next((e["event"] for e in reversed(events) if e.get("event") in names), None)


def _outcome(run_dir: RunDir, attempt: int) -> Outcome | None:
    try:
        return Outcome.model_validate_json(run_dir.attempt(attempt).outcome.read_bytes())
    except (OSError, ValidationError):
        return None


def _end_of_log(run_dir: RunDir) -> str:
    """The last lines of the newest batch log, on one line; "" where there are none."""
    logs = sorted(run_dir.path.glob("batch-*.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return ""
    with logs[-1].open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return " | ".join(line.strip() for line in lines[-_LOG_LINES:] if line.strip())
