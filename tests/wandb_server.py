"""As much of a W&B server as the real client needs, on this machine; and ones that do not work."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

#: Of the form that the client demands; nobody's.
API_KEY = "0123456789abcdef" * 3


def python_path(*first: Path) -> str:
    """PYTHONPATH with directories in front of those that are there."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, first), *([inherited] if inherited else [])])


class Run:
    """A run as the server has it."""

    def __init__(self) -> None:
        #: Rows of history by line number, as the client says where they belong.
        self.history: dict[int, dict[str, Any]] = {}
        #: Numbers of all rows that ever arrived, in order.
        self.arrived: list[int] = []
        self.config: dict[str, Any] = {}
        self.exit_codes: list[int] = []

    def steps(self) -> list[int]:
        return [self.history[line]["_step"] for line in sorted(self.history)]


class WandbServer:
    """Keeps what is sent: runs by id."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.operations: list[str] = []
        self.url = ""
        #: Answers with HTTP 500 while set.
        self.failing = False

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data that a GraphQL operation asks for."""
        self.operations.append(operation)
        project = {"id": "p", "name": variables.get("project") or "project"}
        project["entity"] = {"id": "e", "name": variables.get("entity") or "entity"}
        name = variables.get("name", "")
        match operation:
            case "RunResumeStatus":
                run = self.runs.get(name)
                return {"model": {**project, "bucket": _bucket(name, run) if run else None}}
            case "UpsertBucket":
                inserted = name not in self.runs
                run = self.runs.setdefault(name, Run())
                if variables.get("config"):
                    run.config = json.loads(variables["config"])
                bucket = {"id": "b", "name": name, "displayName": name, "project": project}
                bucket |= {"description": "", "config": "{}", "sweepName": None}
                bucket["historyLineCount"] = len(run.history)
                return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}
            case "Viewer":
                viewer = {"id": "v", "entity": "entity", "username": "me", "email": None}
                return {"viewer": {**viewer, "flags": "{}", "teams": {"edges": []}}}
            case "CreateRunFiles":
                files = [
                    {"name": file, "uploadUrl": f"{self.url}/upload"} for file in variables["files"]
                ]
                return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
            case _:
                return {}

    def stream(self, run_id: str, document: dict[str, Any]) -> None:
        run = self.runs[run_id]
        chunk = document.get("files", {}).get("wandb-history.jsonl")
        if chunk:
            for number, line in enumerate(chunk["content"], start=chunk["offset"]):
                run.history[number] = json.loads(line)
                run.arrived.append(run.history[number]["_step"])
        if document.get("complete"):
            run.exit_codes.append(document["exitcode"])


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A server that works."""
    state = WandbServer()

    class Handler(_Quiet):
        def do_POST(self) -> None:
            document = json.loads(self.body())
            if state.failing:
                self.reply(500, {})
            elif self.path == "/graphql":
                data = state.answer(document["operationName"], document.get("variables") or {})
                self.reply(200, {"data": data})
            else:
                state.stream(unquote(self.path.split("/")[-2]), document)
                self.reply(200, {})

        def do_PUT(self) -> None:
            self.body()
            self.reply(200, {})

    with _serving(Handler) as url:
        state.url = url
        yield state


def wandb_sync(directories: Sequence[Path], environ: Mapping[str, str], *, cwd: Path) -> None:
    """Have wandb's own command send what offline runs left; it leaves its logs in `cwd`."""
    subprocess.run(
        [sys.executable, "-m", "wandb", "sync", *directories],
        env=environ,
        cwd=cwd,
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )


@contextmanager
def failing_server() -> Iterator[str]:
    """The URL of a server that answers everything with HTTP 500."""

    class Handler(_Quiet):
        def do_POST(self) -> None:
            self.body()
            self.reply(500, {})

    with _serving(Handler) as url:
        yield url


@contextmanager
def black_hole() -> Iterator[str]:
    """The URL of a server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def closed_port() -> Iterator[str]:
    """The URL of a port that refuses connections: bound, and nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


class _Quiet(BaseHTTPRequestHandler):
    protocol_version: ClassVar[str] = "HTTP/1.1"

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, status: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        # Clients are killed in these tests, in the middle of whatever they do.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _bucket(name: str, run: Run) -> dict[str, Any]:
    tail = [json.dumps(run.history[line]) for line in sorted(run.history)[-1:]]
    return {
        "id": "b",
        "name": name,
        "displayName": name,
        "summaryMetrics": "{}",
        "logLineCount": 0,
        "historyLineCount": len(run.history),
        "eventsLineCount": 0,
        "historyTail": json.dumps(tail),
        "eventsTail": "[]",
        "config": json.dumps(run.config),
        "tags": [],
        "notes": "",
        "wandbConfig": '{"t": 1}',
    }
