"""The supervisor: starts the ranks, sees every end, and alone judges what an end meant."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from launcher.budgets import run_history
from launcher.goodput import Timekeeper
from launcher.hang import Hang, HangGuard, Limits
from launcher.heartbeat import Heartbeats
from launcher.judge import Decision, Finding, decide, judge
from launcher.outcomes import Ending, publish, read_reports
from launcher.progress import Progress
from launcher.schedulers.base import Interruption, RankGroup, RankLauncher, Surroundings
from launcher.status import finished_steps
from trainer.spec.errors import Fenced, SchedulerUnavailable, StorageError, VitraError
from trainer.spec.outcome import EXIT_SAVED, Outcome, RankExit, RankReport, RunState, Verdict
from trainer.spec.plan import Plan
from trainer.spec.pulse import Phase
from trainer.spec.rundir import (
    LineLog,
    RunDir,
    append_event,
    read_lines,
    utc_now,
    write_atomic,
)

_POLL_S = 0.1
#: After one rank has failed its peers fail as well, when they lose it; then they are ended.
_PEERS_LEAVE_S = 3.0
#: One Ctrl-C may arrive twice: from the terminal, and from a wrapper that passes it on.
_ONE_PRESS_S = 0.3


class Supervisor:
    """Runs one run's attempts until it is done, stopped or given up.

    Args:
        run_dir: a submitted run.
        launcher: what starts ranks.
        progress: told about every finished step.
        surroundings: what may take the ranks away, and how the run starts again then.
        job_id: the scheduler's, recorded with each attempt.
        early: signals that had come before; the list may grow until `run` listens itself.
        limits: when ranks count as hung; None: what follows from the plan's retry.hang_timeout_s.
        clock: gives seconds, and never goes back.
    """

    def __init__(
        self,
        run_dir: RunDir,
        launcher: RankLauncher,
        progress: Progress,
        surroundings: Surroundings,
        *,
        job_id: str | None = None,
        early: Sequence[int] = (),
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._launcher = launcher
        self._progress = progress
        self._surroundings = surroundings
        self._job_id = job_id
        self._limits = limits
        self._clock = clock
        self._early = early
        self._signals: list[int] = []
        self._heeded = 0
        self._interruption: Interruption | None = None

    def run(self) -> Ending:
        """Supervise to the end. The caller holds the run's lock.

        Raises:
            CheckpointError: the checkpoint place or the run directory failed or refused.
            SchedulerError: the ranks could not be started.
        """
        try:
            with self._signals_counted():
                return self._attempts()
        except (Fenced, SchedulerUnavailable) as err:
            # Not this process's to say any more, or not known: `vitra watch` finds out.
            if self._job_id is None and not isinstance(err, Fenced):
                self._finish(RunState.FAILED, Verdict.ERROR, str(err))
            raise
        except (VitraError, OSError) as err:
            # Nobody else is left to record how the run stands.
            with suppress(OSError):
                self._finish(RunState.FAILED, Verdict.ERROR, str(err))
            if isinstance(err, OSError):
                raise StorageError(
                    f"run directory: {err.filename or self._run_dir.path}: {err.strerror}",
                    "no checkpoint is lost by that: mend it, then go on with `vitra resume`",
                ) from err
            raise

    def _attempts(self) -> Ending:
        while True:
            if self._cancelled():
                return self._finish(
                    RunState.CANCELLED, Verdict.CANCELLED, "cancelled before it started"
                )
            if (interruption := self._interrupted()) is not None:
                return self._stopped_between(interruption)
            finding, decision = self._attempt()
            if not decision.restart:
                self._surroundings.stay_away()
                return self._finish(
                    decision.state, decision.verdict, decision.reason, finding.exit_code
                )
            if self._interruption is not None:
                return self._go_on_later(decision.verdict, decision.reason)
            # Noted first: what follows may end this process.
            append_event(
                self._run_dir, "requeued", verdict=decision.verdict, reason=decision.reason
            )
            if not self._surroundings.start_again(decision.verdict, None):
                return Ending(RunState.REQUEUED, decision.verdict, decision.reason)
            self._progress.message(f"{decision.verdict}: {decision.reason}; starting again")

    def _stopped_between(self, interruption: Interruption) -> Ending:
        if interruption.verdict is Verdict.CANCELLED:
            return self._finish(RunState.CANCELLED, Verdict.CANCELLED, "stopped between attempts")
        policy = Plan.read(self._run_dir.plan).spec.retry
        finding = Finding(interruption.verdict, interruption.reason)
        decision = decide(finding, run_history(read_lines(self._run_dir.events)), policy)
        if not decision.restart:
            self._surroundings.stay_away()
            return self._finish(decision.state, decision.verdict, decision.reason)
        return self._go_on_later(decision.verdict, decision.reason)

    def _go_on_later(self, verdict: Verdict, reason: str) -> Ending:
        append_event(self._run_dir, "requeued", verdict=verdict, reason=reason)
        self._surroundings.start_again(verdict, self._interruption)
        return Ending(RunState.REQUEUED, verdict, reason)

    def _interrupted(self) -> Interruption | None:
        """What has come from outside to end the ranks, if anything has.

        A later signal may tell more: that the job was cancelled in its grace time, or that the time
        limit, of which there was a warning, is reached.
        """
        while self._heeded < len(self._signals):
            self._heeded += 1
            heard = self._surroundings.heed(self._signals[self._heeded - 1])
            if self._interruption is None or not self._interruption.comes_back:
                self._interruption = heard
        if self._interruption is None:
            self._interruption = self._surroundings.look()
        if self._interruption is None and self._cancelled():
            self._interruption = Interruption(Verdict.CANCELLED, "cancelled by `vitra cancel`")
        return self._interruption

    def _attempt(self) -> tuple[Finding, Decision]:
        plan = Plan.read(self._run_dir.plan)
        attempt, resume = self._claim(plan)
        files = self._run_dir.attempt(attempt)
        for directory in (files.path, files.logs):
            directory.mkdir(exist_ok=True, mode=0o750)
        write_atomic(files.plan, plan.model_dump_json(indent=1).encode())
        started_at = utc_now()
        append_event(
            self._run_dir, "attempt", attempt=attempt, resume_step=resume, job_id=self._job_id
        )
        with (
            LineLog(files.supervisor_log) as log,
            Heartbeats(self._launcher.address, plan.world_size) as heartbeats,
        ):
            note = _Notes(log)
            note(f"attempt {attempt}: {plan.world_size} ranks, checkpoint to resume from: {resume}")
            self._progress.attempt(plan, files, attempt, resume)
            group = self._launcher.start(self._run_dir, plan, attempt, heartbeats.environment())
            limits = self._limits or Limits.of(plan.spec.retry.hang_timeout_s)
            guard = HangGuard(plan.world_size, limits, files, heartbeats, self._clock)
            timekeeper = Timekeeper(files, self._clock, restores=resume is not None)
            try:
                exits, hang = self._watch(
                    group, plan, attempt, guard, note, lambda: timekeeper.look(heartbeats.places())
                )
            except BaseException:
                group.kill()
                raise
            timekeeper.close()
            places = heartbeats.places()
            reports = read_reports(files, plan.world_size)
            # First: where the scheduler cannot be asked, that is likely to be why.
            self._refuse_if_succeeded(attempt, group)
            if self._interruption is None and hang is None and not _all_done(exits, reports, plan):
                lost = [rank for rank, end in exits.items() if end.is_lost]
                self._interruption = self._surroundings.why_ended(lost, lambda: self._signals)
            self._refuse_if_succeeded(attempt, group)
            stopped = self._interruption
            finding = judge(
                exits,
                reports,
                total_steps=plan.total_steps,
                stop_asked=stopped is not None and stopped.verdict is Verdict.CANCELLED,
                hang=hang,
                interruption=stopped,
                done={r: place.step for r, place in places.items() if place.phase is Phase.DONE},
            )
            note(f"verdict {finding.verdict}: {finding.reason}")
        for stacks in files.logs.glob("*.stack"):
            if not stacks.stat().st_size:
                stacks.unlink()  # made by each rank, filled only by one that was asked
        heard = max((place.step for place in places.values()), default=0)
        first, last = finished_steps(
            self._run_dir, attempt, read_lines(self._run_dir.events), reports, heard
        )
        outcome = Outcome(
            attempt=attempt,
            verdict=finding.verdict,
            reason=finding.reason,
            job_id=self._job_id,
            exit_code=finding.exit_code,
            failed_rank=finding.failed_rank,
            failed_node=finding.failed_node,
            first_step=first,
            last_step=last,
            started_at=started_at,
            ended_at=utc_now(),
        )
        publish(self._run_dir, outcome)
        return finding, decide(
            finding, run_history(read_lines(self._run_dir.events)), plan.spec.retry
        )

    def _claim(self, plan: Plan) -> tuple[int, int | None]:
        """Take the next attempt number; returns it and the step that it may resume from at most."""
        from trainer.store.checkpoints import CheckpointStore

        store = CheckpointStore.of_plan(plan)
        # Before ranks are started: what cannot be written, read and deleted can hold no checkpoint.
        store.storage.probe()
        store.own()
        # Looked at before the claim, which turns the reason of each into "no part of the run".
        survey = store.survey()
        claim = store.claim_next(
            self._job_id,
            None,
            # The checkpoint place may be a new one, where nothing is claimed yet.
            after_attempt=max(self._run_dir.attempt_numbers(), default=0),
            ever_saved=any(e.get("event") == "saved" for e in read_lines(self._run_dir.events)),
        )
        for one in (*survey.damaged, *survey.torn):
            if claim.resume_step is None or one.step > claim.resume_step:
                append_event(
                    self._run_dir,
                    "checkpoint_skipped",
                    attempt=claim.attempt,
                    step=one.step,
                    reason=one.reason,
                )
        store.sweep(claim.attempt)
        return claim.attempt, claim.resume_step

    def _watch(
        self,
        group: RankGroup,
        plan: Plan,
        attempt: int,
        guard: HangGuard,
        note: Callable[[str], None],
        look: Callable[[], None],
    ) -> tuple[dict[int, RankExit], Hang | None]:
        """Wait for every rank to end, and call `look` many times a second meanwhile.

        Passes stops on, ends the rest when one has failed, and all when they hang: then also
        returns how.
        """
        told = False
        failed_at: float | None = None
        while True:
            exits = group.poll()
            self._progress.poll()
            look()
            if len(exits) == plan.world_size:
                return exits, None
            now = self._clock()
            if not told and (interruption := self._interrupted()) is not None:
                told = True
                note(f"{interruption.verdict}: {interruption.reason}; the ranks save and leave")
                # For whoever judges, should this process not live to do it.
                append_event(
                    self._run_dir,
                    "signal",
                    number=self._signals[0] if self._signals else None,
                    attempt=attempt,
                    verdict=interruption.verdict,
                    reason=interruption.reason,
                )
                hint = " (once more to stop at once)" if self._surroundings.insists else ""
                self._progress.message(f"stopping: saving a checkpoint first{hint}")
                group.ask_to_stop()
            if len(self._signals) > 1 and self._surroundings.insists:
                note("stop asked for again: ending the ranks")
                self._progress.message("stopping at once")
                return _end(group, plan, note), None
            failed = [r for r, end in exits.items() if end.exit_code not in (0, EXIT_SAVED)]
            if failed and failed_at is None:
                failed_at = now
                note(f"rank {failed[0]} failed; its peers have {_PEERS_LEAVE_S:g} s to leave")
            if failed_at is not None:
                if now - failed_at > _PEERS_LEAVE_S:
                    note("ending the remaining ranks")
                    return _end(group, plan, note), None
            elif (stalled := guard.look(exits)) is not None:
                note(f"{stalled}: taking the ranks' stacks, then ending them")
                self._progress.message(f"{stalled}: the ranks hang, and are ended")
                hang = guard.examine(group, stalled)
                self._progress.message(f"their stacks are in {guard.stacks}")
                return _end(group, plan, note), hang
            time.sleep(_POLL_S)

    def _refuse_if_succeeded(self, attempt: int, group: RankGroup) -> None:
        """A supervisor that the scheduler has given up may live on beside its successor.

        Then it leaves nothing of its own behind.

        Raises:
            Fenced: that is so; nothing of the run is this one's to judge any more.
        """
        if max(self._run_dir.attempt_numbers(), default=0) > attempt:
            group.kill()
            raise Fenced(f"attempt {attempt} has a successor, which owns the run")

    def _cancelled(self) -> bool:
        return self._run_dir.cancel.exists()

    def _finish(
        self, state: RunState, verdict: Verdict, reason: str, exit_code: int | None = None
    ) -> Ending:
        append_event(self._run_dir, "finished", state=state, verdict=verdict, reason=reason)
        return Ending(
            state, verdict, reason, exit_code, self._signals[0] if self._signals else None
        )

    @contextmanager
    def _signals_counted(self) -> Generator[None]:
        last: tuple[int, float] | None = None

        def count(number: int, _frame: FrameType | None) -> None:
            nonlocal last
            now = time.monotonic()
            again = last is not None and now - last[1] <= _ONE_PRESS_S
            if not (again and (self._surroundings.insists or (last and last[0] == number))):
                last = (number, now)
                self._signals.append(number)

        before = {number: signal.signal(number, count) for number in self._surroundings.signals}
        self._signals.extend(self._early)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _end(group: RankGroup, plan: Plan, note: Callable[[str], None]) -> dict[int, RankExit]:
    """End every rank that still runs; returns how all ended."""
    group.kill()
    exits = group.poll()
    for rank in set(range(plan.world_size)) - exits.keys():
        # It dies when it comes out of the kernel; what it saves then counts for no later attempt.
        note(f"rank {rank} does not die: it waits inside the kernel")
        exits[rank] = RankExit(
            rank=rank, node=os.uname().nodename, signal=signal.SIGKILL, ended_at=time.time()
        )
    return exits


def _all_done(exits: Mapping[int, RankExit], reports: Mapping[int, RankReport], plan: Plan) -> bool:
    return all(end.exit_code == 0 for end in exits.values()) and all(
        (report.last_step or 0) >= (plan.total_steps or 0) for report in reports.values()
    )


class _Notes:
    """Lines of supervisor.log."""

    def __init__(self, log: LineLog) -> None:
        self._log = log

    def __call__(self, text: str) -> None:
        self._log.append({"at": utc_now(), "note": text})


if __name__ == "__main__":
    from launcher.batch import main

    # At once: nothing of what Python does at its end may hold up the job's.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
