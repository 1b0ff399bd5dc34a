"""The code of a run, copied at submit: what happens to the user's tree afterwards changes nothing.

    code/vitra/      launcher and trainer, where they run from a checkout
    code/packages/   packages of the user that lie in no copied work tree
    code/names/      links to code that is imported by another name than its directory's
    code/<tree>/     the git work trees of the spec's own components: tracked, modified and
                     untracked files, none that are ignored
    code/commit, code/dirty.patch    the first tree's commit, and how its tracked files differ
    code/skipped.txt                 what was left out, and why
    code/snapshot.json               where all this came from; what ranks import from, in order

Files are written read-only; directories stay writable, so that `rm -r` works and Python can keep
its bytecode there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import Any

from launcher.git import NotTracked, WorkTree
from launcher.selection import (
    SECRET_NAMES,
    SKIPPED,
    Selection,
    make_directory,
    printable,
    secret_pattern,
    without_results,
)
from trainer.spec.errors import SnapshotError, UsageError
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir, write_atomic
from trainer.spec.snapshot import (
    CopiedComponent,
    CopiedTree,
    Snapshot,
    holds_installed,
    import_root,
    is_installed,
    is_package,
    module_place,
)

_VITRA = "vitra"
_PACKAGES = "packages"
_NAMES = "names"
_RESERVED = frozenset((_VITRA, _PACKAGES, _NAMES, "commit", "snapshot.json", SKIPPED))
_OWN_PACKAGES = ("launcher", "trainer")
_NAMED_AT_MOST = 10


@dataclass(frozen=True)
class Seen:
    """What the probe found around the components.

    `modules` are the files of the imported modules that are neither installed nor vitra's own, by
    their names; links above the directory that they are imported from are resolved. `installed` are
    the top-level names of all other modules, `path` is its sys.path, and `editable` where packages
    lie that an import hook of an editable install knows, by name.
    """

    modules: Mapping[str, str]
    installed: frozenset[str]
    path: tuple[str, ...]
    editable: Mapping[str, str]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Seen:
        """From what the probe has answered."""
        return cls(
            modules=answer["modules"],
            installed=frozenset(answer["installed"]),
            path=tuple(answer["path"]),
            editable=answer["editable"],
        )


def own_components(spec: RunSpec) -> dict[str, str]:
    """The module of each component that is not built in, by its field."""
    kinds = {"model.kind": spec.model.kind, "data.kind": spec.data.kind}
    return {field_: kind.partition(":")[0] for field_, kind in kinds.items() if ":" in kind}


def user_path(spec: RunSpec, cwd: Path, python_path: str) -> list[str]:
    """The directories that a user expects imports from, first to last, before what is installed.

    `cwd`, as for `python -m`, but only where a component is found there: else a file that happens
    to have the name of an installed package would replace it. Then those of PYTHONPATH.

    Raises:
        UsageError: Python cannot be told to import from one of them.
    """
    roots = {module.partition(".")[0] for module in own_components(spec).values()}
    path = [str(cwd)] if any(PathFinder.find_spec(root, [str(cwd)]) for root in roots) else []
    # An empty entry means the current directory, which differs from rank to rank.
    path += [os.path.normpath(cwd / entry) for entry in python_path.split(os.pathsep) if entry]
    for entry in path:
        _check_path(entry, "rename it")
    return list(dict.fromkeys(path))


def has_own_vitra(code: Path) -> bool:
    """Whether a run's code has a copy of vitra, and not just links to what is installed here."""
    return all(
        (place := code / _VITRA / name).is_dir() and not place.is_symlink()
        for name in ("launcher", "trainer")
    )


def place_vitra(code: Path, path: Sequence[str], *, always: bool = False) -> Path | None:
    """Put launcher and trainer into a run's new code directory, and return where; None: not needed.

    From a checkout they are copied. Where they are installed they stay, unless a directory of the
    user's `path` has a package of the same name: then links make sure that ours are found first.
    `always`: it is copied, for ranks that do not have what is installed here.

    Raises:
        UsageError: Python cannot be told to import from there.
    """
    _check_path(str(code), "choose another run root")
    import launcher
    import trainer

    places = {p.__name__: Path(p.__path__[0]).resolve() for p in (launcher, trainer)}
    target = code / _VITRA
    if always or any(not is_installed(place) for place in places.values()):
        selection = Selection(code)
        for name, place in places.items():
            selection.add_directory(place, f"{_VITRA}/{name}")
        selection.write()
        return target
    if any(_regular(name, entry) for name in _OWN_PACKAGES for entry in path):
        make_directory(target)
        for name, place in places.items():
            (target / name).symlink_to(place)
        return target
    return None


