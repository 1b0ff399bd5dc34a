"""One save that goes on while training does."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from trainer.spec.errors import StorageError

T = TypeVar("T")

#: Takes what is to be said of a save that goes on.
Warn = Callable[[str], None]

#: Pauses before an upload is tried again; the storage has tried for as long as requests may pass.
_PAUSES_S = (0.5, 2.0)
_LOOK_S = 0.5
_PIECE_BYTES = 16 << 20


class BackgroundSave:
    """The save of `step`, on a thread of its own from the start.

    Args:
        step: the step that is saved.
        write: all that is left to do. What it warns of waits for `warnings`.
    """

    def __init__(self, step: int, write: Callable[[Warn], None]) -> None:
        self.step = step
        self._error: BaseException | None = None
        self._warnings: deque[str] = deque()
        # A daemon: a rank that has to go does not wait for a storage that does not answer.
        self._thread = threading.Thread(
            target=self._run, args=(write,), name=f"save-{step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> BaseException | None:
        """Return once it has ended: what ended it, None if it is done."""
        # With a time-out, so that signals are heard meanwhile. What hangs is the supervisor's to
        # notice: this rank is then saving for too long.
        while not self.is_over(_LOOK_S):
            pass
        return self._error

    def is_over(self, within_s: float) -> bool:
        """Whether it has ended, done or not, now or in the next `within_s` seconds."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def warnings(self) -> Iterator[str]:
        """What it has warned of since this was asked last."""
        while self._warnings:
            yield self._warnings.popleft()

    def _run(self, write: Callable[[Warn], None]) -> None:
        try:
            write(self._warnings.append)
        except BaseException as err:  # noqa: BLE001 - it is raised on the thread that waits
            self._error = err


def persist(write: Callable[[], T], *, what: str, warn: Warn) -> T:
    """Call `write`, and again after a while where the storage fails; warns once.

    Raises:
        StorageError: it failed to the last.
    """
    for number, pause_s in enumerate((*_PAUSES_S, None)):
        try:
            return write()
        except StorageError as err:
            if pause_s is None:
                raise
            if number == 0:
                warn(f"{what} is not saved so far, and is tried again: {err}")
            time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def pieces(data: memoryview) -> Iterator[memoryview]:
    """`data` in pieces, so that one is written while the next is looked at."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
