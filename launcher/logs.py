"""What the ranks of a run have printed: all attempts in order, the ranks of each merged by time.

However large the files are, a few pieces of them are in memory at a time, and none stays open.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import select
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from trainer.spec.errors import NotFound, StorageError
from trainer.spec.rundir import RunDir

_READ_BYTES = 1 << 16
#: A longer line is printed in pieces.
_LONGEST_LINE_BYTES = 1 << 20
#: How often -f looks for more.
POLL_S = 0.3

_LOG_NAME = re.compile(r"rank_([0-9]+)\.log")
_STAMP = re.compile(rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?(?:Z|[+-]\d\d:?\d\d)?")

_COLOURS = (36, 33, 32, 35, 34, 31)


@dataclass(frozen=True)
class Line:
    """One line, without its end. `rank` is None for the supervisor's."""

    attempt: int
    rank: int | None
    text: bytes


@dataclass(frozen=True)
class Selection:
    """What to show; nothing named of a kind means all of it."""

    ranks: frozenset[int] = frozenset()
    attempts: frozenset[int] = frozenset()
    supervisor: bool = False


def log_lines(
    run_dir: RunDir, selection: Selection, *, is_over: Callable[[], bool], wait: Callable[[], bool]
) -> Iterator[Line]:
    """Every line of the selected logs, once; ends when the run is over and all is given out.

    Lines that begin with a time are merged by it within an attempt, one without follows the line
    before it. `wait` is called when there is nothing more for now; False from it ends the lines.
    Without following, `is_over` says True from the start.

    Raises:
        StorageError: a log cannot be read.
    """
    open_attempts: dict[int, _Attempt] = {}
    closed: set[int] = set()
    while True:
        # In this order: what is over, or has a successor, has written all that it ever will.
        over = is_over()
        numbers = run_dir.attempt_numbers()
        for number in numbers:
            if number in closed or (selection.attempts and number not in selection.attempts):
                continue
            ended = over or number < numbers[-1]
            attempt = open_attempts.setdefault(number, _Attempt(run_dir, number, selection))
            yield from attempt.lines(ended=ended)
            if ended:
                closed.add(number)
                del open_attempts[number]
        if over or not wait():
            return


def check_selection(run_dir: RunDir, selection: Selection, *, world_size: int | None) -> None:
    """Refuse what the run does not have. `world_size` is given when more may come (following).

    Raises:
        NotFound: no such attempt or rank.
    """
    numbers = run_dir.attempt_numbers()
    for number in sorted(selection.attempts):
        may_come = world_size is not None and number > max(numbers, default=0)
        if number not in numbers and not may_come:
            raise NotFound(
                f"{run_dir.path.name} has no attempt {number}",
                f"it has {_ranges(numbers)}" if numbers else "it has not started yet",
            )
    looked_at = selection.attempts & set(numbers) or set(numbers)
    known = {rank for number in looked_at for rank in _rank_logs(run_dir, number)}
    known |= set(range(world_size or 0))
    for rank in sorted(selection.ranks):
        if rank not in known:
            raise NotFound(
                f"{run_dir.path.name} has no log of rank {rank}",
                f"there are ranks {_ranges(known)}" if known else "it has not started yet",
            )


class Printer:
    """Prints lines with their attempt and rank before them.

    With `colour` each rank's label has one. What the ranks have printed stays as it is, but a
    colour that they have left on ends with their line.
    """

    def __init__(self, stream: BinaryIO, *, colour: bool) -> None:
        self._stream = stream
        self._colour = colour

    def __call__(self, line: Line) -> None:
        who = "supervisor" if line.rank is None else line.rank
        label, end = f"[{line.attempt}/{who}]", b"\n"
        if self._colour:
            shade = 37 if line.rank is None else _COLOURS[line.rank % len(_COLOURS)]
            label = f"\x1b[{shade}m{label}\x1b[0m"
            end = b"\x1b[0m\n" if b"\x1b" in line.text else end
        self._stream.write(label.encode() + b" " + line.text + end)


def in_colour(stream: BinaryIO, environ: Mapping[str, str]) -> bool:
    """Whether colours are wanted: `stream` is a terminal that has some, and NO_COLOR is not set."""
    has_some = environ.get("TERM", "dumb") != "dumb"
    return has_some and not environ.get("NO_COLOR") and stream.isatty()


