"""What Slurm's commands print, as values. Pure functions of text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:]*)=")

#: States of a job that is in the queue or on its nodes; every other is an end.
LIVE_STATES = frozenset(
    (
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "SUSPENDED",
        "STOPPED",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    )
)


@dataclass(frozen=True)
class Job:
    """A job as the controller sees it now.

    `restarts` counts its requeues; `end_time` is when its time limit, or a preemption's grace, ends
    it, `start_time` when it started or may start. Times are the controller's local time; None where
    it gives none. `reason` is why it waits, None where there is no reason.
    """

    job_id: str
    state: str
    name: str = ""
    reason: str | None = None
    comment: str = ""
    submit_time: datetime | None = None
    restarts: int = 0
    requeue: bool = True
    start_time: datetime | None = None
    end_time: datetime | None = None
    preempt_time: datetime | None = None
    nodes: str = ""

    @property
    def is_live(self) -> bool:
        """Whether it is not over: it waits, has nodes, or is about to leave them."""
        return self.state in LIVE_STATES

    @property
    def is_waiting(self) -> bool:
        """In the queue, and on no node."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")


@dataclass(frozen=True)
class PastLife:
    """One row of the accounting: a life of a job, from a start to its end or requeue.

    `state` is Slurm's word without what follows it, `by` the uid that cancelled it.
    """

    job_id: str
    state: str
    by: str | None
    exit_code: str
    submitted_at: str
    ended_at: str
    name: str
    nodes: str


@dataclass(frozen=True)
class Partition:
    """A partition as `scontrol show partition` has it; None means that there is no limit."""

    name: str
    state: str
    max_time: timedelta | None
    max_nodes: int | None
    total_nodes: int
    grace_time_s: int
    preempt_mode: str
    nodes: str


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one make in a partition."""

    count: int
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]


def queued_jobs(text: str) -> list[Job]:
    """The jobs that `Slurm.jobs` has asked squeue for."""
    jobs: list[Job] = []
    for line in text.splitlines():
        # The last column is free text.
        words = [word.strip() for word in line.split("|", 7)]
        if len(words) == 8:
            job_id, state, start, nodes, reason, submitted, name, comment = words
            jobs.append(
                Job(
                    job_id=job_id,
                    state=state,
                    name=name,
                    reason=_or_none(reason),
                    comment=_or_none(comment) or "",
                    submit_time=_moment(submitted),
                    start_time=_moment(start),
                    nodes=_or_none(nodes) or "",
                )
            )
    return jobs


def past_lives(text: str) -> list[PastLife]:
    """The rows that `Slurm.history` has asked sacct for."""
    lives: list[PastLife] = []
    for line in text.splitlines():
        words = line.split("|", 6)
        if len(words) == 7:
            state, _, by = words[1].partition(" by ")
            lives.append(
                PastLife(
                    job_id=words[0],
                    state=state,
                    by=by or None,
                    exit_code=words[2],
                    submitted_at=words[3],
                    ended_at=words[4],
                    nodes=words[5],
                    name=words[6],
                )
            )
    return lives


def node_kinds(text: str) -> list[NodeKind]:
    """The kinds of nodes that `Slurm.node_kinds` has asked sinfo for."""
    kinds: list[NodeKind] = []
    for line in text.splitlines():
        words = line.strip().split("|", 3)
        if len(words) == 4:
            count, cpus, memory, gres = words
            kinds.append(NodeKind(int(count), number_of(cpus), number_of(memory), _gpus(gres)))
    return kinds


def fields(line: str) -> dict[str, str]:
    """What a line of `scontrol -o` says: NAME=VALUE, where a value may hold spaces."""
    found = list(_FIELD.finditer(line))
    ends = [*(match.start() for match in found[1:]), len(line)]
    facts: dict[str, str] = {}
    for match, end in zip(found, ends, strict=True):
        # The first one counts: what follows may be a user's text that looks like a field.
        facts.setdefault(match[1], line[match.end() : end].strip())
    return facts


def job_of(facts: Mapping[str, str]) -> Job:
    """A job as `scontrol show job` describes it."""
    return Job(
        job_id=facts.get("JobId", ""),
        state=facts.get("JobState", ""),
        name=facts.get("JobName", ""),
        submit_time=_moment(facts.get("SubmitTime", "")),
        reason=_or_none(facts.get("Reason", "")),
        comment=_or_none(facts.get("Comment", "")) or "",
        restarts=number_of(facts.get("Restarts", "0")),
        requeue=facts.get("Requeue", "1") != "0",
        start_time=_moment(facts.get("StartTime", "")),
        end_time=_moment(facts.get("EndTime", "")),
        preempt_time=_moment(facts.get("PreemptTime", "")),
        nodes=_or_none(facts.get("NodeList", "")) or "",
    )


def partition_of(facts: Mapping[str, str]) -> Partition:
    """A partition as `scontrol show partition` describes it."""
    most = facts.get("MaxNodes", "UNLIMITED")
    return Partition(
        name=facts.get("PartitionName", ""),
        state=facts.get("State", ""),
        max_time=limit(facts.get("MaxTime", "UNLIMITED")),
        max_nodes=int(most) if most.isdigit() else None,
        total_nodes=number_of(facts.get("TotalNodes", "0")),
        grace_time_s=number_of(facts.get("GraceTime", "0")),
        preempt_mode=facts.get("PreemptMode", ""),
        nodes=facts.get("Nodes", ""),
    )


def limit(text: str) -> timedelta | None:
    """A time limit in Slurm's form, [days-]hours:minutes:seconds; None for no limit."""
    days, dash, rest = text.partition("-")
    if not dash:
        days, rest = "0", text
    numbers = rest.split(":")
    if not days.isdigit() or not all(number.isdigit() for number in numbers):
        return None
    if dash:
        numbers += ["0"] * (3 - len(numbers))
    hours, minutes, seconds = [0] * (3 - len(numbers)) + [int(number) for number in numbers]
    return timedelta(days=int(days), hours=hours, minutes=minutes, seconds=seconds)


def _gpus(gres: str) -> dict[str, int]:
    """GPUs of a node by type, "" where it has none; from such as gpu:a100:8(S:0-1),shard:16."""
    found: dict[str, int] = {}
    for one in re.sub(r"\([^)]*\)", "", gres).split(","):
        parts = one.split(":")
        if parts[0] == "gpu" and parts[-1].isdigit():
            kind = parts[1] if len(parts) == 3 else ""
            found[kind] = found.get(kind, 0) + int(parts[-1])
    return found


def number_of(text: str) -> int:
    """The number that a text begins with, as in "64+"."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _or_none(text: str) -> str | None:
    return None if text in ("", "(null)", "None", "N/A", "n/a", "Unknown") else text
