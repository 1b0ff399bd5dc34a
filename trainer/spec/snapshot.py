"""code/ of a run directory: the user's code as it was at submit, and where it came from."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.spec.errors import SnapshotError
from trainer.spec.rundir import RunDir

_INSTALLED = frozenset(("site-packages", "dist-packages"))


class CopiedTree(BaseModel):
    """A git work tree that was copied whole, or a package outside of one.

    `source` is where it was at submit (a directory, or the file of a single module), `copy_at` its
    place in code/. `commit` is None outside git, and where nothing has been committed yet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    source: str
    copy_at: str
    commit: str | None = None
    changed: bool = False


class CopiedComponent(BaseModel):
    """A component of the spec (`field` is model.kind or data.kind) that runs from its copy."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    field: str
    module: str
    source: str


class Snapshot(BaseModel):
    """code/snapshot.json.

    `path` are the directories within code/ that ranks import from, in this order and before all
    others; `outside` the absolute directories that the submitter's PYTHONPATH names besides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    version: int = 1
    path: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    trees: tuple[CopiedTree, ...] = ()
    components: tuple[CopiedComponent, ...] = ()

    @classmethod
    def read(cls, run_dir: RunDir) -> Snapshot:
        """The snapshot of a run.

        Raises:
            SnapshotError: it is missing or damaged: the run's own code cannot be had any more.
        """
        path = run_dir.code / "snapshot.json"
        hint = "the code that the run was submitted with is lost: submit a new run"
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as err:
            raise SnapshotError(f"cannot read {path}: {err.strerror}", hint) from err
        except ValidationError as err:
            raise SnapshotError(f"{path}: {err.error_count()} faults in it", hint) from err

    def is_live(self, path: Path, run_dir: RunDir) -> bool:
        """Whether `path` lies in a tree that was copied, and is not the copy.

        What is installed in a tree, in a virtual environment, was not copied and is not live.
        """
        if not self.trees:
            return False
        path = _real(path)
        if path.is_relative_to(run_dir.code.resolve()):
            return False
        if is_installed(path) or holds_installed(path):
            return False
        return any(path.is_relative_to(tree.source) for tree in self.trees)


def is_installed(path: Path) -> bool:
    """Whether a file or directory belongs to Python itself, or to what a package manager put there.

    What `pip install --target` put somewhere is told by the records that pip leaves beside it.
    """
    if not _INSTALLED.isdisjoint(path.parts):
        return True
    if any(path.is_relative_to(directory) for directory in _standard_library()):
        return True
    return any(path.relative_to(above).parts[0] in _recorded(above) for above in path.parents)


def is_package(file: Path) -> bool:
    """Whether a module's file is that of a package."""
    return file.name.split(".")[0] == "__init__"


def module_place(file: Path) -> Path:
    """The path of a module as its name has it: a package's directory, a file without suffix."""
    return file.parent if is_package(file) else file.with_name(file.name.split(".")[0])


def import_root(parts: Sequence[str], place: Path) -> Path | None:
    """The directory that a module is found in by its dotted name; None if the names differ."""
    for part in reversed(parts):
        if place.name != part:
            return None
        place = place.parent
    return place


def holds_installed(directory: Path) -> bool:
    """Whether a package manager has put packages right into a directory."""
    return bool(_recorded(directory))


def _real(path: Path) -> Path:
    """`path.resolve()` for one of thousands of files in a few hundred directories.

    By itself it asks the file system about every directory on the way, for each file again.
    """
    if not path.is_absolute() or path.is_symlink():
        return path.resolve()
    return _real_directory(path.parent) / path.name


@cache
def _real_directory(directory: Path) -> Path:
    return directory.resolve()


@cache
def _standard_library() -> tuple[Path, ...]:
    return tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})


@cache
def _recorded(directory: Path) -> frozenset[str]:
    """The names in a directory that a package manager has on record there."""
    names: set[str] = set()
    try:
        for record in directory.glob("*.dist-info/RECORD"):
            lines = record.read_text(errors="replace").splitlines()
            names.update(line.split(",")[0].split("/")[0] for line in lines)
    except OSError:
        pass
    return frozenset(names)
