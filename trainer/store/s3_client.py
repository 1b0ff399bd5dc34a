"""Calls of the S3 API through s3fs: retried for as long as that can help, and explained.

s3fs gives the connection: sessions, credentials, endpoints and options are those of any s3fs user
(`AWS_*`, profiles, `storage_options`). What it does not give is needed to lose nothing: conditional
writes with the answer to each, parts of one upload side by side, one layer of retries with an end
in sight, and credentials that are read anew when they have expired.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar, cast

from trainer.spec.errors import StorageError, UsageError

#: How long one call is tried again before its error counts: a server that is started anew takes
#: seconds, and a save that waits is better than one that fails.
PATIENCE_S = 60.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 8.0
#: Reads, and a save in the background.
_CONNECTIONS_AT_MOST = 32
_TIMEOUTS_S = {"connect_timeout": 10, "read_timeout": 60}

NO_SUCH_KEY = "NoSuchKey"
NO_SUCH_UPLOAD = "NoSuchUpload"
PRECONDITION_FAILED = "PreconditionFailed"
INVALID_RANGE = "InvalidRange"

#: Answers without a body have only a number.
_NAMES = {"404": NO_SUCH_KEY, "412": PRECONDITION_FAILED, "416": INVALID_RANGE}
#: Errors below 500 that pass.
_PASSING = frozenset(
    (
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "OperationAborted",
        "RequestTimeout",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "XAmzContentSHA256Mismatch",
    )
)
#: Credentials that were good once; new ones may be there by now, or be there soon.
_EXPIRED = frozenset(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"))
_CREDENTIALS_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, here and for the job"
)
_HINTS = {
    "AccessDenied": "the key needs to read, write, list and delete there",
    "403": "the key needs to read, write, list and delete there",
    "AuthorizationHeaderMalformed": "set AWS_DEFAULT_REGION to the bucket's region",
    "EntityTooLarge": "the server limits the size of objects or of the bucket: have that raised",
    "ExpiredToken": "renew the credentials; a run reads them again from file or profile, but not "
    "from its environment",
    "InvalidAccessKeyId": f"the server does not know the key: {_CREDENTIALS_HINT}",
    "InvalidBucketName": "set checkpoint.uri to s3://BUCKET/PREFIX",
    "NoSuchBucket": "make the bucket, or correct checkpoint.uri",
    "PermanentRedirect": "set AWS_DEFAULT_REGION to the bucket's region",
    "QuotaExceeded": "free space there or have the quota raised, then resume the run",
    "RequestTimeTooSkewed": "set this machine's clock",
    "XMinioStorageFull": "free space on the server, then resume the run",
    "SignatureDoesNotMatch": f"the secret does not belong to the key: {_CREDENTIALS_HINT}",
}


T = TypeVar("T")


class _Connections:
    """The s3fs instances of this process: making one takes half a second."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._held: dict[str, Any] = {}
        self._inherited: list[object] = []

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        if self._pid != os.getpid():
            # In a forked child. Closing its parent's connections, which is what happens to what
            # nobody refers to, would take the parent's sockets out of the event poll that the two
            # share. The lock may be held by a thread that was not forked with this one.
            self._inherited.append(self._held)
            self._held, self._lock, self._pid = {}, threading.Lock(), os.getpid()
        with self._lock:
            if key not in self._held:
                self._held[key] = make()
            return self._held[key]

    def forget(self, fs: Any) -> None:
        """Have the next call make a new one, which reads the credentials anew."""
        with self._lock:
            self._held = {key: one for key, one in self._held.items() if one is not fs}


_CONNECTIONS = _Connections()


