"""What an attempt's end meant, and what follows: every row of the two tables."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from launcher.hang import Hang
from launcher.judge import Finding, PastAttempt, decide, judge
from launcher.schedulers.base import Interruption
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
    lost: bool = False
    not_started: str | None = None


def judged(
    *ends: End,
    stop_asked: bool = False,
    hang: Hang | None = None,
    done: Mapping[int, int] | None = None,
    interruption: Interruption | None = None,
) -> Finding:
    exits, reports = {}, {}
    for rank, end in enumerate(ends):
        killed = end.code < 0
        exits[rank] = RankExit(
            rank=rank,
            node=f"node{rank}",
            exit_code=None if killed else end.code,
            signal=-end.code if killed else None,
            ended_at=end.at,
            is_lost=end.lost,
            not_started=end.not_started,
        )
        if not killed:
            reports[rank] = RankReport(
                rank=rank,
                exit_code=end.code,
                error=end.error,
                message=end.said,
                last_step=end.step,
            )
    return judge(
        exits,
        reports,
        total_steps=TOTAL,
        stop_asked=stop_asked,
        hang=hang,
        done=done,
        interruption=interruption,
    )


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


def test_a_hang_is_blamed_on_the_rank_that_the_others_waited_for() -> None:
    hang = Hang("no step was finished within 5 s", (1,), "kept the others waiting")
    finding = judged(End(KILLED, at=1.0), End(KILLED, at=2.0), hang=hang)
    assert (finding.verdict, finding.exit_code) == ("hang", 128 + 9)
    assert (finding.failed_rank, finding.failed_node) == (1, "node1")
    assert finding.reason == (
        "no step was finished within 5 s: rank 1 on node1 kept the others waiting"
    )


def test_a_hang_of_several_ranks_and_of_nobody_in_particular() -> None:
    several = judged(*[End(KILLED)] * 4, hang=Hang("it hangs", (1, 3), "gives no sign of life"))
    assert several.reason == "it hangs: rank 1 on node1 (and 3) gives no sign of life"
    nobody = judged(*[End(KILLED)] * 2, hang=Hang("it hangs", (), "were saving step 5"))
    assert nobody.reason == "it hangs: all ranks were saving step 5"
    assert (nobody.verdict, nobody.failed_rank) == ("hang", None)


def test_a_hang_after_a_stop_was_asked_for_is_no_hang_of_the_run_s() -> None:
    hang = Hang("step 7 was not saved within 9 s", (0,), "kept the others waiting")
    finding = judged(End(KILLED), End(KILLED), stop_asked=True, hang=hang)
    assert finding.verdict == "cancelled"
    assert "step 7 was not saved within 9 s" in finding.reason


@pytest.mark.parametrize(
    ("step", "stop_asked", "verdict"),
    [(TOTAL, False, "completed"), (TOTAL, True, "completed"), (7, True, "cancelled")],
)
def test_a_rank_killed_when_it_was_done(step: int, stop_asked: bool, verdict: str) -> None:
    hang = Hang("the first rank has left", (1,), "was done, and did not leave")
    first = DONE if step == TOTAL else SAVED
    finding = judged(first, End(KILLED), stop_asked=stop_asked, hang=hang, done={0: step, 1: step})
    assert finding.verdict == verdict
    if verdict == "cancelled":
        assert finding.exit_code == EXIT_SAVED


TAKEN = Interruption(Verdict.PREEMPTED, "preempted by a job with more priority")

#: name: (ends, verdict, exit code, words of the reason)
TAKEN_AWAY = {
    "all saved": ((SAVED, SAVED), "preempted", EXIT_SAVED, "all ranks saved first"),
    "the only one saved": ((SAVED,), "preempted", EXIT_SAVED, "the rank saved first"),
    "killed before they could": (
        (SAVED, End(KILLED)),
        "preempted",
        128 + 9,
        "1 of 2 ranks ended before they had saved",
    ),
    "an error on the way out is no error": (
        (End(1, error=LOST_PEER), End(KILLED, lost=True)),
        "preempted",
        128 + 9,
        "2 of 2 ranks",
    ),
    "all done by then": ((DONE, DONE), "completed", 0, "all 2 ranks reached step 20"),
    "one done, the other killed": ((DONE, End(KILLED)), "preempted", 128 + 9, "2 of 2 ranks"),
}


@pytest.mark.parametrize(
    ("ends", "verdict", "exit_code", "words"), TAKEN_AWAY.values(), ids=TAKEN_AWAY.keys()
)
def test_what_takes_the_ranks_away_is_the_cause(
    ends: tuple[End, ...], verdict: str, exit_code: int, words: str
) -> None:
    finding = judged(*ends, interruption=TAKEN)
    assert (finding.verdict, finding.exit_code) == (verdict, exit_code)
    assert words in finding.reason
    assert finding.failed_rank is None


def test_an_error_before_a_person_s_stop_counts_for_more_than_the_stop() -> None:
    stop = Interruption(Verdict.CANCELLED, "stopped by a signal from outside (SIGTERM)")
    failed = judged(End(1, error="ValueError"), SAVED, interruption=stop, stop_asked=True)
    assert (failed.verdict, failed.failed_rank) == ("error", 0)
    assert judged(SAVED, SAVED, interruption=stop, stop_asked=True).verdict == "cancelled"


def test_a_rank_that_the_kernel_killed_for_lack_of_memory() -> None:
    killed = RankExit(rank=0, node="n", signal=signal.SIGKILL, ended_at=2.0, out_of_memory=True)
    lost = RankExit(rank=1, node="m", exit_code=1, ended_at=1.0)
    said = "Connection closed by peer"
    report = RankReport(rank=1, exit_code=1, error=LOST_PEER, message=said)
    finding = judge({0: killed, 1: lost}, {1: report}, total_steps=TOTAL, stop_asked=False)
    assert (finding.verdict, finding.failed_rank, finding.exit_code) == ("out_of_memory", 0, 137)
    assert "memory ran out" in finding.reason


def test_a_rank_that_left_no_word() -> None:
    finding = judged(End(1, at=1.0, error=LOST_PEER), End(KILLED, at=2.0, lost=True))
    assert (finding.verdict, finding.failed_rank, finding.exit_code) == ("error", 0, 1)
    said = "Connection closed by peer [10.0.0.1]:7"
    lost = judged(End(1, error=LOST_PEER, said=said), End(KILLED, at=2.0, lost=True))
    assert (lost.verdict, lost.failed_rank, lost.exit_code) == ("error", 1, 128 + 9)
    assert lost.reason == "rank 1 on node1 was killed together with the task that watched over it"


def test_ranks_that_did_not_start() -> None:
    end = End(KILLED, lost=True, not_started="no such image: /images/a")
    found = judged(end, end)
    assert (found.verdict, found.failed_rank, found.exit_code) == ("error", 0, 128 + 9)
    assert found.reason == "rank 0 on node0 was not started: no such image: /images/a"


def test_a_rank_that_was_done_but_failed_is_to_blame() -> None:
    finding = judged(DONE, End(3), done={0: TOTAL, 1: TOTAL})
    assert (finding.verdict, finding.failed_rank) == ("error", 1)


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
