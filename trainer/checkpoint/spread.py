"""Reading a checkpoint once: what every rank holds whole is read by one of them and passed on."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from trainer.checkpoint.codec import ReadInto, load_tensors


def load_spread(
    tensors: dict[str, Tensor],
    index: Metadata,
    *,
    read: ReadInto,
    group: dist.ProcessGroup | None,
) -> None:
    """As `load_tensors`, each rank reading its share of what all hold, and what it alone needs.

    Collective over `group` and over all ranks. A storage then gives each byte of a replicated model
    once, not once for every rank, and the ranks' own network does the rest.
    """
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    readers = assign_readers(tensors, world_size)
    rank = dist.get_rank(group) if world_size > 1 else 0
    not_mine = {name for name, reader in readers.items() if reader != rank}
    load_tensors(tensors, index, read=read, group=group, skip=not_mine)
    works = [
        # The default group knows both CPU and CUDA tensors. Bytes, because not every backend knows
        # every dtype.
        dist.broadcast(_bytes_in(tensors[name]), src=reader, async_op=True)
        for name, reader in readers.items()
    ]
    for work in works:
        assert work is not None, "every rank is in the default group"
        work.wait()


def assign_readers(tensors: Mapping[str, Tensor], world_size: int) -> dict[str, int]:
    """Which rank reads which of the tensors that every rank holds whole; the same on every rank.

    Largest first, each to the rank with the least to read so far. Of no use in a world of one.
    """
    if world_size == 1:
        return {}
    whole = [
        name
        for name, tensor in tensors.items()
        if not isinstance(tensor, DTensor) and tensor.numel() and tensor.is_contiguous()
    ]
    loads = [(0, rank) for rank in range(world_size)]
    readers: dict[str, int] = {}
    for name in sorted(whole, key=lambda name: (-tensors[name].nbytes, name)):
        size_bytes, rank = loads[0]
        readers[name] = rank
        heapq.heapreplace(loads, (size_bytes + tensors[name].nbytes, rank))
    return readers


def _bytes_in(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
