"""Own components: what is missing or wrong in one is said exactly, before anything is submitted."""

# ruff: noqa: ARG001, ARG002, ARG005 - members and factories that only have a signature

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer.probe import probe
from trainer.spec.run import RunSpec

sys.path.append(str(Path(__file__).parents[1] / "contract" / "components"))
from line import Line, Points


class Data(Points):
    pass


class Model(Line):
    pass


class NotAModule:
    backbone_prefixes = shard_classes = checkpoint_classes = ()

    def __init__(self, options: Any, context: Any) -> None: ...
    def forward(self, batch: Any) -> None: ...
    def loss_count(self, batch: Any) -> None: ...
    def init_parameter(self, name: Any, tensor: Any, generator: Any) -> None: ...
    def init_buffers(self) -> None: ...


class Empty:
    def __init__(self, options: Any, seed: int) -> None: ...


class Bare(nn.Module):
    def __init__(self, options: Any, context: Any) -> None:
        super().__init__()


def no_arguments() -> None: ...


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def look(model: str = "Model", data: str = "Data", **more: Any) -> dict[str, Any]:
    """The probe's answer for classes of this module."""
    spec = RunSpec.model_validate(
        {
            "name": "a",
            "model": {"kind": f"{__name__}:{model}", "options": {"width": 4}},
            "data": {"kind": f"{__name__}:{data}", "options": {"samples": 8}},
            "train": {"global_batch_size": 4, "max_steps": 2},
            **more,
        }
    )
    out = io.StringIO()
    probe(spec.model_dump_json().encode(), out)
    return json.loads(out.getvalue())


class Scaled(Line):
    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self.scale = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize("strategy", ["fsdp-grad", "fsdp-full"])
def test_a_model_that_cannot_be_sharded(strategy: str) -> None:
    train = {"global_batch_size": 4, "max_steps": 2, "strategy": strategy}
    message = look("Scaled", train=train)["message"]
    assert message == "the parameter 'scale' is a scalar, which cannot be sharded"
    assert "error" not in look("Scaled")
    assert "error" not in look(train=train)


def test_sound_components() -> None:
    answer = look()
    assert "error" not in answer, answer
    assert answer["n_samples"] == 8
    assert answer["notes"] == []


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("Model", "Empty", "gave an Empty without"),
        ("Bare", "Data", "gave a Bare without"),
        ("NotAModule", "Data", "gave a NotAModule, which is no torch.nn.Module"),
        ("no_arguments", "Data", "no_arguments() must take (options, context)"),
        ("Model", "no_arguments", "no_arguments() must take (options, seed)"),
    ],
)
def test_what_a_factory_gives(model: str, data: str, message: str) -> None:
    answer = look(model, data)
    assert answer["error"] == "UsageError"
    assert message in answer["message"]


def test_all_that_is_missing_is_named_at_once() -> None:
    message = look(data="Empty")["message"]
    for name in ("meta", "sample", "collate", "__len__"):
        assert name in message
    message = look("Bare")["message"]
    names = ("backbone_prefixes", "shard_classes", "checkpoint_classes", "forward", "loss_count")
    for name in (*names, "init_parameter", "init_buffers"):
        assert name in message


def _zeros(self: Any, *_: Any, **__: Any) -> None: ...


DATA_FAULTS: dict[str, tuple[str, Any, str]] = {
    "arity": ("sample", lambda self, index: {}, "must take (index, rng)"),
    "collate's arity": ("collate", lambda self: {}, "must take (samples)"),
    "sample": ("sample", lambda self, i, rng: [1], "sample(index, rng) gave a list, not a dict"),
    "field": ("sample", lambda self, i, rng: {"x": [1]}, "sample(index, rng)['x'] is a list"),
    "batch": ("collate", lambda self, s: [1], "collate(samples) gave a list, not a dict"),
    "arrays": ("collate", lambda self, s: {"x": np.zeros(2)}, "is a ndarray, not a tensor"),
    "shape": (
        "collate",
        lambda self, s: {"x": torch.zeros(3, 2)},
        "['x'] has the shape (3, 2) for 2 samples",
    ),
    "scalar": ("collate", lambda self, s: {"x": torch.zeros(())}, "has the shape () for 2"),
    "raises": ("sample", lambda self, i, rng: 1 / 0, "raised ZeroDivisionError"),
}


