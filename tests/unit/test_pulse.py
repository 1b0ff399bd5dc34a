"""Heartbeats over real sockets: what is heard, and what is not believed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.heartbeat import Heartbeats
from tests.conftest import wait_until
from trainer.spec.pulse import BEAT_BYTES, PULSE_VARIABLE, Beat, Phase, Place, patience_s
from trainer.watchdog import Pulse

KEY = b"k" * 32

places = st.builds(Place, st.integers(0, 2**63), st.sampled_from(Phase), st.integers(0, 2**63))


@given(st.integers(0, 2**31), places)
def test_a_beat_arrives_as_it_was(rank: int, place: Place) -> None:
    data = Beat(rank, place).seal(KEY)
    assert len(data) == BEAT_BYTES
    assert Beat.open(data, KEY) == Beat(rank, place)


@given(st.integers(0, BEAT_BYTES - 1), st.integers(1, 255))
def test_a_changed_beat_is_none(at: int, change: int) -> None:
    data = bytearray(Beat(3, Place(7, Phase.SAVING, 2)).seal(KEY))
    data[at] ^= change
    assert Beat.open(bytes(data), KEY) is None


@given(st.binary(max_size=100))
def test_garbage_is_no_beat(data: bytes) -> None:
    assert Beat.open(data, KEY) is None


def test_places_are_in_the_order_in_which_a_rank_passes_them() -> None:
    passed = [
        Place(0, Phase.STARTING),
        Place(0, Phase.JOINING),
        Place(0, Phase.PREPARING, 5),
        Place(4, Phase.LOADING),
        Place(4, Phase.COMPUTING),
        Place(4, Phase.COMPUTING, 1),
        Place(5, Phase.SAVING),
        Place(5, Phase.SAVING, 3),
        Place(5, Phase.LOADING),
        Place(6, Phase.EVALUATING),
        Place(6, Phase.DONE),
    ]
    assert sorted(passed) == passed


def test_patience_is_longer_than_any_step_may_take() -> None:
    assert patience_s(1) == patience_s(1800) == 3600
    assert patience_s(10_000) == 20_000


# -- Over the network ------------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[Heartbeats]:
    with Heartbeats("127.0.0.1", 2) as heartbeats:
        yield heartbeats


@pytest.fixture
def pulses(heard: Heartbeats) -> Iterator[list[Pulse]]:
    """Those of two ranks, as a rank starts its own."""
    pulses = [Pulse.from_environ({**heard.environment(), "RANK": str(rank)}) for rank in range(2)]
    yield pulses
    for pulse in pulses:
        pulse.close()


def test_ranks_are_heard(heard: Heartbeats, pulses: list[Pulse]) -> None:
    wait_until(lambda: len(heard.places()) == 2, "both ranks")
    assert heard.places() == {0: Place(), 1: Place()}
    pulses[0].reached(Phase.JOINING, 0)
    pulses[1].reached(Phase.SAVING, 7)
    wait_until(lambda: heard.places()[0] == Place(0, Phase.JOINING), "rank 0's news")
    wait_until(lambda: heard.places()[1] == Place(7, Phase.SAVING), "rank 1's news")
    # Within a step nothing is sent at once, but repeated.
    pulses[1].reached(Phase.LOADING, 7)
    pulses[1].reached(Phase.COMPUTING, 7)
    pulses[1].mark()
    pulses[1].mark()
    wait_until(lambda: heard.places()[1] == Place(7, Phase.COMPUTING, 2), "rank 1's marks")


def test_the_last_place_is_sent_before_a_rank_leaves(
    heard: Heartbeats, pulses: list[Pulse]
) -> None:
    pulses[1].reached(Phase.DONE, 20)
    began = time.monotonic()
    pulses[1].close()
    assert time.monotonic() - began < 5
    wait_until(lambda: heard.places().get(1) == Place(20, Phase.DONE), "its last word")


def test_the_loop_never_waits_for_the_network(heard: Heartbeats, pulses: list[Pulse]) -> None:
    began = time.monotonic()
    for step in range(100_000):
        pulses[0].reached(Phase.COMPUTING, step)
        pulses[0].mark()
    assert time.monotonic() - began < 20
    assert len(heard.places()) <= 2


def test_lost_heartbeats_are_made_good(heard: Heartbeats, pulses: list[Pulse]) -> None:
    """Nobody reads until the system has no room left for more."""
    key = bytes.fromhex(heard.environment()[PULSE_VARIABLE].split()[2])
    for step in range(20_000):
        send(heard, Beat(0, Place(step % 100, Phase.LOADING)).seal(key))
    pulses[0].reached(Phase.SAVING, 100)
    wait_until(lambda: heard.places().get(0) == Place(100, Phase.SAVING), "the newest place")


def send(heard: Heartbeats, data: bytes) -> None:
    host, port, _ = heard.environment()[PULSE_VARIABLE].split()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(data, (host, int(port)))


def test_what_is_not_believed(heard: Heartbeats) -> None:
    key = bytes.fromhex(heard.environment()[PULSE_VARIABLE].split()[2])
    good = Beat(1, Place(7, Phase.LOADING)).seal(key)
    send(heard, good)
    wait_until(lambda: heard.places() == {1: Place(7, Phase.LOADING)}, "a good one")
    for data in (
        Beat(1, Place(9, Phase.DONE)).seal(b"another attempt's key".ljust(32)),
        Beat(1, Place(9, Phase.DONE)).seal(b""),
        Beat(2, Place(9, Phase.DONE)).seal(key),  # no such rank
        Beat(1, Place(6, Phase.COMPUTING)).seal(key),  # overtaken, or sent again
        good + b"\0",
        good[:-1],
        b"",
        os.urandom(BEAT_BYTES),
        os.urandom(2000),
    ):
        send(heard, data)
    send(heard, Beat(0, Place(7, Phase.LOADING)).seal(key))
    wait_until(lambda: 0 in heard.places(), "a good one after them")
    assert heard.places() == dict.fromkeys((0, 1), Place(7, Phase.LOADING))


def test_each_attempt_has_a_key_of_its_own() -> None:
    with Heartbeats("127.0.0.1", 1) as one, Heartbeats("127.0.0.1", 1) as other:
        keys = [h.environment()[PULSE_VARIABLE].split()[2] for h in (one, other)]
    assert keys[0] != keys[1]
    assert [len(bytes.fromhex(key)) for key in keys] == [32, 32]


def test_without_a_socket_nothing_is_heard_and_nothing_fails() -> None:
    with Heartbeats("no-such-host.invalid", 2) as heartbeats:
        assert heartbeats.environment() == {}
        assert heartbeats.places() == {}


@pytest.mark.parametrize(
    "value", ["", "127.0.0.1", "127.0.0.1 x 00", "127.0.0.1 80 xyz", "a b c d"]
)
def test_without_a_usable_address_nothing_is_sent(value: str) -> None:
    pulse = Pulse.from_environ({PULSE_VARIABLE: value, "RANK": "0"})
    pulse.reached(Phase.LOADING, 3)
    pulse.mark()
    pulse.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "127.0.0.1"])
def test_nobody_listens(host: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    pulse = Pulse(0, (host, port), KEY)
    for step in range(5):
        pulse.reached(Phase.SAVING, step)
    began = time.monotonic()
    pulse.close()
    assert time.monotonic() - began < 5


def test_the_key_goes_no_further(heard: Heartbeats) -> None:
    environ = {**heard.environment(), "RANK": "0", "HOME": "/home/a"}
    Pulse.from_environ(environ).close()
    assert environ == {"RANK": "0", "HOME": "/home/a"}


# -- Stacks ----------------------------------------------------------------------------------------

_STUCK = """
import ctypes, sys, pathlib
from trainer.watchdog import show_stacks_when_asked
show_stacks_when_asked(pathlib.Path(sys.argv[1]))
def stuck_in_c():
    print("ready", flush=True)
    # With Python's lock held: no Python code can run in this process any more.
    ctypes.PyDLL(None).pause()
stuck_in_c()
"""


def test_stacks_of_a_process_that_holds_python_s_lock(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.stack"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _STUCK, str(path)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert path.read_text() == ""
            wait_until(lambda: _sleeps(process.pid), "the call")
            os.kill(process.pid, 3)
            wait_until(lambda: "stuck_in_c" in path.read_text(), "the stack")
        finally:
            process.kill()


def _sleeps(pid: int) -> bool:
    """Whether a process does nothing, at five looks in a row."""

    def looked() -> str:
        time.sleep(0.02)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    return all(looked() == "S" for _ in range(5))
