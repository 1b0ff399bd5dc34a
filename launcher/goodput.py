"""Where a run's time went: into steps that count, and into everything else.

A duration comes from one host's clock that never goes back: of an attempt, from its supervisor, who
hears what rank 0 is at; of a wait in the queue, from Slurm's controller. Times of day are only used
for how long it all took, and what lies between one host and another is nobody's: `other_s`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from launcher.jobs import effective
from trainer.spec.pulse import Phase, Place
from trainer.spec.rundir import AttemptDir, RunDir, read_lines, write_atomic

#: What an attempt does, by its names in `goodput`; of training not all may count in the end.
_STARTING, _RESTORING, _TRAINING, _SAVING = "starting_s", "restoring_s", "training_s", "saving_s"
_PARTS: tuple[str, ...] = (_STARTING, _RESTORING, _TRAINING, _SAVING)
#: A supervisor that is killed takes no more than this with it.
_NOTE_EVERY_S = 10.0


class Timekeeper:
    """Measures what an attempt spends its time on, from its making to `close`.

    Args:
        files: the attempt, in whose seconds.json it is noted again and again.
        clock: gives seconds, and never goes back.
        restores: whether there is a checkpoint to go on from.
    """

    def __init__(self, files: AttemptDir, clock: Callable[[], float], *, restores: bool) -> None:
        self._path = files.seconds
        self._clock = clock
        self._parts = {
            Phase.STARTING: _STARTING,
            Phase.JOINING: _STARTING,
            Phase.PREPARING: _RESTORING if restores else _STARTING,
            Phase.SAVING: _SAVING,
            Phase.LOADING: _TRAINING,
            Phase.COMPUTING: _TRAINING,
        }
        self._spent = dict.fromkeys(_PARTS, 0.0)
        self._part: str | None = _STARTING
        self._since = self._noted_at = clock()

    def look(self, places: Mapping[int, Place]) -> None:
        """Note how far the ranks are now; often, since what they did in between is not known."""
        self._add()
        if (place := places.get(0)) is not None:
            self._part = self._parts.get(place.phase)
        if self._since - self._noted_at >= _NOTE_EVERY_S:
            self._note()

    def close(self) -> None:
        """The ranks have ended."""
        self._add()
        self._part = None
        self._note()

    def _add(self) -> None:
        now = self._clock()
        if self._part is not None:
            self._spent[self._part] += now - self._since
        self._since = now

    def _note(self) -> None:
        self._noted_at = self._since
        rounded = {part: round(seconds, 3) for part, seconds in self._spent.items()}
        # On a disk that is full or gone: no run ends for its accounts.
        with suppress(OSError):
            write_atomic(self._path, json.dumps(rounded).encode())


def goodput(
    run_dir: RunDir,
    events: Iterable[Mapping[str, Any]],
    *,
    alive: bool,
    waiting_s: float = 0.0,
    now: datetime | None = None,
) -> dict[str, float | None]:
    """The parts of a run's time in seconds, which add up to `wall_s`, and the ratio that counts.

    Time between an end and a resume by a person is no part of it.

    Args:
        run_dir: a submitted run.
        events: all of it so far.
        alive: it goes on by itself, so its time goes on too.
        waiting_s: how long its job has been in the queue for its present life.
        now: the time of day; None: now.
    """
    events = effective(events)
    numbers = run_dir.attempt_numbers()
    starts = {int(e["attempt"]): int(e["step"]) for e in events if e.get("event") == "started"}
    spent = dict.fromkeys(_PARTS, 0.0)
    lost_s = 0.0
    for number in numbers:
        files = run_dir.attempt(number)
        of_this = _noted(files)
        # What a later attempt did again was lost; damage may send one back by more than one.
        redone = min((step for later, step in starts.items() if later > number), default=None)
        counted_s, all_s = _step_seconds(files, redone)
        if not of_this[_TRAINING]:
            # No heartbeat got through: the ranks' own clocks are all there is.
            of_this[_TRAINING] = min(of_this[_STARTING], all_s)
            of_this[_STARTING] -= of_this[_TRAINING]
        # Of a step that did not come to its end, a hang among them, nothing counts.
        training_s = min(counted_s, of_this[_TRAINING])
        lost_s += of_this[_TRAINING] - training_s
        of_this[_TRAINING] = training_s
        for part, seconds in of_this.items():
            spent[part] += seconds
    queued_s = waiting_s + sum(
        max(0.0, float(e["queued_s"])) for e in events if e.get("event") == "allocated"
    )
    known_s = queued_s + lost_s + sum(spent.values())
    wall_s = max(_wall_s(events, alive=alive, now=now or datetime.now(UTC)), known_s)
    found = {"wall_s": wall_s, "queued_s": queued_s, **spent, "lost_s": lost_s}
    found["other_s"] = wall_s - known_s
    at_work_s = wall_s - queued_s
    return {
        **{name: round(seconds, 3) for name, seconds in found.items()},
        "ratio": round(spent[_TRAINING] / at_work_s, 4) if at_work_s > 0 else None,
    }


def _noted(files: AttemptDir) -> dict[str, float]:
    """What its supervisor has noted of an attempt; zeros where there is nothing to be read."""
    try:
        found = json.loads(files.seconds.read_bytes())
        return {part: float(found[part]) for part in _PARTS}
    except (OSError, ValueError, KeyError, TypeError):
        return dict.fromkeys(_PARTS, 0.0)


def _step_seconds(files: AttemptDir, redone: int | None) -> tuple[float, float]:
    """What an attempt's steps took up to step `redone` (None: all count), and what all took.

    By rank 0's clock. A record that stands for several steps has the time of its own.
    """
    counted_s = all_s = 0.0
    before: int | None = None
    for record in read_lines(files.metrics):
        step, seconds = int(record["step"]), float(record["step_time_s"])
        steps = 1 if before is None else step - before
        all_s += seconds * steps
        if redone is None or step <= redone:
            counted_s += seconds * steps
        elif before is not None and before < redone:
            counted_s += seconds * (redone - before)
        before = step
    return counted_s, all_s


def _wall_s(events: Sequence[Mapping[str, Any]], *, alive: bool, now: datetime) -> float:
    """From each start by a person to the end that followed, by times of day."""
    total_s = 0.0
    began: datetime | None = None
    before = now
    for event in events:
        at = datetime.fromisoformat(event["at"])
        match event.get("event"):
            case "submitted" | "resumed":
                if began is not None:  # whoever killed it left no word
                    total_s += (before - began).total_seconds()
                began = at
            case "finished" if began is not None:
                total_s += (at - began).total_seconds()
                began = None
            case _:
                pass
        before = at
    if began is not None:
        total_s += ((now if alive else before) - began).total_seconds()
    return max(0.0, total_s)
