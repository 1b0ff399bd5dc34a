"""Ranks that die, stop or leave: found out, named, ended within a minute, and not started again
unless the run says so. Two runs suffer it all, resumed by hand each time, and are none the worse.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import SAVE_INTERVAL, Paced, SharedServer, SideBySide

pytestmark = pytest.mark.timeout(900)

HANG_TIMEOUT_S = 15


@dataclass(frozen=True)
class Failed:
    """What an attempt came to: its outcome, seconds until its job was gone, where rank 1 was."""

    outcome: dict[str, Any]
    gone_after_s: float
    node: str
    state: str
    restarts: int


def end(word: str, number: int) -> Callable[[Paced], None]:
    return lambda run: os.kill(run.pid(word, rank=1), number)


#: What happens to rank 1, by the run that suffers it.
FAULTS: dict[str, dict[str, Callable[[Paced], None]]] = {
    "from outside": {
        "killed": end("trainer", signal.SIGKILL),
        "killed with its task": end("launcher.task", signal.SIGKILL),
        "stopped": end("trainer", signal.SIGSTOP),
    },
    "by itself": {
        trouble: methodcaller("trouble", trouble)
        for trouble in ("exit 0", "exit 3", "take all memory")
    },
}


@pytest.fixture(scope="module")
def runs(
    undisturbed: dict[int, Any], module_cluster: ClusterHandle, shared_server: SharedServer
) -> Iterator[SideBySide]:
    """Each run with what its failures came to, once it has been completed all the same."""
    assert undisturbed

    def suffer(name: str) -> tuple[Paced, dict[str, Failed]]:
        # A hang is otherwise tried again.
        retry = {"restart_on": ["preemption"], "hang_timeout_s": HANG_TIMEOUT_S}
        run = Paced(module_cluster, shared_server, name.replace(" ", "-"), retry=retry)
        failures: dict[str, Failed] = {}
        for attempt, (fault, begin) in enumerate(FAULTS[name].items(), 1):
            run.wait_for_attempt(attempt)
            failures[fault] = fail(run, begin)
            if attempt < len(FAULTS[name]):
                run.resume()
        if name == "by itself":
            fail_and_go_on(run, len(failures))
        else:
            run.resume()
        run.wait_until_finished()
        return run, failures

    with SideBySide() as scenarios:
        for name in FAULTS:
            scenarios.add(name, partial(suffer, name))
        yield scenarios


def fail(run: Paced, begin: Callable[[Paced], None]) -> Failed:
    node = run.hosts()[1]
    run.wait_for_step(run.step() + SAVE_INTERVAL + 2)
    begin(run)
    began = time.monotonic()
    run.wait_until(lambda: not run.jobs(), "the end of its job")
    gone_after_s = time.monotonic() - began
    run.trouble(None)
    status = run.status()
    restarts = run.cluster.restarts(run.job_id)
    return Failed(status["attempts"][-1], gone_after_s, node, status["state"], restarts)


def fail_and_go_on(run: Paced, failed: int) -> None:
    """Twice, where the run may: by an error, and by a hang."""
    run.trouble("raise once")
    run.resume("-o", "retry.restart_on=[error, hang]", "-o", "retry.max_error_restarts=1")
    run.wait_for_attempt(failed + 2)
    os.kill(run.pid("trainer", rank=1), signal.SIGSTOP)


#: What happens to rank 1: the verdict, the exit code, words of the reason.
EXPECTED = {
    "killed": ("error", 137, "killed by SIGKILL"),
    "killed with its task": ("error", 137, "killed together with the task"),
    "stopped": ("hang", 137, "gives no sign of life"),
    "exit 0": ("error", 0, "left with exit code 0 before the last step"),
    "exit 3": ("error", 3, "exited with code 3"),
    "take all memory": ("out_of_memory", 1, "MemoryError"),
}


@pytest.mark.parametrize(("of", "name"), [(of, name) for of in FAULTS for name in FAULTS[of]])
def test_named_and_ended(of: str, name: str, runs: SideBySide) -> None:
    _, failures = runs[of]
    verdict, exit_code, words = EXPECTED[name]
    failed = failures[name]
    outcome = failed.outcome
    assert (outcome["verdict"], outcome["exit_code"]) == (verdict, exit_code), outcome["reason"]
    assert words in outcome["reason"]
    assert (outcome["failed_rank"], outcome["failed_node"]) == (1, failed.node)
    assert failed.gone_after_s < 60 + (HANG_TIMEOUT_S if name == "stopped" else 0)
    assert (failed.state, failed.restarts) == ("failed", 0)


@pytest.mark.parametrize("of", FAULTS)
def test_nothing_in_the_results_tells(
    of: str, runs: SideBySide, undisturbed: dict[int, dict[str, Any]]
) -> None:
    run, _ = runs[of]
    run.assert_equals(undisturbed[2])
    assert run.processes() == []


def test_started_again_in_its_place_where_the_run_allows_it(runs: SideBySide) -> None:
    run, failures = runs["by itself"]
    assert run.verdicts()[len(failures) :] == ["error", "hang", "completed"]
    ended, hung, last = run.attempts()[-3:]
    assert "ValueError: only this once" in ended["reason"]
    assert (hung["failed_rank"], hung["exit_code"]) == (1, 137)
    assert {attempt["job_id"] for attempt in (ended, hung, last)} == {str(run.job_id)}
    assert run.cluster.restarts(run.job_id) == 0
    budgets = run.status()["budgets"]
    assert budgets["error"] == {"used": 1, "left": 0}
    assert budgets["hang"]["used"] == 1
