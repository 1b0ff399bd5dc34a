"""One save that goes on while training does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from trainer.spec.errors import StorageError

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Pauses before an upload is tried again; the storage has tried for as long as requests may pass.
_PAUSES_S = (0.5, 2.0)
_LOOK_S = 0.5
_PIECE_BYTES = 16 << 20


class BackgroundSave:
    """The save of `step`, on a thread of its own from the start.

    Args:
        step: the step that is saved.
        write: all that is left to do.
    """

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        self.step = step
        self._error: BaseException | None = None
        # A daemon: a rank that has to go does not wait for a storage that does not answer.
        self._thread = threading.Thread(
            target=self._run, args=(write,), name=f"save-{step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> BaseException | None:
        """Return once it has ended: what ended it, None if it is done."""
        # With a time-out, so that signals are heard meanwhile. What hangs is the supervisor's to
        # notice: this rank is then saving for too long.
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
        return self._error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as err:  # noqa: BLE001 - it is raised on the thread that waits
            self._error = err


def persist(write: Callable[[], T], *, what: str) -> T:
    """Call `write`, and again after a while where the storage fails; warns once, and loudly.

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
                log.warning("%s is not saved so far, and is tried again: %s", what, err)
            time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def pieces(data: memoryview) -> Iterator[memoryview]:
    """`data` in pieces, so that one is written while the next is looked at."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
