"""One supervisor a run: a file lock that ends with its holder, however that dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from trainer.spec.errors import StorageError, UsageError

# Locks of the open file description: not dropped when some other part of this process opens and
# closes the file, as classic record locks would be.
_OFD_GETLK, _OFD_SETLK = 36, 37
_FLOCK = struct.Struct("hhqqi4x")


@dataclass(frozen=True)
class Holder:
    """Who holds the lock, as far as it said."""

    pid: int | None
    host: str | None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "another process"


class RunLock:
    """Held from `take` until `release`, or until this process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        """Raises UsageError if another supervisor lives, StorageError if the file cannot be locked."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as err:
            raise StorageError(f"cannot open {self._path}: {err.strerror}") from err
        try:
            fcntl.fcntl(descriptor, _OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError as err:
            os.close(descriptor)
            if err.errno in (errno.EAGAIN, errno.EACCES):
                raise UsageError(
                    f"the run is being supervised by {_said(self._path)}",
                    "one process writes a run at a time; stop that one first, or watch it with `vitra status`",
                ) from None
            raise StorageError(f"cannot lock {self._path}: {err.strerror}") from err
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": os.uname().nodename}).encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def lock_holder(path: Path) -> Holder | None:
    """Who holds the lock at `path`; None if nobody does. Never takes it, not even for a moment."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        answer = fcntl.fcntl(descriptor, _OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(descriptor)
    return None if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK else _said(path)


def _said(path: Path) -> Holder:
    try:
        said = json.loads(path.read_bytes())
        return Holder(int(said["pid"]), str(said["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Holder(None, None)
