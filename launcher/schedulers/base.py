"""What the supervisor asks of whatever starts the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainer.spec.outcome import RankExit, Verdict
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir


class RankGroup(Protocol):
    """The running ranks of one attempt."""

    def poll(self) -> dict[int, RankExit]:
        """The ranks that have ended so far; reaps them."""
        ...

    def ask_to_stop(self) -> None:
        """Have every rank save and exit with 75.

        One that has not begun yet is told when it has, as long as `poll` is called.
        """
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


@dataclass(frozen=True)
class Interruption:
    """What comes from outside and takes the ranks away, whatever they do.

    `verdict` is preempted, time_limit, node_failure, or cancelled (a person's stop); `reason` a
    sentence for people. `comes_back`: the scheduler has been told, or has decided by itself, to
    start the run again.
    """

    verdict: Verdict
    reason: str
    comes_back: bool = False


class Surroundings(Protocol):
    """What a supervisor lives in: a terminal, or a batch job that may be taken away.

    `signals` are those that mean something here. `insists`: a second signal means "stop at once",
    where otherwise each may simply come twice.
    """

    @property
    def signals(self) -> Sequence[int]: ...

    @property
    def insists(self) -> bool: ...

    def heed(self, number: int) -> Interruption:
        """What a signal that has come means. What cannot wait is done before this returns."""
        ...

    def look(self) -> Interruption | None:
        """What has come up without a signal. Asked many times a second: costs next to nothing."""
        ...

    def why_ended(
        self, lost: Sequence[int], signals: Callable[[], Sequence[int]]
    ) -> Interruption | None:
        """Why ranks have ended that nobody had interrupted; None: by themselves.

        `lost` are the ranks that left no word, `signals` tells which signals have come meanwhile.
        May take a while, where the scheduler has to find out itself.

        Raises:
            Fenced: another attempt has taken the run over.
        """
        ...

    def start_again(self, verdict: Verdict, interruption: Interruption | None) -> bool:
        """See to the next attempt. True: it can begin here and now; False: elsewhere, or later."""
        ...

    def stay_away(self) -> None:
        """The run is over: undo a return that was arranged."""
        ...
