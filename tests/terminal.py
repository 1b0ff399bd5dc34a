"""Commands as somebody at a terminal sees them."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.conftest import PATIENCE_S


def on_terminal(
    argv: Sequence[str | Path],
    *,
    columns: int,
    cwd: Path,
    environ: Mapping[str, str] | None = None,
    code: int = 0,
) -> str:
    """All that a command prints on a terminal of that width; fails unless it exits with `code`."""
    inherited = {n: v for n, v in os.environ.items() if n not in ("COLUMNS", "LINES", "NO_COLOR")}
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env={**inherited, "TERM": "xterm-256color", **(environ or {})},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            said = _read(ours)
            assert process.wait(PATIENCE_S) == code, said
        finally:
            process.kill()
            os.close(ours)
    return said.replace("\r\n", "\n")


def _read(descriptor: int) -> str:
    """What is printed until the last that could print is gone."""
    pieces: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    # EIO is how the end of a terminal shows.
    with suppress(OSError):
        while True:
            ready, _, _ = select.select([descriptor], [], [], deadline - time.monotonic())
            assert ready, b"".join(pieces)
            pieces.append(os.read(descriptor, 1 << 16))
    return b"".join(pieces).decode(errors="replace")
