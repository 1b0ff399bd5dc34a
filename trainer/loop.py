"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from trainer.context import TrainContext
from trainer.data.loader import StepInput, reseed
from trainer.memory import peak_memory_bytes
from trainer.metrics import StepMetrics, VLAMetrics
from trainer.spec.errors import NonFiniteLoss
from trainer.spec.pulse import Phase

if TYPE_CHECKING:
    from trainer.strategies.base import TrainingStrategy


class LoopEnd(Enum):
    """Why the loop returned."""

    FINISHED = auto()
    STOPPED = auto()


def train(
    strategy: TrainingStrategy,
    steps: Iterable[StepInput],
    metrics: VLAMetrics,
    ctx: TrainContext,
    save_interval: int,
    *,
    only_trainable: bool = False,
) -> LoopEnd:
    """Train the given steps; collective over all ranks, which leave together.

    Saves at each multiple of `save_interval`, at the last step, and where a rank was asked to stop;
    with `only_trainable` without the weights that never change.

    Raises:
        NonFiniteLoss: before the step is applied and before anything is saved.
        CheckpointError: saving failed for good; the newest good checkpoint is untouched.
        DataError: a sample could not be read.
    """
    state, plan, agree = ctx.state, ctx.plan, ctx.agree
    if agree.any(ctx.stop.raised):
        return LoopEnd.STOPPED
    began = waits_since = ctx.clock()
    ctx.pulse.reached(Phase.LOADING, state.step)
    for inputs in steps:
        data_wait_s = ctx.clock() - waits_since
        ctx.pulse.reached(Phase.COMPUTING, state.step)
        assert inputs.step == state.step + 1, f"input of step {inputs.step} after step {state.step}"
        lr = strategy.begin_step()
        # Counted before the first backward pass, from the masks alone: dividing by the global count
        # makes the mean exact whatever the masks of single ranks and micro-batches are.
        counts = [strategy.loss_count(batch) for batch in inputs.micro_batches]
        (count,) = agree.sum(sum(counts))
        loss_sum = torch.zeros((), dtype=torch.float64, device=ctx.device)
        for micro_step, batch in enumerate(inputs.micro_batches):
            reseed(plan.spec.seed, "micro-batch", inputs.step, micro_step, ctx.ranks.rank)
            is_last = micro_step == len(inputs.micro_batches) - 1
            loss_sum += strategy.forward_backward(
                batch, scale=plan.world_size / max(count, 1), is_last=is_last
            )
        grad_norm = strategy.clip()
        global_sum, bad_norms, stops = agree.sum(
            float(loss_sum), not math.isfinite(grad_norm), ctx.stop.raised
        )
        loss = global_sum / max(count, 1)
        if bad_norms or not math.isfinite(loss):
            ctx.checkpoints.finish()
            raise NonFiniteLoss(
                f"step {inputs.step}: loss {loss}, gradient norm {grad_norm}; "
                "stopped before the step was applied",
                "the newest checkpoint is that of an earlier step; lower the learning rate, or look"
                f" at the samples of step {inputs.step} (tracking.sample_ids: true records them)",
            )
        strategy.apply_step()
        state.advance(inputs.epoch, plan.global_batch_size)
        ctx.records.samples(state.step, inputs.ids)
        now = ctx.clock()
        metrics.push(
            StepMetrics(
                step=state.step,
                epoch=state.epoch,
                loss=loss,
                lr=lr,
                grad_norm=grad_norm,
                step_time_s=now - began,
                data_wait_s=data_wait_s,
                memory_bytes=peak_memory_bytes(ctx.device),
                samples_seen=state.samples_seen,
                attempt=ctx.ranks.attempt,
            )
        )
        ctx.checkpoints.tell()
        began = now
        is_end = state.step == plan.total_steps
        if stops or is_end or state.step % save_interval == 0:
            saved = ctx.checkpoints.save(
                strategy,
                state,
                must_succeed=bool(stops) or is_end,
                only_trainable=only_trainable,
            )
            # A stop that was asked for during the save needs no other step; and another save only
            # where this one failed.
            stops = stops or agree.any(ctx.stop.raised)
            if stops and not (saved and ctx.checkpoints.finish()):
                ctx.checkpoints.save(
                    strategy, state, must_succeed=True, only_trainable=only_trainable
                )
            began = ctx.clock()
        if stops and not is_end:
            return LoopEnd.STOPPED
        waits_since = ctx.clock()
        ctx.pulse.reached(Phase.LOADING, state.step)
    return LoopEnd.FINISHED
