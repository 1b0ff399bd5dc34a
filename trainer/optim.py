"""Optimizer, parameter groups and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from trainer.spec.errors import IncompatibleCheckpoint
from trainer.spec.schedule import ACTION_MODEL, BACKBONE, Schedule

#: What the learned token that gathers the condition is called, here as in VITRA.
COGNITION_TOKEN = "cognition_token"


class LearningRates:
    """Sets each parameter group's rate before a step. Counts optimizer steps and nothing else.

    A group carries its `role` and its `peak_lr`; the rate is derived anew from the step, so a
    resume with another total or another peak follows the new schedule at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
        self._optimizer = optimizer
        self.schedule = schedule
        self.last_step = 0

    def begin_step(self) -> dict[str, float]:
        """Set the rates for the next optimizer step and count it; returns them by role."""
        self.last_step += 1
        rates: dict[str, float] = {}
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak_lr"] * self.schedule.factor(self.last_step, group["role"])
            rates[group["role"]] = group["lr"]
        return rates

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_step = int(state["last_step"])


def parameter_role(name: str, backbone_prefixes: Sequence[str]) -> str:
    """BACKBONE or ACTION_MODEL, by the parameter's name alone."""
    return BACKBONE if name.startswith(tuple(backbone_prefixes)) else ACTION_MODEL


def decays(name: str, shape: torch.Size) -> bool:
    """Whether weight decay applies: matrices and kernels do, biases, norms and vectors do not.

    Neither does a cognition token, as in VITRA: it is one learned input, whatever its shape.
    Judged by the name and the original shape: sharding flattens or splits tensors, and a rule that
    looks at the local tensor silently changes with the world size.
    """
    return len(shape) >= 2 and not name.endswith(".bias") and COGNITION_TOKEN not in name


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    backbone_prefixes: Sequence[str],
    *,
    learning_rate: float,
    weight_decay: float,
    action_model_learning_rate: float | None = None,
    action_model_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for the optimizer: role x decay, in a fixed order, empty ones left out.

    Every group carries `name`, `role`, `peak_lr`, `weight_decay` and the `parameter_names` in the
    order of its `params`. Call it before parameters are wrapped or sharded; where sharding puts
    others in their place, bind them with `bind_parameters`.
    """
    settings = {
        BACKBONE: (learning_rate, weight_decay),
        ACTION_MODEL: (
            learning_rate if action_model_learning_rate is None else action_model_learning_rate,
            weight_decay if action_model_weight_decay is None else action_model_weight_decay,
        ),
    }
    groups = {
        (role, decayed): {
            "name": f"{role}.{'decay' if decayed else 'no_decay'}",
            "role": role,
            "params": [],
            "parameter_names": [],
            "peak_lr": settings[role][0],
            "lr": settings[role][0],
            "weight_decay": settings[role][1] if decayed else 0.0,
        }
        for role in (BACKBONE, ACTION_MODEL)
        for decayed in (True, False)
    }
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            group = groups[parameter_role(name, backbone_prefixes), decays(name, parameter.shape)]
            group["params"].append(parameter)
            group["parameter_names"].append(name)
    return [group for group in groups.values() if group["params"]]


def bind_parameters(
    groups: list[dict[str, Any]], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Have the groups hold these parameters, by the names that `parameter_groups` sorted."""
    parameters = dict(named_parameters)
    for group in groups:
        group["params"] = [parameters[name] for name in group["parameter_names"]]


def build_optimizer(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), fused.

    Fused is several times faster than the other implementations and rounds differently from them,
    so it is never chosen by circumstance.
    """
    return torch.optim.AdamW(groups, betas=betas, fused=True)


def check_same_groups(optimizer: torch.optim.Optimizer, saved: dict[str, list[str]]) -> None:
    """Refuse a checkpoint whose parameter groups hold other parameters.

    Raises:
        IncompatibleCheckpoint: naming the first group that differs.
    """
    present = {group["name"]: list(group["parameter_names"]) for group in optimizer.param_groups}
    for name in sorted(present.keys() | saved.keys()):
        if present.get(name) != saved.get(name):
            raise IncompatibleCheckpoint(
                f"optimizer group {name!r}: the checkpoint has {len(saved.get(name, []))} "
                f"parameters in it, this model {len(present.get(name, []))}, and they are not the "
                "same",
                "resume with the model that the run was started with",
            )
