"""The launcher's one door to other programs: no shell ever, every wait has an end, typed errors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.spec.errors import VitraError

#: A finished process's exit code when it was ended by a signal n is -n, as in subprocess.
Process = subprocess.Popen[bytes]


class CommandTimedOut(VitraError):
    """A program did not answer in time; it has been killed and reaped."""


@dataclass(frozen=True)
class Answer:
    """What a finished program said."""

    returncode: int
    stdout: bytes
    stderr: str


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Answer:
    """Run a program to its end.

    Raises:
        CommandTimedOut: it took longer than `timeout_s`.
        FileNotFoundError: there is no such program.
    """
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, timeout=timeout_s, env=env, cwd=cwd, check=False
        )
    except subprocess.TimeoutExpired as err:
        raise CommandTimedOut(f"{argv[0]} gave no answer within {timeout_s:g} s") from err
    return Answer(done.returncode, done.stdout, done.stderr.decode(errors="replace"))


def start(argv: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path) -> Process:
    """Start a program in a session of its own, its output appended to `log`.

    A session of its own keeps the terminal's Ctrl-C to the process that watches over it, and lets
    that one end the whole tree at once.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
