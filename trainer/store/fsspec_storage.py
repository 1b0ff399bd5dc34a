"""Checkpoints in any object store that fsspec can create a file in whole and only once.

What S3 has beyond that (`trainer.store.s3`), fsspec has no words for: here a file is compared and
replaced in two steps, as on disk, and what a killed upload leaves is the store's to clear away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from trainer.spec.errors import StorageError, UsageError
from trainer.store.storage import (
    Chunk,
    check_name,
    flat,
    probe_by_use,
    sizes_one_by_one,
    stream_by_ranges,
)

#: Where files are whole when they appear, and fsspec can be asked not to replace one.
PROTOCOLS = ("memory", "gs", "gcs", "abfs", "abfss", "az")

_STREAM_BYTES = 16 << 20


class FsspecStorage:
    """`Storage` at an fsspec URL.

    Args:
        options: passed to the file system's class.
    """

    def __init__(self, uri: str, options: Mapping[str, Any] | None = None) -> None:
        self._uri = uri.rstrip("/")
        self._options = dict(options or {})
        self._held: tuple[int, Any] | None = None

    @property
    def uri(self) -> str:
        return self._uri

    def names(self, directory: str = "") -> list[str]:
        with self._explained():
            path = self._path(directory) if directory else self._root
            try:
                entries = self._fs.ls(path, detail=True, refresh=True)
            except FileNotFoundError:
                return []
            names = {
                entry["name"].rstrip("/").rpartition("/")[2]
                + ("/" if entry["type"] == "directory" else "")
                for entry in entries
                if entry["name"].strip("/") != path.strip("/")
            }
        return sorted(names)

    def size(self, name: str) -> int | None:
        with self._explained():
            try:
                entry = self._fs.info(self._path(name))
            except FileNotFoundError:
                return None
        return int(entry["size"]) if entry["type"] == "file" else None

    def sizes(self, directory: str, names: Iterable[str]) -> dict[str, int]:
        return sizes_one_by_one(self, directory, names)

    def read(self, name: str) -> bytes:
        with self._explained(expected=FileNotFoundError):
            return self._fs.cat_file(self._path(name))

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(name)
        end = min(size, offset + length)
        if offset >= end:
            return b""
        with self._explained(expected=FileNotFoundError):
            return self._fs.cat_file(self._path(name), start=offset, end=end)

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        found = 0
        while found < len(target):
            piece = self.read_range(name, offset + found, min(_STREAM_BYTES, len(target) - found))
            if not piece:
                break
            target[found : found + len(piece)] = piece
            found += len(piece)
        return found

    def stream(self, name: str) -> Iterator[bytes]:
        return stream_by_ranges(self, name, _STREAM_BYTES)

    def create(self, name: str, chunks: Iterable[Chunk]) -> None:
        if self.size(name) is not None:
            raise FileExistsError(name)
        path = self._path(name)
        with self._explained():
            file = self._fs.open(path, "wb")
        try:
            for chunk in chunks:
                with self._explained():
                    file.write(flat(chunk))
            with self._explained():
                file.close()
        except BaseException:
            # Leaving the file open would leave the upload, closing it makes a file of what came.
            with suppress(Exception):
                file.close()
            with suppress(Exception):
                self._fs.rm_file(path)
            raise

    def claim(self, name: str, data: bytes) -> bool:
        with self._explained():
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
            except OSError:
                # Some say it in words of their own.
                if self.size(name) is None:
                    raise
                return False
        return True

    def replace(self, name: str, data: bytes, expected: bytes) -> bool:
        try:
            if self.read(name) != expected:
                return False
        except FileNotFoundError:
            return False
        with self._explained():
            self._fs.pipe_file(self._path(name), data)
        return True

    def remove(self, name: str) -> bool:
        if self.size(name) is None:
            return False
        with self._explained(), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))
        return True

    def remove_empty_dir(self, directory: str) -> bool:
        if self.names(directory):
            return False
        # Where directories exist by themselves.
        with suppress(Exception):
            self._fs.rmdir(self._path(directory))
        return True

    def discard_leftovers(self, directory: str = "") -> int:
        del directory
        return 0

    def abort_uploads(self, abandoned: Callable[[str], bool]) -> int:
        del abandoned
        return 0

    def probe(self) -> None:
        probe_by_use(self)

    @property
    def _fs(self) -> Any:
        """This process's own: a forked child must not use its parent's connections."""
        if self._held is None or self._held[0] != os.getpid():
            import fsspec

            protocol = self._uri.partition("://")[0]
            try:
                made = fsspec.filesystem(
                    protocol, use_listings_cache=False, skip_instance_cache=True, **self._options
                )
            except (ImportError, TypeError, ValueError) as err:
                raise UsageError(
                    f"checkpoint.uri={self._uri}: fsspec cannot use {protocol}://: {err}",
                    "install the package that it names, or correct checkpoint.storage_options",
                ) from err
            self._held = (os.getpid(), made)
        return self._held[1]

    @property
    def _root(self) -> str:
        return str(self._fs._strip_protocol(self._uri))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{check_name(name)}"

    @contextmanager
    def _explained(self, expected: type[OSError] | None = None) -> Iterator[None]:
        """Turn whatever a file system raises into a StorageError, but for the one expected."""
        try:
            yield
        except (StorageError, UsageError):
            raise
        except Exception as err:
            if expected is not None and isinstance(err, expected):
                raise
            text = " ".join(str(err).split())
            raise StorageError(
                f"{self._uri}: {type(err).__name__}: {text}",
                "see that it is there, and that the credentials in the environment are right",
            ) from err
