"""No process of the trainer outlives the one that started it. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1


def parent_pid(environ: Mapping[str, str]) -> int | None:
    """The parent that the environment names; None if it names none."""
    named = environ.get("VITRA_PARENT_PID", "")
    return int(named) if named.isdigit() else None


def die_with(parent: int | None) -> None:
    """Have the kernel kill this process when the one that started it dies, however that happens.

    `parent` is that process's pid, as far as it is known: if it has died already, leaves at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the line above.
    if parent is not None and os.getppid() != parent:
        os._exit(1)
