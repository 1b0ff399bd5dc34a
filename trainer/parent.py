"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies, however that happens."""
    parent = os.environ.get("VITRA_PARENT_PID", "")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above.
    if parent.isdigit() and os.getppid() != int(parent):
        os._exit(1)
