"""Where checkpoint bytes live: the few operations that the checkpoint store is built on.

The protocol asks for nothing that an object store cannot give: files are whole when they appear and
are never renamed, and the one file that is replaced is replaced by compare-and-swap. Names are
relative, at most one directory deep (`owner.json`, `step-00001000/manifest.json`).

Expected answers are values or the built-in FileNotFoundError and FileExistsError; every other
failure is a StorageError that names the path and the way out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from trainer.spec.errors import StorageError, UsageError

#: A piece of a file's content. A view must be contiguous; it is written in C order.
Chunk = bytes | bytearray | memoryview

_DIRECTORY_MODE = 0o750
_FILE_MODE = 0o640
_STREAM_BYTES = 8 << 20
#: How often an operation starts again after another process moved something under its feet.
_TRIES = 16

_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
_TEMPORARY = re.compile(r"\.tmp-[0-9]+-[0-9a-f]{16}")

_HINTS = {
    errno.ENOSPC: "free space there, or set checkpoint.uri to a larger place, then resume the run",
    errno.EDQUOT: "free space or have the quota raised, then resume the run",
    errno.EFBIG: "raise the file size limit (`ulimit -f`), or use a file system without it",
    errno.EROFS: "mounted read-only: mount it writable, or set checkpoint.uri to another place",
    errno.EACCES: "give this user access, or set checkpoint.uri to another place",
    errno.EPERM: "give this user access, or set checkpoint.uri to another place",
}
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class Storage(Protocol):
    """One place for checkpoints.

    A directory exists because a file is in it: nothing is concluded from a directory alone.
    """

    @property
    def uri(self) -> str:
        """The place, as a user would write it."""
        ...

    def names(self, directory: str = "") -> list[str]:
        """What lies directly in `directory`; sub-directories end with "/". Sorted.

        Asks the storage each time, so it shows what other processes have written. Empty for a
        directory that is not there. Leftovers of unfinished writes are not shown.
        """
        ...

    def size(self, name: str) -> int | None:
        """The file's size in bytes as the storage knows it now; None if there is no such file."""
        ...

    def sizes(self, directory: str, names: Iterable[str]) -> dict[str, int]:
        """The size in bytes, as `size` tells it, of each of `names` that is in `directory`."""
        ...

    def read(self, name: str) -> bytes:
        """The whole content. Raises FileNotFoundError."""
        ...

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), fewer where the file ends. Raises FileNotFoundError."""
        ...

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        """Fill `target` with the bytes from `offset` on; how many there were.

        May be called by several threads at once. Raises FileNotFoundError.
        """
        ...

    def stream(self, name: str) -> Iterator[Chunk]:
        """The whole content in order, in pieces of some MiB, read ahead where that is quicker.

        A piece holds until the next is asked for: its memory may be used again then.

        Raises:
            FileNotFoundError: it is not there, or no longer.
        """
        ...

    def create(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write a new file; it is whole and durable when this returns.

        If anything fails, `chunks` included, what was written is removed and the error goes on. A
        process that is killed may leave part of a file under this name.

        Raises:
            FileExistsError: the name is taken; nothing was changed and no chunk was consumed.
            StorageError: the storage refused or failed.
        """
        ...

    def claim(self, name: str, data: bytes) -> bool:
        """Create `name` with this content in one step, durably; False if the name is taken.

        Of any number of processes that claim one name, exactly one gets True, and nobody ever sees
        the file without its content.
        """
        ...

    def replace(self, name: str, data: bytes, expected: bytes) -> bool:
        """Put `data` in the place of `expected`, in one step, durably; False if it was not there.

        Readers see the old content or the new, never a mixture. A store with conditional writes
        makes the comparison and the write one; on disk a moment lies between them.
        """
        ...

    def remove(self, name: str) -> bool:
        """Remove a file, durably; False if there was none."""
        ...

    def remove_empty_dir(self, directory: str) -> bool:
        """Remove a directory if nothing is in it; True if it is gone now."""
        ...

    def discard_leftovers(self, directory: str = "") -> int:
        """Remove what killed processes left of `claim` and `replace` directly in `directory`.

        Safe at any time: a live `claim` or `replace` whose leftover vanishes starts again. Returns
        how many were removed.
        """
        ...

    def abort_uploads(self, abandoned: Callable[[str], bool]) -> int:
        """Remove what killed processes left of `create`, where no name shows it.

        That is, on object stores, uploads that were never completed, anywhere in the place. Only
        those of files whose name `abandoned` accepts; returns how many.
        """
        ...

    def probe(self) -> None:
        """Write, link, read back, list and delete a small file; leaves the place as it was.

        Raises:
            StorageError: the place cannot hold checkpoints, and why.
        """
        ...


