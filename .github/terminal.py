"""Makes terminal.svg, the picture in the README: real commands on the cluster of slurm/, recorded.

    sudo slurm/cluster start 2
    sudo .venv/bin/python .github/terminal.py

A run is submitted, a job of higher priority takes its nodes away, and it finishes all the same.
Each command has a terminal of its own, and what it writes there is drawn as it is. Takes about two
minutes.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 112
PATIENCE_S = 300.0
#: In the picture, so it is not one of this machine's.
DIRECTORY = Path("/tmp/demo")
REPOSITORY = Path(__file__).parents[1]


class Recording:
    """A terminal session: prompts, what was typed at them, and what came out."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._screen = Text()

    def type(self, command: str) -> None:
        """Run a command to its end in a terminal; fails if it does."""
        self._screen.append("$ ", style="bold green").append(f"{command}\n", style="bold")
        ours, theirs = pty.openpty()
        size = struct.pack("HHHH", 40, WIDTH, 0, 0)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        process = subprocess.Popen(
            shlex.split(command),
            cwd=DIRECTORY,
            env=self._environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        written = b"".join(iter(lambda: _read(ours), b""))
        os.close(ours)
        if process.wait(timeout=PATIENCE_S):
            raise SystemExit(f"{command}: {written.decode()}")
        said = Text.from_ansi(written.decode().replace("\r\n", "\n"))
        said.rstrip()
        self._screen.append_text(said).append("\n\n")

    def remark(self, text: str) -> None:
        """A comment, as one types it at a prompt."""
        self._screen.append(f"# {text}\n", style="italic color(246)")

    def facts(self, command: str) -> dict[str, Any]:
        """What a command says with --json; not recorded."""
        words = [*shlex.split(command), "--json"]
        done = subprocess.run(
            words, cwd=DIRECTORY, env=self._environ, capture_output=True, text=True, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def draw(self, path: Path) -> None:
        console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
        self._screen.rstrip()
        console.print(self._screen)
        drawn = console.export_svg(title="vitra", theme=MONOKAI, unique_id="vitra")
        # A picture loads nothing from elsewhere; without these it is the reader's monospace font.
        path.write_text(re.sub(r"@font-face {.*?}\s*", "", drawn, flags=re.DOTALL))


def _read(terminal: int) -> bytes:
    """What comes next; nothing once the last process has closed its end."""
    try:
        return os.read(terminal, 65536)
    except OSError as err:
        if err.errno != errno.EIO:
            raise
        return b""


def wait_until(true: Callable[[], bool]) -> None:
    """Return once it is true; exits where that takes longer than `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"it did not happen within {PATIENCE_S:g} s")
        time.sleep(0.5)


def main() -> None:
    """Play the scene on the test cluster, and write the picture beside this file."""
    conf = subprocess.run(
        [REPOSITORY / "slurm" / "cluster", "env"], capture_output=True, text=True, check=True
    ).stdout
    (assignment,) = (word for word in shlex.split(conf) if word.startswith("SLURM_CONF="))
    session = Recording(
        {
            **{n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "VITRA_"))},
            "SLURM_CONF": assignment.partition("=")[2],
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TERM": "xterm-256color",
        }
    )
    DIRECTORY.mkdir()
    try:
        session.type("vitra init spec.yaml")
        session.type("vitra submit spec.yaml -o resources.partition=low -o train.max_steps=500")
        status = "vitra status quickstart"
        wait_until(lambda: session.facts(status)["step"] >= 230)
        session.remark("somebody more important wants both nodes")
        session.type("sbatch --partition=high --nodes=2 --exclusive --wrap 'sleep 5'")
        wait_until(lambda: session.facts(status)["state"] == "requeued")
        session.type("vitra ps")
        wait_until(lambda: session.facts(status)["state"] in ("completed", "failed"))
        session.remark("a minute later")
        session.type(status)
    finally:
        shutil.rmtree(DIRECTORY)
    session.draw(Path(__file__).with_suffix(".svg"))


if __name__ == "__main__":
    main()
