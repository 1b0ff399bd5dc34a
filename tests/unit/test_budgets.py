"""The budgets that status shows are those by which it is decided."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from launcher.budgets import budgets, run_history
from launcher.judge import CAUSES, Finding, PastAttempt, decide
from trainer.spec.outcome import Verdict
from trainer.spec.run import RetrySpec
from trainer.spec.rundir import RunDir, append_event, read_lines

MANY = 10
POLICIES = {
    "default": RetrySpec(),
    "errors too": RetrySpec(restart_on=("error", "out_of_memory", "hang"), max_error_restarts=2),
    "errors stuck first": RetrySpec(
        restart_on=("error", "time_limit"), max_error_restarts=9, max_no_progress=2
    ),
    "nothing": RetrySpec(restart_on=()),
}
PASTS = [
    PastAttempt(Verdict.PREEMPTED, made_progress=False),
    PastAttempt(Verdict.HANG, made_progress=False),
    PastAttempt(Verdict.ERROR, made_progress=True),
    PastAttempt(Verdict.ERROR, made_progress=False),
]
HISTORIES = [list(h) for length in range(4) for h in itertools.product(PASTS, repeat=length)]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_what_is_left_is_how_often_it_is_still_decided_to_go_on(policy: RetrySpec) -> None:
    for history in (found for found in HISTORIES if lives(found, policy)):
        for budget in budgets(history, policy):
            assert budget.used == sum(past.verdict is budget.verdict for past in history)
            assert budget.left == starts_again(budget.verdict, history, policy), budget


def lives(history: list[PastAttempt], policy: RetrySpec) -> bool:
    """Whether a run comes so far: it was started again after each of these attempts."""
    return all(
        decide(Finding(past.verdict, "ended"), history[: number + 1], policy).restart
        for number, past in enumerate(history)
    )


def starts_again(verdict: Verdict, history: list[PastAttempt], policy: RetrySpec) -> int | None:
    """How often `decide` goes on with ends by `verdict`, one after the other; None: for ever."""
    for more in range(MANY):
        after = [*history, *[PastAttempt(verdict, made_progress=False)] * (more + 1)]
        if not decide(Finding(verdict, "again"), after, policy).restart:
            return more
    return None


def test_a_person_who_resumes_it_begins_new_budgets(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    append_event(run_dir, "saved", attempt=1, step=5)
    append_event(run_dir, "ended", attempt=1, verdict="hang")
    append_event(run_dir, "ended", attempt=2, verdict="error")
    found = run_history(read_lines(run_dir.events))
    assert found == [PastAttempt(Verdict.HANG, True), PastAttempt(Verdict.ERROR, False)]
    append_event(run_dir, "resumed", scheduler="slurm", changed={})
    assert {
        budget.used for budget in budgets(run_history(read_lines(run_dir.events)), RetrySpec())
    } == {0}
    # Slurm refused the job.
    append_event(run_dir, "withdrawn")
    assert run_history(read_lines(run_dir.events)) == found
    assert [budget.verdict for budget in budgets(found, RetrySpec())] == list(CAUSES)
