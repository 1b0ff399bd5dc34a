"""A run that is training while a test looks at it, signals it and kills parts of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE_S, Vitra, wait_until
from trainer.spec.rundir import RunDir, read_lines


class LiveRun:
    """The one run under `vitra`'s default run root, and the command that supervises it."""

    def __init__(self, vitra: Vitra, **spec: object) -> None:
        """Submit it; it trains when this returns, or is about to."""
        self.vitra = vitra
        vitra.spec(**{"train__max_steps": 100_000, **spec})
        self.command = vitra.start("submit", "spec.yaml", "--local")
        wait_until(lambda: self._paths() or self._gone(), "the run directory")
        (path,) = self._paths()
        self.dir = RunDir(path)

    @property
    def run_id(self) -> str:
        return self.dir.path.name

    def resume(self, *words: str) -> None:
        """Go on with it in the background."""
        self.command = self.vitra.start("resume", self.run_id, *words)

    def wait_for_step(self, step: int) -> None:
        """Return once the newest attempt has finished `step`, which it has not before."""
        wait_until(lambda: self.step() >= step or self._gone(), f"step {step}")

    def wait_for_event(self, event: str, count: int = 1) -> None:
        wait_until(lambda: len(self.events(event)) >= count or self._gone(), f"event {event}")

    def ends(self, within_s: float = PATIENCE_S) -> int:
        """The exit code of the command, once it has ended."""
        return self.command.wait(timeout=within_s)

    def step(self) -> int:
        """The last finished step that the running attempt has logged; 0 if there is none."""
        if self.status()["attempts"][-1:] == []:
            return 0
        return int(self.status()["attempts"][-1]["last_step"] or 0)

    def status(self) -> dict[str, Any]:
        return self.vitra("status", self.run_id, "--json").json

    def events(self, event: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(self.dir.events) if e["event"] == event]

    def steps(self) -> list[int]:
        """The steps that metrics.jsonl has."""
        return [record["step"] for record in read_lines(self.dir.metrics)]

    def processes(self, words: str = "") -> dict[int, str]:
        """The living processes of the ranks: their tasks, trainers and data workers, by pid.

        Only those whose environment names this run, and whose command line holds `words`.
        """
        mark = f"VITRA_RUN_ID={self.run_id}".encode()
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if mark in environ and words in command:
                found[int(entry.name)] = command
        return found

    def trainer_of(self, rank: int) -> int:
        """The pid of a rank's trainer: the child of its task."""
        for pid in self.processes("-m trainer"):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if f"RANK={rank}".encode() in environ and parent in self.processes("launcher.task"):
                return pid
        raise AssertionError(f"no trainer of rank {rank}: {self.processes()}")

    def end(self) -> None:
        """Leave nothing running, however the test went."""
        self.command.kill()
        self.command.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _paths(self) -> list[Path]:
        return [p.parent for p in (self.vitra.directory / "runs").glob("*/run.json")]

    def _gone(self) -> bool:
        if self.command.poll() is not None:
            raise AssertionError(f"ended with {self.command.returncode}: {self.vitra.terminal()}")
        return False


def runs_into_a_full_place(
    live: LiveRun, fill: Callable[[], object], free: Callable[[], object], says: str
) -> None:
    """Checkpoints that find no room: a warning, then the run's end; with room, it goes on.

    `live` has just been started and saves every five steps; `says` is what the place answers.
    """
    vitra = live.vitra
    try:
        live.wait_for_event("saved")
        fill()
        assert live.ends() == 6
        failed = live.status()
        good = failed["last_checkpoint_step"]
        vitra("checkpoints", live.run_id, "--verify")
        free()
        live.resume("-o", f"train.max_steps={good + 7}")
        assert live.ends() == 0
        status = live.status()
    finally:
        live.end()
    assert (failed["state"], failed["attempts"][0]["verdict"]) == ("failed", "error")
    assert says in failed["reason"]
    # The first failure is only a warning, the second in a row ends the run.
    assert [e["step"] for e in live.events("save_failed")] == [good + 5, good + 10]
    assert all(says in e["reason"] for e in live.events("save_failed"))
    assert f"step {good + 5} was not saved" in vitra.terminal()
    assert (status["state"], status["attempts"][1]["first_step"]) == ("completed", good + 1)
    assert live.steps() == list(range(1, good + 8))
