"""Whether a job could ever start, before it is queued: Slurm lets much wait for ever."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from launcher.request import SubmitRequest, render
from launcher.slurm import Slurm
from launcher.slurm_answers import NodeKind, Partition
from launcher.wording import clock_time
from trainer.spec.errors import SchedulerRejected

#: What sbatch says of a request that may be carried out later as it is.
_FOR_NOW = ("Required node not available", "Requested nodes are busy")
#: What it says of an impossible one, and of any while nodes are out of service.
_UNAVAILABLE = "Requested node configuration is not available"
#: What a refusal is about, by what sbatch says, and what helps.
_FIXES = {
    "account": ("account", "`sacctmgr show assoc user=$USER` lists yours"),
    "qos": ("qos", "`sacctmgr show qos` lists them"),
    "generic resource": ("gpu_request", "gpus-per-node, gres and none are the ways to ask"),
    "feature": ("constraint", "`sinfo -o '%N %f'` lists the nodes' features"),
    "reservation": ("reservation", "`scontrol show reservation` lists them"),
    "node name": ("nodelist", "`sinfo -N` lists the nodes"),
    "partition": ("partition", "`sinfo -s` lists them"),
}
_ESTIMATE = re.compile(r"Job \d+ to start at (\S+) using \d+ processors on nodes (\S+)")
_AT_ONCE = timedelta(seconds=90)


def check_feasible(
    request: SubmitRequest,
    slurm: Slurm,
    *,
    say: Callable[[str], None],
    save_s: float | None = None,
    now: datetime | None = None,
) -> None:
    """Refuse what this cluster can never run; say when the job may start, and what looks unwise.

    `save_s` is how long saving has taken this run so far, `now` the time on the controller's clock.

    Raises:
        SchedulerRejected: with limit and wish, a line each. SchedulerUnavailable: no answer.
    """
    partitions = slurm.partitions()
    default = slurm.default_partition() if request.partition is None else None
    names = request.partition.split(",") if request.partition else [default] if default else []
    faults: list[str] = []
    possible: list[Partition] = []
    for name in names:
        if (partition := partitions.get(name)) is None:
            known = ", ".join(sorted(partitions))
            faults.append(f"resources.partition={name}: there is none; use one of {known}")
            continue
        found = list(request_faults(request, partition, slurm.node_kinds(name)))
        faults += found
        possible += [] if found else [partition]
    unknown = [name for name in names if name not in partitions]
    if unknown or (names and not possible):
        raise SchedulerRejected("\n".join(faults))
    _ask_slurm(request, slurm, [p.name for p in possible], say, now or datetime.now())
    for partition in possible:
        # Where nothing is ever preempted there is no grace time to be short of.
        takes_away = partition.preempt_mode not in ("", "OFF")
        if save_s is not None and takes_away and partition.grace_time_s < save_s:
            say(
                f"warning: partition {partition.name} gives {partition.grace_time_s} s when it "
                f"takes nodes away, and saving has taken this run {save_s:.0f} s: a preemption "
                "then loses the steps since the last checkpoint; see checkpoint.save_interval"
            )


def request_faults(
    request: SubmitRequest, partition: Partition, kinds: Sequence[NodeKind]
) -> Iterator[str]:
    """What keeps a request from ever running in a partition with nodes of these kinds."""
    name = partition.name
    if partition.state != "UP":
        yield f"resources.partition={name}: it is {partition.state}, and starts no jobs"
    if partition.max_time is not None:
        limit_min = partition.max_time // timedelta(minutes=1)
        if request.time_limit_min > limit_min:
            yield (
                f"resources.time: {_minutes(request.time_limit_min)} asked for, partition {name} "
                f"allows {_minutes(limit_min)}"
            )
    nodes = int(request.nodes.partition("-")[0])
    most = partition.total_nodes
    if nodes > most:
        yield f"resources.nodes={nodes}: partition {name} has {_count(most, 'node')}"
    elif partition.max_nodes is not None and nodes > partition.max_nodes:
        yield (
            f"resources.nodes={nodes}: partition {name} allows "
            f"{_count(partition.max_nodes, 'node')} a job"
        )
    alone = list(_node_faults(request, name, kinds))
    yield from alone
    fitting = sum(kind.count for kind in kinds if not list(_node_faults(request, name, [kind])))
    if not alone and fitting < nodes <= most:
        yield (
            f"resources.nodes={nodes}: only {_count(fitting, 'node')} of partition {name} have the "
            "GPUs, CPUs and memory asked for"
        )


def _node_faults(
    request: SubmitRequest, partition: str, kinds: Sequence[NodeKind]
) -> Iterator[str]:
    """What is asked of each node, and none of these kinds has."""
    gpus = request.gpus_per_node or (request.gres or "").removeprefix("gpu:")
    if gpus:
        kind_of_gpu, _, number = gpus.rpartition(":")
        best = max((_gpus(kind.gpus, kind_of_gpu) for kind in kinds), default=0)
        if int(number) > best:
            named = f"{kind_of_gpu} GPUs" if kind_of_gpu else "GPUs"
            yield (
                f"resources.gpus_per_node={gpus}: the nodes of partition {partition} have "
                f"{best or 'no'} {named}"
            )
    cpus = request.ntasks_per_node * (request.cpus_per_task or 1)
    best = max((kind.cpus for kind in kinds), default=0)
    if cpus > best:
        yield (
            f"resources.cpus_per_task={request.cpus_per_task or 1} x {request.ntasks_per_node} "
            f"processes = {cpus} CPUs a node: the nodes of partition {partition} have {best}"
        )
    best = max((kind.memory_mb for kind in kinds), default=0)
    if (request.mem_gb or 0) * 1024 > best:
        yield (
            f"resources.mem_gb={request.mem_gb}: the nodes of partition {partition} have "
            f"{best // 1024}"
        )


def measured_save_s(events: Iterable[Mapping[str, Any]]) -> float | None:
    """How long it took the run, when last told to stop, until its checkpoint was complete."""
    told: tuple[object, datetime] | None = None
    taken: float | None = None
    for event in events:
        match event.get("event"):
            case "signal":
                told = (event.get("attempt"), datetime.fromisoformat(str(event["at"])))
            case "saved" if told is not None and told[0] in (None, event.get("attempt")):
                at = datetime.fromisoformat(str(event["at"]))
                taken, told = (at - told[1]).total_seconds(), None
            case _:
                pass
    return taken


def start_estimate(answer: str, now: datetime) -> str | None:
    """When and where a job could start, for people, from what sbatch --test-only says."""
    found = _ESTIMATE.search(answer)
    if found is None:
        return None
    start = datetime.fromisoformat(found[1])
    if start - now < _AT_ONCE:
        return f"could start at once, on {found[2]}"
    wait = clock_time((start - now).total_seconds())
    return f"may start at {start:%Y-%m-%d %H:%M}, in {wait}, on {found[2]}"


def _ask_slurm(
    request: SubmitRequest,
    slurm: Slurm,
    partitions: Sequence[str],
    say: Callable[[str], None],
    now: datetime,
) -> None:
    """Have Slurm judge what only it knows: accounts, QOS, features, reservations."""
    try:
        answer = slurm.test(render(request).encode())
    except SchedulerRejected as err:
        text = err.message.removeprefix("sbatch: ").removeprefix("allocation failure: ")
        passing = any(words in text for words in _FOR_NOW)
        if not passing and _UNAVAILABLE in text:
            passing = any(slurm.out_of_service(partition) for partition in partitions)
        if not passing:
            raise SchedulerRejected(*_refusal(request, text)) from err
        say(f"warning: the job will wait, as nodes are out of service; Slurm: {text}")
    else:
        if (estimate := start_estimate(answer, now)) is not None:
            say(f"Slurm: {estimate}")


def _refusal(request: SubmitRequest, text: str) -> tuple[str, str | None]:
    """Message and hint for a refusal by sbatch."""
    for words, (field, hint) in _FIXES.items():
        if words in text.lower():
            value = getattr(request, field, None)
            named = f"resources.{field}" + (f"={value}" if value else "")
            return f"{named}: Slurm refuses: {text}", hint
    return f"Slurm refuses the job: {text}", None


def _gpus(of_node: Mapping[str, int], kind: str) -> int:
    if not kind:
        return sum(of_node.values())
    return sum(number for name, number in of_node.items() if name.lower() == kind.lower())


def _minutes(minutes: int) -> str:
    return clock_time(60 * minutes).removesuffix(" 0 min").removesuffix(" 0 s")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
