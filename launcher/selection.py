"""Files that are chosen to be copied into a run's code/, and the copying.

Left out, and named: secrets by their names, and links out of the tree. Left out without a word:
what is derived or installed, and the results of runs.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from trainer.spec.errors import SnapshotError
from trainer.spec.rundir import write_atomic

#: Names of files and directories that are never copied, whatever their case, but named instead.
SECRET_NAMES = (".env*", "*.pem", "*.key", "id_*", ".netrc", "*credentials", "*credentials.json")
#: Code is small: more than this is data or results that git does not know to ignore.
SIZE_CAP_BYTES = 200 * 1000 * 1000
#: Where in code/ what was left out is named.
SKIPPED = "skipped.txt"
_DERIVED = frozenset(("__pycache__", ".git"))
#: What marks a directory as a Python environment: installed, not written.
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta/history")


@dataclass
class Selection:
    """What is to be written below code/, by its path there."""

    code: Path
    files: dict[str, Path] = field(default_factory=dict[str, Path])
    links: dict[str, str] = field(default_factory=dict[str, str])
    texts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    #: What is left out, and why.
    skipped: dict[str, str] = field(default_factory=dict[str, str])

    def __contains__(self, target: str) -> bool:
        return target in self.files or target in self.links

    def has_below(self, target: str) -> bool:
        """Whether anything is to be written in the directory `target`."""
        return any(name.startswith(f"{target}/") for name in (*self.files, *self.links))

    def skip(self, target: str, reason: str) -> None:
        """Leave a path out, and say why."""
        self.skipped[target] = reason

    def add(self, source: Path, target: str, *, top: Path) -> None:
        """Select one file or link; what is no longer there, or is neither, is passed over.

        Links within `top` become links within its copy; others are skipped, and so are secrets.
        """
        if target in self:
            return
        if pattern := secret_pattern(source.relative_to(top).parts):
            self.skip(target, f"a secret's name ({pattern})")
            return
        try:
            about = source.lstat()
        except OSError:
            return
        if stat.S_ISLNK(about.st_mode):
            # Unlike Path.resolve, this takes a loop for an answer.
            real = Path(os.path.realpath(source))
            if real.is_relative_to(top) and real != top:
                here = PurePosixPath(target)
                copy_of_top = here.parents[len(source.relative_to(top).parts) - 1]
                self.link(target, (copy_of_top / real.relative_to(top)).as_posix())
            else:
                self.skip(target, f"a link out of the tree, to {source.readlink()}")
        elif stat.S_ISREG(about.st_mode):
            self.skipped.pop(target, None)
            self.files[target] = source
            self.sizes[target] = about.st_size

    def add_directory(self, source: Path, target: str, excluded: Sequence[Path] = ()) -> None:
        """Select all files below a directory that git says nothing about."""
        for directory, inner, names in os.walk(source):
            here = Path(directory)
            kept = [name for name in sorted(inner) if not _is_no_code(here / name, excluded)]
            # os.walk does not follow links to directories: they are links like others.
            links = [name for name in kept if (here / name).is_symlink()]
            inner[:] = [name for name in kept if name not in links]
            for name in (*sorted(names), *links):
                if name in _DERIVED:
                    continue
                path = here / name
                relative = path.relative_to(source).as_posix()
                self.add(path, f"{target}/{relative}", top=source)

    def link(self, target: str, to: str) -> None:
        """Select a link; both are paths in code/."""
        self.links[target] = to

    def add_text(self, target: str, data: bytes) -> None:
        """Select a file that is made here."""
        self.texts[target] = data
        self.sizes[target] = len(data)

    def write(self) -> None:
        """Copy everything.

        Raises:
            SnapshotError: too large, or a file cannot be read. OSError: it cannot be written.
        """
        total = sum(self.sizes.values())
        if total > SIZE_CAP_BYTES:
            largest = ", ".join(f"{name} ({_mb(size)})" for name, size in _largest(self.sizes))
            raise SnapshotError(
                f"the code to copy has {_mb(total)}, the limit is {_mb(SIZE_CAP_BYTES)}; "
                f"the largest of it: {largest}",
                "keep data and results out of the tree, or list them in .gitignore",
            )
        for target, source in self.files.items():
            self._copy(source, self._make_room(target))
            if target.endswith(".py"):
                # Where Python keeps bytecode; what it made itself, others could look into.
                make_directory((self.code / target).parent / "__pycache__")
        for target, to in self.links.items():
            place = self._make_room(target)
            place.symlink_to(os.path.relpath(self.code / to, place.parent))
        if self.skipped:
            lines = [f"{printable(n)}: {printable(why)}\n" for n, why in self.skipped.items()]
            self.add_text(SKIPPED, "".join(sorted(lines)).encode())
        for target, data in self.texts.items():
            write_atomic(self._make_room(target), data)

    def _make_room(self, target: str) -> Path:
        place = self.code / target
        make_directory(place.parent)
        return place

    def _copy(self, source: Path, place: Path) -> None:
        try:
            # A link may have taken the file's place since it was selected.
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as err:
            raise SnapshotError(
                f"cannot copy {source}: {err.strerror}",
                "make it readable, list it in .gitignore, or move it out of the tree",
            ) from err
        with os.fdopen(descriptor, "rb") as reader, place.open("xb") as writer:
            shutil.copyfileobj(reader, writer)
            about = os.fstat(reader.fileno())
            runs = 0o110 if about.st_mode & stat.S_IXUSR else 0
            os.fchmod(writer.fileno(), 0o440 | runs)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, that only the run's owner and group may look into."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(mode=0o750, exist_ok=True)


def secret_pattern(parts: Iterable[str]) -> str | None:
    """The pattern of a secret's name that a part of a path matches."""
    for part in parts:
        for pattern in SECRET_NAMES:
            if fnmatch.fnmatchcase(part.lower(), pattern):
                return pattern
    return None


