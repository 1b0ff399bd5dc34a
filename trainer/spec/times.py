"""Slurm's ways of writing a time limit, read as Slurm reads them, minus its traps."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Slurm adds up a time limit as seconds in a signed 32-bit integer, and 59 more to round up.
LONGEST_MINUTES = (2**31 - 60) // 60

_FORMS = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or "
    "days-hours:minutes:seconds"
)

# No days: the first field is unbounded. With days, hours go to 23. Digits are ASCII.
_WITH_DAYS = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+)(?::([0-9]+))?)?")
_WITHOUT_DAYS = re.compile(r"([0-9]+)(?::([0-9]+)(?::([0-9]+))?)?")


class SlurmTime(NamedTuple):
    """A time limit: whole minutes, never fewer than asked for, at least 1.

    `reading` is how it was understood, for people: "1 min 30 s, rounded up to 2 min".
    `surprising` is True where a reader may have expected something else: minutes:seconds, which
    many take for hours:minutes, and seconds that were rounded up.
    """

    minutes: int
    reading: str
    surprising: bool


def parse_slurm_time(value: str | int) -> SlurmTime:
    """Read a time limit: one of Slurm's six documented forms, or an int of minutes.

    Raises:
        ValueError: 0, negative, empty, unlimited, malformed or longer than Slurm can count; the
            message is a sentence that says what to write.
    """
    seconds_total, surprising = _seconds(value)
    if seconds_total == 0:
        raise ValueError("is no time: Slurm takes 0 for no limit; write at least 1 (a minute)")
    minutes = -(-seconds_total // 60)
    if minutes > LONGEST_MINUTES:
        raise ValueError(f"is longer than the {LONGEST_MINUTES} minutes that Slurm can count")
    reading = _spell(seconds_total)
    if seconds_total % 60:
        reading += f", rounded up to {minutes} min"
    return SlurmTime(minutes, reading, surprising or bool(seconds_total % 60))


def _seconds(value: str | int) -> tuple[int, bool]:
    if isinstance(value, int):
        if value < 0:
            raise ValueError("is negative; write minutes, or one of Slurm's forms")
        return value * 60, False
    if not value.strip():
        raise ValueError('is empty; write minutes, or a time such as "24:00:00"')
    if value.lower() in ("infinite", "unlimited", "-1"):
        raise ValueError("is no limit, and a run needs one; write the partition's longest time")
    if len(value) <= 40:
        if match := _WITH_DAYS.fullmatch(value):
            days, hours, minutes, seconds = (int(field or 0) for field in match.groups())
            _check(hours=(hours, 23), minutes=(minutes, 59), seconds=(seconds, 59))
            return ((days * 24 + hours) * 60 + minutes) * 60 + seconds, False
        if match := _WITHOUT_DAYS.fullmatch(value):
            fields = [int(field) for field in match.groups() if field is not None]
            if len(fields) == 3:
                _check(minutes=(fields[1], 59), seconds=(fields[2], 59))
                return (fields[0] * 60 + fields[1]) * 60 + fields[2], False
            if len(fields) == 2:
                _check(seconds=(fields[1], 59))
                return fields[0] * 60 + fields[1], True
            return fields[0] * 60, False
    raise ValueError(f"is not a time; Slurm's forms are {_FORMS}")


def _check(**fields: tuple[int, int]) -> None:
    for name, (found, most) in fields.items():
        if found > most:
            raise ValueError(
                f"has {found} for its {name} (at most {most}); Slurm's forms are {_FORMS}"
            )


def _spell(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    parts = [(days, "day" if days == 1 else "days"), (hour, "h"), (minute, "min"), (second, "s")]
    return " ".join(f"{amount} {unit}" for amount, unit in parts if amount)
