"""What `vitra doctor` finds of `resources.container`, where ranks will meet it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from pydantic import BaseModel

from launcher import inside
from launcher.container import (
    CHECKPOINT_PLACE,
    RUN_ROOT,
    WORKING_DIRECTORY,
    all_mounts,
    container_command,
    container_of,
    needed_mounts,
)
from launcher.container_look import Request, Seen, is_fetched
from launcher.environment import importing, rank_environment
from launcher.findings import Finding, Level, fault, ok, warning
from launcher.places import NotAnswered, Place
from trainer.spec.container import ContainerSpec, Mount
from trainer.spec.errors import SchedulerUnavailable, StorageError, UsageError, VitraError
from trainer.spec.fields import one_line
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir

_LOOKS_WITHIN_S = 60.0
#: torch takes its time to load from a slow file system; less than srun's own limit.
INSIDE_WITHIN_S = 100.0
#: Characters of what a runtime or Python has said.
_SHOWN = 300
_AGAIN = "try again when one is free"
#: What every rank imports; what else one does, by what the spec asks for.
_IMPORTED = ("torch", "numpy", "pydantic", "safetensors", "xxhash")
_FOR_DEMONSTRATIONS = ("av", "pyarrow")
_FOR_S3 = ("fsspec", "s3fs")
_INSTALL = {
    "pyxis": "have the site install pyxis (and enroot), or use another runtime",
    "apptainer": "have the site install Apptainer, or use another runtime",
    "charliecloud": "have the site install Charliecloud, or use another runtime",
}
_MAKE = {
    "pyxis": "enroot import -o {image} docker://NAME:TAG",
    "apptainer": "apptainer build {image} docker://NAME:TAG",
    "charliecloud": "ch-convert -i podman -o dir NAME {image}",
}
_FETCH_ONCE = {
    "pyxis": "fetch it once to a .sqsh file that all nodes see, and name that: enroot import -o "
    "FILE.sqsh docker://{image}",
    "apptainer": "pull it to a .sif file that all nodes see first, and name that: apptainer pull "
    "FILE.sif {image}",
}
_BUILD = "docker/README.md says what an image needs, and docker/Dockerfile makes one"


@dataclass(frozen=True)
class _Run:
    """What is looked at: a plan's container with all that is mounted."""

    plan: Plan
    container: ContainerSpec
    mounts: Sequence[Mount]
    #: What a rank needs, at paths that it has outside as well, and what that is.
    needed: Mapping[str, str]
    working_dir: Path
    #: What a rank's task finds around it, outside.
    environ: Mapping[str, str]


class _Told(BaseModel):
    """What `launcher.inside` says in the image."""

    python: str
    versions: dict[str, str]
    problems: dict[str, str]
    cuda: str | None
    unread: list[str]
    unwritten: list[str]


def container_findings(
    plan: Plan, place: Place, environ: Mapping[str, str], working_dir: Path
) -> Iterator[Finding]:
    """Whether ranks can be started in the plan's container, and find there what they need.

    Nothing, where the plan has none. A fault that only this host has is a warning: nodes may have
    what it has not.

    Args:
        place: where to look; a compute node, if one can be asked.
        environ: what a job inherits from the shell that submits it.
        working_dir: where the run is submitted from.
    """
    container = container_of(plan.spec)
    if container is None:
        return
    if not place.is_node:
        yield warning(
            "container",
            "no compute node could be asked: what follows is how this host sees it, and whether "
            "nodes do was not looked at",
            _AGAIN,
        )
    needed = needed_mounts(container, plan, working_dir)
    around = rank_environment(environ, plan, RunDir(Path(plan.run_dir)), 0)
    present = around.get("PYTHONPATH", "").split(os.pathsep)
    run = _Run(
        plan,
        container,
        all_mounts(container, plan, working_dir),
        {mount.source: what for mount, what in needed},
        working_dir,
        importing(around, (entry for entry in present if Path(entry).is_absolute())),
    )
    for finding in _findings(run, place):
        if finding.level is Level.FAULT and not place.is_node:
            finding = replace(finding, level=Level.WARNING, exit_code=0)
        yield finding


