"""Real ranks that are killed, stopped and resumed, through the command line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.conftest import Vitra, wait_until
from tests.contract.live import LiveRun
from trainer.spec.rundir import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def live(vitra: Vitra) -> Iterator[LiveRun]:
    run = LiveRun(vitra, data__num_workers=1)
    yield run
    run.end()


def test_a_killed_rank(live: LiveRun) -> None:
    live.wait_for_step(6)
    live.wait_for_event("saved")
    started_at = time.monotonic()
    # Its peer does not even notice: it has to be ended.
    os.kill(live.trainer_of(0), signal.SIGSTOP)
    os.kill(live.trainer_of(1), signal.SIGKILL)
    assert live.ends() == 5
    assert time.monotonic() - started_at < 15
    wait_until(lambda: not live.processes(), "the peers and data workers to be gone", within_s=6)

    assert "rank 1 on" in live.vitra.terminal()
    assert "SIGKILL" in live.vitra.terminal()
    status = live.status()
    assert status["state"] == "failed"
    (attempt,) = status["attempts"]
    assert (attempt["verdict"], attempt["failed_rank"]) == ("error", 1)
    assert attempt["exit_code"] == 128 + signal.SIGKILL
    assert attempt["failed_node"] == os.uname().nodename
    assert attempt["first_step"] == 1
    assert attempt["last_step"] >= 6
    assert status["last_checkpoint_step"] >= 5

    saved = status["last_checkpoint_step"]
    live.resume("-o", f"train.max_steps={saved + 3}")
    assert live.ends() == 0
    status = live.status()
    assert status["state"] == "completed"
    assert [a["verdict"] for a in status["attempts"]] == ["error", "completed"]
    assert status["attempts"][1]["first_step"] == saved + 1
    assert live.steps() == list(range(1, saved + 4))


def test_a_killed_supervisor(live: LiveRun) -> None:
    live.wait_for_step(6)
    live.wait_for_event("saved")
    assert len(live.processes()) >= 6, "two tasks, two trainers, two data workers"
    live.command.kill()
    live.command.wait()
    wait_until(lambda: not live.processes(), "all that it started to be gone", within_s=6)

    status = live.status()
    assert status["state"] == "unknown"
    assert status["attempts"][0]["verdict"] == "node_failure"
    assert status["attempts"][0]["last_step"] >= 6
    assert not live.dir.attempt(1).outcome.exists()

    saved = status["last_checkpoint_step"]
    live.resume("-o", f"train.max_steps={saved + 3}")
    assert live.ends() == 0
    assert live.dir.attempt(1).outcome.exists()
    first, second = live.status()["attempts"]
    assert (first["verdict"], first["first_step"]) == ("node_failure", 1)
    assert first["last_step"] == status["attempts"][0]["last_step"]
    assert (second["verdict"], second["first_step"]) == ("completed", saved + 1)
    assert live.steps() == list(range(1, saved + 4))


def test_a_torn_first_save_is_a_fresh_start_and_said(vitra: Vitra) -> None:
    live = LiveRun(vitra, checkpoint__save_interval=10_000)
    try:
        live.wait_for_step(2)
        live.command.kill()
        live.command.wait()
        wait_until(lambda: not live.processes(), "all that it started to be gone", within_s=6)
        torn = live.dir.path / "checkpoints" / "step-00000005"
        torn.mkdir()
        (torn / "shard-a1-r0.bin").write_bytes(b"half of it")
        live.resume("-o", "train.max_steps=4")
        assert live.ends() == 0
    finally:
        live.end()
    said = vitra.terminal()
    assert "attempt 2: 2 ranks, batch 2 x 2 x 2 = 8, from the beginning" in said
    assert "checkpoint of step 5 passed over: no manifest" in said
    assert live.steps() == [1, 2, 3, 4]
    assert not torn.exists()


def test_stops_and_resumes(live: LiveRun) -> None:
    """Ctrl-C, SIGTERM and a closed terminal once: saved, and exactly there it goes on."""
    last = 0
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for attempt, number in enumerate(numbers, start=1):
        live.wait_for_step(last + 3)
        # One press, which a wrapper passes on as well: that is not "twice".
        live.command.send_signal(number)
        time.sleep(0.02)
        live.command.send_signal(number)
        assert live.ends() == 128 + number
        status = live.status()
        assert status["state"] == "cancelled"
        assert len(status["attempts"]) == attempt
        judged = status["attempts"][-1]
        assert (judged["verdict"], judged["exit_code"]) == ("cancelled", 75)
        assert judged["first_step"] == last + 1
        assert judged["last_step"] == status["last_checkpoint_step"]
        assert judged["last_step"] >= last + 3
        assert not live.processes()
        last = judged["last_step"]
        live.resume()
    live.wait_for_step(last + 1)
    live.command.send_signal(signal.SIGTERM)
    assert live.ends() == 143
    steps = live.steps()
    assert steps == list(range(1, steps[-1] + 1))


def test_twice_stops_at_once(vitra: Vitra) -> None:
    # Ranks that hang, as on a storage that gives no answer, never leave by themselves.
    live = LiveRun(vitra, checkpoint__save_interval=100_000)
    try:
        live.wait_for_step(2)
        for pid in live.processes("-m trainer"):
            os.kill(pid, signal.SIGSTOP)
        live.command.send_signal(signal.SIGINT)
        wait_until(lambda: "once more to stop at once" in vitra.terminal(), "the first to be heard")
        time.sleep(0.5)
        assert live.command.poll() is None
        live.command.send_signal(signal.SIGINT)
        assert live.ends(within_s=15) == 130
        assert not live.processes()
        status = live.status()
    finally:
        live.end()
    assert (status["state"], status["attempts"][0]["verdict"]) == ("cancelled", "cancelled")
    assert status["last_checkpoint_step"] is None


def test_ctrl_c_before_the_first_step(vitra: Vitra) -> None:
    live = LiveRun(vitra, train__max_steps=6)
    try:
        live.wait_for_event("attempt")
        live.command.send_signal(signal.SIGINT)
        assert live.ends() == 130
        status = live.status()
        assert status["state"] == "cancelled"
        assert status["attempts"][0]["last_step"] is None
        live.resume()
        assert live.ends() == 0
    finally:
        live.end()
    assert live.steps() == [1, 2, 3, 4, 5, 6]
    assert [a["verdict"] for a in live.status()["attempts"]] == ["cancelled", "completed"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_checking_leaves_nothing(vitra: Vitra, number: signal.Signals) -> None:
    vitra.spec()
    process = vitra.start("submit", "spec.yaml", "--local")
    wait_until(lambda: "checking" in vitra.terminal(), "the probe to start")
    process.send_signal(number)
    assert process.wait(timeout=20) == 128 + number
    assert {p.name for p in vitra.directory.iterdir()} == {"spec.yaml", "terminal.log"}
    assert vitra.terminal() == "checking data and model\n"


def test_cancel_marker(live: LiveRun) -> None:
    live.wait_for_step(2)
    live.dir.cancel.touch()
    assert live.ends() == 5
    status = live.status()
    assert (status["state"], status["attempts"][0]["verdict"]) == ("cancelled", "cancelled")
    last = status["attempts"][0]["last_step"]
    assert status["last_checkpoint_step"] == last
    live.resume("-o", f"train.max_steps={last + 2}")
    assert live.ends() == 0
    assert not live.dir.cancel.exists()


def test_two_resumes_at_once(live: LiveRun) -> None:
    live.wait_for_step(2)
    live.command.send_signal(signal.SIGINT)
    assert live.ends() == 130
    saved = live.status()["last_checkpoint_step"]
    words = ("resume", "tiny", "-o")
    # Each to a length of its own, and none so short that the last to look finds the run finished.
    lengths = (100_001, 100_002, 100_003)
    racers = [live.vitra.start(*words, f"train.max_steps={length}") for length in lengths]
    wait_until(lambda: [r.poll() for r in racers].count(2) == 2, "two of them to be refused")
    winner = next(n for n, racer in enumerate(racers) if racer.returncode is None)
    live.command = racers[winner]
    live.wait_for_step(saved + 2)
    live.command.send_signal(signal.SIGINT)
    assert live.ends() == 130
    assert live.vitra.terminal().count(f"supervised by process {live.command.pid} on") == 2
    # The others have changed nothing.
    status = live.status()
    assert status["total_steps"] == lengths[winner]
    assert len(live.events("resumed")) == 1
    assert len(status["attempts"]) == 2


def test_two_runs_at_once_do_not_meet(vitra: Vitra) -> None:
    vitra.spec(train__max_steps=30)
    racers = [
        vitra.start("submit", "spec.yaml", "--local", environ={"MASTER_PORT": "29500"})
        for _ in range(3)
    ]
    assert [racer.wait(timeout=300) for racer in racers] == [0, 0, 0]
    finished = list((vitra.directory / "runs").glob("*/metrics.jsonl"))
    assert len(finished) == 3
    losses = {tuple(record["loss"] for record in read_lines(path)) for path in finished}
    assert len(losses) == 1, "one spec, one seed: the same numbers, whoever trained beside it"


def test_nobody_listens_any_more(vitra: Vitra) -> None:
    """`vitra submit --local 2>&1 | head -1` must not end the run, nor call it failed."""
    vitra.spec(train__max_steps=6)
    read_end, write_end = os.pipe()
    process = vitra.start("submit", "spec.yaml", "--local", output=write_end)
    os.close(write_end)
    assert os.read(read_end, 10)
    os.close(read_end)
    assert process.wait(timeout=200) == 0
    assert vitra("status", "tiny", "--json").json["state"] == "completed"
