"""A run that trains while its logs are followed, that is cancelled, and goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.conftest import Vitra, vitra_command, wait_until
from tests.contract.live import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def live(vitra: Vitra) -> Iterator[LiveRun]:
    run = LiveRun(vitra)
    yield run
    run.end()


class Following:
    """`vitra logs -f` with its output in a file."""

    def __init__(self, live: LiveRun, *words: str) -> None:
        self.path = live.vitra.directory / "followed.log"
        with self.path.open("wb") as file:
            self.process = subprocess.Popen(
                [vitra_command(), "logs", live.run_id, "-f", *words],
                cwd=live.vitra.directory,
                stdout=file,
                stdin=subprocess.DEVNULL,
            )

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()


def logged(live: LiveRun, attempt: int) -> list[str]:
    """All lines of an attempt's logs, as they are printed."""
    return [
        f"[{attempt}/{rank}] {line}"
        for rank in range(2)
        for line in live.dir.attempt(attempt).log(rank).read_text().splitlines()
    ]


def test_logs_cancel_and_resume(live: LiveRun) -> None:
    following = Following(live)
    live.wait_for_step(3)
    row = live.vitra("ps", "--json").json["runs"][0]
    assert (row["run_id"], row["state"], row["attempt"]) == (live.run_id, "running", 1)
    assert row["step"] >= 3
    assert row["eta_s"] > 0
    wait_until(lambda: "[1/1]" in following.path.read_text(), "a line of rank 1")

    document = live.vitra("cancel", "tiny", "--json", "--wait", "120").json
    assert (document["was"], document["state"]) == ("running", "cancelled")
    assert document["stopped"] is True
    assert live.ends() == 5
    assert not live.processes()
    assert "is already cancelled" in live.vitra("cancel", "tiny").stdout
    status = live.status()
    last = status["attempts"][0]["last_step"]
    assert (status["state"], status["last_checkpoint_step"]) == ("cancelled", last)
    # The run is over, so is what followed it; and it has not missed a line.
    assert following.process.wait(timeout=60) == 0
    assert sorted(following.lines()) == sorted(logged(live, 1))

    live.resume("-o", f"train.max_steps={last + 2}")
    assert live.ends() == 0
    assert not live.dir.cancel.exists()
    everything = live.vitra("logs", "tiny").stdout.splitlines()
    assert sorted(everything) == sorted([*logged(live, 1), *logged(live, 2)])
    attempts = [re.match(r"\[(\d)/", line) for line in everything]
    assert [m[1] for m in attempts if m] == sorted(m[1] for m in attempts if m)
    one = live.vitra("logs", "tiny", "--rank", "1", "--attempt", "2").stdout.splitlines()
    assert one == [line for line in logged(live, 2) if line.startswith("[2/1]")]
    assert "verdict completed" in live.vitra("logs", "tiny", "--supervisor").stdout
    row = live.vitra("ps", "--json").json["runs"][0]
    status = live.status()
    for key in ("state", "attempt", "step", "total_steps", "last_checkpoint_step"):
        assert row[key] == status[key], key


def test_following_goes_on_through_a_lost_supervisor_and_a_resume(live: LiveRun) -> None:
    live.wait_for_event("saved")
    following = Following(live)
    live.command.kill()
    live.command.wait()
    wait_until(lambda: not live.processes(), "the ranks to be gone")
    saved = live.status()["last_checkpoint_step"]
    assert following.process.poll() is None
    live.resume("-o", f"train.max_steps={saved + 3}")
    assert live.ends() == 0
    assert following.process.wait(timeout=60) == 0
    assert sorted(following.lines()) == sorted([*logged(live, 1), *logged(live, 2)])


def test_leaving_the_logs_leaves_the_run(live: LiveRun) -> None:
    live.wait_for_step(2)
    following = Following(live, "--rank", "0")
    wait_until(lambda: following.path.stat().st_size, "a line")
    following.process.send_signal(signal.SIGINT)
    assert following.process.wait(timeout=60) == 130
    # `vitra logs -f | head -1` ends as soon as head does, though no more lines come.
    read_end, write_end = os.pipe()
    process = live.vitra.start("logs", "tiny", "-f", output=write_end)
    os.close(write_end)
    assert os.read(read_end, 5)
    os.close(read_end)
    assert process.wait(timeout=60) == 0
    assert "Broken" not in live.vitra.terminal()
    assert live.command.poll() is None
    assert b"\x1b" not in following.path.read_bytes(), "colours are for terminals"
