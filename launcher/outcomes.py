"""How runs and attempts have ended, and how that is recorded in the run directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from launcher.status import finished_steps
from trainer.spec.outcome import Outcome, RankReport, RunState, Verdict
from trainer.spec.rundir import AttemptDir, RunDir, append_event, read_lines, utc_now, write_atomic


@dataclass(frozen=True)
class Ending:
    """How a supervisor's work ended. `signal` is the one that a person stopped it with.

    The state is `requeued` where the run goes on in another life of its job.
    """

    state: RunState
    verdict: Verdict
    reason: str
    exit_code: int | None = None
    signal: int | None = None


def publish(run_dir: RunDir, outcome: Outcome) -> None:
    """Record how an attempt ended: its file first, since the event says that it is there."""
    path = run_dir.attempt(outcome.attempt).outcome
    write_atomic(path, outcome.model_dump_json(indent=1).encode())
    append_event(
        run_dir,
        "ended",
        attempt=outcome.attempt,
        verdict=outcome.verdict,
        reason=outcome.reason,
    )


def read_reports(files: AttemptDir, world_size: int) -> dict[int, RankReport]:
    """What the ranks have reported of themselves, as far as they came to it."""
    reports: dict[int, RankReport] = {}
    for rank in range(world_size):
        try:
            reports[rank] = RankReport.model_validate_json(files.report(rank).read_bytes())
        except (OSError, ValidationError):
            continue
    return reports


def close_unjudged(run_dir: RunDir) -> None:
    """Judge attempts that nobody lived to judge: their supervisor was killed, or its node died."""
    for number in run_dir.attempt_numbers():
        files = run_dir.attempt(number)
        if files.outcome.exists() or not files.plan.exists():
            continue
        events = list(read_lines(run_dir.events))
        of_attempt = [event for event in events if event.get("attempt") == number]
        began = next(
            (event for event in of_attempt if event.get("event") == "attempt"), dict[str, Any]()
        )
        verdict, reason = _last_word(of_attempt)
        first, last = finished_steps(run_dir, number, events)
        outcome = Outcome(
            attempt=number,
            verdict=verdict,
            reason=reason,
            job_id=began.get("job_id"),
            first_step=first,
            last_step=last,
            started_at=began.get("at") or utc_now(),
            ended_at=utc_now(),
        )
        publish(run_dir, outcome)


def _last_word(events: Iterable[Mapping[str, Any]]) -> tuple[Verdict, str]:
    """What a supervisor that was killed had found out of why its ranks had to leave.

    `events` are its attempt's.
    """
    gone = "its supervisor was gone before the attempt ended"
    for event in events:
        if event.get("event") == "signal":
            return Verdict(event["verdict"]), f"{event['reason']}; {gone}"
    return Verdict.NODE_FAILURE, gone
