"""From the global order to micro-batches: what one rank trains on, step by step."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from trainer.components import Batch, Dataset, Sample
from trainer.data.keyed import SampleRandom, keyed_generator
from trainer.data.order import SampleOrder, rank_positions
from trainer.parent import die_with
from trainer.spec.errors import VitraError
from trainer.spec.plan import Plan

#: Between a process's last connection being closed and its end being known.
_WORKER_DIES_S = 1.0


@dataclass(frozen=True)
class StepInput:
    """All that one rank trains in one optimizer step.

    `epoch` is the epoch of the step's first sample over all ranks; `ids` this rank's sample ids in
    the order it trains them.
    """

    step: int
    epoch: int
    ids: list[int]
    micro_batches: list[Batch]


def reseed(*key: int | str) -> None:
    """Seed torch, numpy and random from `key`, so that no state has to survive a restart.

    torch's CPU generator uses the low 32 bits of its seed only.
    """
    words = keyed_generator(*key).integers(0, 2**32, size=3, dtype=np.uint64)
    # Not torch.manual_seed: for each device that is not in use it would note the whole call stack.
    torch.default_generator.manual_seed(int(words[0]))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))


class _AtPosition(TorchDataset["Sample | VitraError"]):
    """The samples of a data set by their position in the endless stream.

    An error of ours is an item like any other: raised in a data worker it would arrive as a text of
    tracebacks, its message and hint lost.
    """

    def __init__(
        self,
        data: Dataset,
        order: SampleOrder,
        seed: int,
        draws: Callable[[Sample, SampleRandom], Sample] | None,
    ) -> None:
        self._data = data
        self._order = order
        self._seed = seed
        self._draws = draws

    def __getitem__(self, position: int) -> Sample | VitraError:
        epochs, indices = self._order.at(np.array([position], dtype=np.int64))
        epoch, index = int(epochs[0]), int(indices[0])
        # A data set that draws from the global generators in spite of the protocol is still exact.
        reseed(self._seed, "sample", epoch, index)
        rng = SampleRandom(self._seed, epoch, index)
        try:
            sample = self._data.sample(index, rng)
            return self._draws(sample, rng) if self._draws else sample
        except VitraError as err:
            return err

    def collate(self, items: list[Sample | VitraError]) -> Batch | VitraError:
        """One micro-batch, or the first error among its samples."""
        samples: list[Sample] = []
        for item in items:
            if isinstance(item, VitraError):
                return item
            samples.append(item)
        return self._data.collate(samples)


class RankLoader:
    """Yields a StepInput for each step from `start_step` + 1 to the plan's last.

    Iterating raises what a sample raised: DataError, where the data set keeps to its protocol.

    Args:
        plan: fixes batch sizes, seed and total steps.
        data: the opened data set.
        draws: per-sample draws of the model, made where the sample is loaded.
        rank: of the `plan.world_size` ranks.
        start_step: the last finished optimizer step; 0 for a fresh run.
        pin_memory: stage batches in pinned memory (CUDA).
    """

    def __init__(
        self,
        plan: Plan,
        data: Dataset,
        draws: Callable[[Sample, SampleRandom], Sample] | None,
        *,
        rank: int,
        start_step: int,
        pin_memory: bool = False,
    ) -> None:
        assert plan.total_steps is not None, "the probe fixes total_steps before a run starts"
        self._plan = plan
        self._rank = rank
        self._start_step = start_step
        self._order = SampleOrder(len(data), plan.spec.seed)
        workers = plan.spec.data.num_workers
        stream = _AtPosition(data, self._order, plan.spec.seed, draws)
        self._batches = DataLoader(
            stream,
            batch_sampler=_Positions(self),
            collate_fn=stream.collate,
            num_workers=workers,
            # Forked, so that the opened data set is shared and need not be picklable.
            multiprocessing_context="fork" if workers else None,
            prefetch_factor=plan.spec.data.prefetch_factor if workers else None,
            pin_memory=pin_memory,
            worker_init_fn=partial(_start_worker, os.getpid()),
        )

    def positions(self) -> Iterator[list[int]]:
        """The stream positions of this rank's micro-batches, in training order."""
        plan = self._plan
        for step in range(self._start_step + 1, (plan.total_steps or 0) + 1):
            for micro_step in range(plan.grad_accumulation_steps):
                yield self._micro_positions(step, micro_step).tolist()

    def _micro_positions(self, step: int, micro_step: int) -> np.ndarray:
        plan = self._plan
        return rank_positions(
            step,
            micro_step,
            self._rank,
            plan.world_size,
            plan.global_batch_size,
            plan.per_device_batch_size,
        )

    def __iter__(self) -> Iterator[StepInput]:
        plan = self._plan
        before = multiprocessing.active_children()
        batches = iter(self._batches)
        workers = [child for child in multiprocessing.active_children() if child not in before]
        for step in range(self._start_step + 1, (plan.total_steps or 0) + 1):
            with _blamed_on_dead(workers):
                micro_batches = [
                    _checked(next(batches)) for _ in range(plan.grad_accumulation_steps)
                ]
            mine = [self._micro_positions(step, m) for m in range(plan.grad_accumulation_steps)]
            _, ids = self._order.at(np.concatenate(mine))
            yield StepInput(
                step=step,
                epoch=(step - 1) * plan.global_batch_size // self._order.n,
                ids=ids.tolist(),
                micro_batches=micro_batches,
            )

    def __len__(self) -> int:
        return max(0, (self._plan.total_steps or 0) - self._start_step)


class _Positions:
    """The loader's positions, afresh each time DataLoader asks for them."""

    def __init__(self, loader: RankLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.positions()


def _checked(batch: Batch | VitraError) -> Batch:
    if isinstance(batch, VitraError):
        raise batch
    return batch


@contextmanager
def _blamed_on_dead(workers: Sequence[BaseProcess]) -> Iterator[None]:
    """Say that a data worker has died where only the connection to it was seen to break."""
    try:
        yield
    except (OSError, EOFError) as err:
        wait([worker.sentinel for worker in workers], timeout=_WORKER_DIES_S)
        for worker in workers:
            code = worker.exitcode
            if code:
                how = (
                    f"is killed by signal: {signal.strsignal(-code)}"
                    if code < 0
                    else f"exited unexpectedly with exit code {code}"
                )
                # In torch's own words, which it uses where it notices first.
                raise RuntimeError(f"DataLoader worker (pid {worker.pid}) {how}") from err
        raise


def _start_worker(rank_pid: int, _number: int) -> None:
    """Stop signals are for the rank, which decides when to stop: its data workers keep serving.

    A worker must not outlive its rank, however that ends.
    """
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    die_with(rank_pid)
