"""What would work instead of a batch equation without a solution, and saying so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from launcher.equation import Terms, divisor_above, divisor_below, divisors_near, nearest
from trainer.spec.errors import PlanError
from trainer.spec.fields import LARGEST_COUNT
from trainer.spec.run import MOST_NODES, MOST_PER_NODE, ResourcesSpec, RunSpec


class Fix(NamedTuple):
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


def refusal(spec: RunSpec, terms: Terms) -> NoExactPlan:
    """What to raise for terms that have no solution: the fields at fault, and what would work."""
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


def _complaints(spec: RunSpec, terms: Terms) -> Iterator[tuple[str, str]]:
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


def _spell_sizes(resources: ResourcesSpec, terms: Terms) -> str:
    nodes = (
        f"resources.nodes={terms.counts[0]}"
        if not resources.elastic
        else f"resources.nodes.min={terms.counts[0]} to resources.nodes.max={terms.counts[-1]}"
    )
    if resources.tasks_per_node is None and resources.gpu_count:
        return f"{nodes} x resources.gpus_per_node={resources.gpus_per_node}"
    return f"{nodes} x resources.tasks_per_node={terms.tasks}"


def _fixes(resources: ResourcesSpec, old: Terms, found: Iterable[Terms]) -> list[Fix]:
    """Those of the terms found that have a plan, as changes to the spec."""
    fixes: dict[Fix, None] = {}
    for new in found:
        # More GPUs than asked for are not ours to propose: a node has as many as it has.
        if not new.usable() or (resources.gpu_count and new.tasks > old.tasks):
            continue
        fixes[Fix(tuple(_changes(resources, old, new)))] = None
    return list(fixes)


def _changes(resources: ResourcesSpec, old: Terms, new: Terms) -> Iterator[tuple[str, int | str]]:
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


# What would work: each generator yields terms that differ from the given ones in the fields it is
# named for, nearest values only. Not all of them have a plan; the caller looks.


def _other_batches(terms: Terms) -> Iterator[Terms]:
    units = [terms.unit(n) for n in terms.counts if terms.replicas_fit(n)]
    yield from (
        terms._replace(batch=batch)
        for batch in (
            max((terms.batch // unit * unit for unit in units), default=0),
            min((-(-terms.batch // unit) * unit for unit in units), default=0),
        )
        if 1 <= batch <= LARGEST_COUNT
    )


def _other_per_device(terms: Terms) -> Iterator[Terms]:
    if terms.per_device is None:
        return
    shares = (
        terms.batch // (n * terms.tasks)
        for n in terms.counts
        if terms.batch % (n * terms.tasks) == 0 and terms.replicas_fit(n)
    )
    most = terms.most_per_device or LARGEST_COUNT
    allowed = (d for d in divisors_near(shares, min(terms.per_device, most + 1)) if d <= most)
    for value in nearest(allowed, terms.per_device):
        yield terms._replace(per_device=value)


def _other_most(terms: Terms) -> Iterator[Terms]:
    if terms.over_most:
        yield terms._replace(most_per_device=terms.per_device)


def _other_nodes(terms: Terms) -> Iterator[Terms]:
    # n must divide the quotient and be a multiple of the step that replicate asks for.
    quotient, rest = divmod(terms.batch, terms.tasks * (terms.per_device or 1))
    step = terms.replicate // math.gcd(terms.replicate, terms.tasks)
    if rest or quotient % step:
        return
    least, most = terms.counts[0], terms.counts[-1]
    below = divisor_below(quotient // step, -(-least // step))
    above = divisor_above(quotient // step, most // step)
    if below is not None:
        yield _with_nodes(terms, below * step)
    if above is not None and above * step <= MOST_NODES:
        yield _with_nodes(terms, above * step)


def _with_nodes(terms: Terms, nodes: int) -> Terms:
    """`nodes` instead of a fixed count; a range is widened to it."""
    if len(terms.counts) == 1:
        return terms._replace(counts=range(nodes, nodes + 1))
    least, most = terms.counts[0], terms.counts[-1]
    return terms._replace(counts=range(min(least, nodes), max(most, nodes) + 1))


def _other_tasks(terms: Terms) -> Iterator[Terms]:
    found: set[int] = set()
    for nodes in terms.counts:
        quotient, rest = divmod(terms.batch, nodes * (terms.per_device or 1))
        step = terms.replicate // math.gcd(terms.replicate, nodes)
        if rest or quotient % step:
            continue
        below = divisor_below(quotient // step, -(-terms.tasks // step))
        above = divisor_above(quotient // step, terms.tasks // step)
        found.update(m * step for m in (below, above) if m is not None)
    for value in nearest(found, terms.tasks):
        if value <= MOST_PER_NODE:
            yield terms._replace(tasks=value)


def _other_replicates(terms: Terms) -> Iterator[Terms]:
    worlds = (n * terms.tasks for n in terms.counts if terms.batch_fits(n))
    for value in nearest(divisors_near(worlds, terms.replicate), terms.replicate):
        yield terms._replace(replicate=value)


def _several(terms: Terms) -> Iterator[Terms]:
    """Changes of more than one field, for terms that no single change helps."""
    variants = [terms]
    if terms.over_most:
        variants = [terms._replace(per_device=terms.most_per_device), *_other_most(terms)]
    if not any(terms.replicas_fit(n) for n in terms.counts):
        world = terms.counts[-1] * terms.tasks
        divisors = nearest(divisors_near([world], terms.replicate), terms.replicate)
        variants = [v._replace(replicate=r) for v in variants for r in divisors]
    for variant in variants:
        yield variant
        yield from _other_batches(variant)