def wait_for_more(stream: BinaryIO, seconds: float) -> bool:
    """Flush and wait; False at once where whoever reads `stream` has gone."""
    stream.flush()
    poll = select.poll()
    # Asks for nothing, so that only errors and a hang-up end it early.
    poll.register(stream.fileno(), 0)
    return not poll.poll(seconds * 1000)


class _Attempt:
    """The logs of one attempt, read on from where the last reading ended."""

    def __init__(self, run_dir: RunDir, number: int, selection: Selection) -> None:
        self._run_dir = run_dir
        self._number = number
        self._ranks = selection.ranks
        self._logs: dict[int | None, _Log] = {}
        if selection.supervisor:
            self._logs[None] = _SupervisorLog(run_dir.attempt(number).supervisor_log)

    def lines(self, *, ended: bool) -> Iterator[Line]:
        """What has come since; a last line without its end only once the attempt has `ended`."""
        for rank, path in sorted(_rank_logs(self._run_dir, self._number).items()):
            if rank not in self._logs and (not self._ranks or rank in self._ranks):
                self._logs[rank] = _Log(path)
        streams = [_of_rank(rank, log.lines(ended=ended)) for rank, log in self._logs.items()]
        # Of equal times the earlier stream's comes first: without any, rank follows rank. A stream
        # is never reordered, not even where a clock was set back.
        for _, rank, text in heapq.merge(*streams, key=lambda item: item[0]):
            yield Line(self._number, rank, text)


def _of_rank(
    rank: int | None, lines: Iterator[tuple[float, bytes]]
) -> Iterator[tuple[float, int | None, bytes]]:
    return ((time, rank, text) for time, text in lines)


class _Log:
    """One growing file of lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self._time = 0.0

    def lines(self, *, ended: bool) -> Iterator[tuple[float, bytes]]:
        """(time, line) for what has come since; one without a time has that of the line before."""
        while chunk := self._read():
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                yield from self._timed(line)
            if len(self._rest) > _LONGEST_LINE_BYTES:
                yield from self._timed(self._take_rest())
        if ended and self._rest:
            yield from self._timed(self._take_rest())

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(_READ_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as err:
            raise StorageError(f"cannot read {self._path}: {err.strerror}") from err
        self._offset += len(chunk)
        return chunk

    def _take_rest(self) -> bytes:
        rest, self._rest = self._rest, b""
        return rest

    def _timed(self, line: bytes) -> Iterator[tuple[float, bytes]]:
        line = self._text(line)
        stamp = _time_of(line)
        if stamp is not None:
            self._time = stamp
        # A progress bar draws over itself; each state of it is a line here.
        parts = [part for part in line.split(b"\r") if part] or [b""]
        return ((self._time, part) for part in parts)

    def _text(self, line: bytes) -> bytes:
        return line


class _SupervisorLog(_Log):
    """supervisor.log: JSON lines, shown as their time and note."""

    def _text(self, line: bytes) -> bytes:
        try:
            record = json.loads(line)
            return f"{record['at']} {record['note']}".encode()
        except (ValueError, TypeError, KeyError):
            return line


def _rank_logs(run_dir: RunDir, attempt: int) -> dict[int, Path]:
    logs = run_dir.attempt(attempt).logs
    try:
        names = os.listdir(logs)  # noqa: PTH208 - names are all that is wanted
    except FileNotFoundError:
        return {}
    except OSError as err:
        raise StorageError(f"cannot read {logs}: {err.strerror}") from err
    matches = filter(None, map(_LOG_NAME.fullmatch, names))
    return {int(match[1]): logs / match[0] for match in matches}


def _time_of(line: bytes) -> float | None:
    """The time that a line begins with, in seconds since the epoch; None if it does not.

    A time without a zone is this machine's, as Python's logging writes it.
    """
    match = _STAMP.match(line)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(match[0].decode()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _ranges(numbers: Collection[int]) -> str:
    """Numbers for people: "1", "0 to 7", "0 to 3 and 6"."""
    parts: list[str] = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return " and ".join(parts)
