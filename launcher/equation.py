"""The batch equation of a spec, and the divisors that solve it. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from trainer.spec.plan import ElasticShape
from trainer.spec.run import RunSpec


class Terms(NamedTuple):
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
    def of(cls, spec: RunSpec) -> Terms:
        """Those of a spec."""
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
        """Whether the batch is a multiple of `unit(nodes)`."""
        return self.batch % self.unit(nodes) == 0

    def replicas_fit(self, nodes: int) -> bool:
        """Whether so many nodes make whole groups of replicas."""
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


def divisors_near(numbers: Iterable[int], value: int) -> set[int]:
    """The divisors of each number that are next below and next above `value`."""
    found: set[int] = set()
    for number in numbers:
        found.update(
            divisor
            for divisor in (divisor_below(number, value), divisor_above(number, value))
            if divisor is not None
        )
    return found


def nearest(values: Iterable[int], to: int) -> list[int]:
    """Of the values, the one next below `to` and the one next above it."""
    values = list(values)
    below = [value for value in values if value < to]
    above = [value for value in values if value > to]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def divisor_below(number: int, value: int) -> int | None:
    """The largest divisor of `number` that is less than `value`."""
    return largest_divisor(number, value - 1) if value > 1 else None


def divisor_above(number: int, value: int) -> int | None:
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