def _is_no_code(directory: Path, excluded: Sequence[Path]) -> bool:
    """Whether a directory holds what is derived, installed, or the results of runs."""
    return (
        directory.name in _DERIVED
        or directory in excluded
        or any((directory / mark).is_file() for mark in _ENVIRONMENT_MARKS)
        # A run directory, a checkpoint place.
        or ((directory / "run.json").is_file() and (directory / "plan.json").is_file())
        or ((directory / "owner.json").is_file() and any(directory.glob("step-*/")))
    )


def without_results(top: Path, names: Iterable[str], excluded: Sequence[Path]) -> Iterator[str]:
    """Those files that are no results: git may not have been told to ignore these."""
    known: dict[str, bool] = {"": False}

    def no_code(directory: str) -> bool:
        if directory not in known:
            known[directory] = no_code(directory.rpartition("/")[0]) or _is_no_code(
                top / directory, excluded
            )
        return known[directory]

    return (name for name in names if not no_code(name.rpartition("/")[0]))


def _largest(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """The five files or directories that hold most: each as deep as nearly all of it lies."""
    totals: Counter[str] = Counter()
    for name, size in sizes.items():
        for parent in PurePosixPath(name).parents:
            totals[parent.as_posix()] += size
        totals[name] += size
    found: list[tuple[str, int]] = []
    for name, size in totals.most_common():
        # A tree as a whole says nothing.
        if ("/" not in name and name not in sizes) or any(
            name.startswith(f"{above}/") for above, _ in found
        ):
            continue
        inner = max((s for n, s in totals.items() if n.startswith(f"{name}/")), default=0)
        if inner < 0.8 * size:
            found.append((name, size))
        if len(found) == 5:
            break
    return found


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


def printable(text: str) -> str:
    """Text for one line of a file or a terminal, whatever is in a name."""
    return text if text.isprintable() else ascii(text)
