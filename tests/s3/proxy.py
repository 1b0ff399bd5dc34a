"""A proxy between a client and the S3 server that does to requests what networks and servers do."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

#: Long enough to be noticed, far shorter than any time-out.
_SLOW_S = 0.3


@dataclass(frozen=True)
class Request:
    """A request as the proxy sees it: the `number`-th, from 1."""

    number: int
    method: str
    path: str
    key_id: str


#: What is done to a request; None: nothing. One of `FAULTS`.
Plan = Callable[[Request], str | None]

#: unavailable  answered with 503, not passed on
#: reset        cut off before it is passed on
#: lost         carried out, and cut off before the answer
#: truncated    carried out; of the answer's body only a half comes
#: slow         carried out and answered, late
PASSING = ("unavailable", "reset", "lost", "truncated", "slow")
#: expired      answered with ExpiredToken, not passed on
#: full         answered as by a server that has no room, not passed on
FAULTS = (*PASSING, "expired", "full")


class FaultyProxy:
    """Listens on a port of its own while it is entered. `plan` may be replaced at any time."""

    def __init__(self, upstream: str, plan: Plan = lambda _request: None) -> None:
        self.plan = plan
        self.requests: list[Request] = []
        self._upstream = urllib.parse.urlsplit(upstream).netloc
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def decide(self, method: str, path: str, authorization: str) -> str | None:
        key_id = authorization.partition("Credential=")[2].partition("/")[0]
        with self._lock:
            request = Request(len(self.requests) + 1, method, path, key_id)
            self.requests.append(request)
            return self.plan(request)

    def pass_on(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            # As it came, the host's name included: the signature covers it.
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultyProxy

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.owner.decide(self.command, self.path, self.headers.get("Authorization") or "")
        if fault == "unavailable":
            self._error(503, "ServiceUnavailable")
            return
        if fault == "expired":
            self._error(400, "ExpiredToken")
            return
        if fault == "full":
            self._error(507, "XMinioStorageFull")
            return
        if fault == "reset":
            self._cut()
            return
        headers = [(n, v) for n, v in self.headers.items() if n.lower() != "expect"]
        try:
            status, answer_headers, answer = self.owner.pass_on(
                self.command, self.path, headers, body
            )
        except OSError:
            self._cut()
            return
        if fault == "lost":
            self._cut()
            return
        if fault == "slow":
            time.sleep(_SLOW_S)
        self._answer(status, answer_headers, answer, cut=fault == "truncated")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool
    ) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self._cut()

    def _error(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>a fault</Message></Error>"
        self._answer(status, [("Content-Type", "application/xml")], text.encode(), cut=False)

    def _cut(self) -> None:
        """Reset the connection."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
