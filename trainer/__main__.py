"""`python -P -m trainer RUN_DIR`: what every rank runs. `--probe`: check a spec's components."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path

from trainer.spec.errors import VitraError
from trainer.spec.outcome import RankReport
from trainer.spec.rundir import RunDir, write_atomic
from trainer.state import TrainState
from trainer.stop import StopFlag

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run one rank, or the probe; returns the exit code."""
    if arguments == ["--probe"]:
        from trainer.probe import probe

        return probe(sys.stdin.buffer.read(), sys.stdout)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -P -m trainer RUN_DIR | --probe\n")
        return 2
    # First of all: a stop that comes while torch is being imported must not be lost, and a rank must
    # not outlive the process that started it.
    stop = StopFlag().install()
    _die_with_parent()
    return _run_rank(RunDir(Path(arguments[0])), stop)


def _run_rank(run_dir: RunDir, stop: StopFlag) -> int:
    import logging

    rank, attempt = os.environ.get("RANK", "?"), os.environ.get("VITRA_ATTEMPT", "?")
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s rank {rank} %(levelname)s: %(message)s"
    )
    logging.captureWarnings(True)
    state = TrainState()
    error: BaseException | None = None
    try:
        from trainer.worker import run

        code = run(run_dir, os.environ, stop, state)
    except VitraError as err:
        logging.getLogger(__name__).error("%s: %s", type(err).__name__, err)
        error, code = err, err.exit_code
    except MemoryError as err:
        traceback.print_exc()
        error, code = err, 1
    except BaseException as err:
        traceback.print_exc()
        error, code = err, 1
    if rank.isdigit() and attempt.isdigit():
        report = RankReport(
            rank=int(rank),
            exit_code=code,
            error=None if error is None else type(error).__name__,
            message=None if error is None else (str(error).splitlines() or [""])[0][:500],
            last_step=state.step,
        )
        path = run_dir.attempt(int(attempt)).report(int(rank))
        try:
            write_atomic(path, report.model_dump_json().encode())
        except OSError as err:
            sys.stderr.write(f"cannot write {path}: {err}\n")
    return code


def _die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies, however that happens."""
    parent = os.environ.get("VITRA_PARENT_PID", "")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above.
    if parent.isdigit() and os.getppid() != int(parent):
        os._exit(1)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Data workers and communication threads must not hold up, or alter, the end of a rank.
    os._exit(exit_code)
