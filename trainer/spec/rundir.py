"""The run directory: where each file lies, and how the append-only ones are written and read.

A kill can come at every line. A file that is replaced is written under a new name, synced and
renamed; a log of JSON lines is appended with one write a line, and a reader passes over a torn last
line.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class RunDir:
    """The paths of one run directory (contract section 4)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def spec(self) -> Path:
        return self.path / "spec.yaml"

    @property
    def overrides(self) -> Path:
        return self.path / "overrides.yaml"

    @property
    def profiles(self) -> Path:
        """Copies of the profiles beneath the spec; there only where there were any."""
        return self.path / "profiles"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def script(self) -> Path:
        return self.path / "submit.sbatch"

    @property
    def code(self) -> Path:
        """The code that every attempt runs, as it was at submit (`trainer.spec.snapshot`)."""
        return self.path / "code"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def cancel(self) -> Path:
        return self.path / "CANCEL"

    @property
    def lock(self) -> Path:
        """Held (flock) by the one supervisor on this machine, or who submits the run to Slurm.

        Never removed.
        """
        return self.path / "supervisor.lock"

    @property
    def jobs(self) -> Path:
        """Which job each submission became (`launcher.jobs`)."""
        return self.path / "jobs"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def samples(self, rank: int) -> Path:
        return self.path / f"samples-rank{rank}.jsonl"

    def sample_files(self) -> list[Path]:
        """The sample files of all ranks, of however large a world."""
        return sorted(self.path.glob("samples-rank*.jsonl"))

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / str(number))

    def attempt_numbers(self) -> list[int]:
        """The attempts that have a directory, in order."""
        try:
            names = [p.name for p in self.attempts.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())


class AttemptDir:
    """The paths of attempts/K."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def outcome(self) -> Path:
        return self.path / "outcome.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def seconds(self) -> Path:
        """What the attempt has spent its time on (`launcher.goodput`)."""
        return self.path / "seconds.json"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.log"

    def stack(self, rank: int) -> Path:
        """What a rank's threads were doing when it hung; there only after a hang."""
        return self.logs / f"rank_{rank}.stack"

    def exit(self, rank: int) -> Path:
        return self.path / f"rank_{rank}.exit"

    def report(self, rank: int) -> Path:
        return self.path / f"rank_{rank}.report.json"


def utc_now() -> str:
    """The present time as ISO 8601 in UTC, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_atomic(path: Path, data: bytes) -> None:
    """Publish `data` under `path`: a reader sees the old file or the whole new one.

    Durable on return. Raises OSError; what was there before stays as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as err:
        temporary.unlink(missing_ok=True)
        if isinstance(err, OSError) and err.errno is not None:
            raise _named(err, path) from err
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineLog:
    """An append-only file of JSON lines, each written whole by one call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        end = os.fstat(self._descriptor).st_size
        # A line torn by a full disk must not swallow the next one.
        if end and os.pread(self._descriptor, 1, end - 1) != b"\n":
            os.write(self._descriptor, b"\n")

        self._torn = False

    def append(self, record: dict[str, Any]) -> None:
        """Write one line; in one piece, unless the disk fills up.

        Raises OSError, which names the file; what it left of the line spoils no later one.
        """
        rest = (b"\n" if self._torn else b"") + json_line(record)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
                self._torn = True
        except OSError as err:
            raise _named(err, self._path) from err
        self._torn = False

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> LineLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(err: OSError, path: Path) -> OSError:
    """The same error, naming the file that people know it by."""
    return OSError(err.errno, err.strerror, str(path))


def json_line(record: dict[str, Any]) -> bytes:
    """One line of JSON; floats are written so that they read back bit-equal."""
    return (json.dumps(record, separators=(", ", ": "), allow_nan=False) + "\n").encode()


def append_event(run_dir: RunDir, event: str, **details: Any) -> None:
    """Add one line to events.jsonl: {"at": UTC time, "event": name, ...}."""
    with LineLog(run_dir.events) as log:
        log.append({"at": utc_now(), "event": event, **details})


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines: none if there is no file, torn lines passed over."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


class Tail:
    """The new records of a growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def records(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        found: list[dict[str, Any]] = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found
