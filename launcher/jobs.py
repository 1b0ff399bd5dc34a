"""Which Slurm job a run is: one at a time, whatever sbatch and the network have made of it.

Every submission (the first, a resume, one by `vitra watch`) has a number: an event `submitting`
comes before it. The job that starts first under the newest number makes jobs/N.json, which only one
can; any other job of the run then knows that it is superfluous. So a job that was taken twice,
or comes back after it was given up, never becomes a second writer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.spec.rundir import RunDir, append_event, read_lines, sync_directory, write_atomic


def job_comment(run_id: str) -> str:
    """The comment of every job of a run, by which they are found."""
    return f"vitra:{run_id}"


def effective(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events without resumes that were taken back: Slurm had refused the job (`withdrawn`)."""
    kept: list[Mapping[str, Any]] = []
    for event in events:
        if event.get("event") == "withdrawn":
            resumes = [n for n, known in enumerate(kept) if known.get("event") == "resumed"]
            del kept[resumes[-1] if resumes else len(kept) :]
        else:
            kept.append(event)
    return kept


def begin_submission(run_dir: RunDir) -> int:
    """Note that a job is about to be submitted; returns the submission's number, from 1."""
    append_event(run_dir, "submitting")
    return submissions(list(read_lines(run_dir.events)))


def note_job(run_dir: RunDir, job_id: str) -> None:
    """Note the job that the newest submission became, as far as is known."""
    append_event(run_dir, "queued", job_id=job_id)


def submissions(events: Sequence[Mapping[str, Any]]) -> int:
    """How often the run was submitted to Slurm."""
    return sum(event.get("event") == "submitting" for event in events)


def known_jobs(run_dir: RunDir, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """All jobs that the run is known to have been, oldest first."""
    found = [str(e["job_id"]) for e in events if e.get("event") == "queued" and e.get("job_id")]
    holders = (_holder(run_dir, number) for number in range(1, submissions(events) + 1))
    return list(dict.fromkeys([*found, *(job_id for job_id in holders if job_id)]))


def current_job(run_dir: RunDir, events: Sequence[Mapping[str, Any]]) -> str | None:
    """The job of the newest submission; None if there is none, or it is not known which."""
    number = submissions(events)
    if not number:
        return None
    if holder := _holder(run_dir, number):
        return holder
    for event in reversed(events):
        match event.get("event"):
            case "queued":
                return str(event["job_id"])
            case "submitting":
                return None
            case _:
                pass
    return None


def claim_run(run_dir: RunDir, job_id: str) -> str | None:
    """Take the run for a job that has started; returns None, or the job that has it instead.

    May be called in every life of a job.

    Raises:
        OSError: the run directory cannot be written.
    """
    number = submissions(list(read_lines(run_dir.events)))
    if any(_holder(run_dir, older) == job_id for older in range(1, number)):
        # Given up in the meantime, and another was submitted in its place.
        return _holder(run_dir, number) or "a newer job"
    with suppress(FileExistsError):
        run_dir.jobs.mkdir(mode=0o750)
    path = _path(run_dir, number)
    finished = run_dir.jobs / f"{job_id}.claim"
    write_atomic(finished, json.dumps({"job_id": job_id}).encode() + b"\n")
    try:
        os.link(finished, path)
    except FileExistsError:
        holder = _holder(run_dir, number)
        return None if holder == job_id else holder
    finally:
        finished.unlink(missing_ok=True)
    sync_directory(run_dir.jobs)
    return None


def _path(run_dir: RunDir, number: int) -> Path:
    return run_dir.jobs / f"{number}.json"


def _holder(run_dir: RunDir, number: int) -> str | None:
    try:
        return str(json.loads(_path(run_dir, number).read_bytes())["job_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
