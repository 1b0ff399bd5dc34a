"""A directory of commands named like Slurm's, whose answers a test scripts: for faults at will.

They stand in for a cluster that misbehaves, never for one that works: `tests/cluster` has that.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from launcher.slurm import Slurm

# Plays the next of the steps in NAME.json (the last one again and again), and notes its call.
_PLAYER = f"""\
#!{sys.executable} -I
import json, os, pathlib, sys, time
me = pathlib.Path(__file__)
with me.with_suffix(".calls").open("a") as calls:
    stdin = "" if sys.stdin.isatty() or me.name != "sbatch" else sys.stdin.read()
    call = dict(argv=sys.argv[1:], environ=dict(os.environ), stdin=stdin, cwd=os.getcwd())
    calls.write(json.dumps(call) + "\\n")
steps = json.loads(me.with_suffix(".json").read_text())
step = steps[0]
if len(steps) > 1:
    me.with_suffix(".json").write_text(json.dumps(steps[1:]))
for name, answers in step.get("then", {{}}).items():
    (me.parent / f"{{name}}.json").write_text(json.dumps(answers))
sys.stdout.write(step.get("out", ""))
sys.stderr.write(step.get("err", ""))
sys.stdout.flush()
time.sleep(step.get("hang", 0))
sys.exit(step.get("rc", 0))
"""


class FakeSlurm:
    """The commands in a directory; each answers with nothing until `play` says with what."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo"):
            (directory / name).write_text(_PLAYER)
            (directory / name).chmod(0o755)
            self.play(name, {})

    def play(self, name: str, *steps: dict[str, object]) -> None:
        """What a command does, call for call: out, err, rc, hang (seconds), then (others' steps).

        `then` has the steps of other commands from that call on, by name.
        """
        (self.directory / f"{name}.json").write_text(json.dumps(steps))

    def calls(self, name: str) -> list[dict[str, object]]:
        """How a command was called: argv, environ, stdin and cwd."""
        path = self.directory / f"{name}.calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def slurm(self, **more: str) -> Slurm:
        """The commands, for the code under test."""
        path = f"{self.directory}:{os.environ['PATH']}"
        # Whatever is not played must not reach a cluster that is there.
        return Slurm({**os.environ, "SLURM_CONF": "/nonexistent", "PATH": path, **more})


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
