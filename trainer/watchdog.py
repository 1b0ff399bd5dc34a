"""A rank's part in finding hangs: it says where it is, and shows its stacks when it is asked to.

Standard library only: both begin before torch is imported.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path
from types import FrameType

from trainer.spec.pulse import PULSE_VARIABLE, Beat, Phase, Place

#: Not USR1, which is NCCL's, and not a stop signal.
STACK_SIGNAL = signal.SIGQUIT

_REPEAT_S = 1.0
_LAST_BEAT_S = 1.0
#: Within a step a rank changes its phase too often to tell it at once.
_IN_A_STEP = (Phase.LOADING, Phase.COMPUTING)
#: Data workers write into the same file, one after the other.
_DUMP_TAKES_S = 0.1


class Pulse:
    """Keeps the supervisor informed of how far this rank is, at no cost to the training loop.

    A thread repeats the present place every second, so nothing depends on a single datagram, and
    the loop never waits for the network. A rank whose place no longer changes is what the
    supervisor looks for; whether it still sends does not matter.

    Args:
        rank: who speaks.
        address: where the supervisor listens; None: nobody does, and nothing is sent.
        key: the attempt's.
    """

    def __init__(
        self, rank: int = 0, address: tuple[str, int] | None = None, key: bytes = b""
    ) -> None:
        self._rank = rank
        self._key = key
        self._place = Place()
        self._news = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        if address is not None:
            self._thread = threading.Thread(
                target=self._repeat, args=address, name="pulse", daemon=True
            )
            self._thread.start()

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Pulse:
        """The pulse that the launch variables ask for; a silent one without them.

        The key is taken out of `environ`: it is none of what this process starts.
        """
        words = environ.pop(PULSE_VARIABLE, "").split()
        try:
            host, port, key = words
            return cls(int(environ["RANK"]), (host, int(port)), bytes.fromhex(key))
        except (ValueError, KeyError):
            return cls()

    def reached(self, phase: Phase, step: int) -> None:
        """This rank begins `phase`, `step` steps being finished.

        Every rank passes the same phases and marks in the same order: whoever is behind is the one
        that the others wait for.
        """
        before = self._place.phase
        self._place = Place(step, phase)
        if not (phase in _IN_A_STEP and before in _IN_A_STEP):
            self._news.set()

    def mark(self) -> None:
        """This rank has come one mark further in its phase: at a point that all ranks pass."""
        place = self._place
        self._place = Place(place.step, place.phase, place.mark + 1)

    def close(self) -> None:
        """Send the last place reached and stop; takes a second at most."""
        self._closing = True
        self._news.set()
        if self._thread is not None:
            self._thread.join(_LAST_BEAT_S)

    def _repeat(self, host: str, port: int) -> None:
        sender: socket.socket | None = None
        while True:
            self._news.clear()
            closing = self._closing
            try:
                sender = sender or _connected(host, port)
                sender.send(Beat(self._rank, self._place).seal(self._key))
            except OSError:
                # The network may come back; and without any, the supervisor goes by the metrics.
                pass
            if closing:
                break
            self._news.wait(_REPEAT_S)
        if sender is not None:
            sender.close()


def _connected(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    sender = socket.socket(family, kind, protocol)
    sender.connect(address)
    return sender


def show_stacks_when_asked(path: Path) -> None:
    """Have the stack signal append what every thread is doing to `path`, data workers' after it.

    Written by C code, so it works whatever Python is stuck in; only a process that is stopped, or
    waits inside the kernel, gives no answer. Raises OSError if the file cannot be made.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)

    def ask_data_workers(_number: int, _frame: FrameType | None) -> None:
        # They have inherited the file and the handler by fork.
        for worker in multiprocessing.active_children():
            if worker.pid is not None:
                os.write(descriptor, f"\nData worker {worker.pid}:\n".encode())
                os.kill(worker.pid, STACK_SIGNAL)
                time.sleep(_DUMP_TAKES_S)

    signal.signal(STACK_SIGNAL, ask_data_workers)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=True)
    # Blocked by whoever started this process, so that it could not be killed by an early one.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])
