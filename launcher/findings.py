"""A finding of `vitra doctor`: what was looked at, how it is, and what helps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainer.spec.errors import VitraError


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    #: A run can start, and something will be worse than it could be, or is not known.
    WARNING = "warning"
    #: A run cannot start, or not go on after an interruption.
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """What was looked at, what is the matter, and what helps. `exit_code` is that of a fault."""

    check: str
    level: Level
    text: str
    fix: str | None = None
    exit_code: int = 0


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, text)


def warning(check: str, text: str, fix: str) -> Finding:
    """A run can start all the same, or nobody knows."""
    return Finding(check, Level.WARNING, text, fix)


def fault(check: str, err: VitraError, fix: str | None = None) -> Finding:
    """What a run would meet as `err`; `fix` counts for more than the error's own hint."""
    return Finding(check, Level.FAULT, err.message, fix or err.hint, err.exit_code)
