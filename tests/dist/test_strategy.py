"""Strategies on real gloo worlds: what is communicated, what a gradient is, what clipping does."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import lone_rank, on_ranks, planned
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.agree import Agreement
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.initial import load_initial_weights
from trainer.context import TrainContext
from trainer.data.loader import RankLoader, StepInput
from trainer.loop import LoopEnd
from trainer.metrics import VLAMetrics
from trainer.optim import parameter_groups
from trainer.records import RunRecords
from trainer.spec.errors import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    NonFiniteLoss,
    PlanError,
    UsageError,
)
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir
from trainer.state import TrainState
from trainer.stop import StopFlag
from trainer.store.checkpoints import CheckpointStore
from trainer.store.manifest import MANIFEST_NAME, CheckpointManifest, Digest, FileEntry
from trainer.store.storage import open_storage
from trainer.strategies.base import TrainingStrategy
from trainer.spec.run import is_sharded
from trainer.strategies.build import get_train_strategy
from trainer.strategies.ddp import DDPStrategy
from trainer.strategies.fsdp import FSDPFullStrategy, FSDPGradStrategy
from trainer.watchdog import Pulse
from trainer.factories import build_data, build_model, empty_model

pytestmark = pytest.mark.timeout(120)

NOWHERE = Path("/nowhere")


def arguments(plan: Plan, model: Any = None) -> dict[str, Any]:
    """The constructor's arguments, under the names that VITRA's base class has."""
    train = plan.spec.train
    return {
        "vla": model,
        "device_id": 0,
        "stage": "train",
        "epochs": None,
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
    }


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Rank:
    """One rank's strategy, ready to train, and what it trains on."""

    def __init__(self, rank: int, **train: Any) -> None:
        self._set_up(planned(world_size(), {"train": train}), rank)

    @classmethod
    def of(cls, plan: Plan, rank: int, strategy: str) -> Rank:
        """A rank of any plan, with a strategy in place of its own."""
        made = cls.__new__(cls)
        made._set_up(plan, rank, strategy)
        return made

    def _set_up(self, plan: Plan, rank: int, strategy: str | None = None) -> None:
        self.plan = plan
        data = build_data(plan.spec)
        name = strategy or plan.spec.train.strategy
        self.model = (
            empty_model(plan.spec, data)
            if is_sharded(name)
            else build_model(plan.spec, data, torch.device("cpu"))
        )
        self.strategy = get_train_strategy(
            name,
            **arguments(plan, self.model),
            replicate=plan.spec.train.replicate,
            seed=plan.spec.seed,
        )
        self.strategy.run_setup(NOWHERE, len(data))
        self.loader = RankLoader(plan, data, self.model.draws, rank=rank, start_step=0)

    def steps(self) -> Iterator[StepInput]:
        return iter(self.loader)

    def gradients(self, inputs: StepInput) -> Iterator[list[Tensor]]:
        """The gradients after each micro-batch of a step, which is not applied."""
        self.strategy.begin_step()
        counts = sum(self.strategy.loss_count(batch) for batch in inputs.micro_batches)
        total = torch.tensor(counts)
        if dist.is_initialized():
            dist.all_reduce(total)
        for number, batch in enumerate(inputs.micro_batches):
            last = number == len(inputs.micro_batches) - 1
            scale = self.plan.world_size / int(total)
            self.strategy.forward_backward(batch, scale=scale, is_last=last)
            yield [
                p.grad.clone() for _, p in self.strategy.named_parameters() if p.grad is not None
            ]

    def last_gradient(self, inputs: StepInput) -> Tensor:
        *_, gradients = self.gradients(inputs)
        return torch.cat([gradient.flatten() for gradient in gradients])


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


# -- Accumulation ------------------------------------------------------------------------------


