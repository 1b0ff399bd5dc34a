"""How much memory a rank has needed."""

from __future__ import annotations

import resource

import torch

#: Linux counts resident memory in KiB.
_RSS_UNIT_BYTES = 1024


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held so far: of the GPU where it has one, else RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES
