"""Stopping a run for good: a durable marker that every supervisor looks at."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from launcher.jobs import effective
from launcher.lock import RunLock
from launcher.outcomes import close_unjudged
from launcher.registry import RunRecord, read_record, user_name
from launcher.slurm import Slurm
from launcher.standing import JobBook, scheduler_of, standing
from launcher.status import FINAL_STATES, Standing, is_finished, local_standing
from launcher.wording import next_lines
from trainer.spec.errors import SchedulerUnavailable, StorageError, UsageError
from trainer.spec.outcome import RunState, Verdict
from trainer.spec.rundir import RunDir, append_event, read_lines, utc_now, write_atomic

_POLL_S = 0.1
#: Between two looks into Slurm's queue.
_LOOK_S = 0.5
#: How long a waiting job may take to leave the queue once it is cancelled.
_LEAVES_QUEUE_S = 10.0


def cancel_run(
    run_dir: RunDir, slurm: Slurm, *, wait_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Leave the cancel marker, and wait at most `wait_s` for the run to stop.

    A supervisor that lives has its ranks save a checkpoint and leave; where none does, the marker
    alone makes the run cancelled, and no supervisor starts it again. A job that waits in the queue
    is taken out of it. A run that had ended is left as it is. Only a resume by a person takes the
    marker away. May be called any number of times.

    Returns run_id, run_dir, `was` and `state` (before and after), and `stopped`: whether nothing of
    it runs any more.

    Raises:
        NotFound: no such run. StorageError: its record is damaged, or the marker cannot be written.
        SchedulerUnavailable: the marker is there, and Slurm cannot be asked what has become of it.
    """
    record = read_record(run_dir)
    deadline = time.monotonic() + wait_s
    if scheduler_of(record, list(read_lines(run_dir.events))) == "slurm":
        was, stands = _cancel_on_slurm(run_dir, record, slurm, deadline, say)
    else:
        was, stands = _cancel_here(run_dir, deadline, say)
    return {
        "run_id": record.run_id,
        "run_dir": str(run_dir.path),
        "was": was.value,
        "state": stands.state.value,
        "stopped": not stands.alive,
    }


def _cancel_here(
    run_dir: RunDir, deadline: float, say: Callable[[str], None]
) -> tuple[RunState, Standing]:
    was: RunState | None = None
    while True:
        marked = run_dir.cancel.exists()
        stands = local_standing(run_dir)
        was = was or stands.state
        if stands.state not in FINAL_STATES and not marked:
            _mark(run_dir)
            if stands.alive:
                say("cancelling: a checkpoint is saved first")
            continue
        # While somebody holds the lock, a run that has ended may be about to be resumed.
        if not stands.alive or time.monotonic() >= deadline:
            return was, stands
        time.sleep(_POLL_S)


def _cancel_on_slurm(
    run_dir: RunDir, record: RunRecord, slurm: Slurm, deadline: float, say: Callable[[str], None]
) -> tuple[RunState, Standing]:
    was: RunState | None = None
    while True:
        marked = run_dir.cancel.exists()
        stands = standing(run_dir, record, JobBook(slurm, [run_dir]))
        was = was or stands.state
        over = is_finished(effective(read_lines(run_dir.events)))
        if not over and not marked:
            _mark(run_dir)
            if stands.state is RunState.RUNNING:
                say("cancelling: a checkpoint is saved first")
            continue
        if not over and not stands.known:
            raise SchedulerUnavailable(
                f"{record.run_id} is marked as cancelled, and will not start again; whether "
                f"anything of it runs is not known: {stands.reason.partition(';')[0]}",
                "repeat `vitra cancel` when Slurm answers",
            )
        if stands.job is not None and stands.job.is_waiting:
            # Only while it waits: one that has begun in between finds the marker, and one that
            # comes back by a requeue is seen by the next look.
            slurm.cancel(stands.job.job_id, waiting_only=True)
            deadline = max(deadline, time.monotonic() + _LEAVES_QUEUE_S)
        elif not over and not stands.alive:
            _record(run_dir, stands)
            continue
        if not stands.alive or time.monotonic() >= deadline:
            return was, stands
        time.sleep(_LOOK_S)


def _record(run_dir: RunDir, stands: Standing) -> None:
    """Note that the run is cancelled, since nobody else is left to do so."""
    with suppress(UsageError), RunLock(run_dir.lock):
        if not is_finished(effective(read_lines(run_dir.events))):
            record_end(run_dir, RunState.CANCELLED, Verdict.CANCELLED, stands.reason)


def record_end(run_dir: RunDir, state: RunState, verdict: Verdict, reason: str) -> None:
    """Note how a run has ended that has no supervisor. The caller holds the run's lock."""
    close_unjudged(run_dir)
    append_event(run_dir, "finished", state=state, verdict=verdict, reason=reason)


def cancel_lines(facts: dict[str, Any], run: str) -> list[str]:
    """`vitra cancel`; `run` is what to type for the run."""
    if not facts["stopped"]:
        return [
            f"{facts['run_id']} has been told to stop, and is still {facts['state']}",
            *next_lines((f"vitra status {run}", "whether it has stopped")),
        ]
    if facts["was"] == facts["state"]:
        return [f"{facts['run_id']} is already {facts['state']}"]
    if facts["state"] != RunState.CANCELLED:
        return [f"{facts['run_id']} was faster: it is {facts['state']}"]
    return [
        f"{facts['run_id']} is cancelled",
        *next_lines((f"vitra resume {run}", "goes on from its newest checkpoint")),
    ]


def _mark(run_dir: RunDir) -> None:
    content = {"at": utc_now(), "user": user_name(), "host": os.uname().nodename}
    try:
        write_atomic(run_dir.cancel, json.dumps(content).encode() + b"\n")
    except OSError as err:
        raise StorageError(f"cannot write {run_dir.cancel}: {err.strerror}") from err