class LocalStorage:
    """`Storage` in a directory of a file system, which may be shared by many nodes.

    The directory is made at the first write. Durable means fsync of the file and of its directory.
    Directories get mode 0750 and files 0640, less what the umask takes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return str(self._root)

    def names(self, directory: str = "") -> list[str]:
        return sorted(
            f"{entry.name}/" if entry.is_dir() else entry.name
            for entry in self._entries(directory)
            if not _TEMPORARY.fullmatch(entry.name)
        )

    def size(self, name: str) -> int | None:
        path = self._path(name)
        try:
            # Opening, unlike stat, makes network file systems ask the server.
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError as err:
            raise _failure(path, err) from err
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def sizes(self, directory: str, names: Iterable[str]) -> dict[str, int]:
        return sizes_one_by_one(self, directory, names)

    def read(self, name: str) -> bytes:
        path = self._path(name)
        with _explained(path, expected=FileNotFoundError):
            return path.read_bytes()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        path = self._path(name)
        parts: list[bytes] = []
        with _explained(path, expected=FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                while length > 0:
                    # One read gives at most 2 GiB.
                    part = os.pread(descriptor, length, offset)
                    if not part:
                        break
                    parts.append(part)
                    offset += len(part)
                    length -= len(part)
            finally:
                os.close(descriptor)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        path, found = self._path(name), 0
        with _explained(path, expected=FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                # One read gives at most 2 GiB.
                while count := os.preadv(descriptor, [target[found:]], offset + found):
                    found += count
            finally:
                os.close(descriptor)
        return found

    def stream(self, name: str) -> Iterator[bytes]:
        return stream_by_ranges(self, name, _STREAM_BYTES)

    def create(self, name: str, chunks: Iterable[Chunk]) -> None:
        path = self._path(name)
        with _explained(path, expected=FileExistsError):
            descriptor = self._open_new(path)
        try:
            try:
                for chunk in chunks:
                    with _explained(path):
                        _write_all(descriptor, chunk)
                with _explained(path):
                    os.fsync(descriptor)
            finally:
                with _explained(path):
                    os.close(descriptor)
            with _explained(path):
                _sync_directory(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def claim(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with _explained(path):
            for _ in range(_TRIES):
                temporary = self._write_temporary(path.parent, data)
                try:
                    path.hardlink_to(temporary)
                except FileNotFoundError:
                    continue  # somebody discarded the temporary file as a leftover
                except FileExistsError:
                    # A network file system may carry a link out, lose the answer and then find its
                    # own link in the way when it asks again.
                    if not _is_same_file(temporary, path):
                        return False
                except OSError as err:
                    if err.errno in _NO_HARD_LINKS:
                        raise StorageError(
                            f"{path}: this file system does not allow hard links ({err.strerror})",
                            "they decide which attempt owns a run: set checkpoint.uri to a file "
                            "system that has them",
                        ) from err
                    raise
                finally:
                    _remove_if_there(temporary)
                self._sync_entry(path)
                return True
        raise _restless(path)

    def replace(self, name: str, data: bytes, expected: bytes) -> bool:
        path = self._path(name)
        with _explained(path):
            for _ in range(_TRIES):
                temporary = self._write_temporary(path.parent, data)
                try:
                    if not _holds(path, expected):
                        return False
                    temporary.replace(path)
                except FileNotFoundError:
                    continue  # somebody discarded the temporary file as a leftover
                finally:
                    _remove_if_there(temporary)
                self._sync_entry(path)
                return True
        raise _restless(path)

    def remove(self, name: str) -> bool:
        path = self._path(name)
        with _explained(path):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            # Another process may remove the directory, now empty, before it can be synced.
            with contextlib.suppress(FileNotFoundError):
                _sync_directory(path.parent)
        return True

    def remove_empty_dir(self, directory: str) -> bool:
        path = self._path(directory)
        with _explained(path):
            try:
                path.rmdir()
            except FileNotFoundError:
                return True
            except OSError as err:
                if err.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
        return True

    def discard_leftovers(self, directory: str = "") -> int:
        leftovers = [
            Path(entry.path)
            for entry in self._entries(directory)
            if _TEMPORARY.fullmatch(entry.name)
        ]
        with _explained(self._root):
            return sum(map(_remove_if_there, leftovers))

    def abort_uploads(self, abandoned: Callable[[str], bool]) -> int:
        del abandoned  # what is left of a file has the file's name
        return 0

    def probe(self) -> None:
        made: list[Path] = []
        try:
            with _explained(self._root):
                made = _make_directories(self._root)
            probe_by_use(self)
        finally:
            _remove_directories(made)

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _entries(self, directory: str) -> list[os.DirEntry[str]]:
        path = self._path(directory) if directory else self._root
        with _explained(path):
            try:
                # scandir opens the directory afresh: network file systems then ask the server.
                with os.scandir(path) as entries:
                    return list(entries)
            except FileNotFoundError:
                return []

    def _open_new(self, path: Path) -> int:
        """Open a file that must not exist, making its directory. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        for _ in range(_TRIES - 1):
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, flags, _FILE_MODE)
            # The directory is not there yet, or a sweep removed it, empty, just before.
            _make_directories(path.parent)
        return os.open(path, flags, _FILE_MODE)

    def _write_temporary(self, directory: Path, data: bytes) -> Path:
        temporary = directory / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = self._open_new(temporary)
        try:
            try:
                _write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            _remove_if_there(temporary)
            raise
        return temporary

    def _sync_entry(self, path: Path) -> None:
        """Make a directory entry durable, and the directory's own entry in the root with it."""
        _sync_directory(path.parent)
        if path.parent != self._root:
            _sync_directory(self._root)


