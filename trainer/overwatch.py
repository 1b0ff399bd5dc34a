"""A logger that knows its rank, under the names of VITRA's: `initialize_overwatch(__name__)`.

A strategy written for VITRA asks it for rank and world size as well. Importing or calling this
starts no process group: until there is one, the launch variables tell.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")


class Overwatch:
    """Logs what is the same on every rank on rank 0 only; warnings and worse come from any rank.

    Args:
        name: of the logger.
        environ: where RANK, LOCAL_RANK and WORLD_SIZE are looked up; without them this process is
            taken to be alone.
    """

    def __init__(self, name: str, environ: Mapping[str, str] = os.environ) -> None:
        self.logger = logging.getLogger(name)
        self._environ = environ

    def rank(self) -> int:
        """This process's number among all ranks."""
        return dist.get_rank() if dist.is_initialized() else self._number("RANK", 0)

    def local_rank(self) -> int:
        """This process's number among those of its node."""
        return self._number("LOCAL_RANK", self.rank())

    def world_size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size() if dist.is_initialized() else self._number("WORLD_SIZE", 1)

    def is_rank_zero(self) -> bool:
        return self.rank() == 0

    def is_local_zero(self) -> bool:
        return self.local_rank() == 0

    def debug(self, message: str, *args: Any, ctx_level: int = 0) -> None:
        self._log(logging.DEBUG, message, args, ctx_level, everywhere=False)

    def info(self, message: str, *args: Any, ctx_level: int = 0) -> None:
        """Log on rank 0; `ctx_level` indents what belongs to the line before."""
        self._log(logging.INFO, message, args, ctx_level, everywhere=False)

    def warning(self, message: str, *args: Any, ctx_level: int = 0) -> None:
        self._log(logging.WARNING, message, args, ctx_level, everywhere=True)

    def error(self, message: str, *args: Any, ctx_level: int = 0) -> None:
        self._log(logging.ERROR, message, args, ctx_level, everywhere=True)

    def critical(self, message: str, *args: Any, ctx_level: int = 0) -> None:
        self._log(logging.CRITICAL, message, args, ctx_level, everywhere=True)

    def rank_zero_only(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """A decorator: called on another rank the function does nothing and returns None."""
        return self._only_where(self.is_rank_zero, function)

    def local_zero_only(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """Likewise for one rank a node."""
        return self._only_where(self.is_local_zero, function)

    @contextmanager
    def rank_zero_first(self) -> Generator[None]:
        """Rank 0 runs the block before all others. Collective, where there is a process group."""
        with self._first(self.is_rank_zero()):
            yield

    @contextmanager
    def local_zero_first(self) -> Generator[None]:
        """One rank of each node runs the block before the others. Collective likewise."""
        with self._first(self.is_local_zero()):
            yield

    def _log(
        self, level: int, message: str, args: tuple[Any, ...], ctx_level: int, *, everywhere: bool
    ) -> None:
        if everywhere or self.is_rank_zero():
            text = "|-> ".rjust(4 * ctx_level + 4) + message if ctx_level else message
            # Named after its caller's caller: the line of the strategy, not one of this module.
            self.logger.log(level, text, *args, stacklevel=3)

    def _number(self, name: str, default: int) -> int:
        text = self._environ.get(name, "")
        return int(text) if text.isdecimal() else default

    @staticmethod
    def _only_where(here: Callable[[], bool], function: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return function(*args, **kwargs) if here() else None

        return guarded

    @staticmethod
    @contextmanager
    def _first(is_first: bool) -> Generator[None]:
        if not dist.is_initialized():
            yield
            return
        if not is_first:
            dist.barrier()
        yield
        if is_first:
            dist.barrier()


def initialize_overwatch(name: str) -> Overwatch:
    """The rank-aware logger `name`."""
    return Overwatch(name)
