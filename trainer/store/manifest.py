"""The manifest: the file that makes a directory of shards a checkpoint.

It is written last and lists every other file with size and digest. It also carries a digest of
itself, so that no damaged number in it passes for a good one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainer.spec.errors import CorruptCheckpoint
from trainer.store.storage import Chunk, flat

#: Raised with every change that an older vitra could not read.
MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"

_ALGORITHM = "xxh3_128"
_SELF = "digest"


class Digest:
    """xxh3_128 and size of content that arrives in pieces."""

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self._state = xxhash.xxh3_128()
        self.size_bytes = 0
        for chunk in chunks:
            self.update(chunk)

    def update(self, chunk: Chunk) -> None:
        view = flat(chunk)
        self._state.update(view)
        self.size_bytes += view.nbytes

    @property
    def text(self) -> str:
        """The digest of what came so far, as manifests write it: "xxh3_128:<32 hex digits>"."""
        return f"{_ALGORITHM}:{self._state.hexdigest()}"


class FileEntry(BaseModel):
    """One file of a checkpoint: its name in the step's directory, size and digest."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    size_bytes: int = Field(ge=0)
    digest: str = Field(pattern=rf"^{_ALGORITHM}:[0-9a-f]{{32}}$")

    @model_validator(mode="after")
    def _is_a_file_of_ours(self) -> Self:
        if self.name in (".", "..", MANIFEST_NAME):
            raise ValueError(f"{self.name!r} cannot name a file of a checkpoint")
        return self


class CheckpointManifest(BaseModel):
    """What a checkpoint holds and where it comes from.

    `step` counts finished optimizer steps, `samples_seen` samples trained on since the run's start;
    `attempt` wrote it, with `world_size` ranks under `strategy`. `created_at` is UTC, ISO 8601.
    Always true: there is at least one file, and no name appears twice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Annotated[int, Field(ge=1)] = MANIFEST_VERSION
    run_id: str = Field(min_length=1)
    step: int = Field(ge=0)
    epoch: int = Field(ge=0)
    samples_seen: int = Field(ge=0)
    attempt: int = Field(ge=1)
    world_size: int = Field(ge=1)
    strategy: str = Field(min_length=1)
    spec_digest: str
    files: tuple[FileEntry, ...] = Field(min_length=1)
    created_at: str

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        seen: set[str] = set()
        for entry in self.files:
            if entry.name in seen:
                raise ValueError(f"{entry.name} is listed twice")
            seen.add(entry.name)
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes in all files together, without the manifest."""
        return sum(entry.size_bytes for entry in self.files)

    def entry(self, name: str) -> FileEntry:
        """The entry of the file `name`. Raises KeyError."""
        for entry in self.files:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def to_bytes(self) -> bytes:
        """The manifest file's content."""
        content = self.model_dump(mode="json")
        content[_SELF] = _digest_of(content)
        return json.dumps(content, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a manifest file's content.

        Raises:
            CorruptCheckpoint: it is not what `to_bytes` wrote; the message says in what, in a few
                words and without the file's name.
        """
        if not data.strip(b"\0 \n"):
            raise CorruptCheckpoint("the manifest is empty")
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as err:
            raise CorruptCheckpoint(f"the manifest is not JSON ({err})") from err
        if not isinstance(content, dict):
            raise CorruptCheckpoint("the manifest is not a JSON object")
        version = content.get("version")
        if isinstance(version, int) and version > MANIFEST_VERSION:
            raise CorruptCheckpoint(
                f"the manifest has version {version}, this vitra reads {MANIFEST_VERSION}",
                "use the vitra that wrote it, or a newer one",
            )
        digest = content.pop(_SELF, None)
        if digest != _digest_of(content):
            raise CorruptCheckpoint("the manifest differs from its own digest")
        try:
            return cls.model_validate_json(json.dumps(content))
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CorruptCheckpoint(f"the manifest: {where}: {first['msg']}") from err


#: `shard-a<attempt>-r<rank>.bin` and the like; "-t<n>" marks the n-th try of one save.
_FILE_NAME = re.compile(
    r"(?P<stem>shard|index)-a(?P<attempt>[1-9][0-9]*)(?:-r[0-9]+)?(?:-t[0-9]+)?\.(?:bin|json)"
)


def shard_name(attempt: int, rank: int) -> str:
    """The file in which a rank of an attempt puts its part of the tensors."""
    return f"shard-a{attempt}-r{rank}.bin"


def index_name(attempt: int, rank: int | None = None) -> str:
    """The file in which an attempt, or one rank of it, describes what its shards hold."""
    return f"index-a{attempt}.json" if rank is None else f"index-a{attempt}-r{rank}.json"


def attempt_of(name: str) -> int | None:
    """The attempt that wrote a file of a checkpoint; None for a name that is not one of ours."""
    match = _FILE_NAME.fullmatch(name)
    return int(match["attempt"]) if match else None


def _digest_of(content: object) -> str:
    return Digest([json.dumps(content, sort_keys=True, separators=(",", ":")).encode()]).text
