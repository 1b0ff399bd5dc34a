"""The supervisor's life inside a Slurm job: what its signals mean, and how the run comes back.

Three rules: srun is never sent TERM, its return code is never believed, and when Slurm takes the
nodes away the job is requeued at once, since that still works while a job is being ended, and a
moment later nobody is left to ask for it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from launcher.jobs import begin_submission, claim_run, effective, note_job
from launcher.judge import CAUSES
from launcher.schedulers.base import Interruption
from launcher.slurm import Slurm
from launcher.slurm_answers import Job, PastLife
from launcher.slurm_env import BatchJob
from trainer.spec.errors import (
    Fenced,
    SchedulerError,
    SchedulerRejected,
    SchedulerUnavailable,
    VitraError,
)
from trainer.spec.outcome import EXIT_FENCED, EXIT_SAVED, RunState, Verdict
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir, append_event, read_lines

#: A job that is being ended; its steps get KillWait (30 s by default) from the first signal on.
_ENDING = ("COMPLETING", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "FAILED", "REQUEUED")
#: How long the accounting may take to know why a job is being ended (0.7 s, as measured).
_CAUSE_KNOWN_S = 3.0
#: A signal so long before the limit may still be the one that was asked for: Slurm looks at the
#: limits of jobs about every 30 s.
_EARLY = timedelta(seconds=90)
#: When a node stops answering, Slurm knows after SlurmdTimeout (300 s by default) at the latest.
_NODE_VERDICT_S = 420.0
#: While the controller cannot be reached nothing is concluded: this side may be the one cut off.
_OUT_OF_REACH_S = 1800.0
#: A job that is being ended leaves no more time than this for a requeue.
_AT_ONCE_S = 3.0
#: How long to try for an answer that something else waits for.
_ANSWERS_WITHIN_S = 10.0
_LOOK_EVERY_S = 1.0
_ASK_EVERY_S = 2.0
#: With less time left than this another attempt in the same life is not worth its start.
_WORTH_STARTING_S = 60.0


class SlurmSurroundings:
    """The job around a supervisor.

    Args:
        slurm: the commands.
        batch: this life of the job.
        run_dir: the run, for its cancel marker and its attempts.
        plan: says after what the run may start again, and how early it wants to be warned.
        clock: gives seconds, and never goes back.
    """

    insists = False
    signals = (signal.SIGTERM, signal.SIGUSR2)

    def __init__(
        self,
        slurm: Slurm,
        batch: BatchJob,
        run_dir: RunDir,
        plan: Plan,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slurm = slurm
        self._clock = clock
        self._batch = batch
        self._run_dir = run_dir
        self._plan = plan
        self._parent = os.getppid()
        self._asked_to_return = False
        self._looked_at = self._clock()
        # Not worth failing for: what is to be known of the job is asked again when it matters.
        job = self._job()
        self._end_time = job.end_time if job else None
        #: How long the job waited for this life, by its controller's clock.
        self.queued_s = _waited_s(job)
        if job is not None and not job.requeue:
            try:
                slurm.allow_requeue(batch.job_id)
            except SchedulerError as err:
                append_event(run_dir, "warning", reason=f"the job cannot be requeued: {err}")

    def heed(self, number: int) -> Interruption:
        job = self._job()
        if job is None:
            return Interruption(Verdict.NODE_FAILURE, "signalled, and Slurm cannot say why")
        if job.restarts > self._batch.restarts:
            return self._taken_by_slurm()
        if number == signal.SIGUSR2:
            return self._warned(job)
        if job.state in _ENDING:
            return self._ended_by_slurm(job)
        if job.preempt_time is not None:
            return self._returning(Verdict.PREEMPTED, "preempted by a job with more priority")
        return Interruption(Verdict.CANCELLED, "stopped by a signal from outside (SIGTERM)")

    def look(self) -> Interruption | None:
        if self._clock() - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = self._clock()
        if os.getppid() != self._parent:
            return self._returning(Verdict.NODE_FAILURE, "the batch script was killed")
        if self._end_time is None or datetime.now() < self._end_time - self._last_call:
            return None
        # Slurm's warning has not come, or comes late. Someone may have moved the limit, though.
        job = self._job()
        if job is None or job.end_time is None or datetime.now() < job.end_time - self._last_call:
            self._end_time = job.end_time if job else None
            return None
        return Interruption(Verdict.TIME_LIMIT, "the job's time limit is near")

    def why_ended(
        self, lost: Sequence[int], signals: Callable[[], Sequence[int]]
    ) -> Interruption | None:
        began = self._clock()
        while True:
            job = self._job(patience_s=_OUT_OF_REACH_S)
            if job is None:
                raise Fenced("Slurm no longer knows the job")
            if job.restarts > self._batch.restarts:
                return self._taken_by_slurm()
            if job.state in _ENDING:
                return self._ended_by_slurm(job)
            if job.preempt_time is not None:
                # With a grace time only the ranks are told, and the job goes on running.
                return Interruption(Verdict.PREEMPTED, "preempted by a job with more priority")
            if found := signals():
                return self.heed(found[-1])
            if not lost:
                return None
            if bad := self._bad_nodes(lost):
                return self._returning(Verdict.NODE_FAILURE, f"node {', '.join(bad)} is gone")
            if self._nodes_answer(lost) or self._clock() - began > self._node_verdict_s:
                return None
            time.sleep(_ASK_EVERY_S)

    def start_again(self, verdict: Verdict, interruption: Interruption | None) -> bool:
        if interruption is not None and interruption.comes_back:
            return False
        elsewhere = (Verdict.PREEMPTED, Verdict.TIME_LIMIT, Verdict.NODE_FAILURE)
        if verdict not in elsewhere and self._time_left_s() >= _WORTH_STARTING_S:
            return True
        try:
            self._requeue(_OUT_OF_REACH_S)
        except SchedulerRejected as err:
            job = self._job()
            if job is not None and job.restarts > self._batch.restarts:
                # Slurm has been faster: the ranks took longer than the grace time to leave.
                return False
            append_event(self._run_dir, "warning", reason=f"the job was not requeued: {err}")
            self._submit_successor()
        return False

    def stay_away(self) -> None:
        if self._asked_to_return:
            self._slurm.cancel(self._batch.job_id)

    @property
    def _last_call(self) -> timedelta:
        """How long before the time limit the ranks are stopped where Slurm has not warned."""
        return timedelta(seconds=self._plan.spec.resources.signal_lead_s / 2)

    def _warned(self, job: Job) -> Interruption:
        """USR2: what the batch script asked for as a warning, or somebody's own signal."""
        if job.preempt_time is not None:
            # Sites may have preemption send it in place of TERM.
            return Interruption(Verdict.PREEMPTED, "preempted by a job with more priority")
        lead = timedelta(seconds=self._plan.spec.resources.signal_lead_s) + _EARLY
        if job.end_time is None or datetime.now() >= job.end_time - lead:
            return Interruption(Verdict.TIME_LIMIT, "the job's time limit is near")
        return Interruption(Verdict.CANCELLED, "stopped by a signal from outside (SIGUSR2)")

    def _ended_by_slurm(self, job: Job) -> Interruption:
        """The job is being ended, and will not be requeued by Slurm: classify before requeueing.

        A requeue would revive a job that somebody has cancelled.
        """
        preempted = "preempted by a job with more priority"
        if job.preempt_time is not None:
            meanwhile = "the job was cancelled while it was preempted"
            if job.preempt_time != job.end_time:
                return Interruption(Verdict.CANCELLED, meanwhile)
            # The end of its grace time, or a scancel in the very second in which that began.
            life = self._last_life(("CANCELLED", "PREEMPTED"))
            if life is not None and life.state == "CANCELLED":
                return Interruption(Verdict.CANCELLED, meanwhile)
            return self._returning(Verdict.PREEMPTED, preempted)
        if job.reason == "TimeLimit":
            return self._returning(Verdict.TIME_LIMIT, "the job reached its time limit")
        life = self._last_life(("CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL"))
        match life.state if life else None:
            case "PREEMPTED":
                return self._returning(Verdict.PREEMPTED, preempted)
            case "TIMEOUT":
                return self._returning(Verdict.TIME_LIMIT, "the job reached its time limit")
            case "NODE_FAIL":
                return self._returning(Verdict.NODE_FAILURE, "a node of the job failed")
            case None if self._end_time is not None and datetime.now() >= self._end_time:
                return self._returning(Verdict.TIME_LIMIT, "the job reached its time limit")
            case _:
                by = f" by uid {life.by}" if life and life.by else ""
                return Interruption(Verdict.CANCELLED, f"the job was cancelled{by}")

    def _taken_by_slurm(self) -> Interruption:
        """Slurm has requeued the job, for a reason that only the accounting and the nodes know."""
        known = ("PREEMPTED", "NODE_FAIL", "REQUEUED")
        life = self._last_life(known)
        match life.state if life else None:
            case "PREEMPTED":
                verdict, reason = Verdict.PREEMPTED, "preempted by a job with more priority"
            case "REQUEUED":
                verdict, reason = Verdict.PREEMPTED, "somebody requeued the job"
            case "NODE_FAIL":
                verdict, reason = Verdict.NODE_FAILURE, "a node of the job failed"
            case _:
                verdict, reason = Verdict.PREEMPTED, "Slurm requeued the job"
                if self._bad_nodes(range(self._plan.world_size)):
                    verdict, reason = Verdict.NODE_FAILURE, "a node of the job failed"
        if not self._may_return(verdict):
            return Interruption(verdict, reason)
        return Interruption(verdict, reason, comes_back=True)

    def _returning(self, verdict: Verdict, reason: str) -> Interruption:
        """An interruption that leaves no time: the job is requeued before anything else."""
        if not self._may_return(verdict):
            return Interruption(verdict, reason)
        try:
            self._requeue(_AT_ONCE_S)
        except SchedulerError:
            # Tried again when the ranks have ended, and another way then.
            return Interruption(verdict, reason)
        return Interruption(verdict, reason, comes_back=True)

    def _may_return(self, verdict: Verdict) -> bool:
        allowed = CAUSES[verdict] in self._plan.spec.retry.restart_on
        return allowed and not self._run_dir.cancel.exists()

    def _requeue(self, patience_s: float) -> None:
        """Have the job start again; nothing if it has been asked for, or the run was cancelled.

        Raises:
            SchedulerError: Slurm refused, or could not be asked in time.
        """
        if self._asked_to_return or self._run_dir.cancel.exists():
            return
        delay_s = 0.1
        deadline = self._clock() + patience_s
        while True:
            try:
                self._requeue_even_if_forbidden()
                break
            except SchedulerUnavailable:
                if self._clock() > deadline:
                    raise
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, 10.0)
        self._asked_to_return = True
        # It may have come in between, and requeueing a cancelled job revives it.
        if self._run_dir.cancel.exists():
            self._slurm.cancel(self._batch.job_id)

    def _requeue_even_if_forbidden(self) -> None:
        try:
            self._slurm.requeue(self._batch.job_id)
        except SchedulerRejected:
            # By --no-requeue, or a site's JobRequeue=0, which the job's owner may lift.
            self._slurm.allow_requeue(self._batch.job_id)
            self._slurm.requeue(self._batch.job_id)

    def _submit_successor(self) -> None:
        """Where a requeue is refused: another job, which waits for the end of this one."""
        if self._run_dir.cancel.exists():
            return
        begin_submission(self._run_dir)
        after = f"--dependency=afterany:{self._batch.job_id}"
        job_id = self._slurm.submit(self._run_dir.script, after)
        note_job(self._run_dir, job_id)
        if self._run_dir.cancel.exists():
            self._slurm.cancel(job_id)

    def _job(self, patience_s: float | None = None) -> Job | None:
        """What Slurm knows of the job; None once it knows nothing, or where it cannot be asked.

        Raises:
            Fenced: it could not be asked for so long that another attempt may have begun.
        """
        patience_s = _ANSWERS_WITHIN_S if patience_s is None else patience_s
        delay_s = 0.2
        deadline = self._clock() + patience_s
        while True:
            try:
                return self._slurm.job(self._batch.job_id)
            except SchedulerError as err:
                if self._clock() > deadline:
                    if patience_s >= _OUT_OF_REACH_S:
                        raise Fenced(f"cut off from Slurm: {err}") from err
                    return None
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, 10.0)

    def _last_life(self, states: Sequence[str]) -> PastLife | None:
        """This life's row in the accounting, once it has one of these states."""
        deadline = self._clock() + _CAUSE_KNOWN_S
        while True:
            try:
                lives = self._slurm.history(self._batch.job_id, timeout_s=_CAUSE_KNOWN_S)
            except SchedulerError:
                return None
            # An older job may have had the same number.
            lives = [life for life in lives if life.name == self._plan.spec.name]
            if len(lives) > self._batch.restarts:
                life = lives[self._batch.restarts]
                if life.state in states:
                    return life
            if self._clock() > deadline:
                return None
            time.sleep(0.1)

    def _bad_nodes(self, ranks: Sequence[int]) -> list[str]:
        """The nodes of these ranks that Slurm says are down, or do not answer."""
        try:
            return self._slurm.unusable(self._nodes_of(ranks))
        except SchedulerError:
            return []

    def _nodes_answer(self, ranks: Sequence[int]) -> bool:
        """Whether the nodes of these ranks are sure to be alive."""
        try:
            return self._slurm.nodes_answer(self._batch.job_id, self._nodes_of(ranks))
        except SchedulerError:
            return False

    def _nodes_of(self, ranks: Sequence[int]) -> list[str]:
        hosts = self._slurm.host_names(self._batch.nodes)
        return sorted({hosts[rank // self._plan.tasks_per_node] for rank in ranks})

    @property
    def _node_verdict_s(self) -> float:
        try:
            return self._slurm.slurmd_timeout_s() + 2 * _ASK_EVERY_S + 30.0
        except SchedulerError:
            return _NODE_VERDICT_S

    def _time_left_s(self) -> float:
        if self._end_time is None:
            return float("inf")
        return (self._end_time - datetime.now()).total_seconds()


def _waited_s(job: Job | None) -> float:
    """Seconds from a job's submission, or requeue, to its start; 0 where they are not known."""
    if job is None or job.submit_time is None or job.start_time is None:
        return 0.0
    return max(0.0, (job.start_time - job.submit_time).total_seconds())


def main(arguments: Sequence[str]) -> int:
    """Supervise a run from within its job; returns the exit code of the batch script.

    0: the run is complete. 75: it goes on in the job's next life. 93: it does not go on.
    """
    batch = BatchJob.from_environ(os.environ)
    if len(arguments) != 1 or batch is None:
        sys.stderr.write("usage, within a batch job: python -P -m launcher.job RUN_DIR\n")
        return 2
    early: list[int] = []
    for number in SlurmSurroundings.signals:
        signal.signal(number, lambda caught, _frame: early.append(caught))
    # bash has its background commands ignore these two, and srun would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # From now on the batch script passes on what it gets.
    os.kill(os.getppid(), signal.SIGUSR1)
    try:
        return _supervise(RunDir(Path(arguments[0])), batch, early)
    except Fenced as err:
        sys.stderr.write(f"vitra: {err}\n")
        return EXIT_FENCED
    except VitraError as err:
        sys.stderr.write(f"vitra: {err}\n")
        return err.exit_code
    finally:
        # One that comes while Python shuts down would turn the exit code into its own.
        for number in SlurmSurroundings.signals:
            signal.signal(number, signal.SIG_IGN)


def _supervise(run_dir: RunDir, batch: BatchJob, early: list[int]) -> int:
    from launcher.job import Supervisor
    from launcher.outcomes import close_unjudged
    from launcher.progress import follow
    from launcher.registry import read_plan, read_record
    from launcher.schedulers.slurm import SlurmLauncher
    from launcher.status import is_finished

    record, plan = read_record(run_dir), read_plan(run_dir)
    if (other := claim_run(run_dir, batch.job_id)) is not None:
        raise Fenced(f"the run belongs to job {other}, not to this one ({batch.job_id})")
    if is_finished(effective(read_lines(run_dir.events))):
        raise Fenced("the run is over; `vitra resume` takes it up again")
    slurm = Slurm(os.environ)
    surroundings = SlurmSurroundings(slurm, batch, run_dir, plan)
    append_event(
        run_dir,
        "allocated",
        job_id=batch.job_id,
        restarts=batch.restarts,
        nodes=batch.nodes,
        queued_s=surroundings.queued_s,
    )
    close_unjudged(run_dir)
    supervisor = Supervisor(
        run_dir,
        SlurmLauncher(slurm, batch, os.environ, Path(record.working_dir)),
        follow(run_dir),
        surroundings,
        job_id=batch.job_id,
        early=early,
    )
    ending = supervisor.run()
    sys.stderr.write(f"vitra: {ending.state}: {ending.reason}\n")
    return {RunState.COMPLETED: 0, RunState.REQUEUED: EXIT_SAVED}.get(ending.state, EXIT_FENCED)
