"""Stopping a run for good: a durable marker that every supervisor looks at."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from launcher.lock import lock_holder
from launcher.registry import read_record, user_name
from launcher.status import FINAL_STATES, run_state
from trainer.spec.errors import StorageError, UsageError
from trainer.spec.outcome import RunState
from trainer.spec.rundir import RunDir, read_lines, utc_now, write_atomic

_POLL_S = 0.1


def cancel_run(run_dir: RunDir, *, wait_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Leave the cancel marker, and wait at most `wait_s` for the run to stop.

    A supervisor that lives has its ranks save a checkpoint and leave; where none does, the marker
    alone makes the run cancelled, and no supervisor starts it again. A run that had ended is left
    as it is. Only a resume by a person takes the marker away. May be called any number of times.

    Returns run_id, run_dir, `was` and `state` (before and after), and `stopped`: whether nothing of
    it runs any more.

    Raises:
        NotFound: no such run. StorageError: its record is damaged, or the marker cannot be written.
        UsageError: the run is not one of this machine's.
    """
    record = read_record(run_dir)
    if record.scheduler != "local":
        raise UsageError("cancelling a Slurm job is not yet part of this version")
    was: RunState | None = None
    deadline = time.monotonic() + wait_s
    while True:
        # The lock first: a supervisor records how the run ended before it lets go of it.
        alive = lock_holder(run_dir.lock) is not None
        marked = run_dir.cancel.exists()
        events = list(read_lines(run_dir.events))
        state = run_state(record, events, alive=alive, cancelled=marked)
        was = was or state
        if state not in FINAL_STATES and not marked:
            _mark(run_dir)
            if alive:
                say("cancelling: a checkpoint is saved first")
            continue
        # While somebody holds the lock, a run that has ended may be about to be resumed.
        if not alive or time.monotonic() >= deadline:
            return {
                "run_id": record.run_id,
                "run_dir": str(run_dir.path),
                "was": was.value,
                "state": state.value,
                "stopped": not alive,
            }
        time.sleep(_POLL_S)


def cancel_lines(facts: dict[str, Any], run: str) -> list[str]:
    """`vitra cancel`; `run` is what to type for the run."""
    if not facts["stopped"]:
        return [
            f"{facts['run_id']} has been told to stop, and is still {facts['state']}",
            f"next: vitra status {run}",
        ]
    if facts["was"] == facts["state"]:
        return [f"{facts['run_id']} is already {facts['state']}"]
    if facts["state"] != RunState.CANCELLED:
        return [f"{facts['run_id']} was faster: it is {facts['state']}"]
    return [
        f"{facts['run_id']} is cancelled",
        f"next: vitra resume {run}   goes on from its newest checkpoint",
    ]


def _mark(run_dir: RunDir) -> None:
    content = {"at": utc_now(), "user": user_name(), "host": os.uname().nodename}
    try:
        write_atomic(run_dir.cancel, json.dumps(content).encode() + b"\n")
    except OSError as err:
        raise StorageError(f"cannot write {run_dir.cancel}: {err.strerror}") from err
