"""What a strategy and the loop are given: explicit, built once by the worker, no globals."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trainer.agree import Agreement
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.records import RunRecords
from trainer.spec.plan import Plan
from trainer.spec.ranks import RankInfo
from trainer.state import TrainState
from trainer.stop import StopFlag
from trainer.watchdog import Pulse


@dataclass(frozen=True)
class TrainContext:
    """One rank's view of its run. `clock` gives seconds and never goes back."""

    ranks: RankInfo
    plan: Plan
    device: torch.device
    agree: Agreement
    stop: StopFlag
    records: RunRecords
    checkpoints: Checkpointer
    state: TrainState = field(default_factory=TrainState)
    clock: Callable[[], float] = time.monotonic
    pulse: Pulse = field(default_factory=Pulse)
