"""From a run spec to a plan: the batch equation solved exactly, or refused with what would work.

Everything here is a pure function: no files, no environment, no clock.

Always `per_device_batch_size x world_size x grad_accumulation_steps == global_batch_size`. Nothing
is rounded and nothing is clamped, so a run trains on exactly the batch that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePosixPath

from trainer.spec.errors import PlanError
from trainer.spec.fields import LARGEST_COUNT
from trainer.spec.plan import ElasticShape, Plan, spec_digest, warmup_steps
from trainer.spec.run import MOST_NODES, MOST_PER_NODE, ResourcesSpec, RunSpec
from trainer.spec.times import parse_slurm_time

#: Slurm looks at time limits about every 30 s: a warning comes up to this much earlier than asked.
SIGNAL_SLACK_S = 60
#: A note spells out at most so many runs of node counts.
SPANS_SHOWN = 12


@dataclass(frozen=True)
class Fix:
    """Values that give a refused spec an exact plan: all of `changes`, dotted field and value."""

    changes: tuple[tuple[str, int | str], ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The keys of the spec that it changes."""
        return tuple(field for field, _ in self.changes)

    def __str__(self) -> str:
        return " with ".join(f"{field}={value}" for field, value in self.changes)


class NoExactPlan(PlanError):
    """The batch equation has no solution. Each of `fixes`, applied to the spec, gives it one."""

    def __init__(self, message: str, hint: str | None, fixes: Iterable[Fix]) -> None:
        super().__init__(message, hint)
        self.fixes = tuple(fixes)


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
    terms = _Terms.of(spec)
    usable = terms.usable()
    if not usable:
        raise _refusal(spec, terms)
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
    terms = _Terms.of(plan.spec)
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


@dataclass(frozen=True)
class _Terms:
    """What the batch equation is made of.

    A node count n can be used where `batch` is a multiple of `unit(n)` = n x tasks x per_device
    (1 where the planner chooses it) and `replicate` divides n x tasks.
    """

    batch: int
    counts: range
    tasks: int
    per_device: int | None
    most_per_device: int | None
    replicate: int

    @classmethod
    def of(cls, spec: RunSpec) -> _Terms:
        return cls(
            batch=spec.train.global_batch_size,
            counts=spec.resources.node_counts,
            tasks=spec.resources.tasks,
            per_device=spec.train.per_device_batch_size,
            most_per_device=spec.train.max_per_device_batch_size,
            replicate=spec.train.replicate,
        )

    @property
    def over_most(self) -> bool:
        """True where the fields that bound the per-device batch contradict each other."""
        return (
            self.per_device is not None
            and self.most_per_device is not None
            and self.per_device > self.most_per_device
        )

    def unit(self, nodes: int) -> int:
        """The batch on `nodes` nodes is a multiple of this many samples."""
        return nodes * self.tasks * (self.per_device or 1)

    def batch_fits(self, nodes: int) -> bool:
        return self.batch % self.unit(nodes) == 0

    def replicas_fit(self, nodes: int) -> bool:
        return nodes * self.tasks % self.replicate == 0

    def usable(self) -> list[int]:
        """The node counts that have an exact plan, in rising order."""
        if self.over_most:
            return []
        return [n for n in self.counts if self.batch_fits(n) and self.replicas_fit(n)]

    def shape(self, nodes: int) -> ElasticShape:
        """The solution for a usable node count."""
        world = nodes * self.tasks
        share, rest = divmod(self.batch, world)
        assert rest == 0, f"{nodes} nodes cannot be used"
        per_device = self.per_device or largest_divisor(share, self.most_per_device or share)
        accumulation, rest = divmod(share, per_device)
        assert rest == 0, f"{nodes} nodes cannot be used"
        return ElasticShape(
            nodes=nodes,
            world_size=world,
            per_device_batch_size=per_device,
            grad_accumulation_steps=accumulation,
        )

    def spell_unit(self) -> str:
        """The smallest batch of the smallest node count, as a product."""
        world = self.counts[0] * self.tasks
        if self.per_device is None:
            return f"1 x {world} = {world} samples"
        return f"{self.per_device} x {world} = {self.per_device * world} samples"


# --- what would work instead: each generator yields terms that differ from the given ones in the
# --- fields it is named for, nearest values only. Not all of them have a plan; the caller looks.


