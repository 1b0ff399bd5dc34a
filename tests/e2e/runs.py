"""Real runs of the real command, interrupted for real, and compared bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

#: Figures that tell how a step was computed, not what came of it.
_NOT_COMPARED = ("step_time_s", "data_wait_s", "memory_bytes", "attempt")


def spec(world: int, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run of some seconds: 60 steps, 40 an epoch, accumulation 2, batch 2 a device, dropout."""
    document: dict[str, Any] = {
        "name": "equal",
        "seed": 7,
        "model": {
            "kind": "vla",
            "options": {
                "dim": 32,
                "layers": 1,
                "heads": 2,
                "action_width": 32,
                "action_layers": 1,
                "action_heads": 2,
                "dropout": 0.1,
            },
        },
        "data": {"kind": "synthetic", "options": {"samples": 160 * world}, "num_workers": 0},
        "train": {
            "max_steps": 60,
            "global_batch_size": 4 * world,
            "per_device_batch_size": 2,
            "learning_rate": 1e-3,
            "warmup_ratio": 0.1,
            "repeated_diffusion_steps": 2,
            "enable_mixed_precision_training": False,
            "enable_gradient_checkpointing": False,
        },
        "checkpoint": {"save_interval": 4},
        "resources": {"tasks_per_node": world},
        "tracking": {"sample_ids": True},
    }
    for section, keys in changes.items():
        document[section] = {**document[section], **keys} if isinstance(keys, dict) else keys
    return document


class Run:
    """One run: started, killed and resumed through the command line, from `cwd`."""

    def __init__(
        self,
        root: Path,
        document: dict[str, Any],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        python: Path | None = None,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._spec = root / "spec.yaml"
        self._spec.write_text(yaml.safe_dump(document, sort_keys=False))
        self._env = {**os.environ, **(env or {})}
        self._python = str(python or sys.executable)
        self.cwd = cwd

    @property
    def dir(self) -> Path:
        (found,) = [path.parent for path in (self._root / "runs").glob("*/run.json")]
        return found

    def start(
        self, env: Mapping[str, str] | None = None, more: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Submit, or resume what was submitted, in the background; `more` are words to add."""
        submitted = bool(list((self._root / "runs").glob("*/run.json")))
        words = ["resume", str(self.dir)] if submitted else ["submit", str(self._spec), "--local"]
        with (self._root / "terminal.log").open("ab") as log:
            return subprocess.Popen(
                [
                    self._python,
                    "-P",
                    "-m",
                    "launcher.cli",
                    *words,
                    *more,
                    "--run-root",
                    str(self._root / "runs"),
                ],
                stdout=log,
                stderr=log,
                cwd=self.cwd,
                env={**self._env, **(env or {})},
            )

    def finish(
        self,
        env: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
        timeout_s: float = 240,
    ) -> None:
        """Run to the end; fails with the terminal's text if that is not success."""
        process = self.start(env, more)
        code = process.wait(timeout=timeout_s)
        assert code == 0, f"exit code {code}: {(self._root / 'terminal.log').read_text()[-3000:]}"

    def terminal(self) -> str:
        """What its commands have printed so far."""
        return (self._root / "terminal.log").read_text()

    def processes(self) -> dict[int, str]:
        """The living processes that were started for the run, by pid."""
        return _processes_of(self.dir.name)

    def kill_at(self, step: int, chance: random.Random, timeout_s: float = 120) -> str:
        """Start, and kill -9 the supervisor or a rank at a random moment once `step` is finished.

        Returns what was killed. The command is gone when this returns, and all that it started.
        """
        process = self.start()
        try:
            self._wait_for(step, process, timeout_s)
            time.sleep(chance.random() * 0.15)
            victims = _processes_of(self.dir.name)
            ranks = [pid for pid, words in victims.items() if "trainer" in words]
            if ranks and chance.random() < 0.5:
                os.kill(chance.choice(ranks), signal.SIGKILL)
                what = "rank"
            else:
                process.kill()
                what = "supervisor"
        finally:
            code = process.poll()
            if code is None:
                process.wait(timeout=60)
        deadline = time.monotonic() + 20
        while _processes_of(self.dir.name):
            assert time.monotonic() < deadline, f"left over: {_processes_of(self.dir.name)}"
            time.sleep(0.05)
        return what

    def _wait_for(self, step: int, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert process.poll() is None, (self._root / "terminal.log").read_text()[-3000:]
            if list((self._root / "runs").glob("*/run.json")) and self.newest_step() >= step:
                return
            time.sleep(0.02)
        raise AssertionError(f"step {step} was not reached in {timeout_s} s")

    def newest_step(self) -> int:
        """The last step of the newest attempt's log."""
        attempts = [int(p.name) for p in (self.dir / "attempts").iterdir()]
        if not attempts:
            return -1
        records = read_lines(self.dir / "attempts" / str(max(attempts)) / "metrics.jsonl")
        return records[-1]["step"] if records else -1

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(self.dir / "events.jsonl") if e["event"] == name]

    def results(self) -> dict[str, Any]:
        """All that an interruption must not change, down to the last bit."""
        return results(self.dir)


def results(run_dir: Path, place: Path | None = None) -> dict[str, Any]:
    """What an interruption must not change: metrics, samples of each rank, each byte of state.

    `place` has the checkpoints where they are not in the run directory.
    """
    checkpoints = sorted((place or run_dir / "checkpoints").glob("step-*/manifest.json"))
    manifest = json.loads(checkpoints[-1].read_text())
    metrics = read_lines(run_dir / "metrics.jsonl")
    return {
        "metrics": [{k: v for k, v in m.items() if k not in _NOT_COMPARED} for m in metrics],
        "samples": {p.name: read_lines(p) for p in sorted(run_dir.glob("samples-rank*.jsonl"))},
        "state": tensor_digests(checkpoints[-1].parent),
        "step": manifest["step"],
    }


def tensor_digests(step_directory: Path) -> dict[str, list[str]]:
    """Digests of the bytes of every tensor of a checkpoint: weights and optimizer state.

    Which rank's file a tensor lies in, and where, is no part of the result.
    """
    (index,) = step_directory.glob("index-*.json")
    digests: dict[str, list[str]] = {}
    for name, tensor in json.loads(index.read_text())["tensors"].items():
        for chunk in tensor["chunks"]:
            with (step_directory / chunk["file"]).open("rb") as file:
                file.seek(chunk["start"])
                data = file.read(chunk["length"])
            digests.setdefault(name, []).append(hashlib.blake2b(data, digest_size=16).hexdigest())
    return digests


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines."""
    if not path.exists():
        return []
    data = path.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def _processes_of(run_id: str) -> dict[int, str]:
    """Living processes of a run, by the variable that its ranks and data workers carry."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes().split(b"\0")
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"VITRA_RUN_ID={run_id}".encode() in environ and words:
            found[int(entry.name)] = words
    return found
