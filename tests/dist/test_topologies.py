"""The same learning whatever the topology: worlds, accumulations, strategies, and changes between.

The first twenty steps in float32, without dropout: the losses agree to 1e-5, the samples exactly.
"""

from __future__ import annotations

import os
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from dist_helpers import Checkpoint, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 20
HALF = 10


class Topology(NamedTuple):
    """12 samples a step: per device x world x accumulation."""

    strategy: str
    world: int
    per_device: int
    replicate: int = 1

    def train(self) -> dict[str, Any]:
        return {
            "train": {
                "strategy": self.strategy,
                "per_device_batch_size": self.per_device,
                "replicate": self.replicate,
            }
        }


COMMON: dict[str, Any] = {
    "train": {
        "global_batch_size": 12,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "action_model_learning_rate": 2e-3,
    }
}
#: Accumulation 2; 3, 1; 4, 2, 1; 3, 1, 1, 3.
TOPOLOGIES = [
    Topology("ddp", 1, 6),
    Topology("ddp", 2, 2),
    Topology("fsdp-full", 4, 3),
    Topology("fsdp-grad", 3, 1),
    Topology("ddp", 3, 2),
    Topology("fsdp-full", 2, 6),
    Topology("fsdp-grad", 4, 3, replicate=2),
    Topology("fsdp-grad", 2, 2),
    Topology("fsdp-full", 1, 12),
    Topology("ddp", 4, 1),
]
PAIRS = list(permutations(TOPOLOGIES, 2))
if "VITRA_TORTURE_ROUNDS" not in os.environ:
    # From shards to whole and back; `make torture` asks for every ordered pair.
    PAIRS = [(TOPOLOGIES[2], TOPOLOGIES[4]), (TOPOLOGIES[1], TOPOLOGIES[6])]


def train(run: Run, topology: Topology, *changes: dict[str, Any]) -> None:
    codes = run.train(topology.train(), *changes, world=topology.world)
    assert codes == [0] * topology.world, topology


def started(root: Path) -> Run:
    return Run(root, 1, COMMON)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One rank, unsharded, from the first step to the last."""
    run = started(tmp_path_factory.mktemp("alone"))
    train(run, TOPOLOGIES[0], {"checkpoint": {"save_interval": 1}})
    return run


def assert_same_learning(run: Run, alone: Run) -> None:
    ours, theirs = run.metrics(), alone.metrics()
    assert [record["step"] for record in ours] == list(range(1, STEPS + 1))
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert mine["lr"] == expected["lr"]
        assert run.trained_ids(mine["step"]) == alone.trained_ids(mine["step"])


def assert_same_optimizer(saved: Checkpoint, expected: Checkpoint) -> None:
    """Groups, schedule, step counters and first moments.

    Not the weights one by one: those whose gradient is nothing but rounding (the bias of a key in
    an attention) Adam moves at full speed in any direction, and no loss depends on them.
    """
    assert saved.state == expected.state
    assert saved.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        if name.endswith((".exp_avg", ".step")):
            torch.testing.assert_close(saved.tensors[name], tensor, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("topology", TOPOLOGIES[1:], ids=lambda t: "-".join(map(str, t)))
def test_losses_do_not_depend_on_the_topology(
    topology: Topology, alone: Run, tmp_path: Path
) -> None:
    run = started(tmp_path)
    train(run, topology)
    assert_same_learning(run, alone)
    assert_same_optimizer(run.checkpoint(STEPS), alone.checkpoint(STEPS))


def test_one_run_through_all_topologies(alone: Run, tmp_path: Path) -> None:
    """Two steps each: every save is read by another strategy and another number of ranks."""
    run = started(tmp_path)
    for number, topology in enumerate(TOPOLOGIES, 1):
        train(run, topology, {"train": {"max_steps": 2 * number}})
        saved, expected = run.checkpoint(2 * number), alone.checkpoint(2 * number)
        assert saved.manifest.world_size == topology.world
        assert saved.manifest.strategy == topology.strategy
        assert_same_optimizer(saved, expected)
    assert_same_learning(run, alone)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda t: "-".join(map(str, t)))
def test_any_topology_resumes_in_any_other(
    before: Topology, after: Topology, alone: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = tmp_path_factory.getbasetemp() / f"{'-'.join(map(str, before))}"
    if not first.exists():
        train(started(first), before, {"train": {"max_steps": HALF}})
    copy = tmp_path_factory.mktemp("pair")
    run = started(copy)
    shutil.copytree(first / "core-1", run.dir.path, dirs_exist_ok=True)
    train(run, after)
    assert_same_learning(run, alone)


@pytest.mark.parametrize(
    ("kind", "backbone", "action_model"),
    [
        ("backbone-freeze-warmup", [0.0, 0.0, 1e-3, 1e-3, 1e-3], [1e-3] * 5),
        (
            "linear-warmup+cosine-decay",
            [0.5e-3, 1e-3, 0.775e-3, 0.325e-3, 1e-4],
            [0.5e-3, 1e-3, 0.775e-3, 0.325e-3, 1e-4],
        ),
    ],
)
def test_rates_do_not_depend_on_world_or_accumulation(
    kind: str, backbone: list[float], action_model: list[float], tmp_path: Path
) -> None:
    """Every schedule counts optimizer steps."""
    for world, accumulation in [(1, 1), (1, 4), (2, 2), (4, 1)]:
        changes = {
            "train": {
                "global_batch_size": 16,
                "max_steps": 5,
                "per_device_batch_size": 16 // world // accumulation,
                "lr_scheduler_type": kind,
                "freeze_steps": 2 if kind == "backbone-freeze-warmup" else 0,
                "warmup_ratio": 0.4,
                "learning_rate": 1e-3,
            }
        }
        run = Run(tmp_path / f"{world}-{accumulation}", world, changes)
        assert run.train() == [0] * world
        rates = [record["lr"] for record in run.metrics()]
        assert [rate["backbone"] for rate in rates] == pytest.approx(backbone, rel=1e-12, abs=0)
        assert [rate["action_model"] for rate in rates] == pytest.approx(action_model, rel=1e-12)