def sizes_one_by_one(storage: Storage, directory: str, names: Iterable[str]) -> dict[str, int]:
    """`Storage.sizes` where no listing tells them."""
    sizes = {name: storage.size(f"{directory}/{name}") for name in names}
    return {name: size for name, size in sizes.items() if size is not None}


def stream_by_ranges(storage: Storage, name: str, piece_bytes: int) -> Iterator[bytes]:
    """`Storage.stream` where nothing is read ahead."""
    offset = 0
    while piece := storage.read_range(name, offset, piece_bytes):
        yield piece
        offset += len(piece)


def probe_by_use(storage: Storage, further: Callable[[str], None] | None = None) -> None:
    """`Storage.probe` by the operations that the store is built on.

    `further` is called with the name of the file while it is there, and may replace it.
    """
    name = f"probe-{secrets.token_hex(8)}"
    at, data = f"{storage.uri}/{name}", secrets.token_bytes(256)
    written = False
    try:
        if not storage.claim(name, data):
            raise StorageError(f"{at}: a new random name was already taken")
        written = True
        if storage.read(name) != data or name not in storage.names():
            raise StorageError(
                f"{at}: reads back differently from what was written",
                "this place cannot be trusted with checkpoints: use another",
            )
        if storage.claim(name, data[::-1]):
            raise unconditional(storage)
        if further is not None:
            further(name)
        written = not storage.remove(name)
        if written or storage.size(name) is not None:
            raise StorageError(f"{at}: still there after it was deleted")
    finally:
        if written:
            with contextlib.suppress(StorageError):
                storage.remove(name)


def unconditional(storage: Storage) -> StorageError:
    """The error of a place where a file can be replaced though it must not be."""
    return StorageError(
        f"{storage.uri}: conditional writes (If-None-Match, If-Match) are ignored there",
        "they decide which attempt owns a run: use a server that has them, or a path",
    )


def check_name(name: str) -> str:
    """`name`, which must be one that a `Storage` can have: ours all are."""
    assert _NAME.fullmatch(name), name
    assert not {".", ".."} & set(name.split("/")), name
    return name


