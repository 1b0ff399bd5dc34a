"""Learning-rate schedules: pure functions of the optimizer step, for launcher and trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.spec.plan import warmup_steps

BACKBONE = "backbone"
ACTION_MODEL = "action_model"

CONSTANT = "constant"
WARMUP_CONSTANT = "linear-warmup+constant"
WARMUP_COSINE = "linear-warmup+cosine-decay"
BACKBONE_FREEZE = "backbone-freeze-warmup"


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a pure function of the optimizer step.

    With k the 1-based step, T the total and w = int(warmup_ratio x T): peak x k/w up to w; then,
    for the cosine, floor + (peak - floor) x (1 + cos(pi (k - w)/(T - w)))/2 with
    floor = min_lr_ratio x peak (Loshchilov and Hutter, "SGDR", 2017, one cycle); else the peak.
    backbone-freeze-warmup: the backbone's rate is exactly 0 for k <= freeze_steps and the peak
    after; the action model's is constant.
    """

    kind: str
    total_steps: int
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.0
    freeze_steps: int = 0

    def factor(self, step: int, role: str) -> float:
        """Learning rate over the peak at optimizer step `step` (1-based) for one role."""
        if self.kind == BACKBONE_FREEZE:
            return 0.0 if self.freezes(step) and role == BACKBONE else 1.0
        if self.kind == CONSTANT:
            return 1.0
        warmup = warmup_steps(self.warmup_ratio, self.total_steps)
        if step <= warmup:
            return step / warmup
        if self.kind == WARMUP_CONSTANT:
            return 1.0
        assert self.kind == WARMUP_COSINE, self.kind
        # Beyond the total, which a resume with a smaller one may reach, the rate stays on its
        # floor.
        progress = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        return (
            self.min_lr_ratio
            + (1.0 - self.min_lr_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0
        )

    def freezes(self, step: int) -> bool:
        """Whether the backbone is frozen at optimizer step `step`."""
        return self.kind == BACKBONE_FREEZE and step <= self.freeze_steps
