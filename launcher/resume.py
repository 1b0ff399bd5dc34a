"""Going on with a run that stopped, failed, or is to train longer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from launcher.jobs import begin_submission, submissions
from launcher.load import changed_fields, dotted, dump_overrides, load_spec, read_overrides
from launcher.outcomes import close_unjudged
from launcher.planner import replan
from launcher.profiles import kept_profiles
from launcher.registry import absolute, read_plan
from launcher.status import Standing, run_status
from launcher.submit import refuse_later_parts, refuse_place
from trainer.spec.errors import UsageError
from trainer.spec.outcome import RunState
from trainer.spec.plan import Plan
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir, append_event, read_lines, write_atomic

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


@dataclass(frozen=True)
class Resumption:
    """A resume that is allowed, before anything of it is written.

    `overrides` is the new text of the run's overrides, None where there are no new ones; `changed`
    has each changed field's new value.
    """

    plan: Plan
    overrides: bytes | None
    changed: Mapping[str, object]


def check_resume(
    run_dir: RunDir,
    stands: Standing,
    overrides: Sequence[str],
    *,
    allow_change: bool,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Resumption | None:
    """Whether a run may go on, and as what; writes nothing.

    `overrides` are added to the run's own, for this and every later attempt. Prints each change,
    and the learning rate at the resume step where the schedule changed. Returns None where the run
    is complete and nothing is left to train.

    Raises:
        UsageError: a change is not allowed. SpecError, PlanError: the changed spec is refused.
            CheckpointError: the checkpoint place is another run's.
    """
    old = read_plan(run_dir)
    given = [*read_overrides(run_dir.overrides), *overrides]
    loaded = None
    if overrides:
        profiles = kept_profiles(run_dir)
        loaded = load_spec(run_dir.spec, given, environ=environ, profiles=profiles)
    new = replan(old, loaded.spec, base_dir=str(absolute("."))) if loaded else old
    refuse_later_parts(new)
    changes = changed_fields(old.spec, new.spec)
    refused = [field for field in changes if not _may_change(field)]
    if refused and not allow_change:
        raise UsageError(
            "a resume may not change "
            + ", ".join(_change(field, old.spec, new.spec) for field in refused),
            "it alters what was trained; submit a new run, or add --allow-change",
        )
    status = run_status(run_dir, stands)
    if status["state"] == RunState.COMPLETED and (new.total_steps or 0) <= (old.total_steps or 0):
        say(f"{run_dir.path.name} is already complete: step {status['step']} of {old.total_steps}")
        return None
    saved = status["last_checkpoint_step"] or 0
    if new.total_steps is not None and new.total_steps < saved:
        raise UsageError(
            f"{new.total_steps} steps in all are fewer than the {saved} that are trained and saved",
            f"give {saved} or more",
        )
    refuse_place(new)
    for field in changes:
        say(f"changed: {_change(field, old.spec, new.spec)}")
    if new.threads_per_rank != old.threads_per_rank:
        say("note: another number of threads changes the last bits of results")
    if new.total_steps != old.total_steps:
        _say_rate(old, new, saved, say)
    return Resumption(
        plan=new,
        overrides=dump_overrides(loaded.overrides) if loaded else None,
        changed={field: _value(new.spec, field) for field in changes},
    )


def write_resume(run_dir: RunDir, resumption: Resumption, *, scheduler: str) -> None:
    """Make a run ready to go on. The caller sees to it that nobody else does.

    Raises:
        OSError: the run directory cannot be written.
    """
    close_unjudged(run_dir)
    if resumption.overrides is not None:
        write_atomic(run_dir.overrides, resumption.overrides)
    write_atomic(run_dir.plan, resumption.plan.model_dump_json(indent=1).encode())
    with suppress(FileNotFoundError):
        run_dir.cancel.unlink()
    append_event(run_dir, "resumed", scheduler=scheduler, changed=resumption.changed)
    if scheduler == "local" and submissions(list(read_lines(run_dir.events))):
        # A job of before that comes back must find that the run is no longer its own.
        begin_submission(run_dir)


def _say_rate(old: Plan, new: Plan, step: int, say: Callable[[str], None]) -> None:
    from trainer.spec.schedule import Schedule

    train = new.spec.train

    def rate(total: int | None) -> float:
        schedule = Schedule(
            train.lr_scheduler_type,
            total or 0,
            train.warmup_ratio,
            train.min_lr_ratio,
            train.freeze_steps,
        )
        return train.learning_rate * schedule.factor(step + 1, "backbone")

    say(
        f"the schedule now ends at step {new.total_steps}, not {old.total_steps}: the learning "
        f"rate of step {step + 1} is {rate(new.total_steps):.6g}, it would have been "
        f"{rate(old.total_steps):.6g}"
    )


def _may_change(field: str) -> bool:
    return any(field == allowed or field.startswith(f"{allowed}.") for allowed in _CHANGEABLE)


def _change(field: str, old: RunSpec, new: RunSpec) -> str:
    return f"{field}: {_value(old, field)} -> {_value(new, field)}"


def _value(spec: RunSpec, field: str) -> object:
    """The value of a field as `changed_fields` names it; None where the spec has no such field."""
    return _find(spec.model_dump(mode="json"), field, ())


def _find(table: dict[str, Any], field: str, above: tuple[str, ...]) -> object:
    for key, value in table.items():
        loc = (*above, key)
        if dotted(loc) == field:
            return value
        if isinstance(value, dict) and field.startswith(f"{dotted(loc)}."):
            return _find(cast("dict[str, Any]", value), field, loc)
    return None
