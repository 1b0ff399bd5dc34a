"""Ranks that die, stop or leave: found out, named, ended within a minute, and not started again
unless the run says so. One run suffers it all, resumed by hand each time, and is none the worse.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import SAVE_INTERVAL, Paced, SharedServer

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


@pytest.fixture(scope="module")
def run(
    undisturbed: dict[int, Any], module_cluster: ClusterHandle, shared_server: SharedServer
) -> Paced:
    assert undisturbed
    return Paced(
        module_cluster,
        shared_server,
        "failing",
        # A hang is otherwise tried again.
        retry={"restart_on": ["preemption"], "hang_timeout_s": HANG_TIMEOUT_S},
    )


@pytest.fixture(scope="module")
def failures(run: Paced) -> dict[str, Failed]:
    def end(word: str, number: int) -> None:
        os.kill(run.pid(word, rank=1), number)

    faults: dict[str, Callable[[], None]] = {
        "killed": partial(end, "trainer", signal.SIGKILL),
        "killed with its task": partial(end, "launcher.task", signal.SIGKILL),
        "stopped": partial(end, "trainer", signal.SIGSTOP),
        **{
            trouble: partial(run.trouble, trouble)
            for trouble in ("exit 0", "exit 3", "take all memory")
        },
    }
    failures: dict[str, Failed] = {}
    for attempt, (name, fault) in enumerate(faults.items(), 1):
        if attempt > 1:
            run.resume()
        run.wait_for_attempt(attempt)
        node = run.hosts()[1]
        run.wait_for_step(run.step() + SAVE_INTERVAL + 2)
        fault()
        began = time.monotonic()
        run.wait_until(lambda: not run.jobs(), "the end of its job")
        gone_after_s = time.monotonic() - began
        run.trouble(None)
        status = run.status()
        failures[name] = Failed(
            status["attempts"][-1],
            gone_after_s,
            node,
            status["state"],
            run.cluster.restarts(run.job_id),
        )
    return failures


#: What happens to rank 1: the verdict, the exit code, words of the reason.
EXPECTED = {
    "killed": ("error", 137, "killed by SIGKILL"),
    "killed with its task": ("error", 137, "killed together with the task"),
    "stopped": ("hang", 137, "gives no sign of life"),
    "exit 0": ("error", 0, "left with exit code 0 before the last step"),
    "exit 3": ("error", 3, "exited with code 3"),
    "take all memory": ("out_of_memory", 1, "MemoryError"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_named_and_ended(name: str, failures: dict[str, Failed]) -> None:
    verdict, exit_code, words = EXPECTED[name]
    failed = failures[name]
    outcome = failed.outcome
    assert (outcome["verdict"], outcome["exit_code"]) == (verdict, exit_code), outcome["reason"]
    assert words in outcome["reason"]
    assert (outcome["failed_rank"], outcome["failed_node"]) == (1, failed.node)
    assert failed.gone_after_s < 60 + (HANG_TIMEOUT_S if name == "stopped" else 0)
    assert (failed.state, failed.restarts) == ("failed", 0)


def test_started_again_in_its_place_where_the_run_allows_it(
    run: Paced, failures: dict[str, Failed], undisturbed: dict[int, dict[str, Any]]
) -> None:
    run.trouble("raise once")
    hangs = len(failures) + 2
    # There are not many steps left.
    run.pace(attempt=hangs, forward=0.3)
    run.resume("-o", "retry.restart_on=[error, hang]", "-o", "retry.max_error_restarts=1")
    run.wait_for_attempt(hangs)
    os.kill(run.pid("trainer", rank=1), signal.SIGSTOP)
    run.wait_until_finished()
    run.assert_equals(undisturbed[2])
    assert run.verdicts()[len(failures) :] == ["error", "hang", "completed"]
    ended, hung, _ = run.attempts()[-3:]
    assert "ValueError: only this once" in ended["reason"]
    assert (hung["failed_rank"], hung["exit_code"]) == (1, 137)
    assert {attempt["job_id"] for attempt in run.attempts()[-3:]} == {str(run.job_id)}
    assert run.cluster.restarts(run.job_id) == 0
    budgets = run.status()["budgets"]
    assert budgets["error"] == {"used": 1, "left": 0}
    assert budgets["hang"]["used"] == 1
    assert run.processes() == []
