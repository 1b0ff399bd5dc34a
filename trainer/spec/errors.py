"""Every error that vitra raises on purpose, in one tree.

An error says what is wrong (`message`) and, where there is one, the way out (`hint`). Its class
fixes the exit code of the command that meets it:

    VitraError                  1
      UsageError                2   a command line that cannot be carried out
      SpecError                 2   faults in a spec file or an override, all of them at once
      PlanError                 2   a batch equation that has no exact solution
      SchedulerError            3
        SchedulerUnavailable    3   cannot be asked; later it may
        SchedulerRejected       3
      NotFound                  4   no such run or checkpoint
      RunFailed                 5   the run itself ended badly
        RankMismatch            5   the world found is not the world planned
        DataError               5   a sample or data set that cannot be read
        NonFiniteLoss           5   never retried: the same samples give the same loss
      CheckpointError           6
        CorruptCheckpoint       6   bytes differ from their manifest
        IncompatibleCheckpoint  6   a good checkpoint of another model or optimizer
        Fenced                 93   a newer attempt owns the run: stop, do not requeue
        StorageError            6   a place that fails, or refuses
      SnapshotError             2
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class VitraError(Exception):
    """The base of the tree; the command line catches it once, at the top.

    Args:
        message: what is wrong, with the field or path and its value.
        hint: what to do about it; shown after the message.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageError(VitraError):
    """A command line that cannot be carried out."""

    exit_code = 2


class Fault(NamedTuple):
    """One thing wrong in a spec.

    `where` is `file:line:column` or `-o key`, `field` the dotted path of the field and `problem`
    the rest of the sentence, with the fix.
    """

    where: str
    field: str
    problem: str

    def __str__(self) -> str:
        if self.where == f"-o {self.field}":
            return f"{self.where}: {self.problem}"
        named = f"{self.field}: " if self.field else ""
        return f"{self.where}: {named}{self.problem}"


class SpecError(VitraError):
    """A spec that is refused; `faults` lists everything wrong with it, in file order."""

    exit_code = 2

    def __init__(self, faults: list[Fault]) -> None:
        assert faults, "a SpecError without a fault"
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class PlanError(VitraError):
    """No exact batch plan exists; the message names the fields and the nearest workable values."""

    exit_code = 2


class SnapshotError(VitraError):
    """The code to run could not be copied as it stands."""

    exit_code = 2


class SchedulerError(VitraError):
    """The scheduler refused, or cannot be reached."""

    exit_code = 3


class SchedulerUnavailable(SchedulerError):
    """No answer from the scheduler; the same call may succeed later."""


class SchedulerRejected(SchedulerError):
    """The scheduler answered no."""


class NotFound(VitraError):
    """No such run or checkpoint."""

    exit_code = 4


class RunFailed(VitraError):
    """The run itself ended badly."""

    exit_code = 5


class RankMismatch(RunFailed):
    """The world that a rank found is not the world of the plan."""


class DataError(RunFailed):
    """A data set or a sample that cannot be read; the message names the file, key or sample."""


class NonFiniteLoss(RunFailed):
    """Loss, gradient norm or a weight is not finite. Never retried: it would be so again."""


class CheckpointError(VitraError):
    """A checkpoint could not be written, found or read."""

    exit_code = 6


class CorruptCheckpoint(CheckpointError):
    """Bytes that differ from what their manifest promises."""


class IncompatibleCheckpoint(CheckpointError):
    """A good checkpoint, but of another model or optimizer."""


class StorageError(CheckpointError):
    """The storage failed or refused; the previous checkpoint stays valid."""


class Fenced(CheckpointError):
    """A newer attempt owns this run: whatever this process writes no longer counts."""

    exit_code = 93
