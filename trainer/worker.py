"""The composition root: one process of a run, built in one visible order."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.agree import Agreement
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.initial import load_initial_weights
from trainer.components import Dataset, DrawsPerSample, Evaluates
from trainer.context import TrainContext
from trainer.data.loader import RankLoader
from trainer.factories import build_data, build_model, empty_model
from trainer.loop import LoopEnd
from trainer.metrics import VLAMetrics
from trainer.records import RunRecords
from trainer.snapshot import check_origin, leave_live_trees
from trainer.spec.errors import DataError, RankMismatch
from trainer.spec.outcome import EXIT_SAVED
from trainer.spec.plan import Plan
from trainer.spec.pulse import Phase, patience_s
from trainer.spec.ranks import RankInfo
from trainer.spec.run import is_sharded
from trainer.spec.rundir import RunDir
from trainer.spec.snapshot import Snapshot
from trainer.state import TrainState
from trainer.stop import StopFlag
from trainer.store.checkpoints import CheckpointStore
from trainer.strategies.build import get_train_strategy
from trainer.tracking import start_tracker
from trainer.watchdog import Pulse

log = logging.getLogger(__name__)

#: Beyond every limit of the supervisor's, which judges a hang and names who is to blame; what a
#: collective says when it times out names nobody.
_COLLECTIVE_EXTRA = timedelta(minutes=15)


def run(
    run_dir: RunDir,
    environ: Mapping[str, str],
    stop: StopFlag,
    state: TrainState,
    keep: list[object],
    at_end: list[Callable[[int], None]],
    pulse: Pulse,
) -> int:
    """Train the run in `run_dir` as the rank that `environ` describes; returns the exit code.

    0: the last step is reached and saved. 75: asked to stop, the present step is saved. `state` is
    advanced in place, so that the caller can report how far it came. What is put into `keep` must
    not be torn down before the process ends: the destructors of process groups wait, with Python's
    lock held, for threads that may be waiting for that lock. What is put into `at_end` is to be
    called with the exit code, last of all.

    Raises:
        VitraError: whatever ended it early; its class says whether trying again can help.
    """
    ranks = RankInfo.from_environ(environ)
    plan = Plan.read(run_dir.attempt(ranks.attempt).plan)
    _check_world(plan, ranks)
    device = _prepare_torch(plan, ranks)
    snapshot = Snapshot.read(run_dir)
    leave_live_trees(snapshot, run_dir)

    data = build_data(plan.spec)
    if plan.n_samples != len(data):
        raise DataError(
            f"data: {len(data)} samples now, {plan.n_samples} when the run was submitted",
            "the order of samples depends on their number: restore the data, or submit a new run",
        )
    if is_sharded(plan.spec.train.strategy):
        model = empty_model(plan.spec, data)  # may be larger than this rank's memory
    else:
        model = build_model(plan.spec, data, device)
    check_origin(snapshot, run_dir, plan.spec)
    pulse.reached(Phase.JOINING, 0)
    group = _process_group(plan, ranks, device)
    pulse.reached(Phase.PREPARING, 0)
    agree = Agreement(group, pulse.mark)
    records = RunRecords(
        run_dir,
        ranks,
        log_interval=plan.spec.tracking.log_interval,
        sample_ids=plan.spec.tracking.sample_ids,
    )
    checkpoints = Checkpointer(
        CheckpointStore.of_plan(plan),
        plan=plan,
        ranks=ranks,
        agree=agree,
        group=group,
        records=records,
        pulse=pulse,
        background=_background(plan, group),
        pinned=device.type == "cuda",
    )
    at_end.append(checkpoints.leave)
    ctx = TrainContext(ranks, plan, device, agree, stop, records, checkpoints, state, pulse=pulse)
    strategy = get_train_strategy(plan.spec.train.strategy, **_strategy_arguments(plan, model, ctx))
    strategy.run_setup(run_dir.path, len(data))
    keep += [group, checkpoints, strategy]
    # All of torch that training needs is loaded now, and no garbage: from here on it is collected.
    gc.freeze()
    gc.enable()

    checkpoints.restore(strategy, state)
    start = plan.spec.checkpoint
    if state.step == 0 and start.init_from is not None:
        load_initial_weights(start.init_from, strategy, ranks, agree, start.storage_options)
    checkpoints.warm(strategy)
    if ranks.is_primary:
        records.rebuild(state.step)
    agree.barrier()
    records.open()
    records.event("started", step=state.step, world_size=plan.world_size, node=os.uname().nodename)
    tracker = start_tracker(run_dir, plan, ranks, records, environ)
    if tracker is not None:
        at_end.append(tracker.close)
    log.info("training from step %d to %d", state.step, plan.total_steps)

    loader = RankLoader(
        plan,
        data,
        model.draws if isinstance(model, DrawsPerSample) else None,
        rank=ranks.rank,
        start_step=state.step,
        pin_memory=device.type == "cuda",
    )
    end = strategy.run_training(
        loader,
        VLAMetrics(records, tracker),
        save_interval=plan.spec.checkpoint.save_interval,
        start_global_step=state.step,
    )
    if end is LoopEnd.STOPPED:
        log.info(
            "stopped as asked; the newest checkpoint is that of step %s", checkpoints.saved_step
        )
        pulse.reached(Phase.DONE, state.step)
        return EXIT_SAVED
    pulse.reached(Phase.EVALUATING, state.step)
    _evaluate(model, data, plan, ctx)
    agree.barrier()
    pulse.reached(Phase.DONE, state.step)
    return 0


def _check_world(plan: Plan, ranks: RankInfo) -> None:
    if ranks.world_size != plan.world_size:
        raise RankMismatch(
            f"rank {ranks.rank} finds a world of {ranks.world_size} processes, "
            f"the plan has {plan.world_size}",
            "start as many processes as the plan says; `vitra plan` shows it",
        )


def _prepare_torch(plan: Plan, ranks: RankInfo) -> torch.device:
    """Fix what results depend on: threads, algorithms, device."""
    spec = plan.spec
    torch.set_num_threads(plan.threads_per_rank)
    torch.set_num_interop_threads(1)
    on_cuda = spec.resources.gpu_count > 0
    deterministic = (
        spec.train.deterministic if spec.train.deterministic is not None else not on_cuda
    )
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if not on_cuda:
        return torch.device("cpu")
    if ranks.local_rank >= torch.cuda.device_count():
        raise RankMismatch(
            f"local rank {ranks.local_rank} has no GPU: {torch.cuda.device_count()} are visible "
            f"on {os.uname().nodename}",
            "ask for one GPU a process (resources.gpus_per_node), or train on CPUs (0)",
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def _process_group(plan: Plan, ranks: RankInfo, device: torch.device) -> dist.ProcessGroup | None:
    """Join the other ranks; returns a gloo group for agreements, None in a world of one on CPU.

    The groups are never destroyed: when all ranks have agreed that they are done, each just leaves.
    """
    if ranks.world_size == 1 and device.type == "cpu":
        return None
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"tcp://{ranks.master_addr}:{ranks.master_port}",
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=_collective_timeout(plan),
        device_id=device if device.type == "cuda" else None,
    )
    if device.type == "cpu":
        return dist.group.WORLD
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def _background(plan: Plan, group: dist.ProcessGroup | None) -> Agreement | None:
    """What saves in the background agree on: a group of their own, beside the training's."""
    if not plan.spec.checkpoint.async_save:
        return None
    if group is None:
        return Agreement(None)
    own = dist.new_group(backend="gloo", timeout=_collective_timeout(plan))
    assert isinstance(own, dist.ProcessGroup), "every rank is a member"
    return Agreement(own)


