"""Reads back what wandb has really written to its own file of a run.

wandb hands each row to a service process, which writes `run-<id>.wandb` in pieces, up to 15 s
later; if it is killed before, the rows are gone. What the file holds is therefore the only sound
answer to "which steps were sent?" where there is no server to ask. It is a header of seven bytes,
then LevelDB's log format (https://github.com/google/leveldb/blob/main/doc/log_format.md), each
record a protobuf message of wandb's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.spec.rundir import write_atomic

_HEADER = b":W&B"
_HEADER_LENGTH = 7
_BLOCK = 32768
_CHUNK_HEADER = 7  # checksum 4, length 2, type 1
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class Journal:
    """The steps in one `.wandb` file, which may still be growing, or be torn at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = _HEADER_LENGTH
        self._highest = 0
        self._names_run = False

    def highest_step(self) -> int:
        """The highest step that the file holds by now; 0 if there is none.

        Reads only what is new since the last call. Raises OSError.
        """
        from wandb.proto import wandb_internal_pb2

        try:
            with self._path.open("rb") as file:
                # A file in a form that this module does not know holds nothing that it can tell.
                if file.read(_HEADER_LENGTH)[: len(_HEADER)] != _HEADER:
                    return 0
                # Chunks are laid out in blocks that are counted from the beginning of the file.
                block_start = self._offset - self._offset % _BLOCK
                file.seek(block_start)
                data = file.read()
        except FileNotFoundError:
            return 0
        # wandb's own reader; untyped, as protobuf's generated code is.
        message: Any = wandb_internal_pb2
        for end, content in records(data, self._offset - block_start):
            record = message.Record()
            try:
                record.ParseFromString(content)
            except Exception:  # noqa: BLE001 - each implementation of protobuf has its own class
                break
            self._offset = block_start + end
            self._names_run = self._names_run or record.HasField("run")
            if record.HasField("history"):
                self._highest = max(self._highest, int(record.history.step.num))
        return self._highest

    def mend(self) -> None:
        """Cut off the record that a killed writer left half-written; remove a file without any.

        `wandb sync` gives up at a half record, and with it on all later files of the same run; at a
        file that does not even name its run, on all files. Only for a file that nobody writes any
        more. Raises OSError.
        """
        self.highest_step()
        with self._path.open("rb") as file:
            header = file.read(_HEADER_LENGTH)
            if header[: len(_HEADER)] != _HEADER[: len(header)]:
                return
            if not self._names_run:
                self._path.unlink()
            elif os.fstat(file.fileno()).st_size > self._offset:
                file.seek(0)
                write_atomic(self._path, file.read(self._offset))

    def sync(self) -> None:
        """Make what the file holds durable. Raises OSError."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def records(data: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """The whole records in `data` from `offset` on, each with the offset after it.

    `data` begins with a block. Stops in front of a record that is not there to its end.
    """
    parts: list[bytes] = []
    while True:
        left = _BLOCK - offset % _BLOCK
        if left < _CHUNK_HEADER:  # too little for a chunk: the rest of a block is padding
            offset += left
            continue
        begin = offset + _CHUNK_HEADER
        if begin > len(data):
            return
        end = begin + int.from_bytes(data[offset + 4 : offset + 6], "little")
        kind = data[offset + 6]
        if end > len(data) or not _FULL <= kind <= _LAST:
            return
        if kind in (_FULL, _FIRST):
            parts.clear()
        parts.append(data[begin:end])
        offset = end
        if kind in (_FULL, _LAST):
            yield offset, b"".join(parts)
