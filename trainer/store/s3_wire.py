"""How much data goes to an S3 server and comes from it: in threads, and without a copy too many.

aiobotocore, which s3fs stands on, sends and reads all in one event loop, by small pieces that are
put together and copied. That takes more than twice the CPU time of reading a socket into the place
where the bytes belong, and no second core can help.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.httpsession import URLLib3Session
from urllib3.exceptions import HTTPError

#: How much is read at a time: little enough to be still in the cache when it is copied.
_STEP_BYTES = 1 << 20
#: From here on a body is worth a thread.
_LARGE_BYTES = 256 << 10


class ThreadedSession(AIOHTTPSession):
    """aiobotocore's HTTP session, which leaves requests for or with much data to botocore's.

    Both are made with the same settings: TLS, proxies, time-outs. For `http_session_cls` of an
    aiobotocore configuration.
    """

    def __init__(self, *, connector_args: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(connector_args=connector_args, **settings)
        self._blocking = URLLib3Session(**settings)
        self._threads = ThreadPoolExecutor(settings["max_pool_connections"], "s3-ask")

    async def send(self, request: Any) -> Any:
        body = request.body
        # Over TLS a body is a stream of aiobotocore's own, with its checksum at the end.
        is_large = isinstance(body, bytes) and len(body) > _LARGE_BYTES
        if not request.stream_output and not is_large:
            return await super().send(request)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._threads, self._blocking.send, request)
        content = (
            Content(answer.raw, self._threads) if request.stream_output else _Read(answer.content)
        )
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return AioAWSResponse(request.url, answer.status_code, headers, content)

    async def close(self) -> None:
        self._blocking.close()
        self._threads.shutdown(wait=False)
        await super().close()


class Content:
    """The body of an answer, not read so far. To aiobotocore it is a response of aiohttp's."""

    def __init__(self, response: Any, threads: ThreadPoolExecutor) -> None:
        self._response = response
        self._threads = threads

    def read_into(self, target: memoryview) -> int:
        """Fill `target`, in the calling thread; how many bytes came, fewer where it is cut off.

        Raises:
            OSError: the connection broke.
        """
        found = 0
        try:
            while found < len(target):
                count = self._response.readinto(target[found : found + _STEP_BYTES])
                if not count:
                    break
                found += count
        except HTTPError as err:
            raise ConnectionError(str(err)) from err
        return found

    def close(self) -> None:
        """Give the connection back if all was read, else end it."""
        self._response.close()

    @property
    def content(self) -> Content:
        return self

    async def read(self, size: int = -1) -> bytes:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._read, size)

    def _read(self, size: int) -> bytes:
        try:
            return self._response.read(None if size < 0 else size)
        except HTTPError as err:
            raise ConnectionError(str(err)) from err


class _Read:
    """The body of an answer that was read already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data