@pytest.mark.parametrize("fault", DATA_FAULTS)
def test_faults_of_data_sets(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    member, wrong, message = DATA_FAULTS[fault]
    monkeypatch.setattr(Data, member, wrong)
    answer = look()
    assert answer["message"].startswith(f"data.kind: '{__name__}:Data'")
    assert message in answer["message"]
    if fault == "raises":
        assert "test_checks.py, line" in answer["hint"]


def _draws_elsewhere(self: Any, name: str, tensor: Any, generator: Any) -> None:
    tensor.normal_()


def _fills_half(self: Any, name: str, tensor: Any, generator: Any) -> None:
    tensor.view(-1)[: tensor.numel() // 2] = 0.0


def _deep(self: Any, batch: Any) -> Any:
    return nn.functional.linear(batch["x"], torch.zeros(2, 2)).sum()


MODEL_FAULTS: dict[str, tuple[str, Any, str]] = {
    "arity": ("init_parameter", lambda self, tensor: None, "must take (name, tensor, generator)"),
    "forward's arity": ("forward", lambda self, x, y: None, "must take (batch)"),
    "no forward": ("forward", nn.Module.forward, "without forward"),
    "no method": ("loss_count", 3, "loss_count is an int, not a method"),
    "string": ("backbone_prefixes", "body.", "backbone_prefixes is 'body.', not a tuple"),
    "unknown prefix": (
        "backbone_prefixes",
        ("trunk.",),
        "no parameter's name begins with 'trunk.'",
    ),
    "one class": ("shard_classes", nn.Linear, "not a tuple of nn.Module classes"),
    "no classes": ("checkpoint_classes", ("Linear",), "checkpoint_classes is ('Linear',)"),
    "no scalar": ("forward", lambda self, b: self.head.weight, "a tensor of shape (1, 4)"),
    "no tensor": ("forward", lambda self, b: 1.0, "forward(batch) gave a float, not a scalar"),
    "half": ("forward", lambda self, b: self.head.weight.sum().bfloat16(), "not float32"),
    "detached": ("forward", lambda self, b: torch.zeros(()), "depends on no parameter"),
    "nan": ("forward", lambda self, b: self.head.weight.sum() * float("nan"), "gave nan"),
    "raises": ("forward", _deep, f"on samples of '{__name__}:Data' raised RuntimeError"),
    "tensor count": ("loss_count", lambda self, b: torch.tensor(2), "a tensor of shape () and"),
    "float count": (
        "loss_count",
        lambda self, b: 2.0,
        "loss_count(batch) gave a float, not an int",
    ),
    "negative count": ("loss_count", lambda self, b: -1, "loss_count(batch) gave -1"),
    "unfilled": ("init_parameter", _fills_half, "leaves 'body.weight' unfilled"),
    "random": ("init_parameter", _draws_elsewhere, "fills 'body.weight' with other values"),
    "half evaluation": ("evaluate", _zeros, "without summarize_evaluation"),
    "draws": ("draws", lambda sample: sample, "must take (sample, rng)"),
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_faults_of_models(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    member, wrong, message = MODEL_FAULTS[fault]
    # As an attribute of the object, a function that takes no self.
    monkeypatch.setattr(
        Model, member, staticmethod(wrong) if member == "draws" else wrong, raising=False
    )
    answer = look()
    assert answer["message"].startswith(f"model.kind: '{__name__}:Model'"), answer
    assert message in answer["message"]
    if fault == "raises":
        # torch raised it; what the user can mend is their own line.
        assert "test_checks.py, line" in answer["hint"]


def test_buffers_that_are_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Line.__init__

    def with_buffers(self: Any, options: Any, context: Any) -> None:
        made(self, options, context)
        self.register_buffer("table", torch.zeros(3, dtype=torch.int64), persistent=False)

    monkeypatch.setattr(Model, "__init__", with_buffers)
    assert "init_buffers() leaves 'table' unfilled" in look()["message"]


def test_what_cannot_be_tried_is_said_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "forward", _deep)
    (note,) = look(resources={"gpus_per_node": 1})["notes"]
    assert "cannot be tried without a GPU" in note
    # What came back on the CPU is judged, whatever the run is for.
    monkeypatch.setattr(Model, "forward", lambda self, b: 1.0)
    assert "not a scalar" in look(resources={"gpus_per_node": 1})["message"]
    monkeypatch.setattr("trainer.probe._TRIED_PARAMETERS", 1)
    (note,) = look()["notes"]
    assert "too large to be tried out" in note
