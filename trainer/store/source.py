"""Where weights to start from lie: the directory of one step, or a file. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.store.manifest import MANIFEST_NAME
from trainer.store.storage import Chunk, LocalStorage, Storage, local_path_of, open_storage

_FILE_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Source:
    """What `checkpoint.init_from` names.

    Attributes:
        storage: the directory of one step, or the directory that the file is in.
        file: the file's name; None where it is the directory of a step.
        path: the file, where it lies on a file system.
    """

    storage: Storage
    file: str | None = None
    path: Path | None = None

    def chunks(self) -> Iterator[Chunk]:
        """The file's content, as `Storage.stream` gives it.

        Raises FileNotFoundError, StorageError.
        """
        assert self.file is not None
        return self.storage.stream(self.file)


def find_source(
    source: str, storage_options: Mapping[str, object] | None, *, patience_s: float | None = None
) -> Source | None:
    """What is at a path or URL; None if nothing is. Reads nothing but names and sizes.

    `storage_options` are those of the checkpoint place: they go with a URL. `patience_s` as in
    `open_storage`.

    Raises:
        UsageError: the URL cannot be used. StorageError: it cannot be asked.
    """
    path = local_path_of(source)
    if path is not None:
        if path.is_dir():
            return Source(LocalStorage(path))
        return Source(LocalStorage(path.parent), path.name, path) if path.exists() else None
    step = open_storage(source, storage_options, patience_s=patience_s)
    if step.size(MANIFEST_NAME) is not None:
        return Source(step)
    parent, _, name = source.rstrip("/").rpartition("/")
    if parent.endswith("/") or not _FILE_NAME.fullmatch(name):
        return None
    around = open_storage(parent, storage_options, patience_s=patience_s)
    return Source(around, name) if around.size(name) is not None else None
