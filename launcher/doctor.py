"""Is this machine, its cluster and its storage ready for a run: each finding with its fix."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher.ask import ask_trainer
from launcher.container import container_of, refuse_container_here
from launcher.doctor_container import container_findings
from launcher.drafting import Draft
from launcher.environment import component_environment
from launcher.feasible import check_feasible, measured_save_s
from launcher.findings import Finding, Level, fault, ok, warning
from launcher.places import Here, Node, NotAnswered, Place
from launcher.registry import absolute, find_run
from launcher.request import build_request
from launcher.schedulers.ports import free_port
from launcher.slurm import Slurm
from launcher.submit import refuse_place
from trainer.spec.errors import (
    SchedulerError,
    SchedulerRejected,
    SchedulerUnavailable,
    StorageError,
    UsageError,
    VitraError,
)
from trainer.spec.rundir import read_lines

#: torch takes its time to load from a slow file system.
_TORCH_S = 300.0
_NODE_ANSWERS_S = 60.0
#: Beyond it, times in events of different hosts contradict each other.
_CLOCKS_AGREE_S = 2.0
#: With less, a run soon stops for lack of space.
LITTLE_SPACE = 2 << 30
_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct")
_WANDB_HOST = "api.wandb.ai"


def examine(
    draft: Draft | None, run_root: Path, slurm: Slurm, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Look at everything that a run relies on, one thing after the other.

    Args:
        draft: the spec that is to run; None: only what concerns every run is looked at.
        run_root: where runs live.
        environ: of the shell that submits.
    """
    spec = draft.loaded.spec if draft else None
    yield from torch_findings(draft, environ)
    yield from run_root_findings(run_root)
    yield from network_findings()
    if draft is not None:
        yield from checkpoint_findings(draft)
    if spec is not None and spec.tracking.wandb is not None:
        yield from wandb_findings(spec.tracking.wandb.mode, environ)
    yield from slurm_findings(draft, run_root, slurm)


def doctor_facts(findings: Sequence[Finding]) -> dict[str, Any]:
    """The facts of `vitra doctor --json`."""
    return {
        "ready": all(finding.level is not Level.FAULT for finding in findings),
        "findings": [
            {"check": f.check, "level": f.level.value, "text": f.text, "fix": f.fix}
            for f in findings
        ],
    }


def finding_lines(finding: Finding) -> list[str]:
    """A finding for people."""
    lines = [f"{finding.level.value:8} {finding.check}: {finding.text}"]
    return lines if finding.fix is None else [*lines, f"{'':8}   fix: {finding.fix}"]


