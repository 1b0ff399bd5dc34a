"""`resources.container`: what of the host a rank sees inside, and how each runtime is called.

The supervisor stays outside, where Slurm's commands are; srun starts each rank's task inside. The
rank finds what it works with at the paths that it has outside: nothing is translated.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from trainer.spec.container import SYSTEM_DIRECTORIES, ContainerSpec, Mount, mount_path_problem
from trainer.spec.errors import UsageError
from trainer.spec.plan import Plan
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir
from trainer.spec.safety import text_problem

#: The image's own. Nothing of the host's Python, whose files the image does not have.
_PYTHON = "python3"
#: What `needed_mounts` calls some of what a rank needs.
RUN_ROOT, CHECKPOINT_PLACE = "the run root", "the checkpoint place"
WORKING_DIRECTORY = "the working directory"
#: Of the host's Python, or the user's own packages for it.
_NOT_INSIDE = ("PYTHONHOME", "PYTHONUSERBASE", "VIRTUAL_ENV", "CONDA_PREFIX")


class Command(NamedTuple):
    """How srun starts tasks: more options of its own, the words before the task's, variables."""

    options: tuple[str, ...]
    words: tuple[str, ...]
    environ: Mapping[str, str]


def container_of(spec: RunSpec) -> ContainerSpec | None:
    """The container of a run's processes; None where they have none."""
    container = spec.resources.container
    return None if container is None or container.runtime == "none" else container


def refuse_container_here(spec: RunSpec) -> None:
    """Raises UsageError for a run in a container, which only Slurm can start."""
    if (container := container_of(spec)) is not None:
        raise UsageError(
            f"resources.container: --local starts no containers (runtime {container.runtime})",
            "add -o resources.container.runtime=none to run with this machine's own Python",
        )


def check_container(plan: Plan, working_dir: Path) -> None:
    """Raises UsageError if what a run's ranks need cannot be had in its container."""
    if (container := container_of(plan.spec)) is not None:
        all_mounts(container, plan, working_dir)


def check_resume_inside(plan: Plan, run_dir: RunDir, working_dir: Path) -> None:
    """Raises UsageError if a run that there is already cannot go on in its plan's container."""
    from launcher.snapshot import has_own_vitra

    check_container(plan, working_dir)
    if container_of(plan.spec) is not None and not has_own_vitra(run_dir.code):
        raise UsageError(
            "resources.container: the run has no copy of vitra for ranks in an image, since it was "
            "submitted without one",
            "submit a new run, with this run's last checkpoint as checkpoint.init_from",
        )


def all_mounts(container: ContainerSpec, plan: Plan, working_dir: Path) -> list[Mount]:
    """The user's mounts and those that no run can do without, outer ones first.

    The run root, and not only the run's own directory, so that runs that share an image have the
    same mounts. What lies within another mount at its own path is there already.

    Raises:
        UsageError: one cannot be mounted, or the user has mounted something else in its place.
    """
    chosen = list(container.parsed_mounts)
    needed = needed_mounts(container, plan, working_dir)
    for mount, what in sorted(needed, key=lambda pair: len(PurePosixPath(pair[0].target).parts)):
        path = mount.target
        if path in SYSTEM_DIRECTORIES:
            raise UsageError(
                f"{what} is {path}, which cannot be mounted into a container: it would hide the "
                "image's own",
                "choose another",
            )
        if problem := text_problem(path) or mount_path_problem(path):
            raise UsageError(f"{what}, {path}, cannot be mounted: {problem}", "choose another")
        around = [m for m in chosen if PurePosixPath(path).is_relative_to(m.target)]
        nearest = max(around, key=lambda m: len(m.target), default=None)
        is_there = nearest is not None and nearest.source == nearest.target
        if nearest is not None and is_there and (mount.is_read_only or not nearest.is_read_only):
            continue
        if nearest is not None and nearest.target == path:
            raise UsageError(
                f"resources.container.mounts: {path} is {what}, and has to be mounted there as it "
                "is, to be written to",
                "leave that mount out",
            )
        chosen.append(mount)
    return sorted(chosen, key=lambda m: (len(PurePosixPath(m.target).parts), m.target))


def needed_mounts(
    container: ContainerSpec, plan: Plan, working_dir: Path
) -> list[tuple[Mount, str]]:
    """What every rank reads or writes, at its own path, and what that is."""
    spec = plan.spec
    run_root, working = str(Path(plan.run_dir).parent), str(working_dir)
    found = [(Mount(run_root, run_root), RUN_ROOT)]
    found.append((Mount(working, working), WORKING_DIRECTORY))
    place = plan.checkpoint_uri.removeprefix("file://")
    if place.startswith("/"):
        found.append((Mount(place, place), CHECKPOINT_PLACE))
    read: list[tuple[object, str]] = [(spec.checkpoint.init_from, "checkpoint.init_from")]
    if spec.data.kind == "lerobot":
        read.append((spec.data.options.get("root"), "data.options.root"))
    for value, what in read:
        if isinstance(value, str) and "://" not in value.removeprefix("file://"):
            path = (working_dir / Path(value.removeprefix("file://")).expanduser()).absolute()
            # A file is in its directory, where the mount point of a file would have to be a file.
            path = path if what.startswith("data") else path.parent
            # Charliecloud knows no read-only mounts.
            read_only = container.runtime != "charliecloud"
            found.append((Mount(str(path), str(path), read_only), what))
    if container.runtime == "charliecloud":
        # The host's /tmp is there, unasked.
        return [pair for pair in found if not PurePosixPath(pair[0].target).is_relative_to("/tmp")]
    return found


