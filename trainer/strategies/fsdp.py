"""Sharded data parallel: every rank holds a part of each parameter, and of all that belongs to it.

Built on FSDP2 (`torch.distributed.fsdp.fully_shard`): a parameter is a DTensor, split along its
first dimension. Modules of the model's `shard_classes` are gathered and freed one by one; what lies
outside of them is one more unit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from trainer.components import Evaluates
from trainer.spec.errors import PlanError, UsageError
from trainer.strategies.base import TrainingStrategy
from trainer.strategies.units import shard_units
from trainer.weights import materialize


class FSDPStrategy(TrainingStrategy):
    """What both kinds of sharding share; they differ in when gathered parameters are freed.

    Gradients are summed up locally, whole, until the last micro-batch of a step, and reduced then:
    communication is paid for once a step, with memory for one whole gradient.

    With `replicate` = R the ranks form R groups of neighbours; each group holds the model once, and
    gradients are also averaged between the groups (hybrid sharding).

    Raises:
        PlanError: the world cannot be divided so, or the precision is not supported.
        UsageError: the model cannot be sharded as its `shard_classes` say.
    """

    #: Free a unit's parameters after its forward pass, and gather them again for the backward pass.
    frees_after_forward: ClassVar[bool]

    def run_setup(self, run_dir: Path, n_train_examples: int) -> None:
        del run_dir
        device = torch.device("cpu") if self.context is None else self.context.device
        groups = self._groups()
        self._recompute_activations()
        self._shard(self._mesh(device))
        if any(parameter.is_meta for parameter in self.vla.parameters()):
            if self.seed is None:
                raise UsageError("the model is on the meta device", "pass seed=... to fill it")
            materialize(self.vla, self.seed, device)
        self._optimize(groups, n_train_examples)

    def forward_backward(self, batch: Any, *, scale: float, is_last: bool) -> Tensor:
        # Parameters are gathered in the forward pass: ranks begin to wait for each other here.
        if self.context is not None:
            self.context.pulse.mark()
        return super().forward_backward(batch, scale=scale, is_last=is_last)

    def accumulate(self, is_last: bool) -> AbstractContextManager[Any]:
        self._root.set_requires_gradient_sync(is_last)
        if not self.frees_after_forward:
            # What the next micro-batch needs again stays where it is.
            self._root.set_reshard_after_backward(is_last)
        return nullcontext()

    def clip_grad_norm(self) -> float:
        norm = self._grad_norm()
        if self.max_grad_norm is not None:
            parameters = [p for _, p in self.named_parameters() if p.grad is not None]
            nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        return float(norm)

    def _set_frozen(self, frozen: bool) -> None:
        if frozen != self._frozen:
            # Gathered parameters would keep what they were gathered with.
            for module in self.vla.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        super()._set_frozen(frozen)

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.vla, FSDPModule), "run_setup comes first"
        return self.vla

    def _mesh(self, device: torch.device) -> DeviceMesh:
        if not dist.is_initialized():
            # A mesh needs a group, even one of a single process.
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        world_size = dist.get_world_size()
        if self.replicate == 1:
            return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
        shards, rest = divmod(world_size, self.replicate)
        if rest:
            raise PlanError(
                f"replicate={self.replicate} does not divide the world size {world_size}"
            )
        return init_device_mesh(
            device.type, (self.replicate, shards), mesh_dim_names=("replicate", "shard")
        )

    def _shard(self, mesh: DeviceMesh) -> None:
        precision: dict[str, Any] = {}
        if self.enable_mixed_precision_training:
            if self.mixed_precision_dtype != torch.bfloat16:
                raise PlanError(
                    f"mixed_precision_dtype={self.mixed_precision_dtype}: sharded parameters are "
                    "gathered in bfloat16 or float32",
                    "use torch.bfloat16, or enable_mixed_precision_training: false",
                )
            full = self.reduce_in_full_precision
            precision["param_dtype"] = torch.bfloat16
            precision["reduce_dtype"] = torch.float32 if full else torch.bfloat16
        for unit in shard_units(self.vla):
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=self.frees_after_forward,
                mp_policy=MixedPrecisionPolicy(**precision),
            )
        root = fully_shard(
            self.vla,
            mesh=mesh,
            # The backward pass begins where the forward pass ends: it is needed again at once.
            reshard_after_forward=False,
            # A batch holds what the loss is measured against, which is not to be rounded.
            mp_policy=MixedPrecisionPolicy(**precision, cast_forward_inputs=False),
        )
        # A parameter that one rank's samples never touch is reduced as zero, or the ranks' parts of
        # a reduction would not fit together.
        root.set_reduce_scatter_unused_params(True)
        model: nn.Module = self.vla
        if isinstance(model, Evaluates):
            # It calls parts of the model by themselves, which gather nothing.
            register_fsdp_forward_method(model, "evaluate")


class FSDPGradStrategy(FSDPStrategy):
    """Gradients and optimizer state are sharded; parameters too, but for the length of a step.

    They are gathered with the first micro-batch of a step and freed after the last.
    """

    frees_after_forward = False


class FSDPFullStrategy(FSDPStrategy):
    """Everything is sharded at all times, but for the unit that is being computed."""

    frees_after_forward = True
