"""One supervisor a run: a file lock that ends with its holder, however that dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trainer.spec.errors import StorageError, UsageError

# Locks of the open file description: not dropped when some other part of this process opens and
# closes the file, as classic record locks would be.
_OFD_GETLK, _OFD_SETLK = 36, 37
_FLOCK = struct.Struct("hhqqi4x")
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_SAID_WITHIN_S = 1.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Holder:
    """Who holds the lock, as far as it said."""

    pid: int | None
    host: str | None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "another process"


class RunLock:
    """Held inside a `with` block, or until this process ends.

    Raises:
        UsageError: another process holds it. StorageError: the file cannot be locked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as err:
            raise StorageError(f"cannot open {self._path}: {err.strerror}") from err
        try:
            fcntl.fcntl(descriptor, _OFD_SETLK, _WHOLE_FILE)
        except OSError as err:
            os.close(descriptor)
            if err.errno in (errno.EAGAIN, errno.EACCES):
                raise UsageError(
                    f"{self._path.parent.name} is being supervised by {_said(self._path)}",
                    "one process writes a run at a time: stop that one first, or watch it with "
                    "`vitra status`",
                ) from None
            raise StorageError(f"cannot lock {self._path}: {err.strerror}") from err
        os.ftruncate(descriptor, 0)
        holder = {"pid": os.getpid(), "host": os.uname().nodename}
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        assert self._descriptor is not None, "left without having been entered"
        os.close(self._descriptor)
        self._descriptor = None


def lock_holder(path: Path) -> Holder | None:
    """Who holds the lock at `path`; None if nobody does. Never takes it, not even for a moment.

    For this reading the file is enough: people of the owner's group may ask as well.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        answer = fcntl.fcntl(descriptor, _OFD_GETLK, _WHOLE_FILE)
    finally:
        os.close(descriptor)
    return None if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK else _said(path)


def _said(path: Path) -> Holder:
    """What the holder wrote, which it does a moment after it has taken the lock."""
    deadline = time.monotonic() + _SAID_WITHIN_S
    while True:
        try:
            said = json.loads(path.read_bytes())
            return Holder(int(said["pid"]), str(said["host"]))
        except (OSError, ValueError, KeyError, TypeError):
            if time.monotonic() > deadline:
                return Holder(None, None)
            time.sleep(_POLL_S)
