"""What a rank trains, step by step: the same with data workers or none, and after any resume."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from launcher.planner import plan
from trainer.components import Batch, Sample
from trainer.data.keyed import SampleRandom
from trainer.data.loader import RankLoader, StepInput
from trainer.data.order import SampleOrder
from trainer.data.samples import stack
from trainer.spec.errors import DataError
from trainer.spec.plan import Plan
from trainer.spec.run import RunSpec

# Python 3.12 and later warn of every fork beside threads, which torch has; the workers do not use
# them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.timeout(60),
]

SAMPLES = 10


@pytest.fixture(autouse=True)
def _no_worker_outlives_its_test() -> Iterator[None]:
    """An error keeps the loader that it came through, and its workers take no SIGTERM."""
    yield
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()


def planned(workers: int, *, world: int = 1, steps: int = 9, per_device: int = 2) -> Plan:
    """Steps of 8 samples in micro-batches; five epochs of 10 are four steps."""
    spec = RunSpec.model_validate(
        {
            "name": "loader",
            "seed": 5,
            "model": {"kind": "vla"},
            "data": {"kind": "synthetic", "num_workers": workers},
            "train": {
                "max_steps": steps,
                "global_batch_size": 8,
                "per_device_batch_size": per_device,
            },
            "resources": {"tasks_per_node": world},
        }
    )
    return plan(spec, run_id="loader-1", run_dir="/nowhere").with_samples(SAMPLES)


class Plain:
    """Samples that say which they are and what was drawn for them."""

    meta = None

    def __len__(self) -> int:
        return SAMPLES

    def sample(self, index: int, rng: SampleRandom) -> Sample:
        drawn = rng.generator("augment").standard_normal(3)
        return {"index": np.asarray(index), "epoch": np.asarray(rng.epoch), "drawn": drawn}

    def collate(self, samples: Sequence[Sample]) -> Batch:
        return stack(samples)


class Careless(Plain):
    """Draws from the global generators, against the protocol."""

    def sample(self, index: int, rng: SampleRandom) -> Sample:  # noqa: ARG002 - on purpose
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        return {"index": np.asarray(index), "drawn": np.array(drawn)}


class Broken(Plain):
    def sample(self, index: int, rng: SampleRandom) -> Sample:
        if index == 7:
            raise DataError("frame 7 of episode.mp4 cannot be decoded", "copy it again")
        return super().sample(index, rng)


class Doomed(Plain):
    """The process that loads its sample 7 is killed, as one that takes too much memory is."""

    def sample(self, index: int, rng: SampleRandom) -> Sample:
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(index, rng)


def load(data: Any, the_plan: Plan, *, rank: int = 0, start_step: int = 0) -> list[StepInput]:
    def draws(sample: Sample, rng: SampleRandom) -> Sample:
        return {**sample, "noise": rng.generator("noise").standard_normal(2)}

    loader = RankLoader(the_plan, data, draws, rank=rank, start_step=start_step)
    steps = list(loader)
    assert len(steps) == len(loader)
    return steps


def assert_same(one: list[StepInput], other: list[StepInput]) -> None:
    assert [(s.step, s.epoch, s.ids) for s in one] == [(s.step, s.epoch, s.ids) for s in other]
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
            assert x.keys() == y.keys()
            assert all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_follow_the_stream(workers: int) -> None:
    steps = load(Plain(), planned(workers))
    epochs, indices = SampleOrder(SAMPLES, 5).at(np.arange(72, dtype=np.int64))
    assert [step.step for step in steps] == list(range(1, 10))
    assert [step.epoch for step in steps] == [8 * k // 10 for k in range(9)]
    assert [i for step in steps for i in step.ids] == indices.tolist()
    trained = [batch for step in steps for batch in step.micro_batches]
    assert [len(batch["index"]) for batch in trained] == [2] * 36
    assert torch.cat([b["index"] for b in trained]).tolist() == indices.tolist()
    assert torch.cat([b["epoch"] for b in trained]).tolist() == epochs.tolist()


@pytest.mark.parametrize("data", [Plain(), Careless()], ids=["plain", "careless"])
def test_workers_change_nothing(data: Plain) -> None:
    alone = load(data, planned(0))
    assert_same(load(data, planned(2)), alone)
    drawn = torch.cat([b["drawn"] for step in alone for b in step.micro_batches])
    # The same sample in another epoch draws anew.
    assert len(torch.unique(drawn, dim=0)) == len(drawn) == 72


@pytest.mark.parametrize("data", [Plain(), Careless()], ids=["plain", "careless"])
@pytest.mark.parametrize(
    ("workers", "start_step"), [*((0, step) for step in (3, 5, 8, 9)), (2, 5), (2, 8)]
)
def test_a_resume_gives_exactly_the_rest(data: Plain, workers: int, start_step: int) -> None:
    """Within an epoch (3, 8), at a boundary (5 x 8 samples are 4 epochs of 10), and at the end."""
    whole = load(data, planned(0))
    assert_same(load(data, planned(workers), start_step=start_step), whole[start_step:])


def test_what_was_drawn_before_the_resume_does_not_matter() -> None:
    whole = load(Careless(), planned(0))
    torch.rand(7)
    random.random()
    assert_same(load(Careless(), planned(0), start_step=4), whole[4:])


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_train_what_one_does(world: int) -> None:
    alone = load(Plain(), planned(0, per_device=8))
    ranks = [load(Plain(), planned(0, world=world), rank=rank) for rank in range(world)]
    for number, step in enumerate(alone):
        parts = [steps[number] for steps in ranks]
        assert [i for part in parts for i in part.ids] == step.ids
        for name in ("drawn", "noise"):
            together = torch.cat([b[name] for part in parts for b in part.micro_batches])
            assert torch.equal(together, step.micro_batches[0][name])


def test_beyond_the_last_step_there_is_nothing() -> None:
    assert load(Plain(), planned(0), start_step=12) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_sample_arrives_as_it_was_raised(workers: int) -> None:
    with pytest.raises(DataError) as caught:
        load(Broken(), planned(workers))
    assert caught.value.message == "frame 7 of episode.mp4 cannot be decoded"
    assert caught.value.hint == "copy it again"


# torch raises from a signal handler, wherever the rank is at that moment: also between making the
# socket on which a worker hands over its tensors and closing it.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_killed_worker_is_an_error_and_no_hang() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        load(Doomed(), planned(2))
    assert time.monotonic() - began < 30


def test_workers_leave_stop_signals_to_their_rank() -> None:
    loader = RankLoader(planned(2), Plain(), None, rank=0, start_step=0)
    steps = iter(loader)
    got = [next(steps)]
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            assert worker.pid is not None
            os.kill(worker.pid, number)
    got += list(steps)
    assert_same(got, list(RankLoader(planned(0), Plain(), None, rank=0, start_step=0)))