def torch_findings(draft: Draft | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the trainer's packages load, and fit what the spec asks for."""
    spec = draft.loaded.spec if draft else None
    around = dict(environ) if spec is None else component_environment(environ, spec)
    try:
        about = ask_trainer("about", b"", environ=around, timeout_s=_TORCH_S, doing="loading torch")
    except VitraError as err:
        yield fault("torch", err, f"install vitra with torch for {sys.executable}")
        return
    versions = f"Python {about['python']}, torch {about['torch']}"
    if spec is not None and container_of(spec) is not None:
        yield ok("torch", f"{versions} here; ranks have their image's")
    elif about["cuda"]:
        gpus = f"CUDA {about['cuda']}, NCCL {about['nccl']}, {about['gpus']} GPUs here"
        yield ok("torch", f"{versions}, {gpus}")
    elif spec is not None and spec.resources.gpu_count and about["cuda_build"]:
        yield ok("torch", f"{versions}, CUDA {about['cuda_build']}; no GPU on this host")
    elif spec is not None and spec.resources.gpu_count:
        err = UsageError(f"{versions} is built for CPUs, and the spec asks for GPUs")
        yield fault("torch", err, "install a CUDA build of torch, or set gpus_per_node: 0")
    else:
        yield ok("torch", f"{versions}, on CPUs with gloo")


def run_root_findings(run_root: Path) -> Iterator[Finding]:
    """Whether runs can be written where they are to live, from this host."""
    name = _new_file(run_root)
    there = name.parent
    try:
        name.write_bytes(b"x")
        name.unlink()
    except OSError as err:
        problem = StorageError(f"{there}: cannot be written: {err.strerror}")
        yield fault("run root", problem, "choose another: --run-root, run_root, $VITRA_RUN_ROOT")
        return
    free = shutil.disk_usage(there).free
    text = f"{run_root} can be written, {free / 2**30:.1f} GiB are free"
    if free < LITTLE_SPACE:
        fix = "make room, or choose another run root"
        yield warning("disk", f"{run_root}: only {free / 2**30:.1f} GiB are free", fix)
    elif there.stat().st_mode & 0o002 and not there.stat().st_mode & 0o1000:
        yield warning(
            "run root",
            f"{text}; but everybody may remove what is in {there}",
            f"chmod o-w {there}, or its sticky bit",
        )
    else:
        yield ok("run root", text)


def _new_file(run_root: Path) -> Path:
    """A name for a file to try the run root out with; in what there is above it so far."""
    there = next(path for path in (run_root, *run_root.parents) if path.exists())
    return there / f".vitra-doctor-{secrets.token_hex(8)}"


def network_findings() -> Iterator[Finding]:
    """Whether ranks on this host find a port, and this host an address."""
    try:
        port = free_port()
    except VitraError as err:
        yield fault("network", err, "free one: `ss -ltn` shows who listens")
        return
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as err:
        yield warning(
            "network",
            f"this host's name, {host}, has no address: {err}",
            "name it in DNS or /etc/hosts; ranks on several hosts meet by it",
        )
        return
    yield ok("network", f"{host} is {address}, and ports are free to meet at")


def checkpoint_findings(draft: Draft) -> Iterator[Finding]:
    """Whether the checkpoint place can be used, and is this run's."""
    plan = draft.plan
    try:
        refuse_place(plan)
    except VitraError as err:
        yield fault("checkpoints", err)
        return
    # The run id is not known before submit.
    place = plan.checkpoint_uri.replace(plan.run_id, "RUN_ID")
    yield ok("checkpoints", f"{place} was written, read back, listed and deleted, conditionally")


def wandb_findings(mode: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether metrics will reach Weights & Biases; no run depends on that."""
    if find_spec("wandb") is None:
        yield warning(
            "wandb",
            "the package is not installed: the run trains, and nothing is sent",
            f"{sys.executable} -m pip install wandb",
        )
    elif mode == "online" and not (environ.get("WANDB_API_KEY") or _in_netrc(environ)):
        yield warning(
            "wandb",
            f"no API key: neither WANDB_API_KEY nor {_WANDB_HOST} in ~/.netrc",
            "`wandb login`, or resources.env: {WANDB_API_KEY: null} and the variable",
        )
    else:
        yield ok("wandb", f"installed, mode {mode}")


def _in_netrc(environ: Mapping[str, str]) -> bool:
    import netrc

    path = Path(environ.get("NETRC") or Path(environ.get("HOME", "/")) / ".netrc")
    try:
        return netrc.netrc(str(path)).authenticators(_WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def slurm_findings(draft: Draft | None, run_root: Path, slurm: Slurm) -> Iterator[Finding]:
    """Whether the cluster can be asked, can run the spec, and sees what this host sees."""
    path = slurm.job_environ.get("PATH", os.defpath)
    missing = [name for name in _COMMANDS if shutil.which(name, path=path) is None]
    if len(missing) == len(_COMMANDS):
        yield warning(
            "slurm",
            "none of Slurm's commands is here: only --local can run",
            "submit from a machine of the cluster, or add the commands to PATH",
        )
        if draft is not None:
            try:
                refuse_container_here(draft.loaded.spec)
            except UsageError as err:
                yield fault("container", err)
        return
    if missing:
        err = SchedulerUnavailable(f"not in PATH: {', '.join(missing)}")
        yield fault("slurm", err, "install the whole of Slurm's client commands here")
        return
    try:
        yield ok("slurm", f"{slurm.version()}, its controller answers: {slurm.ping()}")
    except SchedulerError as err:
        yield fault("slurm", err, "`scontrol ping` shows it; see SLURM_CONF and the controller")
        return
    try:
        slurm.history("1")
        yield ok("accounting", "sacct answers")
    except SchedulerError as err:
        yield warning(
            "accounting",
            f"{err.message}: `status` knows of jobs only while the controller does, and a "
            "preemption in a partition with PreemptMode=CANCEL looks like a scancel",
            "have slurmdbd run, with AccountingStorageType=accounting_storage/slurmdbd",
        )
    try:
        if draft is not None:
            yield from _cluster(draft, slurm)
        node = Node(slurm, draft.plan.spec.resources if draft else None)
        answers = yield from _node(node, run_root)
        if draft is not None and answers is not None:
            place: Place = node if answers else Here(slurm.job_environ)
            yield from container_findings(draft.plan, place, slurm.job_environ, absolute("."))
    except SchedulerError as err:
        yield fault("slurm", err)


def _cluster(draft: Draft, slurm: Slurm) -> Iterator[Finding]:
    """What the spec asks for, held against the cluster."""
    request = build_request(draft.plan, python=sys.executable)
    said: list[str] = []
    try:
        check_feasible(request, slurm, say=said.append, save_s=_save_s(draft))
    except SchedulerRejected as err:
        for line in err.message.splitlines():
            yield fault("request", SchedulerRejected(line, err.hint))
        return
    for line in said:
        text = line.removeprefix("warning: ")
        yield ok("request", text) if text == line else warning("request", text, "see `sinfo`")
    partitions = slurm.partitions()
    chosen = request.partition or slurm.default_partition() or ""
    for name in filter(None, chosen.split(",")):
        partition = partitions[name]
        if partition.preempt_mode in ("", "OFF"):
            yield ok("preemption", f"partition {name}: no job is preempted")
            continue
        text = (
            f"partition {name}: jobs are preempted ({partition.preempt_mode}) with "
            f"{partition.grace_time_s} s of grace"
        )
        if partition.grace_time_s:
            yield ok("preemption", text)
        else:
            yield warning(
                "preemption",
                f"{text}: each preemption may lose the steps since the last checkpoint",
                "a smaller checkpoint.save_interval; or have the site set GraceTime",
            )


def _save_s(draft: Draft) -> float | None:
    """How long saving took the newest run of the spec's name, where there is one."""
    try:
        newest = find_run(draft.loaded.spec.name, draft.run_root)
    except VitraError:
        return None
    return measured_save_s(read_lines(newest.events))


def _node(node: Node, run_root: Path) -> Generator[Finding, None, bool | None]:
    """What a compute node sees: the run root, this Python, the time.

    Returns whether one answers; None where that is what has to be mended first.
    """
    marker = _new_file(run_root)
    there = marker.parent
    try:
        marker.write_text(marker.name)
    except OSError:
        return None  # told already
    began = time.time()
    text = ""
    try:
        text = node.run(
            [sys.executable, "-P", "-m", "launcher.node", str(marker)], timeout_s=_NODE_ANSWERS_S
        )
        seen = json.loads(text)
    except NotAnswered as err:
        yield warning(
            "node",
            f"what compute nodes see could not be looked at: {err.message}",
            "try again when one is free",
        )
        return False
    except (SchedulerError, ValueError) as err:
        message = err.message if isinstance(err, SchedulerError) else f"it printed {text!r}"
        yield fault(
            "node",
            SchedulerUnavailable(f"{sys.executable} -m launcher.node fails on a node: {message}"),
            "install vitra where compute nodes have it too, at the same path",
        )
        return None
    finally:
        marker.unlink(missing_ok=True)
    host = seen["host"]
    if seen["read"] != marker.name or not seen["written"]:
        problem = seen["problem"] or "it is another directory there"
        yield fault(
            "node",
            StorageError(f"{there} as {host} sees it: {problem}"),
            "choose a run root that all nodes share and can write",
        )
    else:
        yield ok("node", f"{host} sees {there}, can write it, and has this Python")
    ahead_s = max(began - seen["time"], seen["time"] - time.time(), 0.0)
    if ahead_s > _CLOCKS_AGREE_S:
        yield warning(
            "clock",
            f"the clock of {host} and that of this host are {math.ceil(ahead_s)} s apart",
            "have chrony or ntpd set them; durations are right all the same, times of day are not",
        )
    else:
        yield ok("clock", f"{host} has the same time as this host")
    return True


def first_exit_code(findings: Sequence[Finding]) -> int:
    """Of the first fault; 0 without one."""
    return next((f.exit_code for f in findings if f.level is Level.FAULT), 0)
