"""From a spec file to a submitted run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launcher import shell
from launcher.environment import without_stale
from launcher.load import LoadedSpec, load_spec
from launcher.planner import check_samples, plan
from launcher.registry import DRY_RUN_SUFFIX, RunRecord, choose_run_root, new_run_id, user_name
from launcher.request import build_request, render
from trainer.spec import errors
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir, append_event, utc_now, write_atomic

#: Opening a large data set over a slow file system takes its time; hanging for ever is no option.
_PROBE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Draft:
    """A spec with its plan, before anything is written. The run id ends in DRYRUN."""

    loaded: LoadedSpec
    plan: Plan
    run_root: Path


def draft(
    spec_path: Path, overrides: Sequence[str], *, run_root: str | None, environ: Mapping[str, str]
) -> Draft:
    """Load and plan; touches nothing.

    Raises:
        SpecError, PlanError: the spec is refused.
    """
    loaded = load_spec(spec_path, overrides, environ=environ)
    root = choose_run_root(run_root, loaded.spec.run_root, environ)
    return Draft(loaded, _plan_in(loaded, root, f"{loaded.spec.name}-{DRY_RUN_SUFFIX}"), root)


def script(draft_: Draft) -> str:
    """The batch script that submit sends, byte for byte."""
    return render(build_request(draft_.plan, python=sys.executable))


def refuse_later_parts(checked: Plan) -> None:
    """Refuse what is planned by this version and run by a later one, before anything is written."""
    spec = checked.spec
    if spec.train.strategy != "ddp":
        raise errors.UsageError(
            f"train.strategy={spec.train.strategy}: planned, but not yet run by this version", "use ddp"
        )
    if checked.elastic:
        raise errors.UsageError(
            "resources.nodes is a range: elastic runs are planned, but not yet run by this version",
            f"write one number, such as nodes: {checked.nodes}",
        )


def probe(spec_json: str, *, environ: Mapping[str, str]) -> dict[str, Any]:
    """Open the data set and build the model in a process of their own, as a rank would.

    Raises:
        VitraError: of the class that the component's fault has.
    """
    answer = shell.run(
        [sys.executable, "-P", "-m", "trainer", "--probe"],
        timeout_s=_PROBE_TIMEOUT_S,
        stdin=spec_json.encode(),
        env=without_stale(environ),
    )
    try:
        result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise errors.VitraError(f"the probe failed with exit code {answer.returncode}: {last}") from None
    if "error" in result:
        kind = getattr(errors, str(result["error"]), None)
        known = isinstance(kind, type) and issubclass(kind, errors.VitraError) and kind is not errors.SpecError
        raise (kind if known else errors.UsageError)(result["message"], result["hint"])
    return result


def submit_local(
    draft_: Draft, *, environ: Mapping[str, str], say: Callable[[str], None], now: datetime
) -> tuple[RunDir, Plan]:
    """Probe, then write the run directory; the run is ready to be supervised.

    Raises:
        VitraError: it is refused, and nothing is left behind.
    """
    refuse_later_parts(draft_.plan)
    made = _make_root(draft_.run_root)
    try:
        say("checking data and model")
        found = probe(draft_.loaded.spec.model_dump_json(), environ=environ)
        check_samples(draft_.plan, found["n_samples"])
        say(f"{found['n_samples']} samples, {found['n_parameters']:,} parameters")
        return _write_run(draft_, found, scheduler="local", now=now)
    except BaseException:
        for directory in reversed(made):
            with suppress(OSError):
                directory.rmdir()
        raise


def _write_run(
    draft_: Draft, found: Mapping[str, Any], *, scheduler: str, now: datetime
) -> tuple[RunDir, Plan]:
    from trainer.store.checkpoints import CheckpointStore
    from trainer.store.storage import open_storage

    run_dir = _new_directory(draft_, now)
    try:
        final = _plan_in(draft_.loaded, draft_.run_root, run_dir.path.name).with_samples(found["n_samples"])
        write_atomic(run_dir.spec, draft_.loaded.text)
        write_atomic(run_dir.overrides, overrides_document(draft_.loaded.overrides))
        write_atomic(run_dir.plan, final.model_dump_json(indent=1).encode())
        run_dir.attempts.mkdir(mode=0o750)
        storage = open_storage(final.checkpoint_uri, final.spec.checkpoint.storage_options)
        storage.probe()
        CheckpointStore(storage, final.run_id).own()
        record = RunRecord(
            run_id=final.run_id,
            name=final.spec.name,
            scheduler=scheduler,
            created_at=utc_now(),
            user=user_name(),
            host=os.uname().nodename,
            python=sys.executable,
            versions={"vitra": version("vitra-launcher"), **found["versions"]},
            spec_digest=final.spec_digest,
        )
        append_event(run_dir, "submitted", scheduler=scheduler)
        write_atomic(run_dir.record, record.model_dump_json(indent=1).encode())
    except OSError as err:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        raise errors.StorageError(f"cannot write {run_dir.path}: {err.strerror}") from err
    except BaseException:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        raise
    return run_dir, final


def overrides_document(overrides: Sequence[str]) -> bytes:
    """overrides.yaml: the overrides as they were given, one a line, as a YAML list of strings."""
    return "".join(f"- {json.dumps(text)}\n" for text in overrides).encode()


def _plan_in(loaded: LoadedSpec, run_root: Path, run_id: str) -> Plan:
    return plan(loaded.spec, run_id=run_id, run_dir=str(run_root / run_id), base_dir=str(Path.cwd()))


def _make_root(run_root: Path) -> list[Path]:
    """Make the run root and what is missing above it; returns the directories made, outermost first."""
    missing = [path for path in (run_root, *run_root.parents) if not path.exists()]
    made: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir(mode=0o750)
            made.append(path)
        if not run_root.is_dir():
            raise NotADirectoryError(20, "it is not a directory")
        if not os.access(run_root, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write there")
    except OSError as err:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()
        raise errors.StorageError(
            f"run root {run_root}: {err.strerror}", "name another with --run-root, run_root or $VITRA_RUN_ROOT"
        ) from err
    return made


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
