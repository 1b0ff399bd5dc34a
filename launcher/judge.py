"""What an attempt's end meant, and what follows from it: two pure functions."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.spec.outcome import EXIT_FENCED, EXIT_SAVED, RankExit, RankReport, RunState, Verdict
from trainer.spec.run import RetrySpec

_OUT_OF_MEMORY = frozenset(("MemoryError", "OutOfMemoryError"))
#: Errors that the same samples or files will give again.
_NEVER_RETRIED = frozenset(
    ("NonFiniteLoss", "RankMismatch", "IncompatibleCheckpoint", "CorruptCheckpoint", "Fenced", "UsageError", "PlanError")
)


@dataclass(frozen=True)
class Finding:
    """The judged end of an attempt; `reason` is a sentence for people."""

    verdict: Verdict
    reason: str
    exit_code: int | None = None
    failed_rank: int | None = None
    failed_node: str | None = None
    error: str | None = None


def judge(
    exits: Mapping[int, RankExit],
    reports: Mapping[int, RankReport],
    *,
    total_steps: int | None,
    stop_asked: bool,
) -> Finding:
    """Judge an attempt of which every rank has ended, by how each rank ended.

    The rank to blame is the first that failed by itself: its peers fail a moment later, when they lose
    it. Ranks that saved (75) or finished (0) are not to blame, unless one claims to have finished early.
    """
    codes = {rank: _code(end) for rank, end in exits.items()}
    finished = [r for r, c in codes.items() if c == 0 and _reached_the_end(reports.get(r), total_steps)]
    if len(finished) == len(codes):
        return Finding(Verdict.COMPLETED, f"all {len(codes)} ranks reached step {total_steps}", 0)
    to_blame = [r for r, c in codes.items() if c != EXIT_SAVED and r not in finished]
    if not to_blame:
        return Finding(Verdict.CANCELLED, "all ranks saved and stopped as they were asked", EXIT_SAVED)
    if stop_asked and all(c > 128 or c == EXIT_SAVED for c in codes.values()):
        return Finding(Verdict.CANCELLED, "stopped before the ranks could save", max(codes.values()))

    rank = min(to_blame, key=lambda r: (exits[r].ended_at, r))
    end, report = exits[rank], reports.get(rank)
    blame = {"exit_code": codes[rank], "failed_rank": rank, "failed_node": end.node}
    if end.signal is not None:
        name = signal.Signals(end.signal).name if end.signal in signal.valid_signals() else str(end.signal)
        more = " (from outside, or by the kernel when memory ran out)" if end.signal == signal.SIGKILL else ""
        return Finding(Verdict.ERROR, f"rank {rank} on {end.node} was killed by {name}{more}", **blame)
    if codes[rank] == 0:
        return Finding(Verdict.ERROR, f"rank {rank} on {end.node} left with exit code 0 before the last step", **blame)
    if report is not None and report.error is not None:
        verdict = Verdict.OUT_OF_MEMORY if report.error in _OUT_OF_MEMORY else Verdict.ERROR
        where = f"rank {rank} on {end.node}"
        return Finding(verdict, f"{where}: {report.error}: {report.message}", error=report.error, **blame)
    if codes[rank] == EXIT_FENCED:
        return Finding(Verdict.ERROR, "a newer attempt owns the run", error="Fenced", **blame)
    return Finding(Verdict.ERROR, f"rank {rank} on {end.node} exited with code {codes[rank]}", **blame)


@dataclass(frozen=True)
class PastAttempt:
    """What the restart rules need to know of an attempt since a person last started or resumed the run."""

    verdict: Verdict
    made_progress: bool


@dataclass(frozen=True)
class Decision:
    """What follows an attempt: start again, or the run's final state and why."""

    restart: bool
    state: RunState
    verdict: Verdict
    reason: str


#: The `restart_on` word for each verdict that a run may start again after.
_CAUSES = {
    Verdict.PREEMPTED: "preemption",
    Verdict.TIME_LIMIT: "time_limit",
    Verdict.NODE_FAILURE: "node_failure",
    Verdict.HANG: "hang",
    Verdict.ERROR: "error",
    Verdict.OUT_OF_MEMORY: "out_of_memory",
}
_COUNT_TOWARD_NO_PROGRESS = frozenset((Verdict.HANG, Verdict.ERROR, Verdict.OUT_OF_MEMORY, Verdict.TIME_LIMIT))


def decide(finding: Finding, history: Sequence[PastAttempt], policy: RetrySpec) -> Decision:
    """What to do after an attempt; `history` ends with that attempt.

    Preemption and node failure never use up a budget.
    """
    verdict = finding.verdict
    if verdict is Verdict.COMPLETED:
        return Decision(False, RunState.COMPLETED, verdict, finding.reason)
    if verdict is Verdict.CANCELLED:
        return Decision(False, RunState.CANCELLED, verdict, finding.reason)
    if finding.error in _NEVER_RETRIED:
        return Decision(False, RunState.FAILED, verdict, finding.reason)
    if _CAUSES[verdict] not in policy.restart_on:
        return Decision(False, RunState.FAILED, verdict, finding.reason)
    if verdict in (Verdict.ERROR, Verdict.OUT_OF_MEMORY):
        used = sum(past.verdict in (Verdict.ERROR, Verdict.OUT_OF_MEMORY) for past in history)
        if used > policy.max_error_restarts:
            budget = f"retry.max_error_restarts={policy.max_error_restarts} is used up"
            return Decision(False, RunState.FAILED, verdict, f"{finding.reason}; {budget}")
    stuck = 0
    for past in reversed(history):
        if past.made_progress or past.verdict not in _COUNT_TOWARD_NO_PROGRESS:
            break
        stuck += 1
    if stuck >= policy.max_no_progress:
        why = f"{stuck} attempts in a row without a new checkpoint (retry.max_no_progress); last: {finding.reason}"
        return Decision(False, RunState.FAILED, Verdict.NO_PROGRESS, why)
    return Decision(True, RunState.REQUEUED, verdict, finding.reason)


def _code(end: RankExit) -> int:
    return end.exit_code if end.exit_code is not None else 128 + (end.signal or 0)


def _reached_the_end(report: RankReport | None, total_steps: int | None) -> bool:
    return report is not None and report.last_step is not None and report.last_step >= (total_steps or 0)
