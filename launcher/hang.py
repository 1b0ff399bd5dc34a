"""Whether ranks hang, and which of them the others wait for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.heartbeat import Heartbeats
from launcher.schedulers.base import RankGroup
from trainer.spec.pulse import Phase, Place, patience_s
from trainer.spec.rundir import AttemptDir

#: The first step of an attempt also starts data workers, opens connections and compiles.
_FIRST_STEP_EXTRA_S = 60.0
#: After the first rank has finished, the others do: they have agreed that all is done.
_LEAVE_S = 300.0
#: Time in which the supervisor itself did not run (suspended, or waiting for a disk) counts as no
#: more than this: it could not have seen any progress then.
_LONGEST_GAP_S = 5.0
#: For stacks to be written, and for them to be complete.
_STACKS_S = 10.0
_QUIET_S = 0.6
_POLL_S = 0.1
#: The metrics may lie on a slow disk.
_MEASURE_EVERY_S = 1.0


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which ranks are taken for hung."""

    step_s: float
    first_step_s: float
    patience_s: float
    leave_s: float

    @classmethod
    def of(cls, hang_timeout_s: float) -> Limits:
        """What follows from retry.hang_timeout_s."""
        return cls(
            step_s=hang_timeout_s,
            first_step_s=hang_timeout_s + _FIRST_STEP_EXTRA_S,
            patience_s=patience_s(hang_timeout_s),
            leave_s=_LEAVE_S,
        )


class HangWatch:
    """Measures how long the ranks of an attempt have made no progress.

    Progress is a step finished by any rank, the next phase reached by any rank, or a new line of
    metrics (all there is where no heartbeat gets through). Only `clock`, the supervisor's own,
    counts: seconds that never go back.
    """

    def __init__(self, world_size: int, limits: Limits, clock: Callable[[], float]) -> None:
        self._world_size = world_size
        self._limits = limits
        self._clock = clock
        self._looked_at = clock()
        self._idle_s = 0.0
        self._seen: object = None
        self._began_at: int | None = None
        self._has_stepped = False

    def look(
        self, places: Mapping[int, Place], ended: Collection[int], logged_bytes: int
    ) -> str | None:
        """What has taken too long, as the beginning of a sentence; None while there is hope.

        Args:
            places: how far each rank heard of is.
            ended: the ranks that have left, none of them with an error.
            logged_bytes: the present size of the attempt's metrics.
        """
        now = self._clock()
        self._idle_s += min(now - self._looked_at, _LONGEST_GAP_S)
        self._looked_at = now
        seen = (
            {rank: (place.step, _stage(place.phase)) for rank, place in places.items()},
            len(ended),
            logged_bytes,
        )
        if seen != self._seen:
            self._seen = seen
            self._idle_s = 0.0
        if ended:
            limit_s, what = self._limits.leave_s, "the first rank has left, and not all others"
        elif not places:
            limit_s, what = self._limits.patience_s, "no heartbeat came, and no step was logged"
        else:
            self._note_steps(places)
            limit_s, what = max(
                self._limit(places.get(rank, Place())) for rank in range(self._world_size)
            )
        return f"{what} within {limit_s:g} s" if self._idle_s > limit_s else None

    def _note_steps(self, places: Mapping[int, Place]) -> None:
        steps = [p.step for p in places.values() if p.phase in (Phase.LOADING, Phase.COMPUTING)]
        if steps and self._began_at is None:
            self._began_at = min(steps)
        # Ranks finish a step together, so one that has done so is enough.
        if self._began_at is not None and max(p.step for p in places.values()) > self._began_at:
            self._has_stepped = True

    def _limit(self, place: Place) -> tuple[float, str]:
        match place.phase:
            case Phase.LOADING | Phase.COMPUTING if self._has_stepped:
                return self._limits.step_s, "no step was finished"
            case Phase.LOADING | Phase.COMPUTING:
                return self._limits.first_step_s, "no first step was finished"
            case Phase.SAVING:
                return self._limits.patience_s, f"step {place.step} was not saved"
            case Phase.EVALUATING:
                return self._limits.patience_s, "the model was not evaluated"
            case Phase.DONE:
                return self._limits.leave_s, "the ranks were done, and did not leave"
            case _:
                return self._limits.patience_s, "training did not begin"


