"""A strategy written for VITRA's abstract class, and nothing else, trains here."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_strategy import Alone, arguments

from trainer.data.loader import RankLoader, StepInput
from trainer.loop import LoopEnd
from trainer.metrics import VLAMetrics
from trainer.overwatch import initialize_overwatch
from trainer.spec.rundir import read_lines
from trainer.strategies.base import TrainingStrategy

overwatch = initialize_overwatch(__name__)

#: The positional parameters of VITRA's base class and their defaults, `...` where there is none.
CONSTRUCTOR = {
    "vla": ...,
    "device_id": ...,
    "stage": ...,
    "epochs": ...,
    "max_steps": ...,
    "global_batch_size": ...,
    "per_device_batch_size": ...,
    "learning_rate": ...,
    "weight_decay": ...,
    "max_grad_norm": ...,
    "lr_scheduler_type": ...,
    "warmup_ratio": ...,
    "enable_gradient_checkpointing": True,
    "enable_mixed_precision_training": True,
    "reduce_in_full_precision": False,
    "mixed_precision_dtype": torch.bfloat16,
    "repeated_diffusion_steps": 4,
}
METHODS = {
    "save_checkpoint": {
        "run_dir": ...,
        "global_step": ...,
        "epoch": ...,
        "train_loss": None,
        "only_trainable": True,
    },
    "load_optimizer_and_scheduler": {"checkpoint_path": ...},
    "run_setup": {"run_dir": ..., "n_train_examples": ...},
    "clip_grad_norm": {},
    "run_training": {
        "dataloader": ...,
        "metrics": ...,
        "save_interval": 2500,
        "start_global_step": 0,
        "save_full_model": True,
    },
}


def parameters_of(function: Any) -> dict[str, Any]:
    return {
        name: ... if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name != "self"
    }


def test_names_and_defaults_are_vitras() -> None:
    assert parameters_of(TrainingStrategy.__init__) == CONSTRUCTOR
    for name, parameters in METHODS.items():
        assert parameters_of(getattr(TrainingStrategy, name)) == parameters, name


class WholeStrategy(TrainingStrategy):
    """All five methods its own; of the base class only what VITRA's constructor sets is used."""

    def __init__(self, *args: Any, momentum: float = 0.9, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.momentum = momentum

    def run_setup(self, run_dir: Path, n_train_examples: int) -> None:
        run_dir.mkdir(exist_ok=True)
        assert n_train_examples >= self.global_batch_size
        assert self.optimizer is None
        assert self.lr_scheduler is None
        self.optimizer = torch.optim.SGD(
            [p for p in self.vla.parameters() if p.requires_grad],
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def clip_grad_norm(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.vla.parameters(), max_norm=self.max_grad_norm or 1.0)

    def save_checkpoint(
        self,
        run_dir: Path,
        global_step: int,
        epoch: int,
        train_loss: float | None = None,
        only_trainable: bool = True,
    ) -> None:
        if not overwatch.is_rank_zero():
            return
        kept = {n for n, p in self.vla.named_parameters() if p.requires_grad or not only_trainable}
        weights = {n: tensor for n, tensor in self.vla.state_dict().items() if n in kept}
        assert self.optimizer is not None
        state = {"weights": weights, "optimizer": self.optimizer.state_dict()}
        name = f"step={global_step}-epoch={epoch}-loss={train_loss:.4f}"
        torch.save(state, run_dir / f"{name}.pt")

    def load_optimizer_and_scheduler(self, checkpoint_path: str) -> None:
        assert self.optimizer is not None
        self.optimizer.load_state_dict(torch.load(checkpoint_path)["optimizer"])

    def run_training(
        self,
        dataloader: Iterable[StepInput],
        metrics: VLAMetrics,
        save_interval: int = 2500,
        start_global_step: int = 0,
        save_full_model: bool = True,
    ) -> list[float]:
        del metrics
        assert self.optimizer is not None
        losses: list[float] = []
        for step, inputs in enumerate(dataloader, start_global_step + 1):
            assert len(inputs.micro_batches) == self.grad_accumulation_steps
            self.optimizer.zero_grad()
            total = 0.0
            count = sum(self.vla.loss_count(batch) for batch in inputs.micro_batches)
            for batch in inputs.micro_batches:
                with torch.autocast(
                    "cpu",
                    dtype=self.mixed_precision_dtype,
                    enabled=self.enable_mixed_precision_training,
                ):
                    loss = self.vla(batch) / count
                loss.backward()
                total += float(loss.detach())
            self.clip_grad_norm()
            self.optimizer.step()
            losses.append(total)
            if step % save_interval == 0:
                self.save_checkpoint(
                    self._run_dir, step, inputs.epoch, total, only_trainable=not save_full_model
                )
        return losses

    _run_dir: Path


def test_a_strategy_of_ones_own_trains_with_a_loop_of_its_own(tmp_path: Path) -> None:
    class Own(Alone):
        def set_up(self) -> None:
            self.model.head.null_condition.requires_grad_(False)

        def build(self, **known: Any) -> TrainingStrategy:
            known.pop("context")
            return WholeStrategy(**{**known, "max_steps": 6, "learning_rate": 0.05}, momentum=0.5)

    own = Own(tmp_path)
    strategy = own.strategy
    assert isinstance(strategy, WholeStrategy)
    strategy._run_dir = tmp_path / "mine"
    strategy._run_dir.mkdir()
    loader = RankLoader(own.plan, own.data, own.model.draws, rank=0, start_step=0)
    losses = strategy.run_training(
        loader, VLAMetrics(own.records), save_interval=3, save_full_model=False
    )
    assert losses[-1] < losses[0]
    saved = sorted((tmp_path / "mine").iterdir())
    assert [path.name.partition("-")[0] for path in saved] == ["step=3", "step=6"]
    weights = torch.load(saved[0])["weights"]
    assert "head.null_condition" not in weights
    assert "head.output.weight" in weights

    again = Own(tmp_path).strategy
    again.load_optimizer_and_scheduler(str(saved[1]))
    assert again.optimizer is not None
    assert strategy.optimizer is not None
    ours, theirs = again.optimizer.state_dict(), strategy.optimizer.state_dict()
    assert json.dumps(ours["param_groups"]) == json.dumps(theirs["param_groups"])
    for number, state in theirs["state"].items():
        assert torch.equal(ours["state"][number]["momentum_buffer"], state["momentum_buffer"])


class HalfStrategy(TrainingStrategy):
    """Own clipping as VITRA's, which returns nothing; the rest is the base class's."""

    def run_setup(self, run_dir: Path, n_train_examples: int) -> None:
        del run_dir
        self._prepare(n_train_examples)

    def clip_grad_norm(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.vla.parameters(), max_norm=self.max_grad_norm or 1.0)


def test_a_strategy_that_clips_as_vitras_trains_with_the_loop_of_this_one(tmp_path: Path) -> None:
    class Half(Alone):
        def build(self, **known: Any) -> TrainingStrategy:
            return HalfStrategy(**{**known, "max_grad_norm": 0.25})

    half = Half(tmp_path)
    assert half.train() is LoopEnd.FINISHED
    records = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["grad_norm"] for record in records] == pytest.approx([0.25] * 6, rel=1e-3)
    for record in records:
        assert 0 < record["data_wait_s"] < record["step_time_s"]
        assert record["memory_bytes"] > 2**20
    assert arguments(half.plan).keys() == CONSTRUCTOR.keys()