def _findings(run: _Run, place: Place) -> Iterator[Finding]:
    request = Request(
        container=run.container,
        mounts=tuple(run.mounts),
        paths=tuple(sorted({*run.needed, *(mount.source for mount in run.mounts)})),
        search=run.environ.get("PATH", os.defpath),
    )
    try:
        text = place.run(
            [sys.executable, "-P", "-m", "launcher.container_look", request.model_dump_json()],
            timeout_s=_LOOKS_WITHIN_S,
        )
        seen = Seen.model_validate_json(text.strip().rpartition("\n")[2])
    except NotAnswered as err:
        yield warning("container", f"it could not be looked at: {err.message}", _AGAIN)
        return
    except (VitraError, ValueError) as err:
        said = one_line(str(err))[:_SHOWN]
        problem = SchedulerUnavailable(f"launcher.container_look fails on a node: {said}")
        yield fault("container", problem, "see that nodes have this vitra, at the same path")
        return
    runtime, image = _runtime(run, seen), _image(run, seen)
    yield runtime
    yield image
    yield from _mounts(run, seen)
    if Level.FAULT in (runtime.level, image.level) or seen.cannot_make:
        return
    if runtime.level is Level.WARNING:
        yield warning(
            "in the image",
            f"what is in {run.container.image} was not looked at",
            "`vitra doctor` looks where the runtime is there without resources.setup",
        )
    elif not is_fetched(run.container):
        yield from _inside(run, seen, place)


def _runtime(run: _Run, seen: Seen) -> Finding:
    """Whether the runtime can be called where ranks are started."""
    runtime = run.container.runtime
    lacks: str | None = None
    if runtime == "pyxis":
        if seen.command is None or "--container-image" not in seen.said:
            lacks = f"srun on {seen.host} has no --container-image, which pyxis gives it"
        text = f"srun on {seen.host} has the options of pyxis"
    else:
        name = {"apptainer": "apptainer", "charliecloud": "ch-run"}[runtime]
        if seen.command is None:
            lacks = f"{name} is not in PATH on {seen.host}"
        version = (seen.said.splitlines() or [""])[0].removeprefix(f"{name} version ")
        text = f"{seen.command} on {seen.host}, version {version}"
    if lacks is None:
        return ok("container", text)
    text = f"resources.container.runtime={runtime}: {lacks}"
    if run.plan.spec.resources.setup:
        # A module that is loaded there, for example.
        return warning(
            "container",
            f"{text}, before the lines of resources.setup, which were not run",
            "see that those lines bring it",
        )
    return fault("container", SchedulerUnavailable(text), _INSTALL[runtime])


def _image(run: _Run, seen: Seen) -> Finding:
    container = run.container
    if is_fetched(container):
        return warning(
            "image",
            f"{container.image} is fetched by {container.runtime} on every node at every start, "
            "and after each preemption; what is in it was not looked at",
            _FETCH_ONCE[container.runtime].format(image=container.image.replace("#", "/")),
        )
    if seen.problem is None:
        return ok("image", f"{seen.host} sees {container.image}, and can read it")
    err = UsageError(
        f"resources.container.image: {container.image}, as {seen.host} sees it, {seen.problem}"
    )
    return fault("image", err, f"make it: {_MAKE[container.runtime].format(image=container.image)}")


def _mounts(run: _Run, seen: Seen) -> Iterator[Finding]:
    is_well = True
    for path, problem in sorted(seen.missing.items()):
        what = run.needed.get(path, "resources.container.mounts")
        if what == RUN_ROOT or (what == CHECKPOINT_PLACE and not Path(path).exists()):
            # Looked at already; or made when the run begins.
            continue
        is_well = False
        text = f"{what}: {path}, as {seen.host} sees it, {problem}"
        if what == WORKING_DIRECTORY:
            yield warning(
                "mounts", f"{text}; ranks start in the run directory", "submit from a shared one"
            )
        else:
            kind = StorageError if what == CHECKPOINT_PLACE else UsageError
            yield fault("mounts", kind(text), "name what all nodes share, and you may read")
    if seen.cannot_make is not None and seen.problem is None:
        is_well = False
        message, hint = seen.cannot_make
        yield fault("mounts", UsageError(message, hint))
    if is_well:
        shown = ", ".join(mount.source for mount in run.mounts)
        yield ok("mounts", f"{seen.host} sees what is mounted: {shown}")


