"""Checkpoints in an S3 bucket: `Storage` as objects under one prefix.

What the store above relies on, and how it comes about here:

- A file is whole when it appears: one request puts a small object; a large one is an upload in
  parts, which nobody sees before it is completed. What fails aborts its upload. A killed process
  leaves the upload open, which costs space and means nothing, until `abort_uploads`.
- Of many that create a name one wins: `If-None-Match: *`. A file is replaced only as it was read:
  `If-Match` on its ETag. A store that ignores these headers is found out by `probe`, and refused.
- A request may be carried out though its answer is lost. Each object carries a token of its
  writer's, which tells one's own from another's then.
- Nothing is cached, and no prefix is taken for a directory: some servers list a prefix for a while
  after its last object is gone, or show an empty object in its place.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from trainer.spec.errors import StorageError, UsageError
from trainer.store.s3_client import (
    INVALID_RANGE,
    NO_SUCH_KEY,
    NO_SUCH_UPLOAD,
    PATIENCE_S,
    PRECONDITION_FAILED,
    Answer,
    S3Client,
)
from trainer.store.storage import Chunk, check_name, flat, probe_by_use, unconditional

#: Requests at a time for one file.
_PARALLEL = 8
#: How much one request sends or brings. With `_PARALLEL` it bounds the memory of an upload;
#: what is read goes to where it is wanted, but for what a stream reads ahead.
PIECE_BYTES = 16 << 20
#: How many pieces a stream reads ahead.
_AHEAD = 6
#: An object has at most 10,000 parts of at most 5 GiB and is at most 5 TiB: its later parts grow.
_PARTS_OF_A_SIZE = 1000
_DOUBLINGS = 8
_TOKEN = "vitra-write"

_URI = re.compile(r"s3a?://(?P<bucket>[^/]+)(?:/(?P<prefix>.*))?", re.DOTALL | re.IGNORECASE)


def part_bytes(number: int, first: int = PIECE_BYTES) -> int:
    """How many bytes part `number`, counted from 1, of an upload has; the last may have fewer.

    `first` is the size of the first.
    """
    return first << min((number - 1) // _PARTS_OF_A_SIZE, _DOUBLINGS)


class _Readers:
    """The threads that read, all of a process together; a forked child has its own."""

    def __init__(self) -> None:
        self._held: tuple[int, ThreadPoolExecutor] | None = None

    def get(self) -> ThreadPoolExecutor:
        if self._held is None or self._held[0] != os.getpid():
            self._held = (os.getpid(), ThreadPoolExecutor(_PARALLEL, "s3-read"))
        return self._held[1]


_READERS = _Readers()


class S3Storage:
    """`Storage` in the bucket and under the prefix that `uri` names (s3://bucket/prefix).

    Args:
        options: passed to s3fs.
        patience_s: for how long a request that fails is tried again.
        piece_bytes: of the first parts of an upload; S3 wants 5 MiB or more.

    Raises:
        UsageError: the URI names no bucket.
    """

    def __init__(
        self,
        uri: str,
        options: Mapping[str, Any] | None = None,
        *,
        patience_s: float = PATIENCE_S,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        match = _URI.fullmatch(uri)
        if match is None:
            raise UsageError(f"checkpoint.uri={uri}: names no bucket", "write s3://BUCKET/PREFIX")
        self._bucket = match["bucket"]
        parts = [part for part in (match["prefix"] or "").split("/") if part]
        self._uri = "/".join((f"s3://{self._bucket}", *parts))
        # Ends in a slash: the neighbour "run-10" begins with "run-1".
        self._prefix = "".join(f"{part}/" for part in parts)
        self._client = S3Client(self._uri, options or {}, patience_s)
        self._piece_bytes = piece_bytes

    @property
    def uri(self) -> str:
        return self._uri

    def names(self, directory: str = "") -> list[str]:
        prefix = self._key(directory) + "/" if directory else self._prefix
        found = {
            entry.get("Key", entry.get("Prefix", "")).removeprefix(prefix)
            for page in self._pages(prefix, Delimiter="/")
            for entry in (*page.get("Contents", ()), *page.get("CommonPrefixes", ()))
        }
        # The object that stands for an empty directory on some servers has the prefix for a name.
        return sorted(found - {""})

    def size(self, name: str) -> int | None:
        # A listing, because the answer to a HEAD has no words for what is wrong.
        key = self._key(name)
        page = self._client.call("list_objects_v2", Bucket=self._bucket, Prefix=key, MaxKeys=1)
        for entry in page.get("Contents", ()):
            if entry["Key"] == key:
                return int(entry["Size"])
        return None

    def sizes(self, directory: str, names: Iterable[str]) -> dict[str, int]:
        prefix = self._key(directory) + "/"
        there = {
            entry["Key"].removeprefix(prefix): int(entry["Size"])
            for page in self._pages(prefix, Delimiter="/")
            for entry in page.get("Contents", ())
        }
        return {name: there[name] for name in names if name in there}

    def read(self, name: str) -> bytes:
        return self._read(name)[0]

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        data = bytearray(length)
        found = self.read_into(name, offset, memoryview(data))
        return bytes(memoryview(data)[:found])

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if len(target) <= PIECE_BYTES:
            return self._read_piece(name, offset, target) if len(target) else 0
        pieces = [
            _READERS.get().submit(
                self._read_piece, name, offset + start, target[start : start + PIECE_BYTES]
            )
            for start in range(0, len(target), PIECE_BYTES)
        ]
        try:
            return sum(piece.result() for piece in pieces)
        finally:
            # Once this has returned nothing may write into `target` any more.
            wait([piece for piece in pieces if not piece.cancel()])

    def stream(self, name: str) -> Iterator[memoryview]:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(name)
        offsets = iter(range(0, size, PIECE_BYTES))
        running: deque[tuple[Future[int], memoryview]] = deque()

        def read_next(buffer: memoryview) -> None:
            if (offset := next(offsets, None)) is not None:
                part = buffer[: size - offset]
                running.append((_READERS.get().submit(self._read_piece, name, offset, part), part))

        try:
            for _ in range(min(_AHEAD, -(-size // PIECE_BYTES))):
                read_next(memoryview(bytearray(min(size, PIECE_BYTES))))
            while running:
                future, part = running.popleft()
                yield part[: future.result()]
                # Memory that is used again is faster than new.
                read_next(part)
        finally:
            for future, _ in running:
                future.cancel()

    def create(self, name: str, chunks: Iterable[Chunk]) -> None:
        if self.size(name) is not None:
            raise FileExistsError(name)
        parts = _parts(chunks, self._piece_bytes)
        first = next(parts, b"")
        second = next(parts, None)
        token = secrets.token_hex(16)
        if second is None:
            created = self._put(name, first, token, IfNoneMatch="*") is not None
        else:
            created = self._upload(name, first, second, parts, token)
        if not created:
            raise StorageError(f"{self._uri}/{name}: another process has just written it")

    def claim(self, name: str, data: bytes) -> bool:
        return self._put(name, data, secrets.token_hex(16), IfNoneMatch="*") is not None

    def replace(self, name: str, data: bytes, expected: bytes) -> bool:
        try:
            there, etag = self._read(name)
        except FileNotFoundError:
            return False
        if there != expected:
            return False
        return self._put(name, data, secrets.token_hex(16), IfMatch=etag) is not None

    def remove(self, name: str) -> bool:
        if self.size(name) is None:
            return False
        self._client.call("delete_object", Bucket=self._bucket, Key=self._key(name))
        return True

    def remove_empty_dir(self, directory: str) -> bool:
        return not self.names(directory)

    def discard_leftovers(self, directory: str = "") -> int:
        del directory  # `claim` and `replace` leave none
        return 0

    def abort_uploads(self, abandoned: Callable[[str], bool]) -> int:
        aborted = 0
        for upload in self._uploads():
            if abandoned(upload["Key"].removeprefix(self._prefix)):
                self._abort(upload["Key"], upload["UploadId"])
                aborted += 1
        return aborted

    def probe(self) -> None:
        probe_by_use(self, self._probe_replacing)

    def _probe_replacing(self, name: str) -> None:
        """Whether a file is replaced as it was read, and not otherwise. Raises StorageError."""
        data, etag = self._read(name)
        replaced = self.replace(name, secrets.token_bytes(256), expected=data)
        if not replaced or self._put(name, data, secrets.token_hex(16), IfMatch=etag) is not None:
            raise unconditional(self)

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _pages(self, prefix: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """The pages of a listing."""
        while True:
            page = self._client.call(
                "list_objects_v2", Bucket=self._bucket, Prefix=prefix, **parameters
            )
            yield page
            if not page.get("IsTruncated"):
                return
            parameters["ContinuationToken"] = page["NextContinuationToken"]

    def _uploads(self) -> list[dict[str, Any]]:
        """Open uploads under the prefix."""
        uploads: list[dict[str, Any]] = []
        marker: dict[str, Any] = {}
        while True:
            page = self._client.call(
                "list_multipart_uploads", Bucket=self._bucket, Prefix=self._prefix, **marker
            )
            uploads += page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return uploads
            marker = {
                "KeyMarker": page.get("NextKeyMarker", ""),
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }

    def _read(self, name: str) -> tuple[bytes, str]:
        """Content and ETag. Raises FileNotFoundError."""
        try:
            return self._client.get(
                expected=(NO_SUCH_KEY,), Bucket=self._bucket, Key=self._key(name)
            )
        except Answer as answer:
            raise FileNotFoundError(name) from answer

    def _read_piece(self, name: str, start: int, target: memoryview) -> int:
        """Fill `target` with the bytes from `start` on; how many there were."""
        try:
            return self._client.get_into(
                target,
                expected=(NO_SUCH_KEY, INVALID_RANGE),
                Bucket=self._bucket,
                Key=self._key(name),
                Range=f"bytes={start}-{start + len(target) - 1}",
            )
        except Answer as answer:
            if answer.code == INVALID_RANGE:
                return 0
            raise FileNotFoundError(name) from answer

    def _put(self, name: str, data: bytes, token: str, **condition: str) -> str | None:
        """Put an object if the condition holds: its ETag. None where it does not hold."""
        key = self._key(name)
        try:
            answer = self._client.call(
                "put_object",
                # What is to be replaced may be gone; on servers other than S3, anything may be 404.
                expected=(PRECONDITION_FAILED, *((NO_SUCH_KEY,) if "IfMatch" in condition else ())),
                Bucket=self._bucket,
                Key=key,
                body=data,
                Metadata={_TOKEN: token},
                **condition,
            )
        except Answer:
            return self._etag_if_ours(key, token)
        return answer["ETag"]

    def _etag_if_ours(self, key: str, token: str) -> str | None:
        """The ETag of an object that was written with this token; None where it was not."""
        try:
            head = self._client.call(
                "head_object", expected=(NO_SUCH_KEY,), Bucket=self._bucket, Key=key
            )
        except Answer:
            return None
        return head["ETag"] if head.get("Metadata", {}).get(_TOKEN) == token else None

    def _upload(
        self, name: str, first: bytes, second: bytes, rest: Iterator[bytes], token: str
    ) -> bool:
        """Create a large object, in parts, several at a time; False if the name is taken by now.

        Memory: `_PARALLEL` parts, and the next two. If anything fails, the upload is aborted.
        """
        key = self._key(name)
        place = {"Bucket": self._bucket, "Key": key}
        upload = self._client.call("create_multipart_upload", Metadata={_TOKEN: token}, **place)[
            "UploadId"
        ]
        tags: dict[int, str] = {}
        running: set[Future[None]] = set()

        def send(number: int, part: bytes) -> None:
            sent = self._client.call(
                "upload_part", UploadId=upload, PartNumber=number, body=part, **place
            )
            tags[number] = sent["ETag"]

        def numbered() -> Iterator[tuple[int, bytes]]:
            yield 1, first
            yield 2, second
            yield from enumerate(rest, 3)

        try:
            with ThreadPoolExecutor(_PARALLEL) as pool:
                try:
                    for number, part in numbered():
                        # One waits for its turn, so that no thread waits for the next part.
                        running.add(pool.submit(send, number, part))
                        if len(running) > _PARALLEL:
                            done, running = wait(running, return_when=FIRST_COMPLETED)
                            for future in done:
                                future.result()
                    for future in running:
                        future.result()
                finally:
                    for future in running:
                        future.cancel()
            self._client.call(
                "complete_multipart_upload",
                expected=(PRECONDITION_FAILED, NO_SUCH_UPLOAD),
                UploadId=upload,
                MultipartUpload={
                    "Parts": [{"PartNumber": n, "ETag": tags[n]} for n in sorted(tags)]
                },
                IfNoneMatch="*",
                **place,
            )
        except Answer as answer:
            ours = self._etag_if_ours(key, token) is not None
            if not ours and answer.code == NO_SUCH_UPLOAD:
                raise StorageError(
                    f"{self._uri}/{name}: somebody aborted its upload",
                    "another attempt has taken over, or a rule of the bucket ends uploads early",
                ) from answer
            if not ours:
                self._abort(key, upload)
            return ours
        except BaseException:
            with suppress(StorageError):
                self._abort(key, upload)
            raise
        return True

    def _abort(self, key: str, upload: str) -> None:
        with suppress(Answer):
            self._client.call(
                "abort_multipart_upload",
                expected=(NO_SUCH_UPLOAD, NO_SUCH_KEY),
                Bucket=self._bucket,
                Key=key,
                UploadId=upload,
            )


def _parts(chunks: Iterable[Chunk], piece_bytes: int) -> Iterator[bytes]:
    """The content of `chunks` cut into the parts of an upload."""
    number = 1
    views: list[memoryview] = []
    missing = part_bytes(number, piece_bytes)
    for chunk in chunks:
        rest = flat(chunk)
        while rest:
            views.append(rest[:missing])
            missing -= len(views[-1])
            rest = rest[len(views[-1]) :]
            if not missing:
                yield b"".join(views)
                number += 1
                views, missing = [], part_bytes(number, piece_bytes)
    if views:
        yield b"".join(views)
