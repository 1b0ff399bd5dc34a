"""`resources.container`: the image that ranks live in, and what they see of the host."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal, NamedTuple, Self, get_args

from pydantic import BeforeValidator, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from trainer.spec.fields import (
    Choice,
    Listed,
    Loc,
    SpecModel,
    Text,
    check_text,
    refusal,
    refuse_all,
)

ContainerRuntime = Literal["pyxis", "apptainer", "charliecloud", "none"]

#: What a mount in their place would take from the image, and no program works without.
SYSTEM_DIRECTORIES = frozenset(
    (
        *("/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64"),
        *("/proc", "/run", "/sbin", "/sys", "/usr"),
    )
)

_SCHEME = r"[a-z][a-z0-9+.-]*://."


class Mount(NamedTuple):
    """A file or directory of the host, `source`, that the container has at `target`.

    Both are absolute and normal; neither holds what separates mounts in a runtime's options.
    """

    source: str
    target: str
    is_read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of SRC:DST or SRC:DST:ro. Raises ValueError with what is wrong, for a sentence."""
        source, *rest = text.split(":")
        if len(rest) == 2 and rest[1] != "ro":
            raise ValueError("may only end in :ro, for read-only")
        if not 1 <= len(rest) <= 2:
            raise ValueError("must be SRC:DST or SRC:DST:ro")
        for path in (source, rest[0]):
            if problem := mount_path_problem(path):
                raise ValueError(problem)
        if rest[0] in SYSTEM_DIRECTORIES:
            raise ValueError(f"would hide the image's own {rest[0]}")
        return cls(source, rest[0], len(rest) == 2)


def mount_path_problem(path: str) -> str | None:
    """Why `path` cannot be an end of a mount, or None."""
    if not path.startswith("/"):
        return "must have two absolute paths"
    if "," in path or ":" in path:
        return "has a path with a comma or colon, which separate mounts from each other"
    if str(PurePosixPath(path)) != path or ".." in PurePosixPath(path).parts:
        return "must have paths without .., //, /./ and a slash at the end"
    return None


def _check_mount(value: object) -> str:
    text = check_text(value)
    try:
        Mount.parse(text)
    except ValueError as err:
        raise refusal(f"{err}, found {{found}}", text) from err
    return text


class ContainerSpec(SpecModel):
    """An image for the processes of a run; the supervisor stays outside of it.

    `image` is what the runtime calls an image: pyxis [REGISTRY#]NAME[:TAG] or the path of a squash
    file, apptainer a path or a URL such as docker://NAME:TAG, charliecloud the path of a directory.
    `none` is no container, whatever the rest says. Each mount is SRC:DST or SRC:DST:ro.
    """

    runtime: Annotated[ContainerRuntime, Choice(get_args(ContainerRuntime))]
    image: Text
    mounts: Annotated[tuple[Annotated[str, BeforeValidator(_check_mount)], ...], Listed] = ()

    @field_validator("image")
    @classmethod
    def _is_what_the_runtime_takes(cls, image: str, info: ValidationInfo) -> str:
        runtime = info.data.get("runtime")
        if image.startswith("-"):
            raise refusal("would be read as an option, found {found}", image)
        if runtime == "charliecloud" and not image.startswith("/"):
            raise refusal(
                "must be the absolute path of an image's directory, as ch-convert makes it, "
                "found {found}",
                image,
            )
        if runtime == "apptainer" and not image.startswith("/") and not re.match(_SCHEME, image):
            raise refusal(
                "must be an absolute path, or a URL such as docker://name:tag, found {found}", image
            )
        if runtime == "pyxis" and (image.startswith((".", "~")) or re.match(_SCHEME, image)):
            raise refusal(
                "must be an absolute path, or registry#name:tag without a scheme, found {found}",
                image,
            )
        return image

    @field_validator("mounts")
    @classmethod
    def _each_its_place(cls, mounts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        faults: list[tuple[Loc, PydanticCustomError]] = []
        taken: set[str] = set()
        for index, mount in enumerate(map(Mount.parse, mounts)):
            if mount.target in taken:
                faults.append(((index,), refusal("mounts {found} a second time", mount.target)))
            elif mount.is_read_only and info.data.get("runtime") == "charliecloud":
                problem = "is {found}, but charliecloud has no read-only mounts; leave :ro out"
                faults.append(((index,), refusal(problem, mounts[index])))
            taken.add(mount.target)
        refuse_all(faults)
        return mounts

    @property
    def parsed_mounts(self) -> tuple[Mount, ...]:
        return tuple(map(Mount.parse, self.mounts))
