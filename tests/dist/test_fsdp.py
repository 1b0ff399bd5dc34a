"""Sharded strategies: the same weights, gradients and norms as unsharded ones, in less memory."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from dist_helpers import on_ranks, planned
from test_strategy import NOWHERE, Rank, arguments, distance, world_size
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.components import Batch
from trainer.spec.errors import PlanError, UsageError
from trainer.strategies.base import TrainingStrategy
from trainer.strategies.build import get_train_strategy
from trainer.strategies.fsdp import FSDPFullStrategy
from trainer.strategies.units import shard_units
from trainer.weights import author_name, materialize
from trainer.factories import build_data, build_model, empty_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

FULL: dict[str, Any] = {"strategy": "fsdp-full"}
GRAD: dict[str, Any] = {"strategy": "fsdp-grad"}
HYBRID: dict[str, Any] = {"strategy": "fsdp-full", "replicate": 2}


def whole(tensor: Tensor) -> Tensor:
    """What all ranks together hold of a tensor; a copy."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_gradient(strategy: TrainingStrategy) -> Tensor:
    named = sorted(strategy.named_parameters())
    return torch.cat([whole(p.grad).flatten() for _, p in named if p.grad is not None])


# -- One step, taken apart ---------------------------------------------------------------------


def one_step(rank: int, train: dict[str, Any]) -> dict[str, Any]:
    """All that the first step of a run is made of, as one rank has it."""
    ranked = Rank(rank, **train)
    strategy = ranked.strategy
    assert strategy.optimizer is not None
    found: dict[str, Any] = {
        "weights": {name: whole(tensor) for name, tensor in strategy.named_state().items()},
        "groups": {g["name"]: g["parameter_names"] for g in strategy.optimizer.param_groups},
        "held": [p for g in strategy.optimizer.param_groups for p in g["params"]]
        == [
            dict(strategy.named_parameters())[name]
            for g in strategy.optimizer.param_groups
            for name in g["parameter_names"]
        ],
    }
    inputs = next(ranked.steps())
    calls: list[dict[str, int]] = []
    micro_batches = ranked.gradients(inputs)
    for _ in inputs.micro_batches:
        with Collectives() as seen:
            next(micro_batches)
        calls.append(seen.by_kind())
    # The helper agrees on the global count of valid elements, as the loop does.
    calls[0]["reduce"] -= world_size() > 1
    found["calls"] = calls
    found["gradient"] = whole_gradient(strategy)
    with Collectives() as seen:
        found["norm"] = strategy.clip_grad_norm()
    found["norm calls"] = seen.by_kind()
    found["clipped"] = whole_gradient(strategy)
    strategy.apply_step()
    found["stepped"] = {name: whole(tensor) for name, tensor in strategy.named_state().items()}
    return found


class Collectives(TorchDispatchMode):
    """Counts what this rank communicates while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again as what is done with the parts
        namespace, _, name = func.name().partition("::")
        local = name in ("wait_tensor", "_wrap_tensor_autograd")
        if namespace in ("c10d", "_c10d_functional") and not local:
            self._names[name.replace("_", "")] += 1
        return func(*args, **(kwargs or {}))

    def by_kind(self) -> dict[str, int]:
        """Gathers of parameters; reductions of gradients, scattered or whole (hybrid); others."""
        kinds = {"gather": "allgather", "scatter": "reducescatter", "reduce": "allreduce"}
        found = {
            kind: sum(n for name, n in self._names.items() if part in name)
            for kind, part in kinds.items()
        }
        return {**found, "other": self._names.total() - sum(found.values())}


NONE = {"gather": 0, "scatter": 0, "reduce": 0, "other": 0}
SMALL_STEP: dict[str, Any] = {"max_grad_norm": 0.5, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The step of one unsharded rank, its 16 samples in one batch."""
    return on_ranks(1, one_step, {**SMALL_STEP, "per_device_batch_size": 16})[0]


def check_step(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    plan = planned(1)
    initial = build_model(plan.spec, build_data(plan.spec), torch.device("cpu")).state_dict()
    for rank in found:
        assert rank["weights"].keys() == initial.keys()
        for name, tensor in initial.items():
            assert torch.equal(rank["weights"][name], tensor), name
        assert rank["groups"] == alone["groups"]
        assert rank["held"]
        assert distance(rank["gradient"], alone["gradient"]) < 1e-6
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-6)
        assert rank["norm"] == found[0]["norm"]
        assert float(rank["clipped"].norm()) == pytest.approx(0.5, rel=1e-4)
        assert distance(rank["clipped"], alone["clipped"]) < 1e-5
        for name, tensor in alone["stepped"].items():
            torch.testing.assert_close(rank["stepped"][name], tensor, rtol=1e-4, atol=1e-6)
    assert alone["norm"] > 1


