"""`python -P -m launcher.task RUN_DIR`: watches over one rank. Standard library only.

The scheduler signals the process that it started, and some clusters only that one. So each rank
has this small parent: it starts the trainer, passes signals on once each, and records how the
trainer ended, which a killed process cannot do itself. It dies with the supervisor, and the trainer
with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from launcher.oom import oom_kills
from launcher.slurm_env import is_step_task, rank_variables
from trainer.spec.rundir import RunDir, write_atomic

_PR_SET_PDEATHSIG = 1
#: To stop, and (QUIT) to show what it is doing.
_FORWARDED = (signal.SIGTERM, signal.SIGUSR2, signal.SIGQUIT)


def main(arguments: list[str]) -> int:
    """Run the rank that the environment describes; returns its exit code, 128 + n for signal n.

    As a step's task: 0 wherever the rank's end is on record.
    """
    if len(arguments) != 1:
        sys.stderr.write("usage: python -P -m launcher.task RUN_DIR\n")
        return 2
    _die_with_parent()
    # Before there is a log, from which a supervisor concludes that signals are heard here.
    forward = _Forwarder()
    run_dir = arguments[0]
    if is_step_task(os.environ):
        os.environ |= rank_variables(os.environ)
        _log_to_own_file(RunDir(Path(run_dir)))
    kills = oom_kills()
    # The trainer inherits the mask and lifts it when it has its handlers: a stop that reaches it
    # earlier waits for that, where it would kill an interpreter that is just starting.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "trainer", run_dir],
        env={**os.environ, "VITRA_PARENT_PID": str(os.getpid())},
        stdin=subprocess.DEVNULL,
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    forward.to(child)
    code = child.wait()
    out_of_memory = code == -signal.SIGKILL and oom_kills() > kills
    if _record(RunDir(Path(run_dir)), code, out_of_memory=out_of_memory) and is_step_task(
        os.environ
    ):
        # All is said. On another code srun would have the step ended: ranks that saved as well and
        # are a moment later; and, where srun was cut off from Slurm, after that the step that has
        # this one's number in the job's next life.
        return 0
    return code if code >= 0 else 128 - code


class _Forwarder:
    """Passes each signal to the trainer once, also one that comes before it is there."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._held: list[int] = []
        self._seen: set[int] = set()
        for number in _FORWARDED:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def to(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        while self._held:
            child.send_signal(self._held.pop(0))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number in self._seen:
            return
        self._seen.add(number)
        if self._child is None:
            self._held.append(number)
        else:
            self._child.send_signal(number)


def _log_to_own_file(run_dir: RunDir) -> None:
    """As a step's task: print to the rank's log, not through srun, whose pipe may be cut."""
    log = run_dir.attempt(int(os.environ["VITRA_ATTEMPT"])).log(int(os.environ["RANK"]))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _record(run_dir: RunDir, code: int, *, out_of_memory: bool) -> bool:
    """Publish attempts/K/rank_R.exit, without which the rank counts as lost; whether it is there"""
    rank = int(os.environ["RANK"])
    path = run_dir.attempt(int(os.environ["VITRA_ATTEMPT"])).exit(rank)
    record = {
        "rank": rank,
        "node": os.uname().nodename,
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "ended_at": time.time(),
        "out_of_memory": out_of_memory,
    }
    try:
        write_atomic(path, json.dumps(record).encode())
    except OSError as err:
        # A disk that is full: the supervisor still sees the code that this process exits with.
        with suppress(OSError):
            sys.stderr.write(f"cannot write {path}: {err}\n")
        return False
    return True


def _die_with_parent() -> None:
    parent = os.environ.get("VITRA_PARENT_PID", "")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above.
    if parent.isdigit() and os.getppid() != int(parent):
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
