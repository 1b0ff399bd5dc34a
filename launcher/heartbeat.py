"""Where the supervisor hears how far its ranks are."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from typing import Self

from trainer.spec.pulse import BEAT_BYTES, PULSE_VARIABLE, Beat, Place

_KEY_BYTES = 32
_LOOPBACK = ("127.0.0.1", "::1")
#: Datagrams looked at in one go: a flood of them must not keep the supervisor from its work.
_AT_ONCE = 10_000


class Heartbeats:
    """Listens to the ranks of one attempt, from its start to the end of a `with` block.

    Where no socket is to be had it hears nothing, which is no error: progress then shows in the
    metrics only.

    Args:
        address: this host's name or address as the ranks reach it.
        world_size: ranks beyond it do not exist.
    """

    def __init__(self, address: str, world_size: int) -> None:
        self._address = address
        self._world_size = world_size
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._places: dict[int, Place] = {}
        self._socket = _listening(address)

    def environment(self) -> dict[str, str]:
        """The variable that tells a rank where to send, with its key, which goes nowhere else."""
        if self._socket is None:
            return {}
        port = self._socket.getsockname()[1]
        return {PULSE_VARIABLE: f"{self._address} {port} {self._key.hex()}"}

    def places(self) -> Mapping[int, Place]:
        """The furthest place heard of each rank so far; a rank never heard of is not in it."""
        for _ in range(_AT_ONCE if self._socket else 0):
            try:
                # One byte more, so that a longer datagram does not pass for a beat.
                data = self._socket.recv(BEAT_BYTES + 1) if self._socket else b""
            except OSError:
                break
            beat = Beat.open(data, self._key)
            if beat is None or beat.rank >= self._world_size:
                continue
            # Datagrams overtake each other, and whoever has seen one may send it again.
            if beat.rank not in self._places or beat.place > self._places[beat.rank]:
                self._places[beat.rank] = beat.place
        return dict(self._places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()


def _listening(address: str) -> socket.socket | None:
    try:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)[0][0]
        listener = socket.socket(family, socket.SOCK_DGRAM)
    except OSError:
        return None
    try:
        listener.setblocking(False)
        # The other nodes may reach this one by another address than its name has here.
        listener.bind((address if address in _LOOPBACK else "", 0))
    except OSError:
        listener.close()
        return None
    return listener