class Answer(Exception):
    """The server's answer is an error that the caller has a use for.

    It may be the answer to a second try, where the first was carried out and its answer lost: the
    HTTP client, too, sends some requests again by itself.

    Attributes:
        code: S3's name of the error.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class S3Client:
    """The S3 API as one place uses it. Safe to share between threads, and after a fork.

    Args:
        uri: the place, for messages.
        options: what s3fs is to be made with.
        patience_s: for how long a call is tried again.
    """

    def __init__(self, uri: str, options: Mapping[str, Any], patience_s: float) -> None:
        self._uri = uri
        self._options = dict(options)
        self._patience_s = patience_s

    def call(
        self,
        operation: str,
        *,
        expected: Container[str] = (),
        body: bytes | None = None,
        **parameters: Any,
    ) -> dict[str, Any]:
        """One operation, by botocore's name for it, with `body` to send.

        Raises:
            Answer: the server answered with one of the `expected` error codes.
            StorageError: it refused, or could not be reached for `patience_s`.
        """

        def send(fs: Any) -> dict[str, Any]:
            content = {} if body is None else {"Body": body}
            return _sync(fs, operation, **parameters, **content)

        return self._persist(send, expected)

    def get(self, *, expected: Container[str] = (), **parameters: Any) -> tuple[bytes, str]:
        """Content and ETag of a small object.

        Raises as `call` does; a connection that ends in the middle is tried again.
        """

        async def fetch(fs: Any) -> tuple[bytes, str]:
            answer = await fs._call_s3("get_object", **parameters)
            async with answer["Body"] as body:
                data = await body.read()
            if len(data) != answer["ContentLength"]:
                raise ConnectionError(f"{len(data)} of {answer['ContentLength']} bytes came")
            return data, answer["ETag"]

        def ask(fs: Any) -> tuple[bytes, str]:
            from fsspec.asyn import sync

            return cast("tuple[bytes, str]", sync(fs.loop, fetch, fs))

        return self._persist(ask, expected)

    def get_into(
        self, target: memoryview, *, expected: Container[str] = (), **parameters: Any
    ) -> int:
        """Fill `target` with the range that `parameters` names; how many bytes there were.

        Read by the calling thread. Raises as `get` does; `target` may then hold anything.
        """

        def fetch(fs: Any) -> int:
            answer = _sync(fs, "get_object", **parameters)
            length, content = answer["ContentLength"], answer["Body"].raw_stream
            try:
                if length > len(target):
                    raise ConnectionError(f"{length} bytes came where {len(target)} were asked for")
                found = content.read_into(target[:length])
            finally:
                content.close()
            if found != length:
                raise ConnectionError(f"{found} of {length} bytes came")
            return found

        return self._persist(fetch, expected)

    def _persist(self, act: Callable[[Any], T], expected: Container[str]) -> T:
        """Call `act` with a file system, again and again while that can help."""
        deadline = time.monotonic() + self._patience_s
        pause_s, renewed = _FIRST_PAUSE_S, False
        while True:
            fs = self._file_system()
            try:
                return act(fs)
            except Exception as err:
                cause = _cause_of(err)
                code, status = _code_of(cause)
                if code is not None and code in expected:
                    raise Answer(code) from err
                if code in _EXPIRED or (code == "InvalidAccessKeyId" and not renewed):
                    # Another process may be writing the new ones just now.
                    _CONNECTIONS.forget(fs)
                    renewed = True
                elif not _passes(cause, code, status):
                    raise self._refused(cause, code, fs) from err
                # Many ranks that were refused together should not come back together.
                wait_s = pause_s * random.uniform(0.5, 1)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                if time.monotonic() + wait_s > deadline:
                    raise self._refused(cause, code, fs) from err
                time.sleep(wait_s)

    def _file_system(self) -> Any:
        """An s3fs instance of this process's own; shared by all that want the same one."""
        return _CONNECTIONS.get(self._key(), self._new_file_system)

    def _key(self) -> str:
        """What tells connections apart: options, and what botocore and fsspec take from outside."""
        around = {n: v for n, v in os.environ.items() if n.startswith(("AWS_", "FSSPEC_"))}
        return json.dumps([self._options, around], sort_keys=True, default=repr)

    def _new_file_system(self) -> Any:
        from s3fs import S3FileSystem

        from trainer.store.s3_wire import ThreadedSession

        config = {
            **_TIMEOUTS_S,
            "max_pool_connections": _CONNECTIONS_AT_MOST,
            **self._options.get("config_kwargs", {}),
            "http_session_cls": ThreadedSession,
        }
        # One layer of retries: three that multiply would take minutes to say that it is no use.
        config["retries"] = {"mode": "standard", "total_max_attempts": 1}
        try:
            fs = S3FileSystem(
                **{
                    **self._options,
                    "config_kwargs": config,
                    "use_listings_cache": False,
                    "skip_instance_cache": True,
                }
            )
            fs.retries = 1
            fs.connect()
        except (TypeError, ValueError, KeyError, AttributeError) as err:
            raise UsageError(
                f"checkpoint.storage_options: s3fs cannot use them: {err}",
                "see s3fs.S3FileSystem for what there is; an endpoint is a URL such as "
                "https://storage.example:9000",
            ) from err
        except Exception as err:
            raise self._refused(err, None, None) from err
        return fs

    def _refused(self, cause: BaseException, code: str | None, fs: Any) -> StorageError:
        text = str(cause)
        if code is not None:
            error = getattr(cause, "response", {}).get("Error", {})
            text = f"{code}: {error.get('Message') or 'no further words'}"
        hint = _HINTS.get(code or "")
        kind = type(cause).__name__
        if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
            hint = _CREDENTIALS_HINT
        elif code is None:
            text = f"{kind}: {text}" if text else kind
            hint = hint or (
                "see that the server runs and can be reached from here; AWS_ENDPOINT_URL says "
                "where it is"
            )
        elif code in _EXPIRED:
            hint = _HINTS["ExpiredToken"]
        return StorageError(f"{self._uri}{_at(fs)}: {' '.join(text.split())}", hint)


def _sync(fs: Any, operation: str, **parameters: Any) -> dict[str, Any]:
    """One operation, while this thread waits. Raises what s3fs does."""
    from fsspec.asyn import sync

    return cast("dict[str, Any]", sync(fs.loop, fs._call_s3, operation, **parameters))


def _at(fs: Any) -> str:
    """Which server, as far as that is known."""
    client = getattr(fs, "_s3", None)
    url = getattr(getattr(client, "meta", None), "endpoint_url", None)
    if not url:
        return ""
    parts = urllib.parse.urlsplit(url)
    return f" at {parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _cause_of(err: BaseException) -> BaseException:
    """What botocore raised, under what s3fs makes of it."""
    cause = err.__cause__
    return cause if cause is not None and hasattr(cause, "response") else err


def _code_of(err: BaseException) -> tuple[str | None, int]:
    """S3's name of an error and the HTTP status; (None, 0) where the server has not answered."""
    response = getattr(err, "response", None)
    if not isinstance(response, dict):
        return None, 0
    code = str(response.get("Error", {}).get("Code") or "")
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0
    return _NAMES.get(code, code) or f"HTTP {status}", int(status)


def _passes(err: BaseException, code: str | None, status: int) -> bool:
    """Whether trying again can help."""
    from aiohttp import ClientError
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.exceptions import HTTPClientError, IncompleteReadError
    from botocore.parsers import ResponseParserError

    if code is not None:
        # 507: it has no room, and will not have any in a minute.
        return code in _PASSING or status == 429 or (status >= 500 and status not in (501, 507))
    return isinstance(
        err,
        (
            HTTPClientError,
            NoConnection,
            IncompleteReadError,
            ResponseParserError,
            ClientError,
            asyncio.TimeoutError,
            TimeoutError,
            ConnectionError,
        ),
    )
