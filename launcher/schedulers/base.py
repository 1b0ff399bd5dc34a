"""What the supervisor asks of whatever starts the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trainer.spec.outcome import RankExit
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir


class RankGroup(Protocol):
    """The running ranks of one attempt."""

    def poll(self) -> dict[int, RankExit]:
        """The ranks that have ended so far; reaps them."""
        ...

    def ask_to_stop(self) -> None:
        """Have every rank save and exit with 75."""
        ...

    def ask_for_stacks(self) -> None:
        """Have every rank write what its threads are doing to its stack file."""
        ...

    def kill(self) -> None:
        """End every rank and what it started, now.

        Returns once they are reaped, or after a while: the kernel may hold a process up.
        """
        ...


class RankLauncher(Protocol):
    """Starts the ranks of an attempt. `address` is how they reach this host."""

    @property
    def address(self) -> str: ...

    def start(
        self, run_dir: RunDir, plan: Plan, attempt: int, more: Mapping[str, str]
    ) -> RankGroup:
        """Start them all; `more` are variables that every rank finds in its environment."""
        ...