def _collective_timeout(plan: Plan) -> timedelta:
    return timedelta(seconds=patience_s(plan.spec.retry.hang_timeout_s)) + _COLLECTIVE_EXTRA


def _strategy_arguments(plan: Plan, model: Any, ctx: TrainContext) -> dict[str, Any]:
    train = plan.spec.train
    return {
        "vla": model,
        "device_id": ctx.device.index or 0,
        "stage": "train",
        "epochs": train.epochs,
        "max_steps": plan.total_steps,
        "global_batch_size": plan.global_batch_size,
        "per_device_batch_size": plan.per_device_batch_size,
        "learning_rate": train.learning_rate,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "lr_scheduler_type": train.lr_scheduler_type,
        "warmup_ratio": train.warmup_ratio,
        "enable_gradient_checkpointing": train.enable_gradient_checkpointing,
        "enable_mixed_precision_training": train.enable_mixed_precision_training,
        "reduce_in_full_precision": train.reduce_in_full_precision,
        "mixed_precision_dtype": getattr(torch, train.mixed_precision_dtype),
        "repeated_diffusion_steps": train.repeated_diffusion_steps,
        "action_model_learning_rate": train.action_model_learning_rate,
        "action_model_weight_decay": train.action_model_weight_decay,
        "betas": train.betas,
        "min_lr_ratio": train.min_lr_ratio,
        "freeze_steps": train.freeze_steps,
        "replicate": train.replicate,
        "seed": plan.spec.seed,
        "context": ctx,
    }


def _evaluate(model: Any, data: Dataset, plan: Plan, ctx: TrainContext) -> None:
    """Judge the finished model on held-out data, each rank doing its part; recorded as an event."""
    if not isinstance(model, Evaluates):
        return
    sums = model.evaluate(data, plan.spec.seed, ctx.ranks.rank, ctx.ranks.world_size)
    names = sorted(sums)
    if not names:
        return
    totals = dict(zip(names, ctx.agree.sum(*(sums[name] for name in names)), strict=True))
    figures = model.summarize_evaluation(totals)
    ctx.records.event("evaluated", step=ctx.state.step, **figures)
    log.info(
        "evaluated on held-out data: %s", ", ".join(f"{k} {v:.4f}" for k, v in figures.items())
    )
