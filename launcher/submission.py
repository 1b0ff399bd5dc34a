"""Runs on Slurm: submitted, resumed, and submitted again, each time as one job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from launcher.container import check_resume_inside, refuse_container_here
from launcher.drafting import Draft
from launcher.feasible import check_feasible, measured_save_s
from launcher.jobs import effective
from launcher.lock import RunLock
from launcher.registry import RunRecord, as_argument, read_plan, read_record
from launcher.request import build_request, render
from launcher.resume import Resumption, check_resume, write_resume
from launcher.schedulers.sbatch import Unclear, queue
from launcher.slurm import Slurm
from launcher.standing import JobBook, scheduler_of, standing
from launcher.status import Standing, is_finished, local_standing
from launcher.submit import fill, new_run, refuse_later_parts
from trainer.spec.errors import SchedulerRejected, SchedulerUnavailable, StorageError, UsageError
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir, append_event, read_lines, write_atomic


def submit_slurm(
    draft_: Draft,
    slurm: Slurm,
    *,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    now: datetime,
) -> tuple[RunDir, str]:
    """Check everything that can be checked, write the run directory, and queue the run's job.

    Returns the run and the job's id.

    Raises:
        VitraError: it is refused, and nothing is left behind.
        Unclear: there may be a job; the run directory stays.
    """
    refuse_later_parts(draft_.plan)
    for note in draft_.plan.notes:
        say(note)
    for name, value in draft_.plan.spec.resources.env.items():
        if value is None and name not in environ:
            say(f"warning: resources.env.{name} passes on {name}, which is not set here")
    # Before what takes long. The job's script differs in nothing that matters to Slurm.
    check_feasible(build_request(draft_.plan, python=sys.executable), slurm, say=say)
    with new_run(draft_, now) as run, RunLock(run.dir.lock):
        fill(run.dir, draft_, scheduler="slurm", environ=environ, say=say)
        script = _script(read_plan(run.dir))
        # From here on there may be a job, whatever becomes of this process.
        run.kept = True
        try:
            job_id = _queue(run.dir, read_record(run.dir), script, slurm, environ, say)
        except SchedulerRejected:
            run.kept = False
            raise
    return run.dir, job_id


def resume_slurm(
    run_dir: RunDir,
    overrides: Sequence[str],
    slurm: Slurm,
    *,
    allow_change: bool,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> str | None:
    """Queue a job that goes on with a run; returns its id, None where nothing is left to train.

    Raises:
        VitraError: it is refused, and the run is as it was.
        Unclear: there may be a job, and the run is resumed.
    """
    with RunLock(run_dir.lock):
        record = read_record(run_dir)
        stands = refuse_living(run_dir, record, slurm)
        resumption = check_resume(
            run_dir, stands, overrides, allow_change=allow_change, environ=environ, say=say
        )
        if resumption is None:
            return None
        check_resume_inside(resumption.plan, run_dir, Path(record.working_dir))
        check_feasible(
            build_request(resumption.plan, python=sys.executable),
            slurm,
            say=say,
            save_s=measured_save_s(read_lines(run_dir.events)),
        )
        before = _Before.of(run_dir)
        write_resume(run_dir, resumption, scheduler="slurm")
        try:
            return _queue(run_dir, record, _script(resumption.plan), slurm, environ, say)
        except SchedulerRejected:
            before.restore(run_dir)
            raise


def resume_local(
    run_dir: RunDir,
    overrides: Sequence[str],
    slurm: Slurm,
    *,
    allow_change: bool,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Resumption | None:
    """Make a run ready to go on on this machine. The caller holds the run's lock.

    Returns None where nothing is left to train.

    Raises:
        VitraError: it is refused, and the run is as it was.
    """
    stands = refuse_living(run_dir, read_record(run_dir), slurm)
    resumption = check_resume(
        run_dir, stands, overrides, allow_change=allow_change, environ=environ, say=say
    )
    if resumption is not None:
        refuse_container_here(resumption.plan.spec)
        write_resume(run_dir, resumption, scheduler="local")
    return resumption


def resubmit(
    run_dir: RunDir,
    slurm: Slurm,
    *,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> str:
    """Queue another job for a run whose job is gone, as it was; the caller holds the run's lock.

    Returns the job's id.

    Raises:
        SchedulerRejected: Slurm refused. Unclear: there may be a job.
        VitraError, OSError: the run directory cannot be read or written.
    """
    record = read_record(run_dir)
    try:
        script = run_dir.script.read_bytes()
    except FileNotFoundError:
        # Submit was killed before it came to that.
        python = record.python if os.access(record.python, os.X_OK) else sys.executable
        script = render(build_request(read_plan(run_dir), python=python)).encode()
    return _queue(run_dir, record, script, slurm, environ, say)


def refuse_living(run_dir: RunDir, record: RunRecord, slurm: Slurm) -> Standing:
    """Refuse to start a run with a job in the queue or on nodes; the caller holds the run's lock.

    Raises:
        UsageError: there is one. SchedulerUnavailable: that cannot be found out, and matters.
    """
    events = list(read_lines(run_dir.events))
    if scheduler_of(record, events) != "slurm":
        return local_standing(run_dir, supervised=False)
    stands = standing(run_dir, record, JobBook(slurm, [run_dir]), submitting=True)
    if stands.job is not None:
        raise UsageError(
            f"{record.run_id} has a job: {stands.reason}",
            f"`vitra cancel {record.run_id}` stops it",
        )
    if not stands.known and not is_finished(effective(events)):
        raise SchedulerUnavailable(f"{stands.reason.partition(';')[0]}: a job may still run")
    return stands


def _script(plan: Plan) -> bytes:
    return render(build_request(plan, python=sys.executable)).encode()


def _queue(
    run_dir: RunDir,
    record: RunRecord,
    script: bytes,
    slurm: Slurm,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> str:
    working_dir = Path(record.working_dir)
    try:
        return queue(
            run_dir,
            script,
            record.run_id,
            slurm,
            # As Slurm's users expect: relative paths in setup lines mean the same as at submit.
            cwd=working_dir if working_dir.is_dir() else run_dir.path,
            say=say,
        )
    except Unclear as err:
        run = as_argument(run_dir, environ)
        raise Unclear(
            f"{err.message}: it is not clear whether Slurm has taken run {record.run_id}; its "
            "directory stays",
            f"next: `vitra status {run}` looks for its job, `vitra watch --once` submits it again "
            "if there is none",
        ) from err
    except SystemExit:
        run = as_argument(run_dir, environ)
        say(f"interrupted: `vitra status {run}` tells whether it has a job")
        raise
    except OSError as err:
        raise StorageError(f"{err.filename or run_dir.path}: {err.strerror}") from err


@dataclass(frozen=True)
class _Before:
    """What a resume replaces in the run directory; None: no such file."""

    files: Mapping[str, bytes | None]

    @classmethod
    def of(cls, run_dir: RunDir) -> _Before:
        paths = (run_dir.overrides, run_dir.plan, run_dir.script, run_dir.cancel)
        return cls({p.name: p.read_bytes() if p.exists() else None for p in paths})

    def restore(self, run_dir: RunDir) -> None:
        for name, content in self.files.items():
            if content is None:
                with suppress(FileNotFoundError):
                    (run_dir.path / name).unlink()
            else:
                write_atomic(run_dir.path / name, content)
        append_event(run_dir, "withdrawn", reason="Slurm refused the job")
