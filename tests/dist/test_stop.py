"""Stopping: whoever is signalled, whenever, all ranks save one step and say so."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dist_helpers import Ranks, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ENDLESS = {"train": {"max_steps": 10**6}}


def assert_stopped(run: Run, ranks: Ranks) -> int:
    """All ranks saved the same step, once, and asked to be started again; returns the step."""
    codes = ranks.wait()
    assert set(codes) == {75}, ranks.logs()
    steps = {report.last_step for report in ranks.reports()}
    assert len(steps) == 1
    (step,) = steps
    assert step is not None
    assert [event["step"] for event in run.events("saved")][-1:] == run.saved_steps()[-1:]
    assert max(run.saved_steps(), default=0) == step
    assert [record["step"] for record in run.metrics()] == list(range(1, step + 1))
    return step


def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, ENDLESS)
    with run.start() as ranks:
        ranks.wait_for_step(3)
        ranks.signal(1, signal.SIGUSR2)
        step = assert_stopped(run, ranks)
    assert step >= 3
    assert run.saved_steps() == [step]
    # And from there it goes on.
    assert run.train({"train": {"max_steps": step + 2}}) == [0, 0]
    assert [record["step"] for record in run.metrics()] == list(range(1, step + 3))


def test_signals_spread_over_ranks_and_repeated(tmp_path: Path) -> None:
    """As clusters do it: to each process at another moment, twice within a tenth of a second."""
    run = Run(tmp_path, 4, ENDLESS)
    with run.start() as ranks:
        ranks.wait_for_step(2)
        for number in (signal.SIGUSR2, signal.SIGTERM):
            for rank in (2, 0, 3):
                ranks.signal(rank, number)
                time.sleep(0.015)
        step = assert_stopped(run, ranks)
    assert run.saved_steps() == [step]


def test_the_keyboard_is_the_supervisors_business(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, ENDLESS)
    with run.start() as ranks:
        ranks.wait_for_step(2)
        ranks.signal(0, signal.SIGINT)
        ranks.wait_for_step(max(record["step"] for record in run.metrics()) + 5)
        ranks.signal(0, signal.SIGTERM)
        assert_stopped(run, ranks)


def test_a_signal_before_the_first_step_saves_nothing_and_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, ENDLESS)
    with run.start() as ranks:
        ranks.wait_for_handlers()
        ranks.signal(0, signal.SIGUSR2)
        assert ranks.wait() == [75, 75]
        assert {report.last_step for report in ranks.reports()} == {0}
    assert run.saved_steps() == []
    assert run.train({"train": {"max_steps": 2}}) == [0, 0]
    # The same once there is something to go on from.
    with run.start() as ranks:
        ranks.wait_for_handlers()
        ranks.signal(1, signal.SIGTERM)
        assert assert_stopped(run, ranks) == 2
    assert run.saved_steps() == [2]


# -- Data workers ------------------------------------------------------------------------------

WORKERS: dict[str, Any] = {"data": {"num_workers": 2}}


def is_alive(pid: int) -> bool:
    """Whether there is such a process that has not ended, as a zombie has."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_signal_to_the_whole_tree_does_not_stop_the_data_workers(tmp_path: Path) -> None:
    """As clusters do it that signal every process of a step."""
    run = Run(tmp_path, 1, ENDLESS, WORKERS)
    with run.start() as ranks:
        ranks.wait_for_step(2)
        workers = ranks.data_workers(0)
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
        ranks.signal(0, signal.SIGTERM)
        assert_stopped(run, ranks)


def test_data_workers_do_not_outlive_a_killed_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, ENDLESS, WORKERS)
    with run.start() as ranks:
        ranks.wait_for_step(2)
        workers = ranks.data_workers(0)
        assert len(workers) == 2
        assert all(map(is_alive, workers))
        ranks.signal(0, signal.SIGKILL)
        assert ranks.wait() == [-signal.SIGKILL]
    deadline = time.monotonic() + 20
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline, "a data worker lives on"
        time.sleep(0.01)


# -- During a save -----------------------------------------------------------------------------


def signalled_in_the_save(rank: int) -> None:
    """Rank 1 gets a signal at the moment when it opens its file of the checkpoint of step 4."""
    asked: list[str] = []

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not asked and "step-00000004" in str(arguments[0]):
            asked.append(str(arguments[0]))
            os.kill(os.getpid(), signal.SIGUSR2)

    if rank == 1:
        sys.addaudithook(on_event)


def test_a_signal_during_a_save_ends_with_that_save(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, ENDLESS, {"checkpoint": {"save_interval": 4, "async_save": False}})
    with run.start(prepare=signalled_in_the_save) as ranks:
        assert assert_stopped(run, ranks) == 4
    assert [event["step"] for event in run.events("saved")] == [4]


def signalled_in_a_save_that_fails(rank: int) -> None:
    """As above, and the file cannot be opened either, the first time."""
    failed: list[str] = []

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not failed and "step-00000004" in str(arguments[0]):
            failed.append(str(arguments[0]))
            os.kill(os.getpid(), signal.SIGUSR2)
            raise OSError(28, "No space left on device")

    if rank == 1:
        sys.addaudithook(on_event)


def test_a_signal_during_a_save_that_fails_saves_again(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, ENDLESS, {"checkpoint": {"save_interval": 4, "async_save": False}})
    with run.start(prepare=signalled_in_a_save_that_fails) as ranks:
        assert assert_stopped(run, ranks) == 4
    assert [event["step"] for event in run.events("save_failed")] == [4]
    assert [event["step"] for event in run.events("saved")] == [4]
    assert run.train({"train": {"max_steps": 5}}) == [0, 0]
