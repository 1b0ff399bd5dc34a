"""Parameter groups: by name and shape alone, the same however the model is wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainer.optim import build_optimizer, check_same_groups, decays, parameter_groups
from trainer.spec.errors import IncompatibleCheckpoint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 2), nn.LayerNorm(4), nn.Linear(4, 4))
        self.backbone_adapter = nn.Linear(2, 2)
        self.head = nn.Linear(4, 2)
        self.token = nn.Parameter(torch.zeros(5))
        self.table = nn.Parameter(torch.zeros(3, 5))
        self.bilinear = nn.Bilinear(2, 2, 2)


def groups(model: nn.Module | None = None, **changes: Any) -> dict[str, dict[str, Any]]:
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, **changes}
    model = model or Model()
    found = parameter_groups(model.named_parameters(), ("backbone.",), **settings)
    return {group["name"]: group for group in found}


def test_every_parameter_is_in_the_one_group_that_is_its_own() -> None:
    model = Model()
    found = groups(model)
    assert {name: group["parameter_names"] for name, group in found.items()} == {
        "backbone.decay": ["backbone.0.weight", "backbone.2.weight"],
        "backbone.no_decay": [
            "backbone.0.bias",
            "backbone.1.weight",
            "backbone.1.bias",
            "backbone.2.bias",
        ],
        # The prefix ends in a dot: backbone_adapter is no part of the backbone.
        "action_model.decay": [
            "table",
            "backbone_adapter.weight",
            "head.weight",
            "bilinear.weight",
        ],
        "action_model.no_decay": ["token", "backbone_adapter.bias", "head.bias", "bilinear.bias"],
    }
    names = dict(model.named_parameters())
    for group in found.values():
        for name, parameter in zip(group["parameter_names"], group["params"], strict=True):
            assert parameter is names[name]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("x.weight", (2, 2), True),
        ("x.weight", (2, 3, 4, 4), True),
        ("x.weight", (1, 1), True),
        ("x.weight", (2,), False),
        ("x.scale", (), False),
        ("x.bias", (2, 2), False),
        ("bias_table", (2, 2), True),
        ("backbone.cognition_token", (1, 8), False),
    ],
)
def test_what_decays(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert decays(name, torch.Size(shape)) is expected


def test_rates_and_decay_of_the_groups() -> None:
    found = groups()
    assert {name: (g["peak_lr"], g["weight_decay"], g["role"]) for name, g in found.items()} == {
        "backbone.decay": (1e-3, 0.1, "backbone"),
        "backbone.no_decay": (1e-3, 0.0, "backbone"),
        "action_model.decay": (1e-3, 0.1, "action_model"),
        "action_model.no_decay": (1e-3, 0.0, "action_model"),
    }
    found = groups(action_model_learning_rate=0.0, action_model_weight_decay=0.0)
    assert [g["peak_lr"] for g in found.values()] == [1e-3, 1e-3, 0.0, 0.0]
    assert [g["weight_decay"] for g in found.values()] == [0.1, 0.0, 0.0, 0.0]
    found = groups(action_model_learning_rate=5.0, action_model_weight_decay=0.5)
    assert found["action_model.decay"]["peak_lr"] == 5.0
    assert found["action_model.decay"]["weight_decay"] == 0.5


def test_empty_groups_and_parameters_that_are_not_trained_are_left_out() -> None:
    model = Model()
    model.backbone.requires_grad_(False)
    model.head.weight.requires_grad_(False)
    found = groups(model)
    assert list(found) == ["action_model.decay", "action_model.no_decay"]
    assert "head.weight" not in found["action_model.decay"]["parameter_names"]


def test_the_optimizer_is_fused_adamw_with_the_settings_of_each_group() -> None:
    optimizer = build_optimizer(list(groups().values()), (0.8, 0.9))
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert group["fused"]
        assert group["betas"] == (0.8, 0.9)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0, 0.1, 0.0]


def test_weight_decay_really_applies_to_matrices_only() -> None:
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(list(groups(model, learning_rate=0.5).values()), (0.9, 0.95))
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = 1.0 - 0.5 * 0.1 if decays(name, parameter.shape) else 1.0
        torch.testing.assert_close(parameter, torch.full_like(parameter, expected))


# -- A resume with other groups ----------------------------------------------------------------


def saved_groups() -> dict[str, list[str]]:
    return {name: list(group["parameter_names"]) for name, group in groups().items()}


def test_the_same_groups_are_accepted() -> None:
    check_same_groups(build_optimizer(list(groups().values()), (0.9, 0.95)), saved_groups())


def test_other_groups_are_refused_by_name() -> None:
    optimizer = build_optimizer(list(groups().values()), (0.9, 0.95))
    fewer, more, swapped, moved = (saved_groups() for _ in range(4))
    del fewer["backbone.decay"]
    more["lora.decay"] = ["lora.a"]
    swapped["backbone.decay"].reverse()
    moved["action_model.no_decay"].remove("token")
    moved["action_model.decay"].append("token")
    for saved, name in [
        (fewer, "backbone.decay"),
        (more, "lora.decay"),
        (swapped, "backbone.decay"),
        (moved, "action_model.decay"),
    ]:
        with pytest.raises(IncompatibleCheckpoint, match=f"optimizer group '{name}'"):
            check_same_groups(optimizer, saved)
