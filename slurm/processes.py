"""Daemons without systemd: started detached, found again by pid file, ended by pid alone."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm.settings import ClusterError

_POLL_S = 0.1


def run(
    argv: Sequence[str | Path],
    environ: Mapping[str, str],
    *,
    within_s: float = 30.0,
    log: Path | None = None,
) -> str:
    """What a command printed.

    Args:
        argv: the command.
        environ: its whole environment.
        within_s: it is killed after that long.
        log: a file that gets its output instead, and is named when it fails.

    Raises:
        ClusterError: it failed, took too long or is not installed.
    """
    shown = shlex.join(map(str, argv))
    try:
        if log is not None:
            with log.open("ab") as output:
                subprocess.run(
                    argv,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=within_s,
                    check=True,
                )
            return ""
        return subprocess.run(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=True,
        ).stdout
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{shown}: no answer within {within_s:g} s") from None
    except subprocess.CalledProcessError as err:
        why = f"see {log}" if log else (err.stderr or err.stdout).strip()
        raise ClusterError(f"{shown}: exit code {err.returncode}: {why}") from None
    except FileNotFoundError as err:
        raise ClusterError(f"{err.filename} is not installed") from None


def succeeds(
    argv: Sequence[str | Path], environ: Mapping[str, str], *, within_s: float = 10.0
) -> bool:
    """Whether a command ends well, and in time."""
    try:
        run(argv, environ, within_s=within_s)
    except ClusterError:
        return False
    return True


def wait_until(true: Callable[[], bool], what: str, within_s: float) -> None:
    """Return once `true()` is.

    Raises:
        ClusterError: it is not within `within_s`.
    """
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {within_s:g} s for {what}")
        time.sleep(_POLL_S)


def start_time(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was; None if it is gone.

    A zombie is gone.
    """
    try:
        # The name in parentheses may itself hold parentheses and spaces.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if after_name[0] == "Z" else int(after_name[19])


class Daemons:
    """The processes of one cluster, each known by a name.

    A pid counts only as long as its start time is the recorded one, so that a number that the
    kernel has given to another process since is never signalled.
    """

    def __init__(self, run: Path, log: Path, environ: Mapping[str, str]) -> None:
        self._run = run
        self._log = log
        self._environ = dict(environ)

    def spawn(self, name: str, argv: Sequence[str | Path]) -> None:
        """Start it in a session of its own; its output goes to NAME.out among the logs.

        Raises:
            ClusterError: the program is not installed.
        """
        output = os.open(
            self._log / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        try:
            pid = os.posix_spawnp(
                str(argv[0]),
                [*map(str, argv)],
                self._environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                ],
                setsid=True,
            )
        except FileNotFoundError:
            raise ClusterError(f"{argv[0]} is not installed") from None
        finally:
            os.close(output)
        self._file(name).write_text(f"{pid} {start_time(pid) or 0}\n")

    def pid(self, name: str) -> int | None:
        """Of the daemon while it lives."""
        try:
            pid, started = map(int, self._file(name).read_text().split())
        except (FileNotFoundError, ValueError):
            return None
        return pid if start_time(pid) == started else None

    def halt(self, name: str, sign: signal.Signals, within_s: float) -> None:
        """Signal it; kill it if it is not gone in time. Nothing if it does not run."""
        pid = self.pid(name)
        if pid is not None:
            os.kill(pid, sign)
            deadline = time.monotonic() + within_s
            while self.pid(name) and time.monotonic() < deadline:
                time.sleep(_POLL_S / 2)
            if self.pid(name):
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not self.pid(name), f"{name} to die", 10)
        self._file(name).unlink(missing_ok=True)

    def wait_ready(self, name: str, ready: Callable[[], bool], within_s: float) -> None:
        """Return once a daemon serves.

        Raises:
            ClusterError: it has died or takes too long; with the end of what it said.
        """
        deadline = time.monotonic() + within_s
        while not ready():
            died = self.pid(name) is None
            if died or time.monotonic() > deadline:
                said = (self._log / f"{name}.out").read_text(errors="replace").splitlines()[-8:]
                raise ClusterError(
                    f"{name} {'died' if died else f'does not answer after {within_s:g} s'}; "
                    f"see {self._log}\n" + "\n".join(said)
                )
            time.sleep(_POLL_S)

    def _file(self, name: str) -> Path:
        return self._run / f"{name}.pid"
