"""From a draft to a submitted run."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.ask import ask_trainer
from launcher.container import container_of
from launcher.drafting import Draft, plan_in
from launcher.environment import component_environment, importing
from launcher.load import dump_overrides
from launcher.planner import check_samples
from launcher.profiles import keep_profiles
from launcher.registry import (
    RunRecord,
    absolute,
    new_run_id,
    user_name,
)
from launcher.snapshot import Seen, place_vitra, take_snapshot, user_path
from trainer.spec import errors
from trainer.spec.plan import Plan
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir, append_event, utc_now, write_atomic

if TYPE_CHECKING:
    from trainer.store.checkpoints import CheckpointStore

#: How long a person waits to hear that a checkpoint place cannot be reached.
_PLACE_PATIENCE_S = 8.0
#: Opening a large data set over a slow file system takes its time; hanging for ever is no option.
_PROBE_TIMEOUT_S = 600.0


def refuse_later_parts(checked: Plan) -> None:
    """Refuse what is planned by this version and run by a later one, before anything is written."""
    if checked.elastic:
        raise errors.UsageError(
            "resources.nodes is a range: elastic runs are planned, but not yet run by this version",
            f"write one number, such as nodes: {checked.nodes}",
        )
    if checked.checkpoint_uri.startswith("memory://"):
        raise errors.UsageError(
            f"checkpoint.uri={checked.checkpoint_uri}: each process has a memory of its own",
            "use a path or s3://BUCKET/PREFIX",
        )
    # Refuses places of a kind that cannot be used.
    _store_of(checked)


def probe(spec: RunSpec, *, environ: Mapping[str, str]) -> dict[str, Any]:
    """Open the data set and build the model in a process of their own, as a rank would.

    `environ` is all of that process's environment, PYTHONPATH included.

    Raises:
        UsageError: a component cannot be used, or its data cannot be read.
        VitraError: the probe itself came to no answer.
    """
    result = ask_trainer(
        "probe",
        spec.model_dump_json().encode(),
        environ=environ,
        timeout_s=_PROBE_TIMEOUT_S,
        doing="checking data and model",
    )
    if "error" in result:
        kind = getattr(errors, result["error"], errors.UsageError)
        # Nothing has run yet, so whatever cannot be used is a fault of the spec.
        refusal = kind if issubclass(kind, errors.CheckpointError) else errors.UsageError
        raise refusal(result["message"], result["hint"])
    return result


def submit_local(
    draft_: Draft, *, environ: Mapping[str, str], say: Callable[[str], None], now: datetime
) -> RunDir:
    """Check everything that can be checked, and write the run directory: it can be supervised then.

    Raises:
        VitraError: it is refused, and nothing is left behind.
    """
    refuse_later_parts(draft_.plan)
    with new_run(draft_, now) as run:
        fill(run.dir, draft_, scheduler="local", environ=environ, say=say)
    return run.dir


@dataclass
class NewRun:
    """A run directory in the making. What goes wrong removes it, unless `kept`."""

    dir: RunDir
    kept: bool = False


@contextmanager
def new_run(draft_: Draft, now: datetime) -> Generator[NewRun]:
    """A new, empty run directory; removed again where the block inside raises.

    Raises:
        StorageError: it cannot be made, or an OSError in the block.
    """
    made = _make_root(draft_.run_root)
    run: NewRun | None = None
    try:
        run = NewRun(_new_directory(draft_, now))
        yield run
    except BaseException as err:
        if run is not None and not run.kept:
            shutil.rmtree(run.dir.path, ignore_errors=True)
        _remove_empty(made)
        if isinstance(err, OSError):
            raise errors.StorageError(
                f"run root {draft_.run_root}: {err.strerror or err}",
                "mend that, or name another with --run-root, run_root or $VITRA_RUN_ROOT",
            ) from err
        raise


def fill(
    run_dir: RunDir,
    draft_: Draft,
    *,
    scheduler: str,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Write a new run directory; what takes long or is likely to be refused comes first.

    Raises:
        VitraError: the run is refused. OSError: something cannot be written.
    """
    loaded = draft_.loaded
    planned = plan_in(loaded, draft_.run_root, run_dir.path.name)
    store = _store_of(planned)
    refuse_place(planned)
    _refuse_source(loaded.spec)

    say("checking data and model")
    around = component_environment(environ, loaded.spec)
    path = user_path(loaded.spec, absolute("."), around.get("PYTHONPATH", ""))
    vitra = place_vitra(run_dir.code, path, always=container_of(loaded.spec) is not None)
    imports = path if vitra is None else [str(vitra), *path]
    found = probe(loaded.spec, environ=importing(around, imports))
    check_samples(planned, found["n_samples"])
    say(f"{found['n_samples']} samples, {found['n_parameters']:,} parameters")
    for note in found["notes"]:
        say(note)
    take_snapshot(
        run_dir,
        loaded.spec,
        Seen.from_answer(found),
        path=path,
        excluded=_results(draft_.run_root, planned),
        environ=environ,
        say=say,
    )

    write_atomic(run_dir.spec, loaded.text)
    write_atomic(run_dir.overrides, dump_overrides(loaded.overrides))
    keep_profiles(run_dir, loaded.profiles)
    planned = planned.with_samples(found["n_samples"])
    write_atomic(run_dir.plan, planned.model_dump_json(indent=1).encode())
    run_dir.attempts.mkdir(mode=0o750)
    append_event(run_dir, "submitted", scheduler=scheduler)
    record = RunRecord(
        run_id=planned.run_id,
        name=planned.spec.name,
        scheduler=scheduler,
        created_at=utc_now(),
        user=user_name(),
        host=os.uname().nodename,
        python=sys.executable,
        working_dir=str(absolute(".")),
        versions={"vitra": version("vitra-launcher"), **found["versions"]},
        spec_digest=planned.spec_digest,
    )
    store.own()
    write_atomic(run_dir.record, record.model_dump_json(indent=1).encode())


