"""Data parallel: every rank holds the whole model and averages gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.spec.errors import PlanError
from trainer.strategies.base import TrainingStrategy


class DDPStrategy(TrainingStrategy):
    """torch's DistributedDataParallel, set up so that a resume is bit-equal at any world size.

    DDP by default regroups its buckets after the first step. Beyond two ranks the order in which
    gloo adds depends on a value's place in its bucket, so a process that starts anew would differ
    for one step from one that goes on. With find_unused_parameters the buckets are fixed from the
    start, which also allows the backbone to be frozen and thawed.
    """

    def run_setup(self, run_dir: Path, n_train_examples: int) -> None:
        del run_dir
        self._prepare(n_train_examples)
        if not dist.is_initialized():
            return
        device = torch.device("cpu") if self.context is None else self.context.device
        persistent = self.vla.state_dict().keys() - dict(self.vla.named_parameters()).keys()
        self.model = DistributedDataParallel(
            self.vla,
            device_ids=[device.index] if device.type == "cuda" else None,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            # Constant tables need no broadcast before every forward pass.
            forward_sync_buffers=bool(persistent),
        )
        if self.enable_mixed_precision_training and not self.reduce_in_full_precision:
            if self.mixed_precision_dtype != torch.bfloat16:
                raise PlanError(
                    f"mixed_precision_dtype={self.mixed_precision_dtype}: "
                    "gradients are reduced in bfloat16 or float32",
                    "set reduce_in_full_precision: true",
                )
            self.model.register_comm_hook(None, _reduce_in_bfloat16)

    def accumulate(self, is_last: bool) -> AbstractContextManager[Any]:
        if is_last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    def clip_grad_norm(self) -> float:
        parameters = [p for _, p in self.named_parameters() if p.grad is not None]
        if self.max_grad_norm is not None:
            return float(nn.utils.clip_grad_norm_(parameters, self.max_grad_norm))
        return float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


# torch compares the annotations of a hook with classes, and in this module they would be strings.
def _reduce_in_bfloat16(_state, bucket):
    """A communication hook: sums in bfloat16, half the bytes; divides in the full precision.

    torch's own one accepts no gloo.
    """
    gradients: Tensor = bucket.buffer()
    world_size = dist.get_world_size()
    work = dist.all_reduce(gradients.to(torch.bfloat16), async_op=True)
    assert work is not None, "every rank is in the default group"

    def decompress(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(done.value()[0]).div_(world_size)

    return work.get_future().then(decompress)