def take_snapshot(
    run_dir: RunDir,
    spec: RunSpec,
    seen: Seen,
    *,
    path: Sequence[str],
    excluded: Sequence[Path],
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Snapshot:
    """Copy what the run imports into its code directory, and say what was left out.

    `place_vitra` comes before. `path` is the probe's `user_path`; `excluded` are directories that
    are results, not code: run root and checkpoint place.

    Raises:
        SnapshotError: it is too large, cannot be read, or would not run as it did in the probe.
        OSError: it could not be written.
    """
    used = [Path(p).resolve() for p in (*path, *seen.modules.values())]
    results = [p.resolve() for p in excluded]
    # A run root may also be the very directory that the code is in.
    results = [p for p in results if not any(u.is_relative_to(p) for u in used)]
    taker = _Taker(run_dir.code, seen, (*results, run_dir.path.resolve()), environ, say)
    make_directory(run_dir.code)
    snapshot = taker.take(own_components(spec), path)
    write_atomic(
        run_dir.code / "snapshot.json", json.dumps(snapshot.model_dump(), indent=1).encode()
    )
    return snapshot


@dataclass(frozen=True)
class _Tree:
    """A git work tree that is copied to code/<copy_at>."""

    git: WorkTree
    copy_at: str
    has_untracked: bool

    @property
    def top(self) -> Path:
        return self.git.top

    def copy_of(self, path: Path) -> str | None:
        """Where in code/ the copy of `path` is; None if it lies elsewhere or is installed there."""
        if not path.is_relative_to(self.top) or is_installed(path):
            return None
        return (PurePosixPath(self.copy_at) / path.relative_to(self.top)).as_posix()


class _Taker:
    """Takes one snapshot."""

    def __init__(
        self,
        code: Path,
        seen: Seen,
        excluded: tuple[Path, ...],
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._code = code
        self._files = {name: Path(file) for name, file in seen.modules.items()}
        self._seen = seen
        self._roots = [Path(entry).resolve() for entry in seen.path]
        self._excluded = excluded
        self._environ = environ
        self._say = say
        self._said: set[str] = set()
        self._trees: list[_Tree] = []
        self._selection = Selection(code)
        #: Directories of code/ to import from, in order.
        self._path: dict[str, None] = {}
        self._packages: dict[str, CopiedTree] = {}

    def take(self, components: Mapping[str, str], path: Sequence[str]) -> Snapshot:
        own = {f: module for f, module in components.items() if module in self._files}
        for module in own.values():
            self._find_tree(module)
        for name in sorted(self._files):
            self._take_module(name)
        self._map_path()
        self._check_order()
        trees = [self._describe(tree) for tree in self._trees]
        trees += self._packages.values()
        if not trees:
            self._describe_vitra()
        if (self._code / _VITRA).exists():
            self._path = {_VITRA: None, **self._path}
        for entry in (*self._path, *(tree.source for tree in trees)):
            _check_path(entry, "rename it")
        self._selection.write()
        self._report(trees)
        return Snapshot(
            path=tuple(self._path),
            outside=tuple(p for p in path if self._stays(Path(p).resolve())),
            trees=tuple(trees),
            components=tuple(
                CopiedComponent(field=f, module=module, source=str(self._files[module]))
                for f, module in own.items()
            ),
        )

    def _find_tree(self, module: str) -> None:
        """The work tree of a component, unless it is known; none where git does not list it."""
        file = self._files[module].resolve()
        if self._copy_of(file) is not None:
            return
        try:
            git = WorkTree(file.parent, self._environ)
            listing = git.listing()
        except NotTracked as err:
            self._say_once(f"{file.parent}: {err.message}; only the package itself is copied")
            return
        relative = file.relative_to(git.top).as_posix()
        if relative not in (*listing.tracked, *listing.untracked):
            self._say_once(f"{file}: ignored by git; only the package itself is copied")
            return
        names = without_results(git.top, (*listing.tracked, *listing.untracked), self._excluded)
        tree = _Tree(git, self._free_name(git.top.name), bool(listing.untracked))
        for name in names:
            self._selection.add(git.top / name, f"{tree.copy_at}/{name}", top=git.top)
        for name in listing.unreadable:
            self._selection.skip(f"{tree.copy_at}/{name}", "a git repository that cannot be read")
        self._trees.append(tree)

    def _say_once(self, text: str) -> None:
        """Two components often come from one place."""
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _free_name(self, name: str) -> str:
        # PYTHONPATH has no way to write a colon.
        base = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "tree"
        taken = {*_RESERVED, *(tree.copy_at for tree in self._trees)}
        names = [base, *(f"{base}-{number}" for number in range(2, len(taken) + 3))]
        return next(n for n in names if n not in taken and not n.endswith((".commit", ".patch")))

    def _take_module(self, name: str) -> None:
        """Copy a module's file, where its tree's files do not hold it already, or its package."""
        file, real = self._files[name], self._files[name].resolve()
        parts = name.split(".")
        if self._copy_of(real) is not None:
            file = real
        copy = self._copy_of(file)
        if copy is None:
            self._take_package(parts, file)
            inner = (
                f"/{file.name}" if is_package(file) else file.name[len(module_place(file).name) :]
            )
            target = f"{_PACKAGES}/{'/'.join(parts)}{inner}"
        else:
            self._make_importable(parts, file)
            self._follow_link(file)
            target = copy
        if pattern := secret_pattern(PurePosixPath(target).parts[1:]):
            raise SnapshotError(
                f"{file}: module {name} is imported, but is never copied: "
                f"it has a secret's name ({pattern})",
                "give code another name",
            )
        # What is imported is needed, also where git ignores it, as it does generated and compiled
        # modules, and where only a link led to it.
        self._selection.add(real, target, top=real.parent)

    def _follow_link(self, file: Path) -> None:
        """Copy all of an imported package that only a link out of a tree leads to."""
        inside = [path for path in reversed(file.parents) if self._copy_of(path) is not None]
        link = next((path for path in inside if path.is_symlink()), None)
        if link is not None:
            target = self._copy_of(link)
            assert target is not None
            self._selection.add_directory(link.resolve(), target, self._excluded)
            self._selection.skipped.pop(target, None)

    def _take_package(self, parts: Sequence[str], file: Path) -> None:
        """Copy all of the top-level package that a module outside of the trees belongs to.

        A module that is no package has nothing but its file.
        """
        place = module_place(file)
        root = import_root(parts, place)
        if root is not None and (len(parts) > 1 or is_package(file)):
            source, target = root / parts[0], f"{_PACKAGES}/{parts[0]}"
        elif is_package(file):
            source, target = place, f"{_PACKAGES}/{'/'.join(parts)}"
        else:
            suffix = file.name[len(place.name) :]
            source, target = file, f"{_PACKAGES}/{'/'.join(parts)}{suffix}"
        self._path[_PACKAGES] = None
        if any(target == known or target.startswith(f"{known}/") for known in self._packages):
            return
        self._packages[target] = CopiedTree(source=str(source), copy_at=target)
        if source.is_dir():
            self._selection.add_directory(source.resolve(), target, self._excluded)

    def _make_importable(self, parts: Sequence[str], file: Path) -> None:
        """Make sure that a copied module is found by its name."""
        place = module_place(file)
        root = import_root(parts, place)
        if root is not None and self._copy_of(root) is not None:
            # Else the probe found it through an import hook.
            if root not in self._roots:
                self._path[self._copy_of(root) or ""] = None
            return
        # The directory of the package has another name, or is the tree's top: a link stands for it.
        matched = 0
        while (
            matched < len(parts) - 1
            and place.name == parts[-1 - matched]
            and self._copy_of(place.parent) is not None
        ):
            place, matched = place.parent, matched + 1
        name = "/".join(parts[: len(parts) - matched])
        if not matched and not is_package(file):
            name, place = f"{name}{file.name[len(place.name) :]}", file
        copy = self._copy_of(place)
        assert copy is not None, f"{place} holds {file}"
        self._selection.link(f"{_NAMES}/{name}", copy)
        self._path[_NAMES] = None

    def _map_path(self) -> None:
        """Let the copies stand for what the probe's path named, in the same order."""
        for root in self._roots:
            self._add_root(root)
        for name, place in sorted(self._seen.editable.items()):
            # Packages of the tree that an import hook knows, and that may be imported later.
            root = import_root(name.split("."), Path(place).resolve())
            if root is not None:
                self._add_root(root)

    def _add_root(self, root: Path) -> None:
        copy = self._copy_of(root)
        if copy is not None and self._selection.has_below(copy):
            self._path[copy] = None

    def _check_order(self) -> None:
        """Refuse what would come first in the run, and did not in the probe.

        What is installed as editable comes last in the probe, and its copy first in the run.
        """
        firsts = [i for i, root in enumerate(self._roots) if is_installed(root)]
        late = self._roots[min(firsts, default=0) :]
        late += [Path(place).resolve().parent for place in self._seen.editable.values()]
        for root in late:
            if self._copy_of(root) not in self._path:
                continue
            for name in sorted(self._seen.installed):
                if _regular(name, str(root)):
                    raise SnapshotError(
                        f"{root / name} has the name of an installed package that the run uses, "
                        "and would replace it there",
                        "give it another name",
                    )

    def _stays(self, directory: Path) -> bool:
        """Whether imports go on to come from a directory itself: it is elsewhere, or installed."""
        return self._copy_of(directory) is None or holds_installed(directory)

    def _copy_of(self, path: Path) -> str | None:
        copies = (tree.copy_of(path) for tree in self._trees)
        return next((copy for copy in copies if copy is not None), None)

    def _describe(self, tree: _Tree) -> CopiedTree:
        """Record a tree's commit and changes; the first one's under the plain names."""
        prefix = "" if tree is self._trees[0] else f"{tree.copy_at}."
        commit, changed = self._record(tree.git, prefix, [tree.top])
        return CopiedTree(
            source=str(tree.top),
            copy_at=tree.copy_at,
            commit=commit,
            changed=changed or tree.has_untracked,
        )

    def _describe_vitra(self) -> None:
        """Where nothing but vitra itself is copied, its checkout is what there is to record."""
        import launcher
        import trainer

        places = [Path(package.__path__[0]).resolve() for package in (launcher, trainer)]
        if any(is_installed(place) for place in places):
            return
        with suppress(NotTracked):
            self._record(WorkTree(places[0], self._environ), "", places)

    def _record(self, git: WorkTree, prefix: str, paths: Sequence[Path]) -> tuple[str | None, bool]:
        commit = git.head()
        if commit is None:
            return None, False
        self._selection.add_text(f"{prefix}commit", f"{commit}\n".encode())
        try:
            patch = git.changes(paths, without=SECRET_NAMES)
        except NotTracked as err:
            self._say(f"{git.top}: {err.message}; its changes are copied, but not kept as a patch")
            return commit, True
        self._selection.add_text(f"{prefix}dirty.patch", patch)
        return commit, bool(patch)

    def _report(self, trees: Sequence[CopiedTree]) -> None:
        for tree in trees:
            commit = f" at {tree.commit[:12]}" if tree.commit else ""
            self._say(
                f"code copied: {tree.source}{commit}{' with changes' if tree.changed else ''}"
            )
        skipped = sorted(self._selection.skipped)
        if skipped:
            self._say(f"not copied (code/{SKIPPED} says why): {_enumeration(skipped)}")


def _regular(name: str, directory: str) -> bool:
    """Whether a directory holds a module or package of a name: one with code, no mere directory."""
    found = PathFinder.find_spec(name, [directory])
    return found is not None and found.loader is not None and found.origin is not None


def _check_path(path: str, hint: str) -> None:
    """PYTHONPATH has no way to write a colon, and JSON none to write what is no UTF-8."""
    if os.pathsep in path or any("\ud800" <= c <= "\udfff" for c in path):
        raise UsageError(
            f"code cannot be imported from {printable(path)}: its path has "
            f"{os.pathsep!r} in it, or is not UTF-8",
            hint,
        )


def _enumeration(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = len(names) - _NAMED_AT_MOST
    shown = ", ".join(map(printable, names[:_NAMED_AT_MOST]))
    return f"{shown} and {more} more" if more > 0 else shown
