"""A port for the ranks to meet at."""

from __future__ import annotations

import random
import socket

from trainer.spec.errors import SchedulerUnavailable

#: Below the range from which the kernel gives ports to outgoing connections.
_PORTS = range(20000, 32000)


def free_port(chance: random.Random | None = None) -> int:
    """A port of this host that nothing listens on at the moment; `chance` says where to look first.

    Raises:
        SchedulerUnavailable: none was found in a hundred tries.
    """
    for port in (chance or random.Random()).sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                # On every interface, as the ranks' rendezvous will listen.
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise SchedulerUnavailable(f"no free port between {_PORTS.start} and {_PORTS.stop}")
