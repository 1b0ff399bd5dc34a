"""What tests of the command line share: the real `vitra`, and tiny specs."""

from __future__ import annotations

import copy
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.fixtures import images
from tests.s3.fixtures import s3, s3_place, s3_server, s3_uri

__all__ = ["images", "s3", "s3_place", "s3_server", "s3_uri"]  # fixtures of all tests

#: Far more than any command takes on a busy machine: one that hangs fails its test.
PATIENCE_S = 150.0

pytest_plugins = ["tests.workers", "tests.wheel"]

_SERVER = "vitra_server.py"

# A shell starts what it runs in the background with interrupts ignored, nohup what it runs with
# hang-ups ignored, and commands inherit that; the tests are about commands in the foreground of a
# terminal, wherever they themselves run.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Modules and tests stay to the end: to look for garbage among them takes a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Let torch compute on one thread here: those of two processes wait for each other spinning.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


_TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "kind": "vla",
        "options": {
            "dim": 32,
            "layers": 1,
            "heads": 2,
            "action_width": 32,
            "action_layers": 1,
            "action_heads": 2,
            "eval_frames": 4,
            "eval_samples": 2,
        },
    },
    "data": {
        "kind": "synthetic",
        "options": {"samples": 64, "holdout": 8},
        "num_workers": 0,
    },
    "train": {
        "max_steps": 20,
        "global_batch_size": 8,
        "per_device_batch_size": 2,
        "learning_rate": 1e-3,
        "enable_mixed_precision_training": False,
        "enable_gradient_checkpointing": False,
    },
    "checkpoint": {"save_interval": 5},
    "resources": {"tasks_per_node": 2},
}


def tiny_spec(**changes: object) -> str:
    """A spec that two processes train in a second, as YAML; `train__max_steps=3` changes a key.

    A value of None removes the key.
    """
    document = copy.deepcopy(_TINY)
    for name, value in changes.items():
        *sections, key = name.split("__")
        table = document
        for section in sections:
            table = table.setdefault(section, {})
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def vitra_command() -> str:
    """The installed command that belongs to this Python."""
    found = shutil.which("vitra", path=str(Path(sys.executable).parent))
    assert found, f"vitra is not installed beside {sys.executable}"
    return found


@dataclass(frozen=True)
class Answer:
    """What a finished command said."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one document on stdout; fails if there is anything else."""
        document = json.loads(self.stdout)
        assert isinstance(document, dict)
        return document


class VitraServer:
    """The process of tests/vitra_server.py; started at the first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None

    def run(self, words: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> Answer:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "error", str(Path(__file__).with_name(_SERVER))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        stdout, stderr = self._directory / "stdout", self._directory / "stderr"
        request = {
            "words": words,
            "cwd": str(cwd),
            "environ": dict(environ),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answered, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        if not answered:
            self.stop()
            pytest.fail(f"vitra {' '.join(words)} took more than {PATIENCE_S:g} s")
        code = int(process.stdout.readline())
        return Answer(code, stdout.read_text(), stderr.read_text())

    def stop(self) -> None:
        if self._process is not None:
            with self._process as process:
                process.kill()
            self._process = None


@dataclass
class Vitra:
    """Runs the command in `directory`, without what the shell around the tests may say of runs."""

    directory: Path
    server: VitraServer
    environ: Mapping[str, str] = field(default_factory=dict)

    def __call__(
        self,
        *words: str | Path,
        code: int | None = 0,
        environ: Mapping[str, str] | None = None,
    ) -> Answer:
        """Run to the end; fails unless it exits with `code` (None: any)."""
        answer = self.server.run([*map(str, words)], self.directory, self._environ(environ))
        assert code is None or answer.code == code, (
            f"vitra {' '.join(map(str, words))}: exit code {answer.code}, not {code}\n"
            f"stdout: {answer.stdout}\nstderr: {answer.stderr}"
        )
        assert "Traceback" not in answer.stdout + answer.stderr, answer.stderr
        return answer

    def start(
        self,
        *words: str | Path,
        environ: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start the installed command and leave it running.

        What it prints goes to the descriptor `output`, or to where `terminal` finds it.
        """
        with (self.directory / "terminal.log").open("ab") as log:
            return subprocess.Popen(
                [vitra_command(), *map(str, words)],
                cwd=self.directory,
                env=self._environ(environ),
                stdin=subprocess.DEVNULL,
                stdout=log if output is None else output,
                stderr=subprocess.STDOUT,
            )

    def terminal(self) -> str:
        """What started commands have printed so far."""
        return (self.directory / "terminal.log").read_text()

    def spec(self, text: str | None = None, **changes: object) -> Path:
        """Write a spec file: `text`, or a tiny spec with changes."""
        path = self.directory / "spec.yaml"
        path.write_text(tiny_spec(**changes) if text is None else text)
        return path

    def _environ(self, more: Mapping[str, str] | None) -> dict[str, str]:
        inherited = {n: v for n, v in os.environ.items() if not n.startswith("VITRA_")}
        return {**inherited, **self.environ, **(more or {})}


@pytest.fixture(scope="session")
def vitra_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VitraServer]:
    server = VitraServer(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture
def vitra(tmp_path: Path, vitra_server: VitraServer) -> Vitra:
    """The command, run in a directory of the test's own."""
    return Vitra(tmp_path, vitra_server)


def run_python(code: str, environ: Mapping[str, str] | None = None) -> str:
    """All that a fresh Python prints for a piece of code."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.stdout.decode()


def tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every path below a directory, with modification time and content: to show what changed."""
    return {
        str(path.relative_to(directory)): (
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(directory.rglob("*"))
    }


def wait_until(true: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """Return once `true()` is; fails after `within_s`, naming `what` was waited for."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
        time.sleep(0.02)