def _other_batches(terms: _Terms) -> Iterator[_Terms]:
    units = [terms.unit(n) for n in terms.counts if terms.replicas_fit(n)]
    yield from (
        replace(terms, batch=batch)
        for batch in (
            max((terms.batch // unit * unit for unit in units), default=0),
            min((-(-terms.batch // unit) * unit for unit in units), default=0),
        )
        if 1 <= batch <= LARGEST_COUNT
    )


def _other_per_device(terms: _Terms) -> Iterator[_Terms]:
    if terms.per_device is None:
        return
    shares = (
        terms.batch // (n * terms.tasks)
        for n in terms.counts
        if terms.batch % (n * terms.tasks) == 0 and terms.replicas_fit(n)
    )
    most = terms.most_per_device or LARGEST_COUNT
    allowed = (d for d in _divisors_near(shares, min(terms.per_device, most + 1)) if d <= most)
    for value in _nearest(allowed, terms.per_device):
        yield replace(terms, per_device=value)


def _other_most(terms: _Terms) -> Iterator[_Terms]:
    if terms.over_most:
        yield replace(terms, most_per_device=terms.per_device)


def _other_nodes(terms: _Terms) -> Iterator[_Terms]:
    # n must divide the quotient and be a multiple of the step that replicate asks for.
    quotient, rest = divmod(terms.batch, terms.tasks * (terms.per_device or 1))
    step = terms.replicate // math.gcd(terms.replicate, terms.tasks)
    if rest or quotient % step:
        return
    least, most = terms.counts[0], terms.counts[-1]
    below = _divisor_below(quotient // step, -(-least // step))
    above = _divisor_above(quotient // step, most // step)
    if below is not None:
        yield _with_nodes(terms, below * step)
    if above is not None and above * step <= MOST_NODES:
        yield _with_nodes(terms, above * step)


def _with_nodes(terms: _Terms, nodes: int) -> _Terms:
    """`nodes` instead of a fixed count; a range is widened to it."""
    if len(terms.counts) == 1:
        return replace(terms, counts=range(nodes, nodes + 1))
    least, most = terms.counts[0], terms.counts[-1]
    return replace(terms, counts=range(min(least, nodes), max(most, nodes) + 1))


def _other_tasks(terms: _Terms) -> Iterator[_Terms]:
    found: set[int] = set()
    for nodes in terms.counts:
        quotient, rest = divmod(terms.batch, nodes * (terms.per_device or 1))
        step = terms.replicate // math.gcd(terms.replicate, nodes)
        if rest or quotient % step:
            continue
        below = _divisor_below(quotient // step, -(-terms.tasks // step))
        above = _divisor_above(quotient // step, terms.tasks // step)
        found.update(m * step for m in (below, above) if m is not None)
    for value in _nearest(found, terms.tasks):
        if value <= MOST_PER_NODE:
            yield replace(terms, tasks=value)


def _other_replicates(terms: _Terms) -> Iterator[_Terms]:
    worlds = (n * terms.tasks for n in terms.counts if terms.batch_fits(n))
    for value in _nearest(_divisors_near(worlds, terms.replicate), terms.replicate):
        yield replace(terms, replicate=value)


def _several(terms: _Terms) -> Iterator[_Terms]:
    """Changes of more than one field, for terms that no single change helps."""
    variants = [terms]
    if terms.over_most:
        variants = [replace(terms, per_device=terms.most_per_device), *_other_most(terms)]
    if not any(terms.replicas_fit(n) for n in terms.counts):
        world = terms.counts[-1] * terms.tasks
        divisors = _nearest(_divisors_near([world], terms.replicate), terms.replicate)
        variants = [replace(v, replicate=r) for v in variants for r in divisors]
    for variant in variants:
        yield variant
        yield from _other_batches(variant)


def _divisors_near(numbers: Iterable[int], value: int) -> set[int]:
    """The divisors of each number that are next below and next above `value`."""
    found: set[int] = set()
    for number in numbers:
        found.update(
            divisor
            for divisor in (_divisor_below(number, value), _divisor_above(number, value))
            if divisor is not None
        )
    return found


def _nearest(values: Iterable[int], to: int) -> list[int]:
    """Of the values, the one next below `to` and the one next above it."""
    values = list(values)
    below = [value for value in values if value < to]
    above = [value for value in values if value > to]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def _divisor_below(number: int, value: int) -> int | None:
    """The largest divisor of `number` that is less than `value`."""
    return largest_divisor(number, value - 1) if value > 1 else None


def _divisor_above(number: int, value: int) -> int | None:
    """The smallest divisor of `number` that is more than `value`."""
    if value >= number:
        return None
    # d > value is the same as number/d <= number // (value + 1).
    return number // largest_divisor(number, number // (value + 1))


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is at most `at_most`; both at least 1.

    Takes at most 2 x sqrt(number) steps.
    """
    if at_most >= number:
        return number
    root = math.isqrt(number)
    if at_most > root:
        # A divisor above the root is the partner of one below it: walk the partners upwards.
        for partner in range(-(-number // at_most), root + 1):
            if number % partner == 0:
                return number // partner
        at_most = root
    return next(d for d in range(at_most, 0, -1) if number % d == 0)


# --- refusals and notes


def _refusal(spec: RunSpec, terms: _Terms) -> NoExactPlan:
    complaints = list(_complaints(spec, terms))
    singles = (
        _other_batches,
        _other_per_device,
        _other_most,
        _other_replicates,
        _other_nodes,
        _other_tasks,
    )
    found = [t for neighbours in singles for t in neighbours(terms)]
    fixes = _fixes(spec.resources, terms, found) or _fixes(spec.resources, terms, _several(terms))
    message = ", and ".join(message for _, message in complaints)
    accused = complaints[0][0] if len(complaints) == 1 else None
    return NoExactPlan(message, _advice(accused, fixes), fixes)


def _complaints(spec: RunSpec, terms: _Terms) -> Iterator[tuple[str, str]]:
    """Each field at fault, with what is wrong with it."""
    if terms.over_most:
        yield (
            "train.per_device_batch_size",
            f"train.per_device_batch_size={terms.per_device} is more than "
            f"train.max_per_device_batch_size={terms.most_per_device}",
        )
    batch_fits = any(terms.batch_fits(n) for n in terms.counts)
    replicas_fit = any(terms.replicas_fit(n) for n in terms.counts)
    if batch_fits and replicas_fit and terms.over_most:
        return
    sizes = _spell_sizes(spec.resources, terms)
    nodes, tasks, per_device = terms.counts[0], terms.tasks, terms.per_device
    one, world = len(terms.counts) == 1, nodes * tasks
    if not batch_fits:
        head = f"train.global_batch_size={terms.batch} is not a multiple of "
        if per_device is None:
            product = f"{nodes} x {tasks} = {world}" if one else "the world size at any node count"
            tail = f"{product} ({sizes})"
        elif one:
            tail = (
                f"{per_device} x {world} = {per_device * world} "
                f"(train.per_device_batch_size={per_device}, world size {world}: {sizes})"
            )
        else:
            tail = (
                f"{per_device} x the world size at any node count "
                f"(train.per_device_batch_size={per_device}, {sizes})"
            )
        yield "train.global_batch_size", head + tail
    head = f"train.replicate={terms.replicate} does not divide the world size "
    if not replicas_fit:
        tail = f"{nodes} x {tasks} = {world}" if one else "at any node count"
        yield "train.replicate", f"{head}{tail} ({sizes})"
    elif batch_fits:
        it = "it" if per_device is None else f"it x train.per_device_batch_size={per_device}"
        yield (
            "train.replicate",
            f"{head}at any node count where train.global_batch_size={terms.batch} is a multiple "
            f"of {it} ({sizes})",
        )


def _spell_sizes(resources: ResourcesSpec, terms: _Terms) -> str:
    nodes = (
        f"resources.nodes={terms.counts[0]}"
        if not resources.elastic
        else f"resources.nodes.min={terms.counts[0]} to resources.nodes.max={terms.counts[-1]}"
    )
    if resources.tasks_per_node is None and resources.gpu_count:
        return f"{nodes} x resources.gpus_per_node={resources.gpus_per_node}"
    return f"{nodes} x resources.tasks_per_node={terms.tasks}"


def _fixes(resources: ResourcesSpec, old: _Terms, found: Iterable[_Terms]) -> list[Fix]:
    """Those of the terms found that have a plan, as changes to the spec."""
    fixes: dict[Fix, None] = {}
    for new in found:
        # More GPUs than asked for are not ours to propose: a node has as many as it has.
        if not new.usable() or (resources.gpu_count and new.tasks > old.tasks):
            continue
        fixes[Fix(tuple(_changes(resources, old, new)))] = None
    return list(fixes)


def _changes(resources: ResourcesSpec, old: _Terms, new: _Terms) -> Iterator[tuple[str, int | str]]:
    if new.replicate != old.replicate:
        yield "train.replicate", new.replicate
    if new.per_device != old.per_device and new.per_device is not None:
        yield "train.per_device_batch_size", new.per_device
    if new.most_per_device != old.most_per_device and new.most_per_device is not None:
        yield "train.max_per_device_batch_size", new.most_per_device
    if new.counts != old.counts:
        if not resources.elastic:
            yield "resources.nodes", new.counts[0]
        elif new.counts[0] < old.counts[0]:
            yield "resources.nodes.min", new.counts[0]
        else:
            yield "resources.nodes.max", new.counts[-1]
    if new.tasks != old.tasks:
        if resources.gpu_count:
            kind = resources.gpu_type
            yield "resources.gpus_per_node", f"{kind}:{new.tasks}" if kind else new.tasks
        if resources.tasks_per_node is not None or not resources.gpu_count:
            yield "resources.tasks_per_node", new.tasks
    if new.batch != old.batch:
        yield "train.global_batch_size", new.batch


def _advice(accused: str | None, fixes: Sequence[Fix]) -> str | None:
    """The fixes in words: "use 192 or 384, or resources.nodes=2 or 4".

    The values of the accused field come first and without its name, which the message begins with.
    """
    if not fixes:
        return None
    values: dict[str, list[str]] = {}
    for fix in sorted(fixes, key=lambda fix: fix.fields != (accused,)):
        *before, (field, value) = fix.changes
        lead = "".join(f"{name}={given} with " for name, given in before)
        lead += "" if fix.fields == (accused,) else f"{field}="
        values.setdefault(lead, []).append(str(value))
    return "use " + ", or ".join(lead + " or ".join(group) for lead, group in values.items())


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
