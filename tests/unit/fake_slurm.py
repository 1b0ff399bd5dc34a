"""A directory of commands named like Slurm's, whose answers a test scripts: for faults at will.

They stand in for a cluster that misbehaves, never for one that works: `tests/cluster` has that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.slurm import Slurm

# Plays the next step (the last one again and again), and notes its call. In sh, which starts in a
# tenth of the time that Python takes.
_PLAYER = """\
#!/bin/sh
here=$0.d
read -r calls <"$here/calls"
calls=$((calls + 1))
echo "$calls" >"$here/calls"
call=$here/call-$calls
mkdir "$call"
for word in "$@"; do printf '%s\\0' "$word"; done >"$call/argv"
env -0 >"$call/environ"
pwd >"$call/cwd"
case $0 in */sbatch) cat >"$call/stdin" ;; esac
read -r next <"$here/steps/next"
step=$here/steps/$next
[ ! -d "$here/steps/$((next + 1))" ] || echo "$((next + 1))" >"$here/steps/next"
for other in "$step"/then/*; do
  [ ! -d "$other" ] || { rm -rf "${0%/*}/${other##*/}.d/steps"
    cp -r "$other" "${0%/*}/${other##*/}.d/steps"; }
done
while IFS= read -r line; do printf '%s\\n' "$line"; done <"$step/out"
while IFS= read -r line; do printf '%s\\n' "$line"; done <"$step/err" >&2
read -r hang rc <"$step/end"
[ "$hang" = 0 ] || exec sleep "$hang"
[ "$rc" -ge 0 ] || kill "$rc" $$
exit "$rc"
"""


class FakeSlurm:
    """The commands in a directory; each answers with nothing until `play` says with what."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo", "srun"):
            (directory / name).write_text(_PLAYER)
            (directory / name).chmod(0o755)
            (directory / f"{name}.d").mkdir()
            (directory / f"{name}.d" / "calls").write_text("0\n")
            self.play(name, {})

    def play(self, name: str, *steps: Mapping[str, Any]) -> None:
        """What a command does, call for call: out, err (lines), hang (seconds), rc, then.

        An rc of -9 is a death by signal 9. `then` has the steps of other commands from that call
        on, by name.
        """
        directory = self.directory / f"{name}.d" / "steps"
        shutil.rmtree(directory, ignore_errors=True)
        _write_steps(directory, steps)

    def calls(self, name: str) -> list[Call]:
        """How a command was called."""
        directory = self.directory / f"{name}.d"
        count = int((directory / "calls").read_text())
        return [_call(directory / f"call-{number}") for number in range(1, count + 1)]

    def slurm(self, **more: str) -> Slurm:
        """The commands, for the code under test."""
        path = f"{self.directory}:{os.environ['PATH']}"
        # Whatever is not played must not reach a cluster that is there.
        return Slurm({**os.environ, "SLURM_CONF": "/nonexistent", "PATH": path, **more})


@dataclass(frozen=True)
class Call:
    """One call of a command; `stdin` is sbatch's only."""

    argv: list[str]
    environ: dict[str, str]
    cwd: str
    stdin: str


def _write_steps(directory: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    directory.mkdir(parents=True)
    (directory / "next").write_text("1\n")
    for number, step in enumerate(steps, 1):
        place = directory / str(number)
        place.mkdir()
        (place / "out").write_text(step.get("out", ""))
        (place / "err").write_text(step.get("err", ""))
        (place / "end").write_text(f"{step.get('hang', 0)} {step.get('rc', 0)}\n")
        for name, others in step.get("then", {}).items():
            _write_steps(place / "then" / name, others)


def _call(directory: Path) -> Call:
    stdin = directory / "stdin"
    environ = (directory / "environ").read_text().split("\0")[:-1]
    return Call(
        argv=(directory / "argv").read_text().split("\0")[:-1],
        environ=dict(variable.split("=", 1) for variable in environ),
        cwd=(directory / "cwd").read_text().strip(),
        stdin=stdin.read_text() if stdin.exists() else "",
    )


def queue_line(
    job_id: str,
    state: str = "PENDING",
    *,
    comment: str = "(null)",
    reason: str = "Priority",
    start: str = "N/A",
    nodes: str = "",
    submitted: str = "2026-12-02T04:52:18",
    name: str = "tiny",
) -> str:
    """A line as `squeue -o '%i|%T|%S|%N|%r|%V|%j|%k'` prints it."""
    return f"{job_id}|{state}|{start}|{nodes}|{reason}|{submitted}|{name}|{comment}\n"
