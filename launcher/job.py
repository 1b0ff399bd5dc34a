"""The supervisor: starts the ranks, sees every end, and alone judges what an end meant."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from pydantic import ValidationError

from launcher.hang import Hang, HangGuard, Limits
from launcher.heartbeat import Heartbeats
from launcher.judge import Decision, Finding, PastAttempt, decide, judge
from launcher.progress import Progress
from launcher.schedulers.base import RankGroup, RankLauncher
from launcher.status import finished_steps
from trainer.spec.errors import StorageError, VitraError
from trainer.spec.outcome import EXIT_SAVED, Outcome, RankExit, RankReport, RunState, Verdict
from trainer.spec.plan import Plan
from trainer.spec.pulse import Phase
from trainer.spec.rundir import (
    AttemptDir,
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


@dataclass(frozen=True)
class Ending:
    """How a supervisor's work ended. `signal` is the one that a person stopped it with."""

    state: RunState
    verdict: Verdict
    reason: str
    exit_code: int | None = None
    signal: int | None = None


class Supervisor:
    """Runs one run's attempts until it is done, stopped or given up.

    Args:
        run_dir: a submitted run.
        launcher: what starts ranks.
        progress: told about every finished step.
        job_id: the scheduler's, recorded with each attempt.
        limits: when ranks count as hung; None: what follows from the plan's retry.hang_timeout_s.
        clock: gives seconds, and never goes back.
    """

    def __init__(
        self,
        run_dir: RunDir,
        launcher: RankLauncher,
        progress: Progress,
        *,
        job_id: str | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._launcher = launcher
        self._progress = progress
        self._job_id = job_id
        self._limits = limits
        self._clock = clock
        self._signals: list[int] = []

    def run(self) -> Ending:
        """Supervise to the end. The caller holds the run's lock.

        Raises:
            CheckpointError: the checkpoint place or the run directory failed or refused.
            SchedulerError: the ranks could not be started.
        """
        try:
            with self._signals_counted():
                return self._attempts()
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
            if self._run_dir.cancel.exists():
                return self._finish(
                    RunState.CANCELLED, Verdict.CANCELLED, "cancelled before it started"
                )
            if self._signals:
                return self._finish(
                    RunState.CANCELLED, Verdict.CANCELLED, "stopped between attempts"
                )
            finding, decision = self._attempt()
            if not decision.restart:
                return self._finish(
                    decision.state, decision.verdict, decision.reason, finding.exit_code
                )
            append_event(
                self._run_dir, "requeued", verdict=decision.verdict, reason=decision.reason
            )
            self._progress.message(f"{decision.verdict}: {decision.reason}; starting again")

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
            try:
                exits, hang = self._watch(group, plan, guard, note)
            except BaseException:
                group.kill()
                raise
            places = heartbeats.places()
            reports = _read_reports(files, plan.world_size)
            finding = judge(
                exits,
                reports,
                total_steps=plan.total_steps,
                stop_asked=bool(self._signals) or self._cancelled(),
                hang=hang,
                done={r: place.step for r, place in places.items() if place.phase is Phase.DONE},
            )
            note(f"verdict {finding.verdict}: {finding.reason}")
        for stacks in files.logs.glob("*.stack"):
            if not stacks.stat().st_size:
                stacks.unlink()  # made by each rank, filled only by one that was asked
        heard = max((place.step for place in places.values()), default=0)
        first, last = finished_steps(self._run_dir, attempt, reports, heard)
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
        _publish(self._run_dir, outcome)
        return finding, decide(finding, _history(self._run_dir), plan.spec.retry)

    def _claim(self, plan: Plan) -> tuple[int, int | None]:
        """Take the next attempt number; returns it and the step that it may resume from at most."""
        from trainer.store.checkpoints import CheckpointStore

        store = CheckpointStore.of_plan(plan)
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
        self, group: RankGroup, plan: Plan, guard: HangGuard, note: Callable[[str], None]
    ) -> tuple[dict[int, RankExit], Hang | None]:
        """Wait for every rank to end.

        Passes stops on, ends the rest when one has failed, and all when they hang: then also
        returns how.
        """
        passed_on = 0
        failed_at: float | None = None
        while True:
            exits = group.poll()
            self._progress.poll()
            if len(exits) == plan.world_size:
                return exits, None
            now = self._clock()
            asked = len(self._signals) + self._cancelled()
            if asked > passed_on:
                if passed_on == 0:
                    note("stop asked for: the ranks save and leave")
                    append_event(
                        self._run_dir, "signal", number=self._signals[0] if self._signals else None
                    )
                    self._progress.message(
                        "stopping: saving a checkpoint first (once more to stop at once)"
                    )
                    group.ask_to_stop()
                if len(self._signals) > 1:
                    note("stop asked for again: ending the ranks")
                    self._progress.message("stopping at once")
                    return _end(group, plan, note), None
                passed_on = asked
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
        counted_at = -math.inf

        def count(number: int, _frame: FrameType | None) -> None:
            nonlocal counted_at
            if time.monotonic() - counted_at > _ONE_PRESS_S:
                counted_at = time.monotonic()
                self._signals.append(number)

        numbers = [signal.SIGINT, signal.SIGTERM]
        # The terminal has gone, as when a connection drops; nohup asks for that to be ignored.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, count) for number in numbers}
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


class _Notes:
    """Lines of supervisor.log."""

    def __init__(self, log: LineLog) -> None:
        self._log = log

    def __call__(self, text: str) -> None:
        self._log.append({"at": utc_now(), "note": text})


def close_unjudged(run_dir: RunDir) -> None:
    """Judge attempts that nobody lived to judge: their supervisor was killed, or its node died."""
    for number in run_dir.attempt_numbers():
        files = run_dir.attempt(number)
        if files.outcome.exists() or not files.plan.exists():
            continue
        started = next(
            (
                e["at"]
                for e in read_lines(run_dir.events)
                if e.get("event") == "attempt" and e.get("attempt") == number
            ),
            utc_now(),
        )
        first, last = finished_steps(run_dir, number, {})
        outcome = Outcome(
            attempt=number,
            verdict=Verdict.NODE_FAILURE,
            reason="its supervisor was gone before the attempt ended",
            first_step=first,
            last_step=last,
            started_at=started,
            ended_at=utc_now(),
        )
        _publish(run_dir, outcome)


def _publish(run_dir: RunDir, outcome: Outcome) -> None:
    """Record how an attempt ended: its file first, since the event says that it is there."""
    path = run_dir.attempt(outcome.attempt).outcome
    write_atomic(path, outcome.model_dump_json(indent=1).encode())
    append_event(
        run_dir,
        "ended",
        attempt=outcome.attempt,
        verdict=outcome.verdict,
        reason=outcome.reason,
    )


def _read_reports(files: AttemptDir, world_size: int) -> dict[int, RankReport]:
    reports: dict[int, RankReport] = {}
    for rank in range(world_size):
        try:
            reports[rank] = RankReport.model_validate_json(files.report(rank).read_bytes())
        except (OSError, ValidationError):
            continue
    return reports


def _history(run_dir: RunDir) -> list[PastAttempt]:
    """The judged attempts since a person last started or resumed the run."""
    past: list[PastAttempt] = []
    progressed: set[int] = set()
    for event in read_lines(run_dir.events):
        match event.get("event"):
            case "resumed":
                past = []
            case "saved":
                progressed.add(int(event["attempt"]))
            case "ended":
                past.append(
                    PastAttempt(Verdict(event["verdict"]), int(event["attempt"]) in progressed)
                )
            case _:
                pass
    return past
