"""What a strategy costs a step, against the bare loop on one rank's share: `make bench`.

All are measured side by side, in turns, within one process a rank, so that whatever else the
machine is doing disturbs them alike. Two ranks, four micro-batches a step; the ratio of the median
step times is what counts, the milliseconds are this machine's. "each" communicates with every
micro-batch, as a loop without accumulation contexts does; "last" is what the strategies do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launcher.planner import plan
from launcher.schedulers.local import free_port
from trainer.components import Batch
from trainer.data.loader import RankLoader
from trainer.factories import build_data, build_model, empty_model
from trainer.spec.run import RunSpec, is_sharded
from trainer.strategies.base import TrainingStrategy
from trainer.strategies.build import get_train_strategy

MICRO_BATCHES = 4
_MODEL = {
    "dim": 96,
    "layers": 3,
    "heads": 4,
    "action_width": 96,
    "action_layers": 3,
    "action_heads": 4,
}


def spec_for(world: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "bench",
            "model": {"kind": "vla", "options": _MODEL},
            "data": {"kind": "synthetic", "options": {"samples": 256}, "num_workers": 0},
            "train": {
                "global_batch_size": 4 * MICRO_BATCHES * world,
                "per_device_batch_size": 4,
                "max_steps": 1000,
                "enable_mixed_precision_training": False,
                "enable_gradient_checkpointing": False,
            },
            "resources": {"tasks_per_node": world},
        }
    )


class Contender:
    """A strategy with its own copy of the model, stepped on the same batches as the others."""

    def __init__(self, name: str, world: int, batches: list[Batch], *, every: bool) -> None:
        spec = spec_for(world)
        data = build_data(spec)
        cpu = torch.device("cpu")
        model = empty_model(spec, data) if is_sharded(name) else build_model(spec, data, cpu)
        train = spec.train
        self._strategy: TrainingStrategy = get_train_strategy(
            name,
            vla=model,
            device_id=0,
            stage="bench",
            epochs=None,
            max_steps=train.max_steps,
            global_batch_size=train.global_batch_size,
            per_device_batch_size=4,
            learning_rate=1e-4,
            weight_decay=0.1,
            max_grad_norm=1.0,
            lr_scheduler_type="constant",
            warmup_ratio=0.0,
            enable_gradient_checkpointing=False,
            enable_mixed_precision_training=False,
            seed=1,
        )
        self._strategy.run_setup(Path("/nowhere"), len(data))
        self._batches = batches
        self._every = every

    def without_communication(self) -> Contender:
        """Each rank for itself: what the step costs without any exchange."""
        self._strategy.model = self._strategy.vla
        self._strategy.accumulate = lambda is_last: nullcontext()  # noqa: ARG005
        return self

    def step(self) -> None:
        strategy = self._strategy
        strategy.begin_step()
        for number, batch in enumerate(self._batches):
            last = self._every or number == len(self._batches) - 1
            strategy.forward_backward(batch, scale=1e-3, is_last=last)
        strategy.clip_grad_norm()
        strategy.apply_step()


def measure(rank: int, world: int, port: int, rounds: int) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    spec = spec_for(world)
    data = build_data(spec)
    ready = plan(spec, run_id="bench", run_dir="/nowhere").with_samples(len(data))
    draws: Any = build_model(spec, data, torch.device("cpu")).draws
    inputs = next(iter(RankLoader(ready, data, draws, rank=rank, start_step=0)))

    def contender(name: str, *, every: bool = False) -> Contender:
        return Contender(name, world, inputs.micro_batches, every=every)

    contenders = {
        "bare, no communication": contender("ddp").without_communication(),
        "ddp, last": contender("ddp"),
        "ddp, each": contender("ddp", every=True),
        "fsdp-grad, last": contender("fsdp-grad"),
        "fsdp-grad, each": contender("fsdp-grad", every=True),
        "fsdp-full, last": contender("fsdp-full"),
        "fsdp-full, each": contender("fsdp-full", every=True),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 2):
        for name, one in contenders.items():
            taken = _timed(one.step)
            if number >= 2:  # the first ones load and allocate
                times[name].append(taken)
    if rank == 0:
        bare = statistics.median(times["bare, no communication"])
        for name, taken in times.items():
            middle = statistics.median(taken)
            sys.stdout.write(f"{name:24} {1000 * middle:8.1f} ms  x {middle / bare:.2f}\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _timed(step: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Step times of the strategies, side by side.")
    parser.add_argument("--world", type=int, default=2, help="ranks (2)")
    parser.add_argument("--rounds", type=int, default=30, help="measured steps of each (30)")
    chosen = parser.parse_args()
    mp.spawn(measure, args=(chosen.world, free_port(), chosen.rounds), nprocs=chosen.world)


if __name__ == "__main__":
    main()
