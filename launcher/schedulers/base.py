"""What the supervisor asks of whatever starts the ranks."""

from __future__ import annotations

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

    def kill(self) -> None:
        """End every rank and what it started, now. Returns once they are reaped."""
        ...


class RankLauncher(Protocol):
    """Starts the ranks of an attempt."""

    def start(self, run_dir: RunDir, plan: Plan, attempt: int) -> RankGroup: ...
