"""What is known of a run, read from its directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from launcher.budgets import budgets, run_history
from launcher.goodput import goodput
from launcher.jobs import effective
from launcher.lock import lock_holder
from launcher.pace import pace
from launcher.registry import read_plan, read_record
from trainer.spec.errors import StorageError, VitraError
from trainer.spec.outcome import Outcome, RankReport, RunState, Verdict
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir, read_lines

if TYPE_CHECKING:
    from launcher.slurm_answers import Job, PastLife

#: The states that a run leaves only when a person resumes it.
FINAL_STATES = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED})


@dataclass(frozen=True)
class Standing:
    """Where a run stands; `reason` is a sentence for people, "" where its attempts tell more.

    `alive`: something of it runs, or will run by itself: a supervisor here, or a job in the queue.
    `job` is that job; `job_id` may also name one that is gone, and `gone` is then what Slurm knows
    of its end. `known` is False where the scheduler could not be asked.
    """

    state: RunState
    reason: str
    alive: bool
    job_id: str | None = None
    job: Job | None = None
    gone: Job | PastLife | None = None
    known: bool = True


def local_standing(run_dir: RunDir, *, supervised: bool | None = None) -> Standing:
    """Where a run of this machine stands.

    It is `running` or `requeued` only while its supervisor lives (it holds the run's lock).

    `supervised` says whether a supervisor lives, for a caller that holds the lock itself.
    """
    # The lock first: a supervisor records how the run ended before it lets go of it.
    alive = lock_holder(run_dir.lock) is not None if supervised is None else supervised
    cancelled = run_dir.cancel.exists()
    events = effective(read_lines(run_dir.events))
    state = run_state(events, alive=alive, cancelled=cancelled)
    return Standing(state, _reason(state, events, alive=alive), alive)


def run_status(run_dir: RunDir, stands: Standing | None = None) -> dict[str, Any]:
    """The facts of `vitra status --json`; None: where a run of this machine stands is found out.

    An attempt that nobody lived to judge reads as node_failure.

    Raises:
        NotFound: no such run. StorageError: its record is damaged.
    """
    record = read_record(run_dir)
    stands = stands or local_standing(run_dir)
    plan = _plan(run_dir)
    events = list(read_lines(run_dir.events))
    numbers = run_dir.attempt_numbers()
    running = stands.state is RunState.RUNNING or not stands.known
    attempts = [
        _attempt(run_dir, number, events, running=running and number == numbers[-1])
        for number in numbers
    ]
    steps = [a["last_step"] for a in attempts if a["last_step"] is not None]
    newest = attempts[-1] if attempts else None
    step = (
        newest["last_step"] if newest and newest["last_step"] is not None else _resume_step(events)
    )
    return {
        "run_id": record.run_id,
        "run_dir": str(run_dir.path),
        "name": record.name,
        "state": stands.state.value,
        "reason": stands.reason or _reason_of_attempts(attempts),
        "job_id": stands.job_id,
        "job_state": stands.job.state if stands.job else None,
        "attempt": newest["attempt"] if newest else 0,
        "step": step if step is not None else max(steps, default=0),
        "total_steps": plan.total_steps if plan else None,
        "last_checkpoint_step": _last_checkpoint(plan),
        "eta_s": _eta_s(run_dir, numbers, stands, plan),
        "attempts": attempts,
        "budgets": _budgets(events, plan) if plan else None,
        "goodput": goodput(run_dir, events, alive=stands.alive, waiting_s=_waiting_s(stands)),
    }


def _eta_s(
    run_dir: RunDir, numbers: Sequence[int], stands: Standing, plan: Plan | None
) -> float | None:
    """How long the steps still to be trained take at the present pace, while it trains."""
    if stands.state is not RunState.RUNNING or not numbers or plan is None:
        return None
    return pace(run_dir.attempt(numbers[-1])).to_go_s(plan.total_steps)


def _waiting_s(stands: Standing) -> float:
    """How long the run's job has been waiting, by the clock that its cluster goes by."""
    job = stands.job
    if job is None or not job.is_waiting or job.submit_time is None:
        return 0.0
    return max(0.0, (datetime.now() - job.submit_time).total_seconds())


def finished_steps(
    run_dir: RunDir,
    attempt: int,
    events: Iterable[Mapping[str, Any]],
    reports: Mapping[int, RankReport] | None = None,
    heard: int = 0,
) -> tuple[int | None, int | None]:
    """First and last finished step of an attempt; (None, None) if it finished none.

    `events` are the run's. `reports` are the ranks' own, where they have ended, and `heard` the
    last step in a heartbeat: both know of steps that were not logged.
    """
    # The step really gone on from: damage may send the ranks further back than the claim says.
    start = next(
        (
            int(event["step"])
            for event in events
            if event.get("event") == "started" and event.get("attempt") == attempt
        ),
        None,
    )
    if start is None:
        return None, None
    logged = [int(record["step"]) for record in read_lines(run_dir.attempt(attempt).metrics)]
    reported = [r.last_step for r in (reports or {}).values() if r.last_step is not None]
    last = max([start, heard, *logged, *reported])
    return (start + 1, last) if last > start else (None, None)


def _plan(run_dir: RunDir) -> Plan | None:
    try:
        return read_plan(run_dir)
    except StorageError:
        return None


def _attempt(
    run_dir: RunDir, number: int, events: list[dict[str, Any]], *, running: bool
) -> dict[str, Any]:
    files = run_dir.attempt(number)
    try:
        outcome = Outcome.model_validate_json(files.outcome.read_bytes())
    except (OSError, ValidationError):
        outcome = None
    if outcome is not None:
        return outcome.model_dump(mode="json")
    first, last = finished_steps(run_dir, number, events)
    started = [e for e in events if e.get("event") == "attempt" and e.get("attempt") == number]
    return {
        "attempt": number,
        "verdict": None if running else Verdict.NODE_FAILURE.value,
        "reason": "not judged yet"
        if running
        else "its supervisor is gone, and nobody has judged the attempt yet",
        "job_id": started[-1].get("job_id") if started else None,
        "exit_code": None,
        "failed_rank": None,
        "failed_node": None,
        "first_step": first,
        "last_step": last,
        "started_at": started[-1]["at"] if started else None,
        "ended_at": None,
    }


def run_state(events: Sequence[Mapping[str, Any]], *, alive: bool, cancelled: bool) -> RunState:
    """Where a run of this machine stands, from its events, in order.

    `alive`: a supervisor holds the run's lock. `cancelled`: the run's cancel marker is there; with
    no supervisor left to act on it, it says how the run ended.
    """
    if not alive and cancelled and not is_finished(events):
        return RunState.CANCELLED
    for event in reversed(events):
        match event.get("event"):
            case "finished":
                return RunState(event["state"])
            case "ended":
                return RunState.REQUEUED if alive else RunState.UNKNOWN
            case "attempt" | "resumed":
                return RunState.RUNNING if alive else RunState.UNKNOWN
            case _:
                pass
    return RunState.RUNNING if alive else RunState.UNKNOWN


def is_finished(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the run has ended for good and nobody has resumed it since."""
    for event in reversed(events):
        match event.get("event"):
            case "finished":
                return True
            case "ended" | "attempt" | "resumed":
                return False
            case _:
                pass
    return False


def _reason(state: RunState, events: Sequence[Mapping[str, Any]], *, alive: bool) -> str:
    if is_finished(events):
        return next(str(e["reason"]) for e in reversed(events) if e.get("event") == "finished")
    if alive:
        return "its supervisor is alive"
    if state is RunState.CANCELLED:
        return "cancelled; nobody was left to save a checkpoint first"
    return ""


def _reason_of_attempts(attempts: list[dict[str, Any]]) -> str:
    return attempts[-1]["reason"] if attempts else "submitted, and nothing has run yet"


def _resume_step(events: list[dict[str, Any]]) -> int | None:
    steps = [e["step"] for e in events if e.get("event") == "started"]
    return int(steps[-1]) if steps else None


def _budgets(events: Iterable[Mapping[str, Any]], plan: Plan) -> dict[str, dict[str, int | None]]:
    """By verdict: how often attempts ended by it, and how often more the run goes on after it."""
    found = budgets(run_history(events), plan.spec.retry)
    return {budget.verdict.value: {"used": budget.used, "left": budget.left} for budget in found}


def _last_checkpoint(plan: Plan | None) -> int | None:
    """The step of the newest complete checkpoint; None if there is none, or no telling."""
    if plan is None:
        return None
    from trainer.store.checkpoints import CheckpointStore

    try:
        survey = CheckpointStore.of_plan(plan).survey()
    except VitraError:
        return None
    return survey.complete[0].step if survey.complete else None
