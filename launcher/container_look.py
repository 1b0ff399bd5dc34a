"""What a host has of a run's container: runtime, image and mounts. For `vitra doctor`.

`python -P -m launcher.container_look REQUEST`, on a compute node, prints one JSON document.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from launcher import shell
from launcher.container import missing_mount_points
from trainer.spec.container import ContainerSpec, Mount
from trainer.spec.errors import UsageError, VitraError

#: What each runtime is called by, and what makes it tell of itself.
_SAYS = {
    "pyxis": ("srun", "--help"),
    "apptainer": ("apptainer", "--version"),
    "charliecloud": ("ch-run", "--version"),
}
_VERSION_S = 30.0


class Request(BaseModel):
    """What to look at.

    `search` is the PATH that the runtime's command is looked for in, `paths` what is to be there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    container: ContainerSpec
    mounts: tuple[Mount, ...]
    paths: tuple[str, ...]
    search: str


class Seen(BaseModel):
    """What is there, and what is not.

    `command` is where the runtime's command is, None without one, and `said` what it told of
    itself. `problem` is the image's, `missing` the problem of each path that has one. `unmade` are
    the mounts' places that the image has no directory for yet, `cannot_make` the error and its hint
    where one cannot be made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    command: str | None
    said: str
    problem: str | None
    missing: dict[str, str]
    unmade: tuple[str, ...]
    cannot_make: tuple[str, str] | None


def look(request: Request) -> Seen:
    """Look at everything, on this host; changes nothing."""
    container = request.container
    name, *rest = _SAYS[container.runtime]
    command = shutil.which(name, path=request.search)
    unmade: list[str] = []
    cannot_make: tuple[str, str] | None = None
    try:
        unmade = [mount.target for mount in missing_mount_points(container, request.mounts)]
    except UsageError as err:
        cannot_make = (err.message, err.hint or "")
    return Seen(
        host=os.uname().nodename,
        command=command,
        said="" if command is None else _said([command, *rest]),
        problem=None if is_fetched(container) else _image_problem(container),
        missing={path: problem for path in request.paths if (problem := _problem(path))},
        unmade=tuple(unmade),
        cannot_make=cannot_make,
    )


def is_fetched(container: ContainerSpec) -> bool:
    """Whether the image is no file, and the runtime gets it from somewhere at each start."""
    return not container.image.startswith("/")


def _said(argv: Sequence[str]) -> str:
    try:
        # Charliecloud starts for nobody without a name, not even to say which version it is.
        answer = shell.run(argv, timeout_s=_VERSION_S, env={"USER": "nobody", **os.environ})
    except (VitraError, OSError) as err:
        return str(err)
    return (answer.stdout.decode(errors="replace") or answer.stderr).strip()


def _image_problem(container: ContainerSpec) -> str | None:
    """What is the matter with the image, for the end of a sentence; None: nothing."""
    image = Path(container.image)
    if problem := _problem(str(image)):
        return problem
    is_directory = image.is_dir()
    if container.runtime == "pyxis" and is_directory:
        return "is a directory, not a squash file"
    if container.runtime == "charliecloud":
        if not is_directory:
            return "is no directory"
        if not any((image / part).is_dir() for part in ("bin", "usr")):
            return "is no image: it has neither bin nor usr"
        if not (image / "ch" / "environment").is_file():
            # ch-run reads it for the variables that the image sets, and stops without it.
            return "is no image that ch-convert has made: it has no ch/environment"
    return None


def _problem(path: str) -> str | None:
    """Why a path cannot be read, or None."""
    try:
        mode = Path(path).stat().st_mode
        wanted = os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)
        return None if os.access(path, wanted) else "cannot be read: Permission denied"
    except FileNotFoundError:
        return "is not there"
    except OSError as err:
        return f"cannot be read: {err.strerror}"


def main(arguments: list[str]) -> int:
    """Answer one request."""
    (request,) = arguments
    sys.stdout.write(look(Request.model_validate_json(request)).model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
