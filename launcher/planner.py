"""From a run spec to a plan: the batch equation solved exactly, or refused with what would work.

Everything here is a pure function: no files, no environment, no clock.

Always `per_device_batch_size x world_size x grad_accumulation_steps == global_batch_size`. Nothing
is rounded and nothing is clamped, so a run trains on exactly the batch that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

from launcher.equation import Terms
from launcher.fixes import Fix, NoExactPlan, refusal
from trainer.spec.plan import Plan, spec_digest, warmup_steps
from trainer.spec.run import RunSpec
from trainer.spec.times import parse_slurm_time

#: Slurm looks at time limits about every 30 s: a warning comes up to this much earlier than asked.
SIGNAL_SLACK_S = 60
#: A note spells out at most so many runs of node counts.
SPANS_SHOWN = 12


def plan(spec: RunSpec, *, run_id: str, run_dir: str, base_dir: str | None = None) -> Plan:
    """Work out a run.

    Args:
        run_id: the run's id; in `checkpoint.uri` it replaces `{run_id}`.
        run_dir: the run directory, absolute.
        base_dir: the directory that a relative path in `checkpoint.uri` starts from, absolute.
            None leaves such a path as it is.

    Returns:
        The plan. `total_steps` and `warmup_steps` are None where `train.epochs` decides: see
        `Plan.with_samples`. An elastic run is planned for its largest usable node count.

    Raises:
        NoExactPlan: no node count of the spec has an exact plan.
    """
    train, resources = spec.train, spec.resources
    terms = Terms.of(spec)
    usable = terms.usable()
    if not usable:
        raise refusal(spec, terms)
    shapes = [terms.shape(nodes) for nodes in usable]
    used = shapes[-1]
    unusable = tuple(sorted(set(terms.counts).difference(usable)))
    return Plan(
        run_id=run_id,
        run_dir=run_dir,
        spec=spec,
        spec_digest=spec_digest(spec),
        nodes=used.nodes,
        tasks_per_node=terms.tasks,
        world_size=used.world_size,
        per_device_batch_size=used.per_device_batch_size,
        grad_accumulation_steps=used.grad_accumulation_steps,
        total_steps=train.max_steps,
        warmup_steps=(
            None if train.max_steps is None else warmup_steps(train.warmup_ratio, train.max_steps)
        ),
        time_limit_min=resources.time_limit_min,
        threads_per_rank=resources.threads,
        checkpoint_uri=_checkpoint_uri(spec, run_id, run_dir, base_dir),
        elastic=tuple(shapes) if resources.elastic else (),
        unusable_nodes=unusable,
        notes=tuple(_notes(spec, unusable)),
    )


def replan(old: Plan, spec: RunSpec, *, base_dir: str | None = None) -> Plan:
    """The plan of a run that goes on with a changed spec.

    Keeps the run's id, its directory and the size of its data, and its checkpoint place unless
    `checkpoint.uri` itself has changed (`base_dir` as in `plan`).

    Raises:
        NoExactPlan: the changed spec has no exact plan, or its batch exceeds the data.
    """
    new = plan(spec, run_id=old.run_id, run_dir=old.run_dir, base_dir=base_dir)
    if spec.checkpoint.uri == old.spec.checkpoint.uri:
        # The old place was made absolute where the run was submitted, maybe not where we are now.
        new = new.model_copy(update={"checkpoint_uri": old.checkpoint_uri})
    if old.n_samples is None:
        return new
    check_samples(new, old.n_samples)
    return new.with_samples(old.n_samples)


def check_samples(plan: Plan, n_samples: int) -> None:
    """Refuse a batch that is larger than the training data (`n_samples` samples).

    Raises:
        NoExactPlan: it is; its fixes are the batches that fit, largest first.
    """
    batch = plan.global_batch_size
    if n_samples >= batch:
        return
    if n_samples < 1:
        raise NoExactPlan("the training data holds no samples", "see data.options", ())
    terms = Terms.of(plan.spec)
    units = (terms.unit(nodes) for nodes in terms.counts if terms.replicas_fit(nodes))
    best = max((n_samples // unit * unit for unit in units), default=0)
    message = (
        f"train.global_batch_size={batch} is more than the {n_samples} "
        f"{'sample' if n_samples == 1 else 'samples'} of the training data"
    )
    if best:
        raise NoExactPlan(
            message, f"use at most {best}", [Fix((("train.global_batch_size", best),))]
        )
    raise NoExactPlan(
        message,
        f"one step of {terms.spell_unit()} does not fit either: use fewer processes"
        + (" or a smaller train.per_device_batch_size" if terms.per_device else ""),
        (),
    )


def public_view(plan: Plan) -> dict[str, object]:
    """The document of `vitra plan --json`; its keys are documented and stay."""
    shape_fields = {"nodes", "world_size", "per_device_batch_size", "grad_accumulation_steps"}
    return {
        "name": plan.spec.name,
        "strategy": plan.spec.train.strategy,
        "replicate": plan.spec.train.replicate,
        "nodes": plan.nodes,
        "tasks_per_node": plan.tasks_per_node,
        "world_size": plan.world_size,
        "global_batch_size": plan.global_batch_size,
        "per_device_batch_size": plan.per_device_batch_size,
        "grad_accumulation_steps": plan.grad_accumulation_steps,
        "total_steps": plan.total_steps,
        "warmup_steps": plan.warmup_steps,
        "time_limit_min": plan.time_limit_min,
        "threads_per_rank": plan.threads_per_rank,
        "checkpoint_uri": plan.checkpoint_uri,
        "container": (
            None
            if (container := plan.spec.resources.container) is None
            else container.model_dump(mode="json")
        ),
        "elastic": [shape.model_dump(include=shape_fields) for shape in plan.elastic] or None,
        "unusable_nodes": list(plan.unusable_nodes),
        "notes": list(plan.notes),
    }


def _notes(spec: RunSpec, unusable: Sequence[int]) -> Iterator[str]:
    train, resources = spec.train, spec.resources
    time = parse_slurm_time(resources.time)
    if time.surprising:
        yield f"resources.time: {resources.time} is {time.reading}"
    early_s = resources.signal_lead_s + SIGNAL_SLACK_S
    if 2 * early_s > time.minutes * 60:
        yield (
            f"warning: resources.signal_lead_s={resources.signal_lead_s} is close to the time "
            f"limit of {time.minutes} min: Slurm's warning can come {early_s} s before the end, "
            "and the run saves and stops when it comes"
        )
    if unusable:
        yield (
            f"node counts without an exact plan: {_spell_counts(unusable)}; they are not used: "
            "when so many nodes are granted, the surplus stays idle"
        )
    if train.max_steps is not None and train.epochs is not None:
        yield f"train.max_steps={train.max_steps} decides; train.epochs is not used"
    if train.max_steps is not None and 0 < train.max_steps <= train.freeze_steps:
        yield (
            f"warning: train.freeze_steps={train.freeze_steps} covers all of "
            f"train.max_steps={train.max_steps}: the backbone is never trained"
        )


def _spell_counts(counts: Sequence[int]) -> str:
    """Rising numbers with runs drawn together, such as "3, 5-7"; of very many only the first."""
    starts = [counts[0], *(b for a, b in pairwise(counts) if b != a + 1)]
    ends = [*(a for a, b in pairwise(counts) if b != a + 1), counts[-1]]
    spans = [
        str(start) if start == end else f"{start}-{end}"
        for start, end in zip(starts, ends, strict=True)
    ]
    if len(spans) > SPANS_SHOWN:
        spans[SPANS_SHOWN:] = [f"... ({len(counts)} in all)"]
    return ", ".join(spans)


def _checkpoint_uri(spec: RunSpec, run_id: str, run_dir: str, base_dir: str | None) -> str:
    uri = spec.checkpoint.uri
    if uri is None:
        return str(PurePosixPath(run_dir) / "checkpoints")
    # Literal, one after the other: neither a name nor a run id can hold a brace.
    uri = uri.replace("{name}", spec.name).replace("{run_id}", run_id)
    if base_dir is None or "://" in uri:
        return uri
    return str(PurePosixPath(base_dir) / uri)
