"""`python -P -m trainer RUN_DIR`: what every rank runs. `--probe`: check a spec's components."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from trainer.parent import die_with_parent
from trainer.spec.errors import VitraError
from trainer.spec.outcome import RankReport
from trainer.spec.rundir import RunDir, write_atomic
from trainer.state import TrainState
from trainer.stop import StopFlag

_LONGEST_MESSAGE = 500
#: How torch's DataLoader passes on what a worker raised, not always in the class that it was.
_IN_WORKER = re.compile(r"Caught (\w+) in DataLoader worker")


def main(arguments: list[str]) -> int:
    """Run one rank, or the probe; returns the exit code."""
    if arguments == ["--probe"]:
        return _run_probe()
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -P -m trainer RUN_DIR | --probe\n")
        return 2
    # First of all: a stop that comes while torch is being imported must not be lost, and a rank
    # must not outlive the process that started it.
    stop = StopFlag().install()
    die_with_parent()
    return _run_rank(RunDir(Path(arguments[0])), stop)


def _run_probe() -> int:
    die_with_parent()
    # What components print must not get mixed up with the answer.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        from trainer.probe import probe

        return probe(sys.stdin.buffer.read(), answer)


def _run_rank(run_dir: RunDir, stop: StopFlag) -> NoReturn:
    import logging

    rank, attempt = os.environ.get("RANK", "?"), os.environ.get("VITRA_ATTEMPT", "?")
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s rank {rank} %(levelname)s: %(message)s",
    )
    logging.captureWarnings(True)
    state = TrainState()
    keep: list[object] = []
    at_end: list[Callable[[int], None]] = []
    error: BaseException | None = None
    try:
        from trainer.worker import run

        code = run(run_dir, os.environ, stop, state, keep, at_end)
    except VitraError as err:
        logging.getLogger(__name__).error("%s: %s", type(err).__name__, err)
        error, code = err, err.exit_code
    except BaseException as err:  # noqa: BLE001 - the supervisor is told, whatever it was
        traceback.print_exc()
        error, code = err, 1
    if rank.isdigit() and attempt.isdigit():
        report = RankReport(
            rank=int(rank),
            exit_code=code,
            error=None if error is None else _name_of(error),
            message=None if error is None else _line_of(error),
            last_step=state.step,
        )
        path = run_dir.attempt(int(attempt)).report(int(rank))
        try:
            write_atomic(path, report.model_dump_json().encode())
        except OSError as err:
            sys.stderr.write(f"cannot write {path}: {err}\n")
    # After the report: what takes its time here must not cost the rank its say.
    for end in at_end:
        end(code)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process at once: no destructor, data worker or other thread may hold it up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _name_of(error: BaseException) -> str:
    """The class that the supervisor judges by; running out of memory has many."""
    in_worker = _IN_WORKER.match(str(error))
    name = in_worker[1] if in_worker else type(error).__name__
    # NumPy raises a subclass; torch's CPU allocator only a RuntimeError.
    if name.endswith("MemoryError") or "can't allocate memory" in str(error):
        return "MemoryError"
    return name


def _line_of(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    # An error of a data worker comes with a traceback, and says what it is at its end.
    line = lines[-1] if _IN_WORKER.match(lines[0]) else lines[0]
    return line[:_LONGEST_MESSAGE]


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