def _results(run_root: Path, planned: Plan) -> list[Path]:
    """Directories that hold results of runs, and may lie among the code."""
    place = Path(planned.checkpoint_uri.removeprefix("file://"))
    return [run_root, place] if place.is_absolute() else [run_root]


def refuse_place(checked: Plan) -> None:
    """Try the checkpoint place out; leaves it as it was.

    Raises:
        StorageError: it cannot be written, read, listed and deleted from here.
        CheckpointError: it belongs to another run.
    """
    store = _store_of(checked)
    store.storage.probe()
    if store.owner() not in (None, checked.run_id):
        store.own()


def _refuse_source(spec: RunSpec) -> None:
    """Raises NotFound or StorageError if there are no weights to start from."""
    from trainer.store.source import find_source

    source = spec.checkpoint.init_from
    if source is None:
        return
    options = spec.checkpoint.storage_options
    if find_source(source, options, patience_s=_PLACE_PATIENCE_S) is None:
        raise errors.NotFound(
            f"checkpoint.init_from={source}: there is nothing there",
            "name a safetensors file, a weights.pt, or the directory of one step (.../step-...)",
        )


def _store_of(planned: Plan) -> CheckpointStore:
    """Raises UsageError if the checkpoint place is of a kind that cannot be used."""
    from trainer.store.checkpoints import CheckpointStore

    return CheckpointStore.of_plan(planned, patience_s=_PLACE_PATIENCE_S)


def _make_root(run_root: Path) -> list[Path]:
    """Make the run root and what is missing above it; returns what was made, outermost first."""
    made: list[Path] = []
    try:
        missing = [path for path in (run_root, *run_root.parents) if not path.exists()]
        for path in reversed(missing):
            # Another submit may be just as far.
            with suppress(FileExistsError):
                path.mkdir(mode=0o750)
                made.append(path)
        if not run_root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(run_root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written to")
    except OSError as err:
        _remove_empty(made)
        raise errors.StorageError(
            f"run root {run_root}: {err.strerror}",
            "name another with --run-root, run_root or $VITRA_RUN_ROOT",
        ) from err
    return made


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories, given outermost first, in which nothing is."""
    for directory in reversed(directories):
        with suppress(OSError):
            directory.rmdir()


def _new_directory(draft_: Draft, now: datetime) -> RunDir:
    for _ in range(100):
        path = draft_.run_root / new_run_id(draft_.plan.spec.name, now)
        try:
            path.mkdir(mode=0o750)
        except FileExistsError:
            continue
        except OSError as err:
            raise errors.StorageError(f"cannot make {path}: {err.strerror}") from err
        return RunDir(path)
    raise errors.StorageError(f"no free run id for {draft_.plan.spec.name} under {draft_.run_root}")
