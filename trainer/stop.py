"""Stopping: a signal sets a flag, and the ranks agree on it at the boundary between two steps.

A handler that did more would run in the middle of a backward pass, on one rank only. SIGTERM comes
from Slurm (preemption, scancel) and SIGUSR2 from the supervisor (time limit, a person's stop). USR1
is left alone, NCCL uses it. Standard library only: the flag is set up before torch is imported.
"""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopFlag:
    """True once this process was asked to stop. Ranks learn of each other's flags by agreement."""

    def __init__(self) -> None:
        self.raised = False

    def install(self) -> StopFlag:
        """Take over the stop signals; a keyboard's interrupt is the supervisor's business."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Blocked by whoever started this process, so that none could come before its handler.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.raised = True
