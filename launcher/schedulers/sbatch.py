"""Handing a run's batch script to Slurm so that one job comes of it, whatever answer comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import shell
from launcher.jobs import begin_submission, current_job, job_comment, known_jobs, note_job
from launcher.slurm import Slurm, is_out_of_reach, no_such_command, refusal
from launcher.slurm_answers import Job
from trainer.spec.errors import SchedulerError, SchedulerRejected, SchedulerUnavailable
from trainer.spec.rundir import RunDir, read_lines, write_atomic

if TYPE_CHECKING:
    from submitit.core.core import Job as SubmititJob

#: sbatch takes milliseconds, and some seconds where the controller is busy.
SBATCH_S = 30.0
#: Seconds between one try and the next, while no job is found either.
_PAUSES_S = (2.0, 8.0)
#: A request that sbatch has given up on may still be read by the controller: when to look for its
#: job, in seconds after the last look.
_LOOKS_S = (0.3, 1.0, 3.0)
#: How long to go on looking where the controller does not answer.
_OUT_OF_REACH_S = 45.0


class Unclear(SchedulerUnavailable):
    """It is not known whether Slurm has taken the job."""


def queue(
    run_dir: RunDir,
    script: bytes,
    run_id: str,
    slurm: Slurm,
    *,
    cwd: Path,
    say: Callable[[str], None],
    sbatch_s: float = SBATCH_S,
) -> str:
    """Submit a run, as `script` byte for byte; returns the job's id.

    The caller holds the run's lock. The script is left in the run directory. The job starts in
    `cwd`, with the environment that `slurm` was given. Where sbatch fails to say what has happened,
    the job is looked for by its comment before anything is tried again. May be killed at any
    moment: a job that came of it is found later by that comment as well.

    Raises:
        SchedulerRejected: Slurm has refused, and there is no job.
        Unclear: there may be a job.
        OSError: the run directory cannot be written.
    """
    write_atomic(run_dir.script, script)
    known = known_jobs(run_dir, list(read_lines(run_dir.events)))
    begin_submission(run_dir)
    job_id = _submit(run_dir, run_id, slurm, known, cwd, say, sbatch_s)
    note_job(run_dir, job_id)
    return job_id


def jobs_by_comment(slurm: Slurm, run_id: str) -> list[Job]:
    """This user's living jobs of a run, oldest first.

    Raises:
        SchedulerError: Slurm cannot be asked.
    """
    comment = job_comment(run_id)
    found = [job for job in slurm.jobs(os.getuid()) if job.comment == comment and job.is_live]
    return sorted(found, key=lambda job: int(job.job_id))


def drop_superfluous(run_dir: RunDir, jobs: Collection[Job], slurm: Slurm) -> Job:
    """The one of a run's living jobs that it is; the others are cancelled where they wait.

    One that runs already finds out by itself that the run is not its own.
    """
    holder = current_job(run_dir, list(read_lines(run_dir.events)))
    keep = next((job for job in jobs if job.job_id == holder), min(jobs, key=_oldest_running_first))
    for job in jobs:
        if job is not keep:
            slurm.cancel(job.job_id, waiting_only=True)
    return keep


def _oldest_running_first(job: Job) -> tuple[bool, int]:
    return (job.is_waiting, int(job.job_id))


def _submit(
    run_dir: RunDir,
    run_id: str,
    slurm: Slurm,
    known: Collection[str],
    cwd: Path,
    say: Callable[[str], None],
    sbatch_s: float,
) -> str:
    submitter = _submitter(run_dir, slurm.job_environ, cwd, sbatch_s)
    doubted = False
    for pause_s in (*_PAUSES_S, None):
        try:
            job_id = submitter()
        except SchedulerRejected as err:
            # Its word counts, unless a job proves otherwise.
            try:
                found = _new_jobs(slurm, run_id, known)
            except SchedulerError:
                raise err from None
            if not found:
                raise
            return drop_superfluous(run_dir, found, slurm).job_id
        except SchedulerUnavailable as err:
            doubted = True
            say(f"{err.message}: looking for the job")
            if found := _look(slurm, run_id, known, err):
                return drop_superfluous(run_dir, found, slurm).job_id
            if pause_s is None:
                raise Unclear(f"{err.message}, and there is no job so far") from err
            time.sleep(pause_s)
        else:
            if doubted and (found := _new_jobs(slurm, run_id, known)):
                # An earlier request may have been carried out late.
                return drop_superfluous(run_dir, found, slurm).job_id
            return job_id
    raise AssertionError("the last try returns or raises")


def _look(
    slurm: Slurm, run_id: str, known: Collection[str], problem: SchedulerUnavailable
) -> list[Job]:
    """Jobs that a request without an answer came to, once there are any; none after a while.

    Raises:
        Unclear: the controller does not answer.
    """
    deadline = time.monotonic() + _OUT_OF_REACH_S
    looks = list(_LOOKS_S)
    while looks:
        time.sleep(looks[0])
        try:
            if found := _new_jobs(slurm, run_id, known):
                return found
            looks.pop(0)
        except SchedulerError as err:
            if time.monotonic() > deadline:
                raise Unclear(f"{problem.message}; then {err.message}") from err
    return []


def _new_jobs(slurm: Slurm, run_id: str, known: Collection[str]) -> list[Job]:
    return [job for job in jobs_by_comment(slurm, run_id) if job.job_id not in known]


def _submitter(
    run_dir: RunDir, environ: Mapping[str, str], cwd: Path, sbatch_s: float
) -> Callable[[], str]:
    """What submits run_dir's script and returns the job's id.

    It is submitit's executor, without its pickles and its own script: the script that is there is
    what sbatch gets. What is used of its private methods is held by a test.
    """
    from submitit.core.utils import FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    class Executor(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2  # Whether Slurm is there has been found out, and better, before.

        def _num_tasks(self) -> int:
            return 1  # However many ranks the supervisor starts, the job itself is one task.

        def _submit_command(self, command: str) -> SubmititJob[object]:
            # submitit's has no time-out, and hands on the surrounding environment as it is.
            argv = self._make_submission_command(Path(command))
            try:
                answer = shell.run(argv, timeout_s=sbatch_s, env=environ, cwd=cwd)
            except shell.CommandTimedOut as err:
                raise SchedulerUnavailable(err.message) from err
            except OSError as err:
                raise SchedulerRejected(no_such_command(argv[0], err).message) from err
            unanswered = answer.returncode < 0 or not answer.stderr.strip()
            if answer.returncode and (unanswered or is_out_of_reach(answer.stderr)):
                raise SchedulerUnavailable(refusal(argv[0], answer.stderr).message)
            if answer.returncode:
                raise refusal(argv[0], answer.stderr)
            try:
                job_id = self._get_job_id_from_submission_command(answer.stdout)
            except FailedSubmissionError as err:
                raise SchedulerUnavailable(f"{argv[0]} named no job") from err
            return self.job_class(folder=self.folder, job_id=job_id, tasks=[0])

        def __call__(self) -> str:
            return self._submit_command(str(run_dir.script)).job_id

    return Executor(run_dir.path)