def test_full_sharding_gathers_each_time_and_reduces_once_a_step(alone: dict[str, Any]) -> None:
    found = on_ranks(2, one_step, {**SMALL_STEP, **FULL})
    check_step(found, alone)
    # Three units: two blocks and what lies outside. The blocks are gathered for forward and
    # backward passes, the rest once a micro-batch.
    quiet = {**NONE, "gather": 5}
    assert found[0]["calls"] == [quiet, quiet, quiet, {**quiet, "scatter": 3}]
    # The norm is one number to agree on, however many parameters there are.
    assert found[0]["norm calls"] == {**NONE, "reduce": 1}


def test_gradient_sharding_gathers_and_reduces_once_a_step(alone: dict[str, Any]) -> None:
    found = on_ranks(2, one_step, {**SMALL_STEP, **GRAD})
    check_step(found, alone)
    assert found[0]["calls"] == [{**NONE, "gather": 3}, NONE, NONE, {**NONE, "scatter": 3}]
    assert found[0]["norm calls"] == {**NONE, "reduce": 1}


@pytest.mark.parametrize(
    ("world", "train"),
    [
        (1, FULL),
        (4, FULL),
        (4, GRAD),
        (4, HYBRID),
        (4, {**GRAD, "replicate": 4}),
        (2, {**FULL, "enable_gradient_checkpointing": True}),
        (2, {**GRAD, "per_device_batch_size": 8}),
        (4, {"strategy": "ddp", "enable_gradient_checkpointing": True}),
    ],
)
def test_a_step_is_the_same_on_other_topologies(
    alone: dict[str, Any], world: int, train: dict[str, Any]
) -> None:
    found = on_ranks(world, one_step, {**SMALL_STEP, **train})
    check_step(found, alone)
    if train.get("replicate") == 2:
        first, *_, last = found[0]["calls"]
        # Scattered within a group of two, then averaged between the two groups.
        assert (first["scatter"], first["reduce"]) == (0, 0)
        assert (last["scatter"], last["reduce"]) == (3, 3)


# -- Memory ------------------------------------------------------------------------------------


