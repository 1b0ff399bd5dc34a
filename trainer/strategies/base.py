"""The interface of a training strategy, and what all strategies share.

The constructor's names and the five methods are those of VITRA's base class, so a strategy written
against it works here; what is new is keyword-only and has a default.
"""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor

from trainer.components import Batch
from trainer.context import TrainContext
from trainer.loop import LoopEnd, train
from trainer.metrics import VLAMetrics
from trainer.optim import (
    LearningRates,
    bind_parameters,
    build_optimizer,
    parameter_groups,
)
from trainer.spec.errors import PlanError, UsageError
from trainer.spec.schedule import BACKBONE, Schedule
from trainer.weights import author_name


class TrainingStrategy(ABC):
    """How a model is laid out over ranks, stepped, saved and restored.

    Args:
        vla: the model (trainer.components.Model); each rank holds one, with equal weights. A
            strategy that shards takes it on the meta device too, and fills it from `seed`.
        device_id: index of this process's accelerator; ignored on CPU.
        stage: a name for logs.
        epochs, max_steps: length of the run; `max_steps` decides if set. Optimizer steps.
        global_batch_size, per_device_batch_size: samples; the first must be an exact multiple of
            the second times the world size.
        learning_rate, weight_decay: of the backbone, and of the action model unless it has its own.
        max_grad_norm: global norm to clip gradients to; None: no clipping.
        lr_scheduler_type, warmup_ratio: see trainer.optim.Schedule.
        enable_gradient_checkpointing: recompute activations of `vla.checkpoint_classes`.
        enable_mixed_precision_training, mixed_precision_dtype: autocast the forward pass.
        reduce_in_full_precision: reduce gradients in float32 rather than in the mixed precision.
        repeated_diffusion_steps: diffusion draws per sample; the model was built with it.
        replicate: groups of ranks that each hold all of a sharded model (hybrid sharding).
        seed: of the initial weights, for a model on the meta device.

    Raises:
        PlanError: the batch sizes do not divide exactly.
    """

    def __init__(
        self,
        vla: Any,
        device_id: int,
        stage: str,
        epochs: float | None,
        max_steps: int | None,
        global_batch_size: int,
        per_device_batch_size: int,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float | None,
        lr_scheduler_type: str,
        warmup_ratio: float,
        enable_gradient_checkpointing: bool = True,
        enable_mixed_precision_training: bool = True,
        reduce_in_full_precision: bool = False,
        mixed_precision_dtype: torch.dtype = torch.bfloat16,
        repeated_diffusion_steps: int = 4,
        *,
        action_model_learning_rate: float | None = None,
        action_model_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        min_lr_ratio: float = 0.1,
        freeze_steps: int = 0,
        replicate: int = 1,
        seed: int | None = None,
        context: TrainContext | None = None,
        **unknown: Any,
    ) -> None:
        _warn_unknown(unknown)
        self.vla = vla
        self.device_id = device_id
        self.stage = stage
        self.epochs = epochs
        self.max_steps = max_steps
        self.global_batch_size = global_batch_size
        self.per_device_batch_size = per_device_batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.max_grad_norm = max_grad_norm
        self.lr_scheduler_type = lr_scheduler_type
        self.warmup_ratio = warmup_ratio
        self.enable_gradient_checkpointing = enable_gradient_checkpointing
        self.enable_mixed_precision_training = enable_mixed_precision_training
        self.reduce_in_full_precision = reduce_in_full_precision
        self.mixed_precision_dtype = mixed_precision_dtype
        self.repeated_diffusion_steps = repeated_diffusion_steps
        self.action_model_learning_rate = action_model_learning_rate
        self.action_model_weight_decay = action_model_weight_decay
        self.betas = betas
        self.min_lr_ratio = min_lr_ratio
        self.freeze_steps = freeze_steps
        self.replicate = replicate
        self.seed = seed
        self.context = context

        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: LearningRates | None = None
        self.model: nn.Module = vla
        self._frozen = False

        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.grad_accumulation_steps, rest = divmod(
            global_batch_size, per_device_batch_size * world_size
        )
        if rest or not self.grad_accumulation_steps:
            raise PlanError(
                f"global_batch_size={global_batch_size} is not a multiple of per_device_batch_size "
                f"x world size = {per_device_batch_size} x {world_size}",
                "see `vitra plan` for sizes that work",
            )

    @abstractmethod
    def run_setup(self, run_dir: Path, n_train_examples: int) -> None:
        """Wrap the model, build optimizer and schedule. `n_train_examples` counts samples."""

    @abstractmethod
    def clip_grad_norm(self) -> float | None:
        """Clip gradients to `max_grad_norm`; returns the global norm before it. Collective.

        VITRA's own strategies return None; then the norm after clipping is what is recorded.
        """

    def save_checkpoint(
        self,
        run_dir: Path,
        global_step: int,
        epoch: int,
        train_loss: float | None = None,
        only_trainable: bool = True,
    ) -> None:
        """Save the whole state at the present step. Collective; returns once it is committed.

        The place and the files' names are the run's (contract section 4), so `run_dir` and
        `train_loss` only serve subclasses. With `only_trainable` the weights of parameters that are
        never trained are left out, and a resume keeps those that the model is built with. A
        backbone that is frozen for the first steps is not among them.

        Raises:
            CheckpointError: it could not be saved; the previous checkpoint stays valid.
        """
        del run_dir, train_loss, epoch
        ctx = self._need_context()
        if global_step != ctx.state.step:
            raise UsageError(
                f"global_step={global_step}: only the present step, {ctx.state.step}, can be saved"
            )
        ctx.checkpoints.save(self, ctx.state, must_succeed=True, only_trainable=only_trainable)

    def load_optimizer_and_scheduler(self, checkpoint_path: str) -> None:
        """Restore optimizer and schedule from one checkpoint directory (`step-...`). Collective.

        Raises:
            CheckpointError: it is missing, damaged, or of another model.
        """
        self._need_context().checkpoints.load_from(Path(checkpoint_path), self)

    def run_training(
        self,
        dataloader: Any,
        metrics: VLAMetrics,
        save_interval: int = 2500,
        start_global_step: int = 0,
        save_full_model: bool = True,
    ) -> LoopEnd:
        """Train to the last step or until asked to stop. Collective.

        `dataloader` yields a trainer.data.loader.StepInput for each step after `start_global_step`.
        Without `save_full_model` the checkpoints hold only what is trained, see `save_checkpoint`.
        """
        ctx = self._need_context()
        assert start_global_step == ctx.state.step, (start_global_step, ctx.state.step)
        return train(
            self, dataloader, metrics, ctx, save_interval, only_trainable=not save_full_model
        )

    # What the loop and the checkpoints use, the same for every strategy unless it says otherwise.

    def begin_step(self) -> dict[str, float]:
        """Make ready for the next optimizer step: rates, freezing, gradients gone.

        Returns the rates by role.
        """
        assert self.lr_scheduler is not None, "run_setup comes first"
        assert self.optimizer is not None
        rates = self.lr_scheduler.begin_step()
        self._set_frozen(self.lr_scheduler.schedule.freezes(self.lr_scheduler.last_step))
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        return rates

    def loss_count(self, batch: Batch) -> int:
        """Valid elements of the loss in a batch."""
        return self.vla.loss_count(batch)

    def forward_backward(self, batch: Batch, *, scale: float, is_last: bool) -> Tensor:
        """One micro-batch forward and backward; returns its loss sum, on the device.

        Gradients are averaged over ranks with the last micro-batch of a step only. `scale` turns
        the sum over this micro-batch into its part of the global mean, times the world size.
        """
        device = torch.device("cpu") if self.context is None else self.context.device
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with self.accumulate(is_last):
            with torch.autocast(
                device.type,
                dtype=self.mixed_precision_dtype,
                enabled=self.enable_mixed_precision_training,
            ):
                loss_sum: Tensor = self.model(batch)
            if self.context is not None:
                # Gradients are exchanged in the backward pass: here ranks begin to wait.
                self.context.pulse.mark()
            (loss_sum * scale).backward()
        return loss_sum.detach()

    def clip(self) -> float:
        """Clip gradients; the global norm as far as `clip_grad_norm` tells it. Collective."""
        norm = self.clip_grad_norm()
        return float(self._grad_norm()) if norm is None else norm

    def apply_step(self) -> None:
        """Apply the gradients."""
        assert self.optimizer is not None
        self.optimizer.step()

    def accumulate(self, is_last: bool) -> AbstractContextManager[Any]:
        """A context in which gradients stay local unless this is the step's last micro-batch."""
        del is_last
        return nullcontext()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters by the names that its author gave them, whatever wraps it."""
        for name, parameter in self.vla.named_parameters():
            yield author_name(name), parameter

    def named_state(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by name: the live tensors, not copies."""
        return {
            author_name(name): tensor.detach()
            for name, tensor in self.vla.state_dict(keep_vars=True).items()
        }

    def untrained(self) -> frozenset[str]:
        """The names of parameters that are in no optimizer group: they never change."""
        assert self.optimizer is not None, "run_setup comes first"
        trained = {n for g in self.optimizer.param_groups for n in g["parameter_names"]}
        return frozenset(name for name, _ in self.named_parameters() if name not in trained)

    def _grad_norm(self) -> Tensor:
        """The global norm of all gradients, sharded ones included. Collective."""
        norm = nn.utils.get_total_norm(
            [p.grad for _, p in self.named_parameters() if p.grad is not None]
        )
        # Of sharded gradients it is known by parts.
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _prepare(self, n_train_examples: int) -> None:
        """Optimizer, schedule and activation checkpointing: what precedes the wrapping by DDP."""
        groups = self._groups()
        self._recompute_activations()
        self._optimize(groups, n_train_examples)

    def _groups(self) -> list[dict[str, Any]]:
        """The parameter groups, by the names and shapes that the model's author gave."""
        return parameter_groups(
            self.named_parameters(),
            self.vla.backbone_prefixes,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            action_model_learning_rate=self.action_model_learning_rate,
            action_model_weight_decay=self.action_model_weight_decay,
        )

    def _recompute_activations(self) -> None:
        if not self.enable_gradient_checkpointing:
            return
        classes = tuple(self.vla.checkpoint_classes)
        apply_activation_checkpointing(
            self.vla,
            checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(
                module, checkpoint_impl=CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda module: isinstance(module, classes),
        )

    def _optimize(self, groups: list[dict[str, Any]], n_train_examples: int) -> None:
        """Build optimizer and schedule over the parameters as they are now."""
        bind_parameters(groups, self.named_parameters())
        self.optimizer = build_optimizer(groups, self.betas)
        total = self.max_steps
        if total is None:
            if self.context is None or self.context.plan.total_steps is None:
                assert self.epochs is not None, "one of epochs and max_steps"
                total = math.ceil(self.epochs * n_train_examples / self.global_batch_size)
            else:
                total = self.context.plan.total_steps
        schedule = Schedule(
            self.lr_scheduler_type,
            total,
            warmup_ratio=self.warmup_ratio,
            min_lr_ratio=self.min_lr_ratio,
            freeze_steps=self.freeze_steps,
        )
        self.lr_scheduler = LearningRates(self.optimizer, schedule)

    def _set_frozen(self, frozen: bool) -> None:
        if frozen == self._frozen:
            return
        assert self.optimizer is not None
        # Flipped after wrapping: a parameter frozen before would never get its gradient hooks. What
        # the model's author froze for good is in no group, and stays as it is.
        for group in self.optimizer.param_groups:
            if group["role"] == BACKBONE:
                for parameter in group["params"]:
                    parameter.requires_grad_(not frozen)
        self._frozen = frozen

    def _need_context(self) -> TrainContext:
        if self.context is None:
            raise UsageError(
                f"{type(self).__name__} was built without a context", "pass context=..."
            )
        return self.context


def known_arguments() -> list[str]:
    """The names of all arguments that the constructor of TrainingStrategy knows."""
    parameters = inspect.signature(TrainingStrategy.__init__).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]


def _warn_unknown(unknown: dict[str, Any]) -> None:
    for name in unknown:
        close = difflib.get_close_matches(name, known_arguments(), n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        warnings.warn(
            f"TrainingStrategy ignores the unknown argument {name!r}{meant}", stacklevel=3
        )