def communication(rank: int) -> tuple[list[int], list[Tensor]]:
    ranked = Rank(rank, global_batch_size=16, per_device_batch_size=2)
    calls: list[int] = []

    # Without annotations: torch compares them with classes, and here they would be strings.
    def counted(_, bucket):  # type: ignore[no-untyped-def]
        calls.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    assert isinstance(ranked.strategy.model, DistributedDataParallel)
    ranked.strategy.model.register_comm_hook(None, counted)
    counts: list[int] = []
    sums: list[Tensor] = []
    for inputs, _ in zip(ranked.steps(), range(2), strict=False):
        for gradients in ranked.gradients(inputs):
            counts.append(len(calls))
            sums.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return counts, sums


def test_gradients_are_communicated_with_the_last_micro_batch_only() -> None:
    (counts, ours), (_, theirs) = on_ranks(2, communication)
    buckets = counts[3]
    assert buckets > 0
    assert counts == [0, 0, 0, buckets] + [buckets] * 3 + [2 * buckets]
    same = [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert same == [False, False, False, True] * 2


def gradient(rank: int, per_device: int) -> Tensor:
    ranked = Rank(rank, global_batch_size=16, per_device_batch_size=per_device)
    return ranked.last_gradient(next(ranked.steps()))


def test_a_gradient_does_not_depend_on_how_the_batch_is_split() -> None:
    whole = on_ranks(1, gradient, 16)[0]
    for world, per_device in [(2, 8), (2, 2), (4, 1)]:
        found = on_ranks(world, gradient, per_device)
        assert all(torch.equal(found[0], other) for other in found)
        assert distance(found[0], whole) < 1e-6, (world, per_device)


# -- Precision ---------------------------------------------------------------------------------


def precise_gradients(rank: int) -> dict[str, Tensor]:
    settings = {
        "float32": {"enable_mixed_precision_training": False},
        "reduced in float32": {
            "enable_mixed_precision_training": True,
            "reduce_in_full_precision": True,
        },
        "reduced in bfloat16": {
            "enable_mixed_precision_training": True,
            "reduce_in_full_precision": False,
        },
    }
    found: dict[str, Tensor] = {}
    for name, train in settings.items():
        ranked = Rank(rank, **train)
        found[name] = ranked.last_gradient(next(ranked.steps()))
        assert all(p.dtype == torch.float32 for p in ranked.model.parameters())
    return found


def test_bfloat16_forward_and_reduction() -> None:
    ours, theirs = on_ranks(2, precise_gradients)
    for name, found in ours.items():
        assert torch.equal(found, theirs[name]), name
        assert found.isfinite().all()
        assert found.dtype == torch.float32
    full, half = ours["reduced in float32"], ours["reduced in bfloat16"]
    # Each reduced value has the 8 bits of a bfloat16 left, and only with that reduction.
    assert torch.equal(half.to(torch.bfloat16).float(), half)
    assert not torch.equal(full.to(torch.bfloat16).float(), full)
    assert 1e-5 < distance(half, full) < 2**-7
    assert 1e-5 < distance(full, ours["float32"]) < 0.05


def set_up_in_float16(rank: int) -> str:
    del rank
    plan = planned(world_size())
    model = build_model(plan.spec, build_data(plan.spec), torch.device("cpu"))
    changes = {"enable_mixed_precision_training": True, "mixed_precision_dtype": torch.float16}
    try:
        DDPStrategy(**{**arguments(plan, model), **changes}).run_setup(NOWHERE, 40)
    except PlanError as err:
        return str(err)
    return "set up"


def test_float16_gradients_are_not_reduced() -> None:
    assert on_ranks(1, set_up_in_float16) == ["set up"]
    for message in on_ranks(2, set_up_in_float16):
        assert "mixed_precision_dtype=torch.float16" in message
        assert "reduce_in_full_precision: true" in message


# -- Clipping ----------------------------------------------------------------------------------


def clipped(rank: int) -> list[tuple[float, Tensor, Tensor]]:
    found: list[tuple[float, Tensor, Tensor]] = []
    for max_grad_norm in (0.01, 1e6, None):
        ranked = Rank(rank, max_grad_norm=max_grad_norm)
        before = ranked.last_gradient(next(ranked.steps()))
        norm = ranked.strategy.clip_grad_norm()
        gradients = [p.grad for _, p in ranked.strategy.named_parameters() if p.grad is not None]
        found.append((norm, before, torch.cat([gradient.flatten() for gradient in gradients])))
    return found


def test_clipping_returns_the_norm_before_it() -> None:
    ours, theirs = on_ranks(2, clipped)
    assert [norm for norm, _, _ in ours] == [norm for norm, _, _ in theirs]
    for number, (norm, before, after) in enumerate(ours):
        assert norm == pytest.approx(float(before.double().norm()), rel=1e-5)
        assert norm > 0.01
        if number == 0:
            assert float(after.norm()) == pytest.approx(0.01, rel=1e-3)
            assert distance(after / 0.01, before / norm) < 1e-3
        else:
            # Below the limit, or without one, nothing is changed.
            assert torch.equal(after, before)


# -- Names and groups --------------------------------------------------------------------------


def names_and_groups(rank: int) -> list[Any]:
    found: list[Any] = []
    for checkpointing in (False, True):
        ranked = Rank(rank, enable_gradient_checkpointing=checkpointing)
        assert ranked.strategy.optimizer is not None
        groups = ranked.strategy.optimizer.param_groups
        found.append(
            (
                {g["name"]: g["parameter_names"] for g in groups},
                [name for name, _ in ranked.strategy.named_parameters()],
                sorted(ranked.strategy.named_state()),
                any("wrapped" in name for name, _ in ranked.model.named_parameters()),
            )
        )
    return found


def test_wrapping_changes_neither_names_nor_groups() -> None:
    plan = planned(1)
    model = build_model(plan.spec, build_data(plan.spec), torch.device("cpu"))
    groups = parameter_groups(
        model.named_parameters(), model.backbone_prefixes, learning_rate=1.0, weight_decay=1.0
    )
    expected = (
        {group["name"]: group["parameter_names"] for group in groups},
        [name for name, _ in model.named_parameters()],
        sorted(model.state_dict()),
    )
    assert len(expected[0]) == 4
    for world in (1, 2):
        for plain, wrapped in on_ranks(world, names_and_groups):
            assert (*plain[:3], *wrapped[:3]) == (*expected, *expected)
            # Otherwise nothing was wrapped, and nothing shown.
            assert (plain[3], wrapped[3]) == (False, True)


# -- The constructor ---------------------------------------------------------------------------


class Minimal(TrainingStrategy):
    """A strategy of a user's, written against the interface."""

    def run_setup(self, run_dir: Path, n_train_examples: int) -> None:
        del run_dir
        self._prepare(n_train_examples)

    def clip_grad_norm(self) -> float:
        return 0.0


def test_the_arguments_may_come_by_position() -> None:
    plan = planned(1)
    strategy = Minimal(*arguments(plan, "model").values())
    assert (strategy.vla, strategy.stage) == ("model", "train")
    assert strategy.repeated_diffusion_steps == plan.spec.train.repeated_diffusion_steps
    assert strategy.grad_accumulation_steps == plan.grad_accumulation_steps == 8


def test_an_unknown_argument_of_the_constructor_is_a_warning_each() -> None:
    with pytest.warns(UserWarning, match="ignores the unknown argument") as caught:
        Minimal(**arguments(planned(1)), warmup_ration=0.5, something_else=1)
    assert [str(warning.message) for warning in caught] == [
        "TrainingStrategy ignores the unknown argument 'warmup_ration'; did you mean warmup_ratio?",
        "TrainingStrategy ignores the unknown argument 'something_else'",
    ]


def test_known_arguments_do_not_warn() -> None:
    extras = {"betas": (0.9, 0.99), "freeze_steps": 3, "action_model_learning_rate": 1e-3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy = Minimal(**arguments(planned(1)), **extras)
    assert (strategy.betas, strategy.freeze_steps) == ((0.9, 0.99), 3)


def test_get_train_strategy_refuses_unknown_arguments() -> None:
    with pytest.raises(UsageError, match="'warmup_ration'; did you mean warmup_ratio"):
        get_train_strategy("ddp", **arguments(planned(1)), warmup_ration=0.5)
    with pytest.raises(UsageError, match="'zzz'; known: vla, device_id"):
        get_train_strategy("ddp", **arguments(planned(1)), zzz=0.5)
    with pytest.raises(UsageError, match="'self'"):
        get_train_strategy("ddp", **arguments(planned(1)), self=1)


def test_get_train_strategy_refuses_unknown_strategies() -> None:
    with pytest.raises(UsageError, match="'horovod' is not available; known: ddp, fsdp-grad, fsdp"):
        get_train_strategy("horovod", **arguments(planned(1)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ddp", DDPStrategy),
        ("fsdp-grad", FSDPGradStrategy),
        ("fsdp-full", FSDPFullStrategy),
        ("fsdp-shard-grad-op", FSDPGradStrategy),
        ("fsdp-full-shard", FSDPFullStrategy),
    ],
)
def test_strategies_by_name_and_by_the_names_of_vitra(
    name: str, kind: type[TrainingStrategy]
) -> None:
    assert type(get_train_strategy(name, **arguments(planned(1)))) is kind


@pytest.mark.parametrize(("whole", "part"), [(7, 2), (2, 4), (9, 9)])
def test_batches_that_do_not_divide_are_refused(whole: int, part: int) -> None:
    sizes = {"global_batch_size": whole, "per_device_batch_size": part}
    if whole % part == 0:
        assert Minimal(**{**arguments(planned(1)), **sizes}).grad_accumulation_steps == 1
        return
    with pytest.raises(PlanError, match=f"global_batch_size={whole} .* = {part} x 1"):
        Minimal(**{**arguments(planned(1)), **sizes})


def test_without_a_context_what_needs_one_says_so() -> None:
    strategy = Minimal(**arguments(planned(1)))
    with pytest.raises(UsageError, match="without a context"):
        strategy.save_checkpoint(NOWHERE, 1, 0)
    with pytest.raises(UsageError, match="without a context"):
        strategy.load_optimizer_and_scheduler("/nowhere/step-00000001")


def test_the_length_in_epochs_counts_optimizer_steps() -> None:
    plan = planned(1)
    model = build_model(plan.spec, build_data(plan.spec), torch.device("cpu"))
    strategy = Minimal(**{**arguments(plan, model), "epochs": 3, "max_steps": None})
    strategy.run_setup(NOWHERE, 41)
    assert strategy.lr_scheduler is not None
    # 3 x 41 samples in steps of 16.
    assert strategy.lr_scheduler.schedule.total_steps == 8


# -- The methods of VITRA's interface that save and load ----------------------------------------


class Alone:
    """One process with all that a strategy needs, put together by hand."""

    def __init__(self, root: Path, **train: Any) -> None:
        self.plan = planned(1, {"train": train}, run_dir=str(root))
        store = CheckpointStore(open_storage(self.plan.checkpoint_uri), "core-1")
        store.own()
        attempt = store.claim_next(None, None).attempt
        run_dir = RunDir(root)
        run_dir.attempt(attempt).path.mkdir(parents=True)
        ranks = lone_rank(attempt)
        agree = Agreement(None)
        self.records = RunRecords(run_dir, ranks, log_interval=1, sample_ids=False)
        self.records.open()
        self.checkpoints = Checkpointer(
            store,
            plan=self.plan,
            ranks=ranks,
            agree=agree,
            group=None,
            records=self.records,
            pulse=Pulse(),
        )
        self.context = TrainContext(
            ranks,
            self.plan,
            torch.device("cpu"),
            agree,
            StopFlag(),
            self.records,
            self.checkpoints,
            TrainState(),
        )
        self.data = build_data(self.plan.spec)
        self.model = build_model(self.plan.spec, self.data, torch.device("cpu"))
        self.set_up()
        self.strategy = self.build(context=self.context, **arguments(self.plan, self.model))
        self.strategy.run_setup(root, len(self.data))

    def set_up(self) -> None:
        """What is done to the model before the strategy has it."""

    def build(self, **known: Any) -> TrainingStrategy:
        return get_train_strategy("ddp", **known)

    def train(self, save_interval: int = 4, *, save_full_model: bool = True) -> LoopEnd:
        loader = RankLoader(self.plan, self.data, self.model.draws, rank=0, start_step=0)
        return self.strategy.run_training(
            loader,
            VLAMetrics(self.records),
            save_interval=save_interval,
            save_full_model=save_full_model,
        )


def moments(strategy: TrainingStrategy) -> dict[str, Tensor]:
    assert strategy.optimizer is not None
    return {
        f"{name}.{key}": value
        for name, parameter in strategy.named_parameters()
        for key, value in strategy.optimizer.state[parameter].items()
    }


def test_a_strategy_saves_and_loads_by_itself(tmp_path: Path) -> None:
    first = Alone(tmp_path)
    assert first.train() is LoopEnd.FINISHED
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-00000004", "step-00000006"]

    second = Alone(tmp_path)
    before = {name: tensor.clone() for name, tensor in second.strategy.named_state().items()}
    directory = tmp_path / "checkpoints" / "step-00000006"
    second.strategy.load_optimizer_and_scheduler(str(directory))
    for name, moment in moments(first.strategy).items():
        assert torch.equal(moments(second.strategy)[name], moment), name
    assert second.strategy.lr_scheduler is not None
    assert second.strategy.lr_scheduler.last_step == 6
    # What its name says and no more: the weights are as they were.
    for name, tensor in second.strategy.named_state().items():
        assert torch.equal(tensor, before[name])

    with pytest.raises(UsageError, match="global_step=7: only the present step, 0"):
        second.strategy.save_checkpoint(tmp_path, 7, 0)
    second.context.state.step = 7
    second.strategy.save_checkpoint(tmp_path, 7, 0)
    assert (tmp_path / "checkpoints" / "step-00000007" / "manifest.json").exists()


def test_only_what_is_trained_is_saved_and_the_rest_stays(tmp_path: Path) -> None:
    frozen = "head.null_condition"

    class Partly(Alone):
        def set_up(self) -> None:
            self.model.get_parameter(frozen).requires_grad_(False)

    first = Partly(tmp_path)
    assert first.strategy.untrained() == {frozen}
    before = first.model.get_parameter(frozen).detach().clone()
    assert first.train(save_full_model=False) is LoopEnd.FINISHED
    (index,) = (tmp_path / "checkpoints" / "step-00000006").glob("index-*.json")
    document = json.loads(index.read_bytes())
    names = {name.removeprefix("model.") for name in document["tensors"] if name[0] == "m"}
    assert names == first.strategy.named_state().keys() - {frozen}
    assert document["state"]["only_trainable"]

    second = Partly(tmp_path)
    second.model.get_parameter(frozen).data.fill_(7.0)
    second.checkpoints.restore(second.strategy, second.context.state)
    assert second.context.state.step == 6
    trained = dict(first.strategy.named_state())
    for name, tensor in second.strategy.named_state().items():
        if name != frozen:
            assert torch.equal(tensor, trained[name]), name
    assert torch.equal(second.model.get_parameter(frozen), torch.full_like(before, 7.0))
    # One that trains it has no business with such a checkpoint.
    third = Alone(tmp_path)
    with pytest.raises(IncompatibleCheckpoint, match="optimizer group"):
        third.checkpoints.restore(third.strategy, third.context.state)


def test_what_cannot_be_loaded_is_an_error_that_names_it(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    missing = tmp_path / "checkpoints" / "step-00000009"
    with pytest.raises(CorruptCheckpoint, match=r"step-00000009: no readable manifest\.json"):
        alone.strategy.load_optimizer_and_scheduler(str(missing))
    assert alone.train() is LoopEnd.FINISHED
    (shard,) = (tmp_path / "checkpoints" / "step-00000006").glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=shard.name):
        alone.strategy.load_optimizer_and_scheduler(str(shard.parent))


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """The loss before the step and its gradients are; only what the step makes of them is not."""
    alone = Alone(tmp_path, learning_rate=1e39, lr_scheduler_type="constant")
    with pytest.raises(NonFiniteLoss, match=r"step 1 left \S+ not finite; not saved"):
        alone.train(save_interval=1)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


# -- Checkpoints that mean ill -------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a good one; copied by each test."""
    root = tmp_path_factory.mktemp("good")
    assert Alone(root, max_steps=1).train() is LoopEnd.FINISHED
    return root / "checkpoints" / "step-00000001"


@pytest.fixture
def tampered(checkpoint: Path, tmp_path: Path) -> tuple[Alone, Path]:
    """One process, and in its own checkpoint place a copy to be tampered with."""
    alone = Alone(tmp_path, max_steps=1)
    step = tmp_path / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, step)
    return alone, step


def replace(step: Path, name: str, content: bytes) -> None:
    """Put a file into a checkpoint in a way that its manifest agrees with."""
    manifest = CheckpointManifest.from_bytes((step / MANIFEST_NAME).read_bytes())
    (step / name).write_bytes(content)
    files = [entry for entry in manifest.files if entry.name != name]
    digest = Digest([content])
    files.append(FileEntry(name=name, size_bytes=digest.size_bytes, digest=digest.text))
    sealed = manifest.model_copy(update={"files": tuple(files)}).to_bytes()
    (step / MANIFEST_NAME).write_bytes(sealed)


class Runs:
    """Makes a directory when it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self._sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._sign),)


@pytest.mark.parametrize(
    ("kind", "sealed"),
    [
        *(("shard-a1-r0.bin", True), ("shard-a1-r0.bin", False)),
        *(("index-a1.json", True), ("index-a1.json", False)),
        (MANIFEST_NAME, False),
    ],
)
def test_code_in_a_checkpoint_is_refused_and_never_run(
    tampered: tuple[Alone, Path], tmp_path: Path, kind: str, sealed: bool
) -> None:
    alone, step = tampered
    sign = tmp_path / "it-was-run"
    poison = pickle.dumps(Runs(sign))
    if sealed:
        replace(step, kind, poison)
    else:
        (step / kind).write_bytes(poison)
    # What torch itself, or an older trainer, would read is no part of a checkpoint here.
    (step / ".metadata").write_bytes(poison)
    with pytest.raises(CorruptCheckpoint, match=r"step-00000001|step 1|the index"):
        alone.strategy.load_optimizer_and_scheduler(str(step))
    with pytest.raises(CorruptCheckpoint, match=re.escape(f"checkpoint.init_from={step}")):
        load_initial_weights(str(step), alone.strategy, lone_rank(), Agreement(None))
    weights = tmp_path / "weights.pt"
    weights.write_bytes(poison)
    with pytest.raises(CorruptCheckpoint, match=r"checkpoint\.init_from=.*weights\.pt"):
        load_initial_weights(str(weights), alone.strategy, lone_rank(), Agreement(None))
    assert not sign.exists()
    pickle.loads(poison)
    assert sign.exists(), "it does run where it is unpickled"


def without(index: dict[str, Any], part: str) -> dict[str, Any]:
    if part in index["state"]:
        return {**index, "state": {k: v for k, v in index["state"].items() if k != part}}
    kept = {k: v for k, v in index["tensors"].items() if not k.startswith(part)}
    assert len(kept) < len(index["tensors"])
    return {**index, "tensors": kept}


@pytest.mark.parametrize("part", ["optimizer.", "schedule", "optimizer_groups"])
def test_a_part_of_the_state_is_not_gone_on_from(tampered: tuple[Alone, Path], part: str) -> None:
    alone, step = tampered
    index = json.loads((step / "index-a1.json").read_bytes())
    replace(step, "index-a1.json", json.dumps(without(index, part)).encode())
    with pytest.raises(CorruptCheckpoint, match="step 1 lacks the state of optimizer or schedule"):
        alone.strategy.load_optimizer_and_scheduler(str(step))


def test_damaged_weights_are_not_started_from(tampered: tuple[Alone, Path]) -> None:
    alone, step = tampered
    (shard,) = step.glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=rf"{shard.name} differs from its digest"):
        load_initial_weights(str(step), alone.strategy, lone_rank(), Agreement(None))
