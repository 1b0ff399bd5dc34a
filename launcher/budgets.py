"""What a run has used of its budgets, and what it has left: the other side of `judge.decide`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.jobs import effective
from launcher.judge import CAUSES, PastAttempt, error_restarts_left, starts_left_without_progress
from trainer.spec.outcome import Verdict
from trainer.spec.run import RetrySpec

_FROM_OUTSIDE = (Verdict.PREEMPTED, Verdict.NODE_FAILURE)
_ERRORS = (Verdict.ERROR, Verdict.OUT_OF_MEMORY)


@dataclass(frozen=True)
class Budget:
    """Of one verdict: how many attempts ended by it since a person last started the run.

    `left` is after how many more such ends the run would start again, if nothing is saved in
    between; None where that is not limited.
    """

    verdict: Verdict
    used: int
    left: int | None


def budgets(history: Sequence[PastAttempt], policy: RetrySpec) -> list[Budget]:
    """Every verdict that a run may start again after; `history` as for `decide`."""
    found: list[Budget] = []
    for verdict, cause in CAUSES.items():
        left: int | None = starts_left_without_progress(history, policy)
        if cause not in policy.restart_on:
            left = 0
        elif verdict in _FROM_OUTSIDE:
            left = None
        elif verdict in _ERRORS:
            left = max(0, min(left, error_restarts_left(history, policy)))
        used = sum(past.verdict is verdict for past in history)
        found.append(Budget(verdict, used, left))
    return found


def run_history(events: Iterable[Mapping[str, Any]]) -> list[PastAttempt]:
    """The judged attempts since a person last started or resumed the run, from its events."""
    past: list[PastAttempt] = []
    progressed: set[int] = set()
    for event in effective(events):
        match event.get("event"):
            case "resumed":
                past = []
            case "saved":
                progressed.add(int(event["attempt"]))
            case "ended":
                past.append(
                    PastAttempt(Verdict(event["verdict"]), int(event["attempt"]) in progressed)
                )
            case _:
                pass
    return past
