"""Going on with a run that stopped, failed, or is to train longer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.job import close_unjudged
from launcher.load import changed_fields, load_spec
from launcher.lock import lock_holder
from launcher.planner import replan
from launcher.status import run_status
from launcher.submit import overrides_document, refuse_later_parts
from trainer.spec.errors import StorageError, UsageError
from trainer.spec.outcome import RunState
from trainer.spec.plan import Plan
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir, append_event, write_atomic

#: What a resume may change, because it does not alter what was trained.
_CHANGEABLE = (
    "train.max_steps",
    "train.epochs",
    "train.strategy",
    "train.replicate",
    "train.per_device_batch_size",
    "train.max_per_device_batch_size",
    "checkpoint",
    "resources",
    "tracking",
    "retry",
    "run_root",
)


def prepare_resume(
    run_dir: RunDir,
    overrides: Sequence[str],
    *,
    allow_change: bool,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Plan | None:
    """Make a run ready to go on, with `overrides` added to its own for this and every later attempt.

    Prints each change, and the learning rate at the resume step where the schedule changed. Returns
    the new plan, or None where the run is complete and nothing is left to train.

    Raises:
        UsageError: a supervisor is alive, or a change is not allowed. SpecError, PlanError: the
            changed spec is refused. Nothing is changed then.
    """
    holder = lock_holder(run_dir.lock)
    if holder is not None:
        raise UsageError(
            f"{run_dir.path.name} is being supervised by {holder}",
            "one process writes a run at a time; stop that one first, or watch it with `vitra status`",
        )
    old = _read_plan(run_dir)
    given = [*_read_overrides(run_dir), *overrides]
    loaded = load_spec(run_dir.spec, given, environ=environ) if overrides else None
    new = replan(old, loaded.spec, base_dir=str(Path.cwd())) if loaded else old
    refuse_later_parts(new)
    changes = changed_fields(old.spec, new.spec)
    refused = [field for field in changes if not _may_change(field)]
    if refused and not allow_change:
        raise UsageError(
            "a resume may not change " + ", ".join(_change(field, old.spec, new.spec) for field in refused),
            "it alters what was trained; submit a new run, or add --allow-change",
        )
    status = run_status(run_dir)
    if status["state"] == RunState.COMPLETED and (new.total_steps or 0) <= (old.total_steps or 0):
        say(f"{run_dir.path.name} is already complete: step {status['step']} of {old.total_steps}")
        return None
    for field in changes:
        say(f"changed: {_change(field, old.spec, new.spec)}")
    if new.threads_per_rank != old.threads_per_rank:
        say("note: another number of threads changes the last bits of results")
    if new.total_steps != old.total_steps:
        _say_rate(old, new, status["last_checkpoint_step"] or 0, say)

    close_unjudged(run_dir)
    if loaded is not None:
        write_atomic(run_dir.overrides, overrides_document(loaded.overrides))
    write_atomic(run_dir.plan, new.model_dump_json(indent=1).encode())
    with suppress(FileNotFoundError):
        run_dir.cancel.unlink()
    append_event(run_dir, "resumed", changed={field: _value(new.spec, field) for field in changes})
    return new


def _say_rate(old: Plan, new: Plan, step: int, say: Callable[[str], None]) -> None:
    from trainer.spec.schedule import Schedule

    train = new.spec.train

    def rate(total: int | None) -> float:
        schedule = Schedule(
            train.lr_scheduler_type, total or 0, train.warmup_ratio, train.min_lr_ratio, train.freeze_steps
        )
        return train.learning_rate * schedule.factor(step + 1, "backbone")

    say(
        f"the schedule now ends at step {new.total_steps}, not {old.total_steps}: the learning rate of step "
        f"{step + 1} is {rate(new.total_steps):.6g}, it would have been {rate(old.total_steps):.6g}"
    )


def _read_plan(run_dir: RunDir) -> Plan:
    try:
        return Plan.read(run_dir.plan)
    except (OSError, ValueError) as err:
        raise StorageError(f"{run_dir.plan} cannot be read: {err}", "restore it from attempts/K/plan.json") from err


def _read_overrides(run_dir: RunDir) -> list[str]:
    """The overrides of the submit and of earlier resumes."""
    try:
        lines = run_dir.overrides.read_text(encoding="utf-8").splitlines()
        return [json.loads(line.removeprefix("- ")) for line in lines]
    except (OSError, ValueError) as err:
        raise StorageError(f"{run_dir.overrides} cannot be read: {err}") from err


def _may_change(field: str) -> bool:
    return any(field == allowed or field.startswith(f"{allowed}.") for allowed in _CHANGEABLE)


def _change(field: str, old: RunSpec, new: RunSpec) -> str:
    return f"{field}: {_value(old, field)} -> {_value(new, field)}"


def _value(spec: RunSpec, field: str) -> object:
    value: object = spec.model_dump(mode="json")
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return value  # pyright: ignore[reportUnknownVariableType]
