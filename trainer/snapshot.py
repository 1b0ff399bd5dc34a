"""Which code a process runs: the copy that was made at submit, or the user's own tree."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from trainer.spec.errors import SnapshotError
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir
from trainer.spec.snapshot import Snapshot, import_root, is_installed, module_place

log = logging.getLogger(__name__)

_NOT_THE_USERS = frozenset(
    ("trainer", "launcher", "__main__", "__mp_main__", "sitecustomize", "usercustomize")
)
_EDITABLE = "__editable__"


def leave_live_trees(snapshot: Snapshot, run_dir: RunDir) -> None:
    """Import no more from the trees that were copied, whatever else names them: editable installs.

    Called before any component is imported.
    """
    sys.path[:] = [entry for entry in sys.path if not snapshot.is_live(Path(entry), run_dir)]


def check_origin(snapshot: Snapshot, run_dir: RunDir, spec: RunSpec) -> None:
    """Make sure that the components came from the copy. Called when all of them are built.

    Raises:
        SnapshotError: one did not; names both files.
    """
    code = run_dir.code.resolve()
    kinds = {"model.kind": spec.model.kind, "data.kind": spec.data.kind}
    for component in snapshot.components:
        if kinds[component.field].partition(":")[0] != component.module:
            # A resume was told to use another one.
            continue
        file = _file_of(component.module)
        if file is None or not file.resolve().is_relative_to(code):
            raise SnapshotError(
                f"{component.field}: module {component.module} was {component.source} when the run "
                f"was submitted, and is {file} now, not the copy in {code}",
                "let no code put its own tree first in sys.path, and submit a new run",
            )
    for name in sorted(sys.modules) if snapshot.trees else ():
        file = _file_of(name)
        if file is not None and snapshot.is_live(file, run_dir):
            log.warning("module %s is %s, not its copy: it may have changed", name, file)


def imported() -> dict[str, Any]:
    """What launcher.snapshot.Seen wants to know of this process, in which components were built."""
    modules: dict[str, str] = {}
    installed: set[str] = set()
    editable: dict[str, str] = {}
    for name in sorted(sys.modules):
        if name.startswith(_EDITABLE):
            # The hook that setuptools leaves for packages whose directory cannot be put on a path.
            editable |= vars(sys.modules[name]).get("MAPPING", {})
        if name.partition(".")[0] in _NOT_THE_USERS:
            continue
        file = _file_of(name)
        # A link may stand in an installed package for what lies elsewhere, and the other way round.
        if file is None or is_installed(file) or is_installed(file.resolve()):
            installed.add(name.partition(".")[0])
        elif file.is_file():
            root = import_root(name.split("."), module_place(file))
            # Links below that are part of the module's name.
            logical = file.resolve() if root is None else root.resolve() / file.relative_to(root)
            modules[name] = str(logical)
    users = {name.partition(".")[0] for name in modules}
    mapped = {n: p for n, p in editable.items() if n.partition(".")[0] not in _NOT_THE_USERS}
    return {
        "modules": modules,
        "installed": sorted(installed - users),
        "path": [entry for entry in sys.path if entry],
        "editable": mapped,
    }


def _file_of(name: str) -> Path | None:
    """The file of an imported module; None for what has none: built in, or a mere namespace."""
    # Not getattr: some modules make up attributes when they are asked for them.
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
    return Path(file) if isinstance(file, str) and Path(file).is_absolute() else None