def open_storage(
    uri: str,
    storage_options: Mapping[str, object] | None = None,
    *,
    patience_s: float | None = None,
) -> Storage:
    """The storage behind `checkpoint.uri`. Touches nothing.

    Args:
        storage_options: passed to fsspec; a path has none.
        patience_s: for how long a request that fails is tried again, where requests are made; None:
            as long as a run waits.

    Raises:
        UsageError: the URI cannot be used, and why.
    """
    path = local_path_of(uri)
    if path is not None:
        if storage_options:
            raise UsageError(
                f"checkpoint.storage_options: {', '.join(sorted(storage_options))} mean nothing "
                f"for the path {path}",
                "remove them",
            )
        return LocalStorage(path)
    if _scheme_of(uri) in ("s3", "s3a"):
        from trainer.store.s3 import S3Storage
        from trainer.store.s3_client import PATIENCE_S

        return S3Storage(
            uri, storage_options, patience_s=PATIENCE_S if patience_s is None else patience_s
        )
    from trainer.store.fsspec_storage import PROTOCOLS, FsspecStorage

    if _scheme_of(uri) in PROTOCOLS:
        return FsspecStorage(uri, storage_options)
    raise UsageError(
        f"checkpoint.uri: {_scheme_of(uri)}:// cannot hold checkpoints: fsspec has no way to "
        "create a file there whole and only once, which decides what attempt owns a run",
        "use a path or s3://BUCKET/PREFIX",
    )


def local_path_of(uri: str) -> Path | None:
    """The absolute path that a plain path or a file:// URL names; None for any other URL.

    Raises:
        UsageError: an empty path, another machine's file:// URL, or `~` for an unknown user.
    """
    scheme = _scheme_of(uri)
    if scheme not in (None, "file", "local"):
        return None
    text = uri
    if scheme is not None:
        host, slash, rest = uri.split("://", 1)[1].partition("/")
        if host not in ("", "localhost"):
            raise UsageError(
                f"checkpoint.uri={uri}: names a file on the machine {host}",
                "write file:///path, with three slashes, or the path alone",
            )
        text = urllib.parse.unquote(slash + rest)
    if not text.strip():
        raise UsageError("checkpoint.uri is empty", "give a path, or leave it unset")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as err:
        raise UsageError(f"checkpoint.uri={uri}: {err}", "write the path in full") from err


def flat(chunk: Chunk) -> memoryview:
    """The chunk's bytes, one-dimensional, without a copy."""
    view = memoryview(chunk)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _scheme_of(uri: str) -> str | None:
    scheme, separator, _ = uri.partition("://")
    return scheme.lower() if separator else None


def _failure(path: Path, err: OSError) -> StorageError:
    """The user's view of an operating system error at `path`."""
    hint = _HINTS.get(err.errno or 0)
    if err.errno == errno.ENOTDIR:
        for part in (*reversed(path.parents), path):
            if os.path.lexists(part) and not part.is_dir():
                hint = f"{part} is not a directory: move it away or set checkpoint.uri elsewhere"
                break
    return StorageError(f"{path}: {err.strerror or err}", hint)


def _restless(path: Path) -> StorageError:
    return StorageError(
        f"{path}: its temporary file vanished {_TRIES} times while it was written",
        "stop whatever deletes files there",
    )


@contextlib.contextmanager
def _explained(path: Path, expected: type[OSError] | None = None) -> Iterator[None]:
    """Turn an OSError into a StorageError, except the one that is an answer."""
    try:
        yield
    except OSError as err:
        if expected is not None and isinstance(err, expected):
            raise
        raise _failure(path, err) from err


def _write_all(descriptor: int, chunk: Chunk) -> None:
    rest = flat(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as err:
        # A file system that cannot sync directories answers EINVAL and has nothing better to offer.
        if err.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _make_directories(path: Path) -> list[Path]:
    """Make a directory and its missing parents, durably; returns what was made, outermost first.

    If it fails, what it made is removed. Raises OSError.
    """
    missing: list[Path] = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    made: list[Path] = []
    try:
        for directory in reversed(missing):
            try:
                directory.mkdir(_DIRECTORY_MODE)
            except FileExistsError as err:
                if not directory.is_dir():
                    code = errno.ENOTDIR
                    raise NotADirectoryError(code, os.strerror(code), str(directory)) from err
                continue  # another process was faster
            made.append(directory)
            _sync_directory(directory.parent)
    except BaseException:
        _remove_directories(made)
        raise
    return made


def _remove_directories(made: list[Path]) -> None:
    """Remove directories that `_make_directories` made, as far as they are still empty."""
    for directory in reversed(made):
        with contextlib.suppress(OSError):
            directory.rmdir()


def _remove_if_there(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


def _holds(path: Path, expected: bytes) -> bool:
    try:
        return path.read_bytes() == expected
    except FileNotFoundError:
        return False
