"""Makes a rank forget one kind of state on resume: negative controls of the equality test.

On PYTHONPATH of the real command, with FORGET naming the kind. If a run that forgets something were
still equal to the undisturbed one, the equality test could not see that kind of state at all.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _forget_after_load(forget: Callable[[Any], None]) -> Callable[[ModuleType], None]:
    def patch(module: ModuleType) -> None:
        original = module.Checkpointer._load

        def load(self: Any, store: Any, ref: Any, strategy: Any, **kw: Any) -> None:
            original(self, store, ref, strategy, **kw)
            forget(strategy)

        module.Checkpointer._load = load

    return patch


def _forget_schedule(strategy: Any) -> None:
    strategy.lr_scheduler.last_step = 0


def _forget_position(module: ModuleType) -> None:
    original = module.RankLoader._micro_positions
    module.RankLoader._micro_positions = lambda self, step, micro: original(
        self, step - self._start_step, micro
    )


def _forget_reseeding(module: ModuleType) -> None:
    module.reseed = lambda *_: None


_PATCHES: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "optimizer": (
        "trainer.checkpoint.checkpointer",
        _forget_after_load(lambda s: s.optimizer.state.clear()),
    ),
    "schedule": ("trainer.checkpoint.checkpointer", _forget_after_load(_forget_schedule)),
    "position": ("trainer.data.loader", _forget_position),
    "reseeding": ("trainer.loop", _forget_reseeding),
}


class _PatchOnImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._patch = patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            spec = next(
                filter(
                    None,
                    (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self),
                ),
                None,
            )
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("FORGET"):
    sys.meta_path.insert(0, _PatchOnImport(*_PATCHES[os.environ["FORGET"]]))
