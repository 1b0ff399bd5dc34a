"""`python -P -m trainer RUN_DIR`: what every rank runs.

`--probe` checks a spec's components, `--export` writes a checkpoint's weights to one file,
`--about` says what there is of torch; each reads a request from stdin and answers with one JSON
document.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from trainer.parent import die_with, parent_pid
from trainer.spec.errors import VitraError
from trainer.spec.outcome import RankReport
from trainer.spec.rundir import RunDir, write_atomic
from trainer.state import TrainState
from trainer.stop import StopFlag
from trainer.watchdog import Pulse, show_stacks_when_asked

_LONGEST_MESSAGE = 500
#: How torch's DataLoader passes on what a worker raised, not always in the class that it was.
_IN_WORKER = re.compile(r"Caught (\w+) in DataLoader worker")
#: What torch says of a data worker that was killed, at times only of the cause of what it raises.
_WORKER_KILLED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([\w ]+)")


def main(arguments: list[str]) -> int:
    """Run one rank, or answer one request; returns the exit code."""
    # Loading torch makes half a million objects that stay: to look for garbage among them, time and
    # again, would be a fifth of all the work.
    gc.disable()
    if arguments in (["--probe"], ["--export"], ["--about"]):
        return _answer(arguments[0])
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -P -m trainer RUN_DIR | --probe | --export | --about\n")
        return 2
    # First of all: a stop that comes while torch is being imported must not be lost, and a rank
    # must not outlive the process that started it.
    stop = StopFlag().install()
    die_with(parent_pid(os.environ))
    return _run_rank(RunDir(Path(arguments[0])), stop)


def _answer(question: str) -> int:
    die_with(parent_pid(os.environ))
    # What components print must not get mixed up with the answer.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        if question == "--export":
            from trainer.export import export as carry_out
        elif question == "--about":
            from trainer.about import about as carry_out
        else:
            from trainer.probe import probe as carry_out

        gc.freeze()
        gc.enable()
        return carry_out(sys.stdin.buffer.read(), answer)


def _run_rank(run_dir: RunDir, stop: StopFlag) -> NoReturn:
    import logging

    rank, attempt = os.environ.get("RANK", "?"), os.environ.get("VITRA_ATTEMPT", "?")
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s rank {rank} %(levelname)s: %(message)s",
    )
    logging.captureWarnings(True)
    pulse = Pulse.from_environ(os.environ)
    is_rank = rank.isdigit() and attempt.isdigit()
    if is_rank:
        try:
            show_stacks_when_asked(run_dir.attempt(int(attempt)).stack(int(rank)))
        except OSError as err:
            logging.getLogger(__name__).warning("a hang would leave no stacks here: %s", err)
    state = TrainState()
    keep: list[object] = []
    at_end: list[Callable[[int], None]] = []
    error: BaseException | None = None
    try:
        from trainer.worker import run

        code = run(run_dir, os.environ, stop, state, keep, at_end, pulse)
    except VitraError as err:
        _hear_no_more_of_data_workers()
        logging.getLogger(__name__).error("%s: %s", type(err).__name__, err)
        error, code = err, err.exit_code
    except BaseException as err:  # noqa: BLE001 - the supervisor is told, whatever it was
        _hear_no_more_of_data_workers()
        with suppress(OSError):
            traceback.print_exc()
        error, code = err, 1
    if is_rank:
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
            with suppress(OSError):
                sys.stderr.write(f"cannot write {path}: {err}\n")
    # After the report: what takes its time here must not cost the rank its say.
    for end in at_end:
        end(code)
    pulse.close()
    _leave(code)


def _hear_no_more_of_data_workers() -> None:
    """torch raises in the middle of anything when a worker has died; not while that is reported."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _leave(code: int) -> NoReturn:
    """End the process at once: no destructor, data worker or other thread may hold it up.

    The exit code gets through even where the log is on a disk that is full.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
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
    killed = _WORKER_KILLED.search(f"{error} {error.__cause__}")
    if killed:
        return (
            f"data worker (process {killed[1]}) was killed by signal: {killed[2]}; from outside, "
            "or by the kernel when memory ran out"
        )
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    # An error of a data worker comes with a traceback, and says what it is at its end.
    line = lines[-1] if _IN_WORKER.match(lines[0]) else lines[0]
    return line[:_LONGEST_MESSAGE]


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
