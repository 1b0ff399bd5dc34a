"""Runs under a run root: names, identities, and finding one again. The directories are the truth."""

from __future__ import annotations

import difflib
import getpass
import json
import os
import secrets
import string
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.spec.errors import NotFound, StorageError, UsageError
from trainer.spec.rundir import RunDir

RUN_ROOT_VARIABLE = "VITRA_RUN_ROOT"
_DEFAULT_RUN_ROOT = "runs"
DRY_RUN_SUFFIX = "DRYRUN"


class RunRecord(BaseModel):
    """run.json: who, when and where. Written last at submit: a directory without it is not a run."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 1
    run_id: str
    name: str
    scheduler: str
    created_at: str
    user: str
    host: str
    python: str
    versions: dict[str, str]
    spec_digest: str


def new_run_id(name: str, now: datetime) -> str:
    """`<name>-<yyyymmdd>-<hhmmss>-<4 letters>`, in local time; made once, at submit."""
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))
    return f"{name}-{now:%Y%m%d-%H%M%S}-{letters}"


def choose_run_root(option: str | None, spec_value: str | None, environ: Mapping[str, str]) -> Path:
    """--run-root, else the spec's (with its overrides), else $VITRA_RUN_ROOT, else ./runs; absolute."""
    chosen = option or spec_value or environ.get(RUN_ROOT_VARIABLE) or _DEFAULT_RUN_ROOT
    if any(ord(c) < 32 or ord(c) == 127 for c in chosen):
        raise UsageError(f"run root {chosen!r} has a control character in it")
    return Path(os.path.abspath(Path(chosen).expanduser()))  # noqa: PTH100 - resolve() would follow links


def user_name() -> str:
    """The name of the user who submits; the numeric id where there is no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def read_record(run_dir: RunDir) -> RunRecord:
    """Read run.json.

    Raises:
        NotFound: the directory is not a run. StorageError: run.json cannot be read.
    """
    try:
        return RunRecord.model_validate_json(run_dir.record.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{run_dir.path} is not a run: it has no run.json") from None
    except OSError as err:
        raise StorageError(f"cannot read {run_dir.record}: {err.strerror}") from err
    except ValidationError as err:
        raise StorageError(f"{run_dir.record} is damaged: {err.error_count()} faults in it") from err


def runs(run_root: Path) -> Iterator[str]:
    """The ids of all runs under a root, newest first by the time in the id."""
    try:
        names = [entry.name for entry in os.scandir(run_root) if (Path(entry.path) / "run.json").is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from sorted(names, key=_made_at, reverse=True)


def find_run(text: str, run_root: Path) -> RunDir:
    """The run that `text` means: a path, a run id, a name (its newest run), or a unique prefix.

    Raises:
        NotFound: none. UsageError: a prefix of several.
    """
    path = Path(text).expanduser()
    if (path / "run.json").is_file():
        return RunDir(Path(os.path.abspath(path)))  # noqa: PTH100 - resolve() would follow links
    known = list(runs(run_root))
    if text in known:
        return RunDir(run_root / text)
    of_name = [run_id for run_id in known if _name_of(run_id) == text]
    if of_name:
        return RunDir(run_root / max(of_name, key=lambda run_id: _age_key(run_root, run_id)))
    begins = [run_id for run_id in known if text and run_id.startswith(text)]
    if len(begins) == 1:
        return RunDir(run_root / begins[0])
    if begins:
        shown = ", ".join(begins[:5]) + (" ..." if len(begins) > 5 else "")
        raise UsageError(f"{text!r} is the beginning of {len(begins)} runs: {shown}", "give more of the id")
    close = difflib.get_close_matches(text, [*known, *map(_name_of, known)], n=1)
    hint = f"did you mean {close[0]}?" if close else "--run-root names another root"
    raise NotFound(f"no run {text!r} under {run_root}", hint)


def _made_at(run_id: str) -> tuple[str, str]:
    parts = run_id.rsplit("-", 3)
    return ("-".join(parts[1:3]), run_id) if len(parts) == 4 else ("", run_id)


def _name_of(run_id: str) -> str:
    return run_id.rsplit("-", 3)[0]


def _age_key(run_root: Path, run_id: str) -> tuple[str, str]:
    """Two runs of one second are told apart by the milliseconds in run.json."""
    try:
        document: Any = json.loads((run_root / run_id / "run.json").read_bytes())
        return (_made_at(run_id)[0], str(document["created_at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return (_made_at(run_id)[0], "")
