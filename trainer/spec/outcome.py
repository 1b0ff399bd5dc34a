"""How an attempt ended: what ranks report, what the supervisor concludes."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

#: A rank's exit code after it has saved because it was asked to stop ("please requeue").
EXIT_SAVED = 75
#: A rank's exit code when a newer attempt owns the run ("do not requeue").
EXIT_FENCED = 93


class Verdict(StrEnum):
    """The one cause by which an attempt ended."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    NODE_FAILURE = "node_failure"
    CANCELLED = "cancelled"
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"
    ERROR = "error"
    NO_PROGRESS = "no_progress"


class RunState(StrEnum):
    """Where a whole run stands."""

    QUEUED = "queued"
    RUNNING = "running"
    REQUEUED = "requeued"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class RankReport(BaseModel):
    """What a trainer process says of its own end (attempts/K/rank_R.report.json).

    A process killed outright writes none. `error` is the error's class name, `message` its one
    line; `last_step` the last finished optimizer step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    rank: int
    exit_code: int
    error: str | None = None
    message: str | None = None
    last_step: int | None = None


class RankExit(BaseModel):
    """How a trainer process ended, as its task saw it (attempts/K/rank_R.exit).

    Exactly one of `exit_code` and `signal` is set. `ended_at` is UTC seconds since the epoch.
    `out_of_memory`: the kernel killed it for lack of memory. `is_lost`: the task left no word, and
    all this is inferred; `not_started`: what was said then, where even the task never began.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    rank: int
    node: str
    exit_code: int | None = None
    signal: int | None = None
    ended_at: float
    out_of_memory: bool = False
    is_lost: bool = False
    not_started: str | None = None


class Outcome(BaseModel):
    """The supervisor's conclusion on one attempt (attempts/K/outcome.json)."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    attempt: int
    verdict: Verdict
    reason: str
    job_id: str | None = None
    exit_code: int | None = None
    failed_rank: int | None = None
    failed_node: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    started_at: str
    ended_at: str