def container_command(
    container: ContainerSpec,
    plan: Plan,
    run_dir: RunDir,
    working_dir: Path,
    mounts: Sequence[Mount],
    environ: Mapping[str, str],
) -> Command:
    """How srun starts the tasks of ranks in the container; `environ` is what they shall find.

    What an image sets itself, each runtime lets win, or not, over what is handed in. So what the
    run depends on is named: the variables that vitra sets, and those of the spec. Those that tell a
    rank which one it is no image knows, and their values, which may be a secret, are on no command
    line.
    """
    inside = {name: value for name, value in environ.items() if name not in _NOT_INSIDE}
    # Packages in the user's home are for the host's Python.
    inside["PYTHONNOUSERSITE"] = "1"
    names = _insisted_on(plan, run_dir, inside)
    texts = [
        f"{mount.source}:{mount.target}{':ro' if mount.is_read_only else ''}" for mount in mounts
    ]
    match container.runtime:
        case "pyxis":
            options = (
                f"--container-image={container.image}",
                f"--container-mounts={','.join(texts)}",
                f"--container-workdir={working_dir}",
                f"--container-env={','.join(names)}",
                "--no-container-entrypoint",
            )
            return Command(options, (_PYTHON,), inside)
        case "apptainer":
            words = (
                *("apptainer", "exec"),
                *(("--nv",) if plan.spec.resources.gpu_count else ()),
                *(f"--bind={text}" for text in texts),
                f"--pwd={working_dir}",
                container.image,
            )
            insisted = {f"APPTAINERENV_{name}": inside[name] for name in names}
            return Command((), (*words, _PYTHON), inside | insisted)
        case "charliecloud":
            recorded = (name for name in names if plan.spec.resources.env.get(name, "") is not None)
            words = (
                # What the image sets, such as PATH; then ours, as they are.
                *("ch-run", "--set-env", "--env-no-expand"),
                *(f"--set-env={name}={inside[name]}" for name in recorded),
                *(f"--bind={text}" for text in texts),
                f"--cd={working_dir}",
                *(container.image, "--"),
            )
            # It refuses to start without.
            return Command((), (*words, _PYTHON), {"USER": "nobody"} | inside)
        case "none":
            raise AssertionError("no container")


def _insisted_on(plan: Plan, run_dir: RunDir, inside: Mapping[str, str]) -> list[str]:
    """The variables that must reach a rank even where its image sets others, in order."""
    from launcher.environment import rank_environment

    ours = rank_environment({}, plan, run_dir, 0)
    names = {name for name in ours if not name.startswith("VITRA_")}
    names |= {"PYTHONPATH", "PYTHONNOUSERSITE", *plan.spec.resources.env}
    return sorted(name for name in names if name in inside)


def make_mount_points(container: ContainerSpec, mounts: Sequence[Mount]) -> None:
    """Make the empty directories that Charliecloud wants in an image where it mounts something.

    The other runtimes make their own.

    Raises:
        UsageError: one is missing and cannot be made.
    """
    if container.runtime != "charliecloud":
        return
    image = Path(container.image)
    for mount in mounts:
        place = image
        for part in PurePosixPath(mount.target).parts[1:]:
            place /= part
            try:
                # A link in an image, such as /bin, leads to a place of the host's when it is
                # followed here: it is left to ch-run. So is an image that is not there.
                if place.is_symlink() or not place.parent.is_dir():
                    break
                place.mkdir(exist_ok=True)
            except OSError as err:
                raise _cannot_make(container, mount, err) from err


def missing_mount_points(container: ContainerSpec, mounts: Sequence[Mount]) -> list[Mount]:
    """The mounts for which `make_mount_points` would have to make a directory; makes none.

    Raises:
        UsageError: one is missing and cannot be made.
    """
    image = Path(container.image)
    if container.runtime != "charliecloud" or not image.is_dir():
        return []
    missing: list[Mount] = []
    for mount in mounts:
        place = image
        for part in PurePosixPath(mount.target).parts[1:]:
            inner = place / part
            if inner.is_symlink():
                break
            if not inner.is_dir():
                number = errno.EEXIST if inner.exists() else errno.EACCES
                if number == errno.EEXIST or not os.access(place, os.W_OK | os.X_OK):
                    raise _cannot_make(container, mount, OSError(number, os.strerror(number)))
                missing.append(mount)
                break
            place = inner
    return missing


def _cannot_make(container: ContainerSpec, mount: Mount, err: OSError) -> UsageError:
    image = container.image
    return UsageError(
        f"resources.container.image: {image} has no {mount.target} to mount "
        f"{mount.source} at, and it cannot be made: {err.strerror}",
        f"make it once: mkdir -p {image}{mount.target}",
    )
