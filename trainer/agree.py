"""Small agreements between ranks, on a gloo group, so that no CUDA stream ever waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Agreement:
    """Collective: every rank must make the same calls in the same order.

    `mark` is called as each begins: a rank that waits for others is one mark ahead of them.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, mark: Callable[[], None] = lambda: None
    ) -> None:
        self._group = group
        self._mark = mark
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1

    def sum(self, *values: float) -> list[float]:
        """The sums over all ranks, in float64 (exact for integers below 2**53)."""
        if self.world_size == 1:
            return [float(value) for value in values]
        self._mark()
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._group)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """True on every rank if the flag is set on one."""
        return self.sum(float(flag))[0] > 0

    def from_primary(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        self._mark()
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        self._mark()
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        """Returns once every rank has come here."""
        self.sum(0.0)
