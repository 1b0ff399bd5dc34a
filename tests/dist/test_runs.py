"""Whole runs on real ranks: the same at every world size, through freezing, faults and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dist_helpers import Checkpoint, Run, planned, spoiled
from torch import Tensor

from trainer.data.keyed import SampleRandom
from trainer.data.order import SampleOrder
from trainer.factories import build_data, build_model

pytestmark = pytest.mark.timeout(180)


def assert_same_state(one: Checkpoint, other: Checkpoint) -> None:
    """Bit for bit: weights, moments, step counters and the schedule."""
    assert one.state == other.state
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


# -- World sizes -------------------------------------------------------------------------------

TWENTY: dict[str, Any] = {
    "train": {"max_steps": 20, "learning_rate": 1e-3, "per_device_batch_size": 4}
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """Twenty steps with one rank, and with four: accumulation 4 and 1."""
    runs: dict[int, Run] = {}
    for world in (1, 4):
        runs[world] = Run(tmp_path_factory.mktemp("world"), world, TWENTY)
        assert runs[world].train() == [0] * world
    return runs


def test_losses_do_not_depend_on_the_world(worlds: dict[int, Run]) -> None:
    alone, together = worlds[1].metrics(), worlds[4].metrics()
    assert [record["step"] for record in together] == list(range(1, 21))
    for a, b in zip(alone, together, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        for field in ("step", "epoch", "lr", "samples_seen", "attempt"):
            assert a[field] == b[field], field
    # They learn, so the equality is one of something.
    assert np.mean(worlds[1].losses()[-5:]) < 0.95 * np.mean(worlds[1].losses()[:5])


def test_samples_do_not_depend_on_the_world(worlds: dict[int, Run]) -> None:
    _, stream = SampleOrder(40, 11).at(np.arange(320, dtype=np.int64))
    for run in worlds.values():
        trained = [sample for step in range(1, 21) for sample in run.trained_ids(step)]
        assert trained == stream.tolist()


def test_the_loss_is_the_exact_mean_over_the_global_batch(worlds: dict[int, Run]) -> None:
    """The first step's, sample by sample, with the weights that a run starts with."""
    plan = planned(1, TWENTY)
    data = build_data(plan.spec)
    model = build_model(plan.spec, data, torch.device("cpu"))
    _, ids = SampleOrder(40, 11).at(np.arange(16, dtype=np.int64))
    sums, counts = [], []
    for index in ids.tolist():
        rng = SampleRandom(11, 0, index)
        batch = data.collate([model.draws(data.sample(index, rng), rng)])
        with torch.no_grad():
            sums.append(float(model(batch)))
        counts.append(model.loss_count(batch))
    exact = sum(sums) / sum(counts)
    for run in worlds.values():
        assert run.losses()[0] == pytest.approx(exact, rel=1e-6)
    # The mean of the micro-batches' means is another number: the masks are unequal.
    parts = [np.sum(sums[i : i + 4]) / np.sum(counts[i : i + 4]) for i in range(0, 16, 4)]
    assert abs(np.mean(parts) / exact - 1) > 1e-3


# -- Interrupted runs --------------------------------------------------------------------------


#: Figures that tell how a step was computed, not what came of it.
_NOT_COMPARED = ("step_time_s", "data_wait_s", "memory_bytes", "attempt")


def without_times(run: Run) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name not in _NOT_COMPARED}
        for record in run.metrics()
    ]


def assert_resumes_exactly(
    root: Path, world: int, last: int, stops: list[int], *changes: Any
) -> Run:
    """A run to step `last` in one go, and one that ended at each of `stops`; returns the first."""
    whole = Run(root / "whole", world, *changes)
    every_step = {"checkpoint": {"save_interval": 1}}
    assert whole.train({"train": {"max_steps": last}}, every_step) == [0] * world
    parts = Run(root / "parts", world, *changes)
    for stop in [*stops, last]:
        assert parts.train({"train": {"max_steps": stop}}) == [0] * world
    assert parts.saved_steps() == [*stops, last]
    assert without_times(parts) == without_times(whole)
    assert [r["attempt"] for r in parts.metrics()] == [
        1 + sum(step > stop for stop in stops) for step in range(1, last + 1)
    ]
    for stop in [*stops, last]:
        assert_same_state(parts.checkpoint(stop), whole.checkpoint(stop))
        assert parts.trained_ids(stop) == whole.trained_ids(stop)
    return whole


