"""What an attempt's end meant, and what follows: every row of the two tables."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest

from launcher.judge import Finding, PastAttempt, decide, judge
from trainer.spec.outcome import EXIT_FENCED, EXIT_SAVED, RankExit, RankReport, RunState, Verdict
from trainer.spec.run import RetrySpec

TOTAL = 20


@dataclass(frozen=True)
class End:
    """How one rank ended: its code (below 0: a signal), when, and what it said last."""

    code: int
    at: float = 0.0
    error: str | None = None
    step: int | None = 7
    said: str = "what it said"


def judged(*ends: End, stop_asked: bool = False) -> Finding:
    exits, reports = {}, {}
    for rank, end in enumerate(ends):
        killed = end.code < 0
        exits[rank] = RankExit(
            rank=rank,
            node=f"node{rank}",
            exit_code=None if killed else end.code,
            signal=-end.code if killed else None,
            ended_at=end.at,
        )
        if not killed:
            reports[rank] = RankReport(
                rank=rank,
                exit_code=end.code,
                error=end.error,
                message=end.said,
                last_step=end.step,
            )
    return judge(exits, reports, total_steps=TOTAL, stop_asked=stop_asked)


DONE = End(0, step=TOTAL)
SAVED = End(EXIT_SAVED)
KILLED = -signal.SIGKILL
LOST_PEER = "RuntimeError"

#: name: (ends, asked to stop, verdict, exit code, rank to blame)
ENDS = {
    "all done": ((DONE, DONE), False, "completed", 0, None),
    "one rank, done": ((DONE,), False, "completed", 0, None),
    "done, and asked to stop too late": ((DONE, DONE), True, "completed", 0, None),
    "all saved, asked": ((SAVED, SAVED), True, "cancelled", EXIT_SAVED, None),
    "all saved, by a signal to the ranks": ((SAVED, SAVED), False, "cancelled", EXIT_SAVED, None),
    "one killed, then its peer fails": (
        (End(1, at=2.0, error=LOST_PEER), End(KILLED, at=1.0)),
        False,
        "error",
        128 + 9,
        1,
    ),
    "one fails, its peer is ended": (
        (End(KILLED, at=5.0), End(1, at=1.0, error="ValueError")),
        False,
        "error",
        1,
        1,
    ),
    "exit 3, and the other saved alone": (
        (End(3, at=1.0), End(EXIT_SAVED, at=2.0)),
        False,
        "error",
        3,
        0,
    ),
    "exit 0 early": ((End(0, at=1.0), End(1, at=2.0, error=LOST_PEER)), False, "error", 0, 0),
    "all exit 0 early": ((End(0, at=2.0), End(0, at=1.0)), False, "error", 0, 1),
    "exit 0 without a word": ((End(0, step=None), DONE), False, "error", 0, 0),
    "no memory": (
        (End(1, at=1.0, error="MemoryError"), End(1, at=2.0, error=LOST_PEER)),
        False,
        "out_of_memory",
        1,
        0,
    ),
    "no GPU memory": ((End(1, error="OutOfMemoryError"),), False, "out_of_memory", 1, 0),
    "not finite": ((End(5, error="NonFiniteLoss"),) * 2, False, "error", 5, 0),
    "all damaged": ((End(6, error="CorruptCheckpoint"),) * 2, False, "error", 6, 0),
    "fenced off": ((End(EXIT_FENCED), End(EXIT_FENCED)), False, "error", EXIT_FENCED, 0),
    "stopped twice": ((End(KILLED), End(KILLED)), True, "cancelled", 128 + 9, None),
    "stopped before the handler was there": (
        (End(-signal.SIGUSR2), SAVED),
        True,
        "cancelled",
        128 + signal.SIGUSR2,
        None,
    ),
    "killed, and nobody asked": ((End(KILLED), End(KILLED, at=1.0)), False, "error", 128 + 9, 0),
    "the save failed after a stop": (
        (End(6, error="StorageError"), End(6, error="StorageError")),
        True,
        "error",
        6,
        0,
    ),
}


@pytest.mark.parametrize(
    ("ends", "stop_asked", "verdict", "exit_code", "rank"), ENDS.values(), ids=ENDS.keys()
)
def test_judge(
    ends: tuple[End, ...], stop_asked: bool, verdict: str, exit_code: int, rank: int | None
) -> None:
    finding = judged(*ends, stop_asked=stop_asked)
    assert (finding.verdict, finding.exit_code) == (verdict, exit_code)
    assert finding.failed_rank == rank
    assert finding.failed_node == (None if rank is None else f"node{rank}")
    assert finding.reason


def test_the_reason_says_what_the_rank_said() -> None:
    assert judged(End(1, error="ValueError")).reason == "rank 0 on node0: ValueError: what it said"
    assert "SIGKILL" in judged(End(KILLED)).reason
    assert "memory" in judged(End(KILLED)).reason
    assert "SIGSEGV" in judged(End(-signal.SIGSEGV)).reason
    assert "memory" not in judged(End(-signal.SIGSEGV)).reason


def past(verdict: str, progress: bool = False) -> PastAttempt:
    return PastAttempt(Verdict(verdict), progress)


ERROR, OOM, HANG = past("error"), past("out_of_memory"), past("hang")
PREEMPTED, NODE = past("preempted"), past("node_failure")
TIME = past("time_limit")
PORT_TAKEN = "DistNetworkError"
ON_ERROR = {"restart_on": ["error", "preemption", "node_failure", "hang", "time_limit"]}

#: name: (policy, history, error of the last one, starts again, final verdict)
DECISIONS = {
    "default: an error is final": ({}, [ERROR], None, False, "error"),
    "default: preemption is not": ({}, [PREEMPTED], None, True, "preempted"),
    "default: a lost node is not": ({}, [NODE], None, True, "node_failure"),
    "default: nor a hang": ({}, [HANG], None, True, "hang"),
    "default: nor the time limit": ({}, [TIME], None, True, "time_limit"),
    "preemption turned off": ({"restart_on": ["hang"]}, [PREEMPTED], None, False, "preempted"),
    "error, no budget": (ON_ERROR, [ERROR], None, False, "error"),
    "error, within": (ON_ERROR | {"max_error_restarts": 1}, [ERROR], None, True, "error"),
    "error, used up": (
        ON_ERROR | {"max_error_restarts": 1},
        [past("error", True), past("error", True)],
        None,
        False,
        "error",
    ),
    "out of memory is not an error": (
        {"restart_on": ["error"], "max_error_restarts": 5},
        [OOM],
        None,
        False,
        "out_of_memory",
    ),
    "out of memory uses the same budget": (
        {"restart_on": ["error", "out_of_memory"], "max_error_restarts": 1},
        [past("error", True), past("out_of_memory", True)],
        None,
        False,
        "out_of_memory",
    ),
    "never tried again: not finite": (
        ON_ERROR | {"max_error_restarts": 9},
        [ERROR],
        "NonFiniteLoss",
        False,
        "error",
    ),
    "never tried again: fenced off": (
        ON_ERROR | {"max_error_restarts": 9},
        [ERROR],
        "Fenced",
        False,
        "error",
    ),
    "tried again: storage": (
        ON_ERROR | {"max_error_restarts": 9},
        [ERROR],
        "StorageError",
        True,
        "error",
    ),
    "no progress, twice": ({}, [HANG, HANG], None, True, "hang"),
    "no progress, three times": ({}, [HANG, HANG, HANG], None, False, "no_progress"),
    "no progress, mixed causes": ({}, [TIME, HANG, TIME], None, False, "no_progress"),
    "progress in between": ({}, [HANG, past("hang", True), HANG], None, True, "hang"),
    "progress in the last": ({}, [HANG, HANG, past("hang", True)], None, True, "hang"),
    "preempted for ever": ({}, [PREEMPTED] * 50, None, True, "preempted"),
    "nodes lost for ever": ({}, [NODE] * 50, None, True, "node_failure"),
    "preemption is no progress": (
        {},
        [HANG, PREEMPTED, HANG, NODE, HANG],
        None,
        False,
        "no_progress",
    ),
    "preempted after hangs": ({}, [HANG, HANG, PREEMPTED], None, True, "preempted"),
    "port taken": ({}, [ERROR], PORT_TAKEN, True, "error"),
    "port taken for ever": ({}, [ERROR] * 3, PORT_TAKEN, False, "no_progress"),
    "no progress, own limit": ({"max_no_progress": 1}, [HANG], None, False, "no_progress"),
}


@pytest.mark.parametrize(
    ("policy", "history", "error", "restart", "verdict"),
    DECISIONS.values(),
    ids=DECISIONS.keys(),
)
def test_decide(
    policy: dict[str, object],
    history: list[PastAttempt],
    error: str | None,
    restart: bool,
    verdict: str,
) -> None:
    reason = "why: name: EADDRINUSE" if error == PORT_TAKEN else "why"
    finding = Finding(history[-1].verdict, reason, error=error)
    decision = decide(finding, history, RetrySpec.model_validate(policy))
    assert (decision.restart, decision.verdict) == (restart, verdict)
    assert decision.state is (RunState.REQUEUED if restart else RunState.FAILED)
    assert "why" in decision.reason


@pytest.mark.parametrize(
    ("verdict", "state"),
    [(Verdict.COMPLETED, RunState.COMPLETED), (Verdict.CANCELLED, RunState.CANCELLED)],
)
def test_final_verdicts(verdict: Verdict, state: RunState) -> None:
    policy = RetrySpec(restart_on=("error",), max_error_restarts=9)
    decision = decide(Finding(verdict, "why"), [PastAttempt(verdict, True)], policy)
    assert (decision.restart, decision.state) == (False, state)


@pytest.mark.parametrize(
    "said",
    [
        "[pair.cc:553] Connection closed by peer [127.0.0.1]:21194. This is typically caused by",
        "[pair.cc:534] Read error [127.0.0.1]:21194: Connection reset by peer",
        "NCCL error: remote process exited or there was a network error",
    ],
)
def test_a_rank_that_lost_its_peer_is_not_to_blame_however_early(said: str) -> None:
    lost = End(1, at=1.0, error="RuntimeError", said=said)
    finding = judged(lost, End(3, at=1.1, error=None, step=None))
    assert (finding.failed_rank, finding.exit_code) == (1, 3)
    # Where all say so, somebody still has to be named.
    assert judged(lost, lost).failed_rank == 0
