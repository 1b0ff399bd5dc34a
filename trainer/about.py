"""What the trainer runs on here, for `vitra doctor`."""

from __future__ import annotations

import platform
from typing import Any, TextIO

import torch
import torch.cuda.nccl as nccl
import torch.distributed as dist

from trainer.answer import answer


def about(request: bytes, out: TextIO) -> int:
    """Answer with the versions of what training needs; `request` is empty. Returns 0."""
    del request
    return answer(out, _versions)


def _versions() -> dict[str, Any]:
    cuda = torch.version.cuda if torch.cuda.is_available() else None
    version = nccl.version() if cuda and dist.is_nccl_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        # Of a host without a GPU, such as one that only submits, the build says what nodes can do.
        "cuda_build": torch.version.cuda,
        "cuda": cuda,
        "nccl": None if version is None else ".".join(map(str, version)),
        "gpus": torch.cuda.device_count() if cuda else 0,
    }