def backbone(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Weights and optimizer state of the backbone."""
    return {name: t for name, t in checkpoint.tensors.items() if ".backbone." in f".{name}"}


@pytest.mark.slow
def test_a_frozen_backbone_stays_frozen_and_thaws_through_resumes(tmp_path: Path) -> None:
    """Frozen for 3 steps; stopped within the freeze, and after it."""
    changes = {
        "train": {
            "lr_scheduler_type": "backbone-freeze-warmup",
            "freeze_steps": 3,
            "action_model_learning_rate": 1e-3,
        }
    }
    whole = assert_resumes_exactly(tmp_path, 2, 6, [2, 5], changes)
    saved = {step: backbone(whole.checkpoint(step)) for step in range(1, 7)}
    weights = [name for name in saved[1] if name.startswith("model.")]
    assert len(weights) > 10
    plan = planned(2, changes)
    initial = build_model(plan.spec, build_data(plan.spec), torch.device("cpu")).state_dict()
    for step in (1, 2, 3):
        assert saved[step].keys() == set(weights), "a frozen backbone has no optimizer state"
        assert all(torch.equal(saved[step][n], initial[n.removeprefix("model.")]) for n in weights)
    for step in (4, 5, 6):
        assert len(saved[step]) == 4 * len(weights), "AdamW has step, exp_avg and exp_avg_sq"
        moved = [n for n in weights if not torch.equal(saved[step][n], saved[step - 1][n])]
        # What this data never touches has no gradient: the words that no instruction has.
        assert set(weights) - set(moved) <= {n for n in weights if "embedding" in n}
        counters = {float(t) for n, t in saved[step].items() if n.endswith(".step")}
        assert counters == {step - 3}
    rates = [record["lr"] for record in whole.metrics()]
    assert [rate["backbone"] for rate in rates] == [0.0] * 3 + [3e-3] * 3
    assert [rate["action_model"] for rate in rates] == [1e-3] * 6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp-grad", "fsdp-full"])
def test_a_resume_at_the_end_of_a_freeze_is_exact(tmp_path: Path, strategy: str) -> None:
    changes = {
        "train": {
            "strategy": strategy,
            "lr_scheduler_type": "backbone-freeze-warmup",
            "freeze_steps": 3,
        }
    }
    whole = assert_resumes_exactly(tmp_path, 2, 6, [3, 4], changes)
    frozen, first = backbone(whole.checkpoint(3)), backbone(whole.checkpoint(4))
    assert all(name.startswith("model.") for name in frozen)
    assert any(not torch.equal(first[name], frozen[name]) for name in frozen)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_a_resume_is_exact_at_other_world_sizes(tmp_path: Path, world: int) -> None:
    """With dropout, bfloat16 and recomputation: what a model draws by itself is repeated too."""
    changes = {
        "model": {"options": {**planned(1).spec.model.options, "dropout": 0.2}},
        "train": {
            "enable_mixed_precision_training": True,
            "enable_gradient_checkpointing": True,
            "lr_scheduler_type": "linear-warmup+constant",
        },
    }
    assert_resumes_exactly(tmp_path, world, 16, [5, 6], changes)


@pytest.mark.slow
def test_a_resume_on_another_world_trains_the_same(tmp_path: Path) -> None:
    constant = {"train": {"lr_scheduler_type": "constant"}}
    whole, parts = (Run(tmp_path / name, 2, constant) for name in ("whole", "parts"))
    assert whole.train({"train": {"max_steps": 8}}) == [0, 0]
    assert parts.train({"train": {"max_steps": 3}}) == [0, 0]
    assert parts.train({"train": {"max_steps": 5}}, world=4) == [0] * 4
    assert parts.train({"train": {"max_steps": 8}}, world=1) == [0]
    assert parts.losses() == pytest.approx(whole.losses(), rel=1e-5)
    assert parts.checkpoint(5).manifest.world_size == 4
    for step in range(1, 9):
        assert parts.trained_ids(step) == whole.trained_ids(step)


# -- Recomputed activations --------------------------------------------------------------------


@pytest.mark.slow
def test_recomputation_changes_neither_losses_nor_names(tmp_path: Path) -> None:
    dropout = {"model": {"options": {**planned(1).spec.model.options, "dropout": 0.2}}}
    runs = []
    for on in (False, True):
        run = Run(tmp_path / str(on), 1, dropout)
        assert run.train({"train": {"enable_gradient_checkpointing": on, "max_steps": 4}}) == [0]
        runs.append(run)
    plain, recomputed = runs
    assert recomputed.losses() == plain.losses()
    assert_same_state(plain.checkpoint(4), recomputed.checkpoint(4))
    plan = planned(1)
    model = build_model(plan.spec, build_data(plan.spec), torch.device("cpu"))
    names = {name for name in recomputed.checkpoint(4).tensors if name.startswith("model.")}
    assert names == {f"model.{name}" for name in model.state_dict()}


# -- Failures ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_every_rank_before_anything_is_saved(tmp_path: Path) -> None:
    data = spoiled("infinite", step=4, rank=1, world=2)
    run = Run(tmp_path, 2, data, {"checkpoint": {"save_interval": 1}})
    with run.start() as ranks:
        assert ranks.wait() == [5, 5]
        reports = ranks.reports()
    for report in reports:
        assert (report.error, report.last_step) == ("NonFiniteLoss", 3)
        assert report.message is not None
        assert report.message.startswith("step 4: loss ")
    assert run.saved_steps() == [1, 2, 3]
    assert [record["step"] for record in run.metrics()] == [1, 2, 3]
    assert all(t.isfinite().all() for t in run.checkpoint(3).tensors.values())
    # It happens again, whoever tries again.
    assert run.train() == [5, 5]
    assert run.saved_steps() == [1, 2, 3]


def test_an_unreadable_sample_is_named_by_the_rank_that_met_it(tmp_path: Path) -> None:
    data = spoiled("unreadable", step=3, rank=0, world=1)
    data["data"]["num_workers"] = 1
    run = Run(tmp_path, 1, data)
    with run.start() as ranks:
        assert ranks.wait() == [5]
        (report,) = ranks.reports()
        log = ranks.logs()
    assert (report.error, report.last_step) == ("DataError", 2)
    assert report.message is not None
    assert report.message.endswith("is unreadable; restore it")
    assert "Traceback" not in log