@dataclass(frozen=True)
class Hang:
    """Ranks that make no progress: `stalled` says what was waited for and how long.

    `ranks` are those to blame and `why` goes on from their names; empty if no rank stands out.
    """

    stalled: str
    ranks: tuple[int, ...]
    why: str


def blame(
    stalled: str, places: Mapping[int, Place], running: Sequence[int], silent: Collection[int]
) -> Hang:
    """Find whom the others wait for.

    Args:
        places: how far each rank heard of was.
        running: the ranks that had not left.
        silent: those of them that did not show their stacks when asked.
    """
    if silent and len(silent) < len(running):
        why = "gives no sign of life: stopped from outside, or waiting inside the kernel"
        return Hang(stalled, tuple(sorted(silent)), why)
    if not places:
        return Hang(stalled, (), "stopped somewhere; their stacks say where")
    where = {rank: places.get(rank, Place()) for rank in running}
    furthest_back = min(where.values())
    behind = tuple(rank for rank in running if where[rank] == furthest_back)
    doing = _words(furthest_back)
    if len(running) == 1:
        return Hang(stalled, behind, f"was {doing}")
    if len(behind) == len(running):
        return Hang(stalled, (), f"were {doing}")
    return Hang(stalled, behind, f"kept the others waiting; it was {doing}")


class HangGuard:
    """Watches over the ranks of one attempt, and finds out what they were doing when they hang."""

    def __init__(
        self,
        world_size: int,
        limits: Limits,
        files: AttemptDir,
        heartbeats: Heartbeats,
        clock: Callable[[], float],
    ) -> None:
        self._world_size = world_size
        self._watch = HangWatch(world_size, limits, clock)
        self._files = files
        self._heartbeats = heartbeats
        self._clock = clock
        self._logged_bytes = 0
        self._measured_at = -math.inf

    @property
    def stacks(self) -> Path:
        """Where `examine` leaves the stacks, in a file for each rank."""
        return self._files.logs

    def look(self, ended: Collection[int]) -> str | None:
        """As `HangWatch.look`, which see, with what is to be known of the ranks now."""
        if self._clock() - self._measured_at > _MEASURE_EVERY_S:
            self._measured_at = self._clock()
            self._logged_bytes = _size(self._files.metrics)
        return self._watch.look(self._heartbeats.places(), ended, self._logged_bytes)

    def examine(self, group: RankGroup, stalled: str) -> Hang:
        """Have the ranks save their stacks, and find the one that the others wait for."""
        running = sorted(set(range(self._world_size)) - group.poll().keys())
        group.ask_for_stacks()
        silent = self._await_stacks(running)
        return blame(stalled, self._heartbeats.places(), running, silent)

    def _await_stacks(self, ranks: Sequence[int]) -> list[int]:
        """Returns once all stacks are there, or after a while; the ranks that showed none."""
        deadline = self._clock() + _STACKS_S
        sizes: dict[int, int] = {}
        quiet_since = self._clock()
        while self._clock() < deadline:
            before, sizes = sizes, {rank: _size(self._files.stack(rank)) for rank in ranks}
            if sizes != before:
                quiet_since = self._clock()
            if all(sizes.values()) and self._clock() - quiet_since > _QUIET_S:
                break
            time.sleep(_POLL_S)
        return [rank for rank in ranks if not sizes.get(rank)]


def _size(path: Path) -> int:
    """The size of a file in bytes; 0 if it cannot be seen."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _stage(phase: Phase) -> Phase:
    """What counts as progress when it changes: within a step only the step itself does."""
    return Phase.LOADING if phase is Phase.COMPUTING else phase


def _words(place: Place) -> str:
    match place.phase:
        case Phase.STARTING:
            return "still starting up"
        case Phase.JOINING:
            return "waiting for the other ranks to join"
        case Phase.PREPARING:
            return "laying out the model or restoring a checkpoint"
        case Phase.SAVING:
            return f"saving step {place.step}"
        case Phase.LOADING:
            return f"waiting for the data of step {place.step + 1}"
        case Phase.COMPUTING:
            return f"computing step {place.step + 1}"
        case Phase.EVALUATING:
            return "evaluating the model"
        case Phase.DONE:
            return "done, and did not leave"
