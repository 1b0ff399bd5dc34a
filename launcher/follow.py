"""Following a run of Slurm's to its end from outside, with the lines that a local run prints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from launcher.outcomes import Ending
from launcher.progress import Progress
from launcher.registry import read_record
from launcher.slurm import Slurm
from launcher.standing import JobBook, standing
from launcher.status import FINAL_STATES, Standing
from trainer.spec.outcome import RunState, Verdict
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir, Tail

_POLL_S = 0.3
#: Between two looks into Slurm's queue, which many may look into.
_LOOK_S = 5.0
#: When a run's end was recorded, its job leaves soon.
_LEAVING_LOOK_S = 0.7
#: How long a run may be without a job until it is clear that no job comes any more by itself.
_LOST_S = 60.0


def follow_run(run_dir: RunDir, slurm: Slurm, progress: Progress) -> Ending:
    """Show what happens from the newest submit or resume on; returns once the run is over.

    Also returns, with the state `unknown`, where its job is gone and nobody goes on with it.

    Raises:
        StorageError: the run's record is damaged.
    """
    record = read_record(run_dir)
    events = Tail(run_dir.events)
    told, finished, lost_since = "", None, None
    new = _since_start(events.records())
    looked_at = 0.0
    while True:
        for event in new:
            if event.get("event") == "finished":
                finished = event
            _tell(run_dir, event, progress)
        progress.poll()
        now = time.monotonic()
        if now - looked_at >= (_LEAVING_LOOK_S if finished else _LOOK_S):
            looked_at = now
            stands = standing(run_dir, record, JobBook(slurm, [run_dir]))
            if stands.state in FINAL_STATES and not stands.alive:
                return _ending(stands, finished)
            lost = stands.known and not stands.alive
            lost_since = (lost_since or now) if lost else None
            if lost_since is not None and now - lost_since > _LOST_S:
                return _ending(stands, None)
            waits = stands.state in (RunState.QUEUED, RunState.REQUEUED, RunState.UNKNOWN)
            if waits and stands.reason != told:
                progress.message(f"{stands.state}: {stands.reason}")
            told = stands.reason
        time.sleep(_POLL_S)
        new = events.records()


def _since_start(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    starts = [n for n, e in enumerate(events) if e.get("event") in ("submitted", "resumed")]
    return events[starts[-1] + 1 :] if starts else events


def _tell(run_dir: RunDir, event: Mapping[str, Any], progress: Progress) -> None:
    match event.get("event"):
        case "attempt":
            files = run_dir.attempt(int(event["attempt"]))
            progress.attempt(
                Plan.read(files.plan), files, int(event["attempt"]), event.get("resume_step")
            )
        case "signal":
            progress.message(f"stopping: {event.get('reason', 'it was asked to')}")
        case "requeued":
            progress.message(f"{event['verdict']}: {event['reason']}; starting again")
        case "resubmitted":
            progress.message(f"submitted again: {event['reason']}")
        case _:
            pass


def _ending(stands: Standing, finished: Mapping[str, Any] | None) -> Ending:
    if finished is not None:
        return Ending(
            RunState(finished["state"]), Verdict(finished["verdict"]), str(finished["reason"])
        )
    verdict = Verdict.CANCELLED if stands.state is RunState.CANCELLED else Verdict.NODE_FAILURE
    return Ending(stands.state, verdict, stands.reason)


def exit_code(ending: Ending) -> int:
    """Of a command that waited: 0 where the run is complete."""
    return 0 if ending.state is RunState.COMPLETED else 5