def live_bytes() -> int:
    """The memory of all tensors of this process, each storage once."""
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        if isinstance(item, Tensor) and not item.is_meta:
            local = item.to_local() if isinstance(item, DTensor) else item
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def most_while_filling(rank: int) -> tuple[int, int, int, int]:
    """Bytes: the most that was held while weights were drawn, the model, its largest, this part."""
    del rank
    gc.freeze()  # what the process began with is not counted, nor looked through
    plan = planned(world_size(), {"train": FULL})
    model = empty_model(plan.spec, build_data(plan.spec))
    most = 0
    fill = type(model).init_parameter

    def watched(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        nonlocal most
        fill(model, name, tensor, generator)
        most = max(most, live_bytes())

    model.init_parameter = watched
    strategy = get_train_strategy("fsdp-full", **arguments(plan, model), seed=3)
    strategy.run_setup(NOWHERE, 40)
    parameters = [p for _, p in strategy.named_parameters()]
    sizes = [p.numel() * p.itemsize for p in parameters]
    held = sum(p.to_local().nbytes for p in parameters if isinstance(p, DTensor))
    return most, sum(sizes), max(sizes), held


def test_no_rank_ever_holds_the_whole_model() -> None:
    for most, model, largest, held in on_ranks(2, most_while_filling):
        assert held < 0.55 * model
        buffers = 4096
        assert held < most <= held + largest + buffers < model


BIG_MODEL: dict[str, Any] = {
    "dim": 768,
    "layers": 6,
    "heads": 12,
    "action_width": 768,
    "action_layers": 5,
    "action_heads": 12,
}


def held_after_a_step(rank: int, strategy_name: str) -> tuple[int, int]:
    """(parameters of the model, bytes of parameters and optimizer state on this rank)."""
    plan = planned(
        world_size(),
        {"model": {"options": {**planned(1).spec.model.options, **BIG_MODEL}}},
        {"train": {"global_batch_size": 4, "per_device_batch_size": 4 // world_size()}},
    )
    ranked = Rank.of(plan, rank, strategy_name)
    for _ in ranked.gradients(next(ranked.steps())):
        pass
    ranked.strategy.apply_step()
    assert ranked.strategy.optimizer is not None
    held = 0
    parameters = [p for _, p in ranked.strategy.named_parameters()]
    for parameter in parameters:
        state = ranked.strategy.optimizer.state[parameter].values()
        for tensor in (parameter.detach(), *state):
            held += (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
    return sum(p.numel() for p in parameters), held


def test_full_sharding_over_four_ranks_takes_at_most_two_fifths_of_the_memory() -> None:
    ((count, unsharded),) = on_ranks(1, held_after_a_step, "ddp")
    assert count > 100_000_000
    assert unsharded >= 12 * count
    for number, held in on_ranks(4, held_after_a_step, "fsdp-full"):
        assert number == count
        assert held <= 0.4 * unsharded


# -- Precision and unused parameters -----------------------------------------------------------


def precise_gradients(rank: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, mixed, full in [("f", False, True), ("mixed", True, True), ("half", True, False)]:
        train = {"enable_mixed_precision_training": mixed, "reduce_in_full_precision": full}
        ranked = Rank(rank, **FULL, **train, per_device_batch_size=8)
        for _ in ranked.gradients(next(ranked.steps())):
            pass
        found[name] = whole_gradient(ranked.strategy)
        assert all(p.dtype == torch.float32 for _, p in ranked.strategy.named_parameters())
    return found


def test_bfloat16_parameters_and_reduction() -> None:
    ours, _ = on_ranks(2, precise_gradients)
    full, half = ours["mixed"], ours["half"]
    assert full.dtype == half.dtype == torch.float32
    assert torch.equal(half.to(torch.bfloat16).float(), half)
    assert not torch.equal(full.to(torch.bfloat16).float(), full)
    assert 1e-5 < distance(half, full) < 0.02
    assert 1e-5 < distance(full, ours["f"]) < 0.05


class Choosy(nn.Module):
    """Each sample goes through the one of two layers that it names; one layer has two names."""

    backbone_prefixes = ("tied.",)
    shard_classes = ()
    checkpoint_classes = ()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 5) for _ in range(2))
        self.tied = self.layers[1]

    def forward(self, batch: Batch) -> Tensor:
        layer = self.layers[int(batch["layer"])]
        return layer(batch["x"]).square().sum()

    def loss_count(self, batch: Batch) -> int:
        return batch["x"].numel()

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        del name
        tensor.normal_(generator=generator)

    def init_buffers(self) -> None: ...


def choosy_arguments(model: nn.Module) -> dict[str, Any]:
    sizes = {"global_batch_size": 2, "per_device_batch_size": 2 // world_size()}
    return {**arguments(planned(1), model), **sizes, "seed": 5}


def unequal_use(rank: int) -> tuple[bool, list[Tensor]]:
    with torch.device("meta"):
        model = Choosy()
    strategy = get_train_strategy("fsdp-full", **choosy_arguments(model))
    strategy.run_setup(NOWHERE, 2)
    strategy.begin_step()
    batch = {"x": torch.ones(1, 3), "layer": torch.tensor(rank)}
    strategy.forward_backward(batch, scale=1.0, is_last=True)
    return model.tied.weight is model.layers[1].weight, [
        whole(p.grad) for _, p in strategy.named_parameters() if p.grad is not None
    ]


def test_ranks_may_use_different_parameters_and_one_may_have_two_names() -> None:
    with torch.device("meta"):
        model = Choosy()
    materialize(model, 5, torch.device("cpu"))
    assert model.tied.weight is model.layers[1].weight
    for layer in range(2):
        batch = {"x": torch.ones(1, 3), "layer": torch.tensor(layer)}
        (0.5 * model(batch)).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for still_tied, gradients in on_ranks(2, unequal_use):
        assert still_tied
        assert len(gradients) == len(expected) == 4
        for found, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(found, wanted)


# -- What cannot be sharded --------------------------------------------------------------------


class Layer(nn.Linear): ...


def test_units_are_the_models_own_inner_ones_first() -> None:
    model: Any = nn.Sequential(Layer(2, 2), nn.Linear(2, 2), nn.Sequential(Layer(2, 2)))
    model.shard_classes = (Layer, nn.Sequential)
    assert shard_units(model) == [model[2][0], model[2], model[0]]
    assert author_name("0._checkpoint_wrapped_module.weight") == "0.weight"


def test_what_cannot_be_sharded_is_named() -> None:
    model: Any = nn.Sequential(Layer(2, 2), Layer(2, 2))
    model.shard_classes = (Layer,)
    model[0].bias = model[1].bias
    with pytest.raises(UsageError, match=r"'0\.bias' and '1\.bias' are one, but lie in modules"):
        shard_units(model)
    model.shard_classes = ()
    assert shard_units(model) == []
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UsageError, match=r"'scale' is a scalar.*; give it the shape \(1,\)"):
        shard_units(model)


def refused(rank: int) -> list[str]:
    del rank
    plan = planned(world_size())
    model = empty_model(plan.spec, build_data(plan.spec))
    lines: list[str] = []
    for changes in (
        {"replicate": 3, "seed": 1},
        {"enable_mixed_precision_training": True, "mixed_precision_dtype": torch.float16},
        {},
    ):
        strategy = FSDPFullStrategy(**{**arguments(plan, model), **changes})
        try:
            strategy.run_setup(NOWHERE, 40)
        except (PlanError, UsageError) as err:
            lines.append(str(err))
    return lines


def test_what_the_strategy_refuses() -> None:
    for lines in on_ranks(2, refused):
        assert lines[0] == "replicate=3 does not divide the world size 2"
        assert lines[1].startswith("mixed_precision_dtype=torch.float16: sharded parameters are")
        assert lines[2] == "the model is on the meta device; pass seed=... to fill it"
