"""What an attempt's end meant, and what follows from it: two pure functions."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.hang import Hang
from launcher.schedulers.base import Interruption
from trainer.spec.outcome import EXIT_FENCED, EXIT_SAVED, RankExit, RankReport, RunState, Verdict
from trainer.spec.run import RetrySpec

_OUT_OF_MEMORY = frozenset(("MemoryError", "OutOfMemoryError"))
#: Errors that the same samples or files will give again.
_NEVER_RETRIED = frozenset(
    (
        "NonFiniteLoss",
        "RankMismatch",
        "IncompatibleCheckpoint",
        "CorruptCheckpoint",
        "Fenced",
        "UsageError",
        "PlanError",
    )
)
#: What a rank's error says when it is another rank that has gone (gloo, and NCCL).
_PEER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited",
)
#: torch's error where the port for the ranks' rendezvous is in use, and how its message tells.
_RENDEZVOUS_ERROR = "DistNetworkError"
_PORT_TAKEN = "EADDRINUSE"


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
    hang: Hang | None = None,
    done: Mapping[int, int] | None = None,
    interruption: Interruption | None = None,
) -> Finding:
    """Judge an attempt of which every rank has ended, by how each rank ended.

    `interruption` is what took the ranks away from outside: whatever they met after that, it is the
    cause, unless they had finished before.

    `hang` is why the supervisor ended ranks that would not end; `done` holds the last step of each
    rank that had nothing left to do but to leave: if it was killed then, nothing is lost.

    The rank to blame is the first that failed by itself: its peers fail a moment later, when they
    lose it. That they say so counts for more than the times, which lie too close together for
    that on a busy machine. Ranks that saved (75) or finished (0) are not to blame, unless one
    claims to have finished early.
    """
    codes = {rank: _code(end) for rank, end in exits.items()}
    last_steps = {rank: report.last_step for rank, report in reports.items()}
    for rank, step in (done or {}).items():
        if exits[rank].signal == signal.SIGKILL:
            last_steps[rank] = step
            codes[rank] = 0 if step >= (total_steps or 0) else EXIT_SAVED
    finished = [r for r, c in codes.items() if c == 0 and _reached(last_steps.get(r), total_steps)]
    if len(finished) == len(codes):
        ranks = "the one rank" if len(codes) == 1 else f"all {len(codes)} ranks"
        return Finding(Verdict.COMPLETED, f"{ranks} reached step {total_steps}", 0)
    if interruption is not None and interruption.verdict is not Verdict.CANCELLED:
        return _taken_away(interruption, codes)
    to_blame = [r for r, c in codes.items() if c != EXIT_SAVED and r not in finished]
    if not to_blame:
        reason = "all ranks saved and stopped as they were asked"
        return Finding(Verdict.CANCELLED, reason, EXIT_SAVED)
    if stop_asked and all(c > 128 or c == EXIT_SAVED for c in codes.values()):
        reason = "stopped before the ranks could save" + (f"; {hang.stalled}" if hang else "")
        return Finding(Verdict.CANCELLED, reason, max(codes.values()))

    if hang is not None:
        return _hung(hang, exits, codes)
    rank = min(to_blame, key=lambda r: (_lost_a_peer(reports.get(r)), exits[r].ended_at, r))
    end, report = exits[rank], reports.get(rank)
    where = f"rank {rank} on {end.node}"

    def blame(verdict: Verdict, reason: str, error: str | None = None) -> Finding:
        return Finding(verdict, reason, codes[rank], rank, end.node, error)

    if end.is_lost and end.not_started is not None:
        return blame(Verdict.ERROR, f"{where} was not started: {end.not_started}")
    if end.is_lost:
        return blame(
            Verdict.ERROR, f"{where} was killed together with the task that watched over it"
        )
    if end.out_of_memory:
        killed = "was killed by the kernel, as memory ran out (its job's limit, or the machine's)"
        return blame(Verdict.OUT_OF_MEMORY, f"{where} {killed}")
    if end.signal is not None:
        return blame(Verdict.ERROR, f"{where} was killed by {_signal_name(end.signal)}")
    if codes[rank] == 0:
        return blame(Verdict.ERROR, f"{where} left with exit code 0 before the last step")
    if report is not None and report.error is not None:
        verdict = Verdict.OUT_OF_MEMORY if report.error in _OUT_OF_MEMORY else Verdict.ERROR
        reason = f"{where}: {report.error}: {report.message}"
        return blame(verdict, reason, report.error)
    if codes[rank] == EXIT_FENCED:
        return blame(Verdict.ERROR, "a newer attempt owns the run", "Fenced")
    return blame(Verdict.ERROR, f"{where} exited with code {codes[rank]}")


def _taken_away(interruption: Interruption, codes: Mapping[int, int]) -> Finding:
    unsaved = sum(code != EXIT_SAVED for code in codes.values())
    if not unsaved:
        how = "all ranks saved first" if len(codes) > 1 else "the rank saved first"
        return Finding(interruption.verdict, f"{interruption.reason}; {how}", EXIT_SAVED)
    how = f"{unsaved} of {len(codes)} ranks ended before they had saved"
    return Finding(interruption.verdict, f"{interruption.reason}; {how}", max(codes.values()))


def _hung(hang: Hang, exits: Mapping[int, RankExit], codes: Mapping[int, int]) -> Finding:
    if not hang.ranks:
        return Finding(Verdict.HANG, f"{hang.stalled}: all ranks {hang.why}")
    rank = hang.ranks[0]
    where = f"rank {rank} on {exits[rank].node}"
    if len(hang.ranks) > 1:
        where += f" (and {', '.join(str(other) for other in hang.ranks[1:])})"
    return Finding(
        Verdict.HANG, f"{hang.stalled}: {where} {hang.why}", codes[rank], rank, exits[rank].node
    )


@dataclass(frozen=True)
class PastAttempt:
    """What the restart rules need to know of an attempt.

    Only attempts since a person last started or resumed the run count.
    """

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
CAUSES = {
    Verdict.PREEMPTED: "preemption",
    Verdict.TIME_LIMIT: "time_limit",
    Verdict.NODE_FAILURE: "node_failure",
    Verdict.HANG: "hang",
    Verdict.ERROR: "error",
    Verdict.OUT_OF_MEMORY: "out_of_memory",
}
_ERRORS = frozenset((Verdict.ERROR, Verdict.OUT_OF_MEMORY))
_COUNT_TOWARD_NO_PROGRESS = frozenset(
    (Verdict.HANG, Verdict.ERROR, Verdict.OUT_OF_MEMORY, Verdict.TIME_LIMIT)
)


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
    # Somebody took the port between its choice and its use: no error of the program's, whatever
    # the policy says of those; the next attempt chooses another.
    port_taken = finding.error == _RENDEZVOUS_ERROR and _PORT_TAKEN in finding.reason
    if CAUSES[verdict] not in policy.restart_on and not port_taken:
        return Decision(False, RunState.FAILED, verdict, finding.reason)
    if verdict in _ERRORS and not port_taken and error_restarts_left(history, policy) < 0:
        budget = f"retry.max_error_restarts={policy.max_error_restarts} is used up"
        return Decision(False, RunState.FAILED, verdict, f"{finding.reason}; {budget}")
    stuck = _stuck(history)
    if stuck >= policy.max_no_progress:
        why = (
            f"{stuck} attempts in a row without a new checkpoint (retry.max_no_progress); "
            f"last: {finding.reason}"
        )
        return Decision(False, RunState.FAILED, Verdict.NO_PROGRESS, why)
    return Decision(True, RunState.REQUEUED, verdict, finding.reason)


def error_restarts_left(history: Sequence[PastAttempt], policy: RetrySpec) -> int:
    """How many more errors a run starts again after; -1 after one that was too many."""
    return policy.max_error_restarts - sum(past.verdict in _ERRORS for past in history)


def starts_left_without_progress(history: Sequence[PastAttempt], policy: RetrySpec) -> int:
    """How many more ends that count toward retry.max_no_progress a run starts again after."""
    return max(0, policy.max_no_progress - 1 - _stuck(history))


def _stuck(history: Sequence[PastAttempt]) -> int:
    """How many attempts have failed since the last one that saved something new."""
    stuck = 0
    for past in reversed(history):
        if past.made_progress:
            break
        # A preemption between two hangs is no progress, and no fault of the run either.
        stuck += past.verdict in _COUNT_TOWARD_NO_PROGRESS
    return stuck


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
    if number == signal.SIGKILL:
        return f"{name} (from outside, or by the kernel when memory ran out)"
    return name


def _code(end: RankExit) -> int:
    return end.exit_code if end.exit_code is not None else 128 + (end.signal or 0)


def _reached(step: int | None, total_steps: int | None) -> bool:
    return step is not None and step >= (total_steps or 0)


def _lost_a_peer(report: RankReport | None) -> bool:
    return report is not None and any(words in (report.message or "") for words in _PEER_IS_GONE)
