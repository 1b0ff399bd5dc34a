"""Runs under a run root: names, ids, and finding one again. The directories are the truth."""

from __future__ import annotations

import difflib
import getpass
import json
import os
import secrets
import shlex
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.spec.errors import NotFound, StorageError, UsageError
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir

RUN_ROOT_VARIABLE = "VITRA_RUN_ROOT"
_DEFAULT_RUN_ROOT = "runs"
DRY_RUN_SUFFIX = "DRYRUN"


class RunRecord(BaseModel):
    """run.json: who, when and where. Written last at submit: without it a directory is not a run.

    `working_dir` is the directory that the run was submitted from, where its ranks run as well.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    version: int = 1
    run_id: str
    name: str
    scheduler: str
    created_at: str
    user: str
    host: str
    python: str
    working_dir: str
    versions: dict[str, str]
    spec_digest: str


def new_run_id(name: str, now: datetime) -> str:
    """`<name>-<yyyymmdd>-<hhmmss>-<4 letters>`, in local time; made once, at submit."""
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))
    return f"{name}-{now:%Y%m%d-%H%M%S}-{letters}"


def choose_run_root(option: str | None, spec_value: str | None, environ: Mapping[str, str]) -> Path:
    """--run-root, else the spec's with its overrides, else $VITRA_RUN_ROOT, else ./runs; absolute.

    Raises:
        UsageError: it is no path that a run can live under.
    """
    if option is not None and not option.strip():
        raise UsageError("--run-root is empty", "name a directory, or leave it out")
    chosen = option or spec_value or environ.get(RUN_ROOT_VARIABLE) or _DEFAULT_RUN_ROOT
    root = str(absolute(chosen))
    if any(ord(c) < 32 or ord(c) == 127 for c in root):
        raise UsageError(f"run root {root!r} has a control character in it", "choose another name")
    if any("\ud800" <= c <= "\udfff" for c in root):
        raise UsageError(f"run root {root!r} is not UTF-8", "choose another name")
    return Path(root)


def absolute(text: str) -> Path:
    """The absolute path that a person means by `text`; `~` is filled in, links are not followed.

    Raises:
        UsageError: a NUL, `~` of an unknown user, or a relative path where no directory is left.
    """
    try:
        return Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100 - resolve() follows links
    except RuntimeError as err:
        raise UsageError(f"{text}: {err}", "write the path in full") from err
    except ValueError as err:
        raise UsageError(f"{text!r} has a NUL in it", "choose another name") from err
    except FileNotFoundError as err:
        raise UsageError("the current directory has been removed", "cd to one that exists") from err


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
        raise StorageError(
            f"{run_dir.record} is damaged: {err.error_count()} faults in it"
        ) from err


def read_plan(run_dir: RunDir) -> Plan:
    """Read the newest plan of a run.

    A run directory may have been moved, or have several paths: checkpoints in it move with it.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        plan = Plan.read(run_dir.plan)
    except OSError as err:
        raise _unreadable_plan(run_dir, str(err.strerror)) from err
    except ValidationError as err:
        raise _unreadable_plan(run_dir, f"{err.error_count()} faults in it") from err
    here, place = str(run_dir.path), plan.checkpoint_uri
    if place.startswith(f"{plan.run_dir}/"):
        place = here + place.removeprefix(plan.run_dir)
    return plan.model_copy(update={"run_dir": here, "checkpoint_uri": place})


def _unreadable_plan(run_dir: RunDir, problem: str) -> StorageError:
    hint = "restore it from the newest of attempts/*/plan.json"
    return StorageError(f"{run_dir.plan} cannot be read: {problem}", hint)


def runs(run_root: Path) -> Iterator[str]:
    """The ids of all runs under a root, newest first by the time in the id.

    Whether a directory is a run is looked at when its turn comes: who wants the newest few of
    10,000 waits for those alone.

    Raises:
        StorageError: the root is there and cannot be read.
    """
    yield from (name for name in _directories(run_root) if _is_run(run_root / name))


def find_run(text: str, run_root: Path) -> RunDir:
    """The run that `text` means: a path, a run id, a name (its newest run), or a unique prefix.

    Among 10,000 runs on a shared disk, only those that it may mean are looked at.

    Raises:
        NotFound: none. UsageError: a prefix of several.
    """
    if not text.strip():
        raise UsageError("RUN is empty", "give a run's directory, id, name or the start of its id")
    path = absolute(text)
    if _is_run(path):
        return RunDir(path)
    known = _directories(run_root)
    if text in known and _is_run(run_root / text):
        return RunDir(run_root / text)
    of_name = (name for name in known if _name_of(name) == text and _is_run(run_root / name))
    if newest := next(of_name, None):
        second = _made_at(newest)[0]
        twins = takewhile(lambda run_id: _made_at(run_id)[0] == second, of_name)
        newest = max((newest, *twins), key=lambda run_id: _created_at(run_root, run_id))
        return RunDir(run_root / newest)
    begins = [name for name in known if name.startswith(text) and _is_run(run_root / name)]
    if len(begins) == 1:
        return RunDir(run_root / begins[0])
    if begins:
        shown = ", ".join(begins[:5]) + (" ..." if len(begins) > 5 else "")
        raise UsageError(
            f"{text!r} is the beginning of {len(begins)} runs: {shown}", "give more of the id"
        )
    if "/" in text:
        raise NotFound(f"{path} is not a run: it has no run.json")
    near = difflib.get_close_matches(text, {*known, *map(_name_of, known)}, n=5)
    close = next((word for word in near if _means_a_run(word, known, run_root)), None)
    hint = f"did you mean {close}?" if close else "--run-root names another root"
    raise NotFound(f"no run {text!r} under {run_root}", hint)


def as_argument(run_dir: RunDir, environ: Mapping[str, str]) -> str:
    """What to type for a run: its id where that is enough to find it again, else its path."""
    # Where there is no default run root, as in a directory that was removed, a path still works.
    with suppress(UsageError):
        if choose_run_root(None, None, environ) == run_dir.path.parent:
            return run_dir.path.name
    return shlex.quote(str(run_dir.path))


def _directories(run_root: Path) -> list[str]:
    """The names of all directories under a run root, newest first by the time in a run's id.

    Raises:
        StorageError: the root is there and cannot be read.
    """
    try:
        with os.scandir(run_root) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as err:
        raise StorageError(f"run root {run_root}: {err.strerror}") from err
    return sorted(names, key=_made_at, reverse=True)


def _is_run(path: Path) -> bool:
    # Unlike Path.is_file, this takes "name too long" and the like for an answer.
    return os.path.isfile(path / "run.json")  # noqa: PTH113


def _means_a_run(word: str, directories: Sequence[str], run_root: Path) -> bool:
    return any(_is_run(run_root / name) for name in directories if word in (name, _name_of(name)))


def _made_at(run_id: str) -> tuple[str, str]:
    parts = run_id.rsplit("-", 3)
    return ("-".join(parts[1:3]), run_id) if len(parts) == 4 else ("", run_id)


def _name_of(run_id: str) -> str:
    return run_id.rsplit("-", 3)[0]


def _created_at(run_root: Path, run_id: str) -> str:
    """The time in run.json, whose milliseconds tell apart two runs of one second."""
    try:
        document: Any = json.loads((run_root / run_id / "run.json").read_bytes())
        return str(document["created_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