def _inside(run: _Run, seen: Seen, place: Place) -> Iterator[Finding]:
    """What a task sees, started as a rank's task is, but for what a run has yet to make."""
    check, container = "in the image", run.container
    usable = [m for m in run.mounts if m.source not in seen.missing and m.target not in seen.unmade]
    imported = run.environ.get("PYTHONPATH", "").split(os.pathsep)
    hidden = [m.target for m in container.parsed_mounts if m.target in seen.unmade]
    hidden += [e for e in imported if _reaches(e, run.mounts) and not _reaches(e, usable)]
    if hidden:
        yield warning(
            check,
            f"what is in {container.image} was not looked at: {hidden[0]} has no place in it yet, "
            "which the first start of a run makes",
            f"look again after that, or after mkdir -p {container.image}{hidden[0]}",
        )
        return
    there = [path for path in run.needed if _reaches(path, usable) and path not in seen.missing]
    command = container_command(
        container,
        run.plan,
        RunDir(Path(run.plan.run_dir)),
        run.working_dir if str(run.working_dir) in there else Path("/"),
        usable,
        run.environ,
    )
    wanted = {
        "import": _imports(run.plan),
        "read": list(dict.fromkeys((*there, *(mount.target for mount in usable)))),
        "write": [path for path in there if run.needed[path] in (RUN_ROOT, CHECKPOINT_PLACE)],
    }
    try:
        text = place.run(
            [*command.words, "-P", "-c", Path(inside.__file__).read_text(), json.dumps(wanted)],
            options=command.options,
            environ=command.environ,
            timeout_s=INSIDE_WITHIN_S,
        )
        told = _Told.model_validate_json(text.strip().rpartition("\n")[2])
    except NotAnswered as err:
        text = f"what is in {container.image} could not be looked at: {err.message}"
        yield warning(check, text, "try again; or run a `python3` in it by hand")
        return
    except ValueError:
        err = UsageError(f"resources.container.image: python3 in {container.image} gave no answer")
        yield fault(check, err, _BUILD)
        return
    except VitraError as err:
        if "unrecognized option" in err.message:
            text = f"what is in {container.image} could not be looked at from here: {err.message}"
            yield warning(check, text, "run doctor on a host whose srun has pyxis, too")
            return
        message = f"resources.container.image: python3 does not start in {container.image}: "
        said = one_line(err.message)[:_SHOWN]
        yield fault(check, UsageError(f"{message}{said}"), f"it has to be 3.11+; {_BUILD}")
        return
    yield from _told(run, told)


def _told(run: _Run, told: _Told) -> Iterator[Finding]:
    """What a task in the image has said of itself."""
    check, image = "in the image", run.container.image
    versions = told.versions
    faults: list[Finding] = []
    if problems := told.problems:
        err = UsageError(
            f"resources.container.image: {image} has no {', '.join(problems)} that a rank could "
            f"import: {one_line(next(iter(problems.values())))[:_SHOWN]}"
        )
        faults.append(fault(check, err, _BUILD))
    for paths, doing in ((told.unread, "read"), (told.unwritten, "written to")):
        faults += [
            fault(
                check,
                UsageError(f"resources.container.mounts: {path} cannot be {doing} in the image"),
                "see what the runtime's settings let be mounted, and as whom it runs ranks",
            )
            for path in paths
        ]
    if run.plan.spec.resources.gpu_count and "torch" in versions and not told.cuda:
        err = UsageError(
            f"torch {versions['torch']} in {image} is built for CPUs, and the spec asks for GPUs"
        )
        yield fault(check, err, "build the image with CUDA=1, or set gpus_per_node: 0")
        return
    yield from faults
    if faults:
        return
    others = [
        f"{name} {theirs} there and {ours} here"
        for name, theirs in versions.items()
        if _public(theirs) != _public(ours := _version_here(name))
    ]
    if others:
        text = f"{image} has other versions than your code is tried out with at submit"
        fix = "build it with the versions that you submit with"
        yield warning(check, f"{text}: {', '.join(others)}", fix)
        return
    text = f"Python {told.python}, torch {versions['torch']}; vitra itself comes with the run"
    yield ok(check, text)


def _imports(plan: Plan) -> list[str]:
    packages = [*_IMPORTED]
    if plan.spec.data.kind == "lerobot":
        packages += _FOR_DEMONSTRATIONS
    if plan.checkpoint_uri.startswith("s3://"):
        packages += _FOR_S3
    return packages


def _reaches(path: str, mounts: Sequence[Mount]) -> bool:
    """Whether a path outside is seen at the same path inside."""
    around = [m for m in mounts if PurePosixPath(path).is_relative_to(m.target)]
    nearest = max(around, key=lambda m: len(m.target), default=None)
    return nearest is not None and nearest.source == nearest.target


def _version_here(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _public(version: str) -> str:
    """A version less what tells builds of it apart, as in 2.6.0+cpu."""
    return version.partition("+")[0]
