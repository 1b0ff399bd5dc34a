"""On PYTHONPATH: a Python in which wandb is not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _NotInstalled(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
        return None


sys.meta_path.insert(0, _NotInstalled())
