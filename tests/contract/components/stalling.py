"""A data set and a model of a user's own that stall, on one rank, where their options say.

`stall` lists where rank 1 stalls for ever, attempt by attempt, counted by the length of the file
`counter`: in `open` (the data set), `sample`, `forward`, `backward`, `save` or `leave`. In each
attempt the first `after` times are good.

With `slow_s` these places take so many seconds on rank 1.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from trainer.components import Batch, ModelContext, Sample
from trainer.data.keyed import SampleRandom
from trainer.data.samples import DataMeta
from trainer.data.synthetic import SyntheticData
from trainer.models.vla import Vla
from trainer.spec.options import SyntheticOptions, VlaOptions

_COUNTER = Path("counter")


class Stall:
    def __init__(self, options: Mapping[str, Any]) -> None:
        count = _COUNTER.stat().st_size
        self._where = dict(enumerate(options.get("stall", []))).get(count)
        self._after = options.get("after", 0)
        self._slow_s = options.get("slow_s", {})
        self._passed = 0

    def begins(self, where: str) -> bool:
        """Whether to stall here, now."""
        if self._where != where or os.environ.get("RANK") != "1":
            return False
        self._passed += 1
        return self._passed > self._after

    def __call__(self, where: str) -> None:
        if os.environ.get("RANK") == "1":
            time.sleep(self._slow_s.get(where, 0.0))
        if self.begins(where):
            a_call_that_never_returns()


def a_call_that_never_returns() -> None:
    with _COUNTER.open("a") as file:
        file.write("x")
    threading.Event().wait()


_KEYS = ("stall", "after", "slow_s")


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], Stall]:
    rest = {name: value for name, value in options.items() if name not in _KEYS}
    return rest, Stall(options)


def build_data(options: Mapping[str, Any], seed: int) -> StallingData:
    rest, stall = _split(options)
    stall("open")
    if stall.begins("leave"):
        # Flushed when everything is done, just before the process ends.
        sys.stdout = _NeverFlushed()
    return StallingData(SyntheticOptions.model_validate(rest), seed, stall)


def build_model(options: Mapping[str, Any], context: ModelContext) -> StallingModel:
    rest, stall = _split(options)
    return StallingModel(VlaOptions.model_validate(rest), context, stall)


class StallingData(SyntheticData):
    def __init__(self, options: SyntheticOptions, seed: int, stall: Stall) -> None:
        super().__init__(options, seed)
        self._stall = stall

    def sample(self, index: int, rng: SampleRandom) -> Sample:
        self._stall("sample")
        return super().sample(index, rng)


class StallingModel(Vla):
    def __init__(self, options: VlaOptions, context: ModelContext, stall: Stall) -> None:
        assert isinstance(context.data_meta, DataMeta)
        super().__init__(options, context.data_meta, context.repeated_diffusion_steps)
        self._stall = stall

    def forward(self, batch: Batch) -> Tensor:
        self._stall("forward")
        loss: Tensor = _StallInBackward.apply(super().forward(batch), self._stall)
        return loss

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if kwargs.get("keep_vars"):  # as a save asks for it, and DDP does not
            self._stall("save")
        return super().state_dict(*args, **kwargs)


class _StallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, loss: Tensor, stall: Stall) -> Tensor:
        ctx.stall = stall  # type: ignore[attr-defined]
        return loss.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.stall("backward")  # type: ignore[attr-defined]
        return gradient, None


class _NeverFlushed:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        a_call_that_never_returns()
