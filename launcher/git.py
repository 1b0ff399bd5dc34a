"""What git knows of a work tree. Every call has an end.

Nothing is changed, but for the times of files that `git diff` notes in the index.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import shell
from trainer.spec.errors import SnapshotError, VitraError

_TIMEOUT_S = 120.0
#: Set by a git hook for instance, these would have git look at another repository.
_LOCATING = frozenset(
    f"GIT_{name}"
    for name in (
        "ALTERNATE_OBJECT_DIRECTORIES",
        "COMMON_DIR",
        "DIR",
        "INDEX_FILE",
        "NAMESPACE",
        "OBJECT_DIRECTORY",
        "PREFIX",
        "WORK_TREE",
    )
)
_SUBMODULE = b"160000"
#: In git's own words; of a broken repository it says something else.
_NO_REPOSITORY = "not a git repository (or any"
#: Whatever the user's settings make of `git diff`. A submodule's own changes must stay out of the
#: patch: what is excluded by name is not excluded in there.
_PLAIN_PATCH = (
    "--binary",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--submodule=short",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


class NotTracked(VitraError):
    """git cannot say anything about a directory: not installed, no work tree, or a broken one."""


@dataclass(frozen=True)
class Listing:
    """Files of a work tree, by their paths in it; names that are no UTF-8 as os.fsdecode has them.

    `tracked` are in git's index, if perhaps no longer on disk; `untracked` are neither there nor
    ignored. Submodules and other repositories within are looked into; `unreadable` are those that
    git could not read.
    """

    tracked: tuple[str, ...]
    untracked: tuple[str, ...]
    unreadable: tuple[str, ...]


class WorkTree:
    """The work tree that a directory lies in; that of the outermost project, for a submodule."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        """Find it.

        Raises:
            NotTracked: there is none, or git cannot be used.
        """
        self._environ = {name: v for name, v in environ.items() if name not in _LOCATING} | {
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }
        top = directory
        above: Path | None = directory
        while above is not None:
            top = _one_path(self._git(above, "rev-parse", "--show-toplevel")) or above
            above = _one_path(self._git(top, "rev-parse", "--show-superproject-working-tree"))
        self.top = top

    def listing(self) -> Listing:
        """All files that are tracked, or neither tracked nor ignored.

        Raises:
            NotTracked: the repository is broken.
        """
        return self._listing(self.top)

    def head(self) -> str | None:
        """The commit that is checked out; None where nothing has been committed yet."""
        try:
            return self._git(self.top, "rev-parse", "--verify", "HEAD").decode().strip()
        except NotTracked:
            return None

    def changes(self, paths: Sequence[Path], *, without: Sequence[str]) -> bytes:
        """The difference of tracked files below `paths` from HEAD, as a patch for `git apply`.

        `without`: patterns of names whose files and directories are left out, whatever their case.

        Raises:
            NotTracked: git could not tell.
        """
        excluded = [
            f":(top,exclude,icase,glob)**/{pattern}{below}"
            for pattern in without
            for below in ("", "/**")
        ]
        below = [os.path.relpath(path, self.top) for path in paths]
        included = [f":(top,literal){'' if path == '.' else path}" for path in below]
        return self._git(self.top, "diff", "HEAD", *_PLAIN_PATCH, "--", *included, *excluded)

    def _listing(self, top: Path) -> Listing:
        tracked: list[str] = []
        untracked: list[str] = []
        unreadable: list[str] = []
        nested: list[tuple[str, list[str]]] = []
        for entry in self._names(top, "--stage"):
            # mode SP object SP stage TAB name; a name in conflict comes with several stages.
            about, _, raw = entry.partition(b"\t")
            name = os.fsdecode(raw)
            if about.startswith(_SUBMODULE):
                nested.append((name, tracked))
            elif name not in tracked[-1:]:
                tracked.append(name)
        for raw in self._names(top, "--others", "--exclude-standard"):
            name = os.fsdecode(raw)
            if name.endswith("/"):
                # Another repository, which git does not look into.
                nested.append((name.rstrip("/"), untracked))
            else:
                untracked.append(name)
        for name, names in nested:
            if not (top / name / ".git").exists():
                # A submodule that was never checked out.
                continue
            try:
                found = _one_path(self._git(top / name, "rev-parse", "--show-toplevel"))
                # With a broken repository within it git would look at the one around it.
                inner = self._listing(top / name) if found == top / name else None
            except NotTracked:
                inner = None
            if inner is None:
                unreadable.append(name)
                continue
            names.extend(f"{name}/{inner_name}" for inner_name in inner.tracked)
            untracked.extend(f"{name}/{inner_name}" for inner_name in inner.untracked)
            unreadable.extend(f"{name}/{inner_name}" for inner_name in inner.unreadable)
        return Listing(tuple(tracked), tuple(untracked), tuple(unreadable))

    def _names(self, top: Path, *options: str) -> list[bytes]:
        return [raw for raw in self._git(top, "ls-files", "-z", *options).split(b"\0") if raw]

    def _git(self, directory: Path, *words: str) -> bytes:
        try:
            answer = shell.run(
                ["git", "-C", str(directory), *words], timeout_s=_TIMEOUT_S, env=self._environ
            )
        except OSError as err:
            raise NotTracked(f"git cannot be run ({err.strerror})") from err
        except shell.CommandTimedOut as err:
            raise SnapshotError(
                f"{directory}: git {words[0]}: {err.message}",
                "submit from a tree on a faster file system, or with fewer files in it",
            ) from err
        if answer.returncode:
            lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
            if _NO_REPOSITORY in lines[0]:
                raise NotTracked("not in a git work tree")
            raise NotTracked(f"git {words[0]}: {lines[0]}")
        return answer.stdout


def _one_path(output: bytes) -> Path | None:
    text = os.fsdecode(output.removesuffix(b"\n"))
    return Path(text) if text else None
