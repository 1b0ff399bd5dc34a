"""Progress of a running attempt: a live line on a terminal, plain lines in a log; on stderr."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from launcher.wording import clock_time
from trainer.spec.plan import Plan
from trainer.spec.rundir import AttemptDir, RunDir, Tail

#: Seconds between two lines where nobody watches live.
_LINE_EVERY_S = 10.0
_REFRESH_EVERY_S = 0.25


class Progress(Protocol):
    """What the supervisor tells whoever is watching."""

    def attempt(self, plan: Plan, files: AttemptDir, attempt: int, resume_step: int | None) -> None:
        """An attempt starts."""
        ...

    def poll(self) -> None:
        """Look for news; called several times a second and must return at once."""
        ...

    def message(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def close(self) -> None:
        """Nothing more comes; leaves the terminal as it was."""
        ...


def write(stream: TextIO, text: str) -> None:
    """Write and flush; from then on silent if whoever read it has gone."""
    with _whoever_listens(stream):
        stream.write(text)
        stream.flush()


@contextmanager
def _whoever_listens(stream: TextIO) -> Generator[None]:
    """What happens inside may write to a stream whose reader has gone.

    That is how `| head` ends, and a closed terminal: no reason to end a run, or to call it failed.
    """
    try:
        yield
    except OSError as err:
        if err.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def follow(run_dir: RunDir) -> Progress:
    """A live display where stderr is a terminal, else plain lines."""
    if sys.stderr.isatty():
        return _Live(run_dir)
    return _Plain(run_dir)


class _Following:
    """What both displays know: the newest step's figures, speed, and the newest checkpoint."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._events = Tail(run_dir.events)
        self._metrics: Tail | None = None
        self._plan: Plan | None = None
        self._newest: dict[str, Any] | None = None
        self._step_time_s = 0.0
        self._saved_step: int | None = None
        self._events.records()

    def _start(self, plan: Plan, files: AttemptDir, resume_step: int | None) -> None:
        self._plan = plan
        self._metrics = Tail(files.metrics)
        self._newest = None
        self._step_time_s = 0.0
        self._saved_step = resume_step

    def _read(self) -> tuple[bool, list[str]]:
        """(is there a newer step, lines worth printing)."""
        lines: list[str] = []
        for event in self._events.records():
            match event.get("event"):
                case "saved":
                    self._saved_step = event["step"]
                case "checkpoint_skipped":
                    lines.append(
                        f"checkpoint of step {event['step']} passed over: {event['reason']}"
                    )
                case "save_failed":
                    lines.append(f"WARNING: step {event['step']} was not saved: {event['reason']}")
                case "tracking_failed":
                    lines.append(f"WARNING: {event['reason']}")
                case "evaluated":
                    lines.extend(_evaluation_lines(event))
                case _:
                    pass
        records = self._metrics.records() if self._metrics else []
        for record in records:
            taken = float(record["step_time_s"])
            self._step_time_s = (
                0.9 * self._step_time_s + 0.1 * taken if self._step_time_s else taken
            )
            self._newest = record
        return bool(records), lines

    def _figures(self) -> str:
        plan, newest = self._plan, self._newest
        if plan is None or newest is None:
            return "starting"
        total = plan.total_steps or 0
        speed = plan.global_batch_size / self._step_time_s if self._step_time_s else 0.0
        saved = "none yet" if self._saved_step is None else str(self._saved_step)
        return (
            f"step {newest['step']}/{total}  loss {newest['loss']:.4f}  {speed:.0f} samples/s  "
            f"ETA {clock_time((total - newest['step']) * self._step_time_s)}  checkpoint {saved}"
        )


class _Plain(_Following):
    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(run_dir)
        self._printed_at = 0.0

    def attempt(self, plan: Plan, files: AttemptDir, attempt: int, resume_step: int | None) -> None:
        self._start(plan, files, resume_step)
        self.message(_attempt_line(plan, attempt, resume_step))

    def poll(self) -> None:
        newer, lines = self._read()
        for line in lines:
            self.message(line)
        now = time.monotonic()
        done = (
            self._newest is not None
            and self._plan is not None
            and self._newest["step"] == self._plan.total_steps
        )
        if newer and (done or now - self._printed_at >= _LINE_EVERY_S):
            self._printed_at = now
            self.message(self._figures())

    def message(self, text: str) -> None:
        write(sys.stderr, f"{time.strftime('%H:%M:%S')} {text}\n")

    def close(self) -> None: ...


class _Live(_Following):
    def __init__(self, run_dir: RunDir) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(run_dir)
        self._polled_at = 0.0
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=Console(file=sys.stderr),
            # Refreshed by poll(): a thread's errors could not be caught.
            auto_refresh=False,
        )
        self._task = self._bar.add_task("starting", total=None)
        with _whoever_listens(sys.stderr):
            self._bar.start()

    def attempt(self, plan: Plan, files: AttemptDir, attempt: int, resume_step: int | None) -> None:
        self._start(plan, files, resume_step)
        self.message(_attempt_line(plan, attempt, resume_step))
        self._bar.update(
            self._task, total=plan.total_steps, completed=resume_step or 0, description="starting"
        )

    def poll(self) -> None:
        now = time.monotonic()
        if now - self._polled_at < _REFRESH_EVERY_S:
            return
        self._polled_at = now
        newer, lines = self._read()
        for line in lines:
            self.message(line)
        with _whoever_listens(sys.stderr):
            if newer and self._newest:
                done = self._newest["step"]
                self._bar.update(self._task, completed=done, description=self._figures())
            self._bar.refresh()

    def message(self, text: str) -> None:
        with _whoever_listens(sys.stderr):
            self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._polled_at = 0.0
        self.poll()
        with _whoever_listens(sys.stderr):
            self._bar.stop()


def _attempt_line(plan: Plan, attempt: int, resume_step: int | None) -> str:
    where = (
        "from the beginning"
        if resume_step is None
        else f"from the checkpoint of step {resume_step}"
    )
    return (
        f"attempt {attempt}: {plan.world_size} ranks, batch {plan.per_device_batch_size} x "
        f"{plan.world_size} x {plan.grad_accumulation_steps} = {plan.global_batch_size}, {where}"
    )


def _evaluation_lines(event: dict[str, Any]) -> list[str]:
    figures = {k: v for k, v in event.items() if k not in ("at", "event", "attempt", "step")}
    width = max(map(len, figures), default=0)
    return [
        "on held-out data:",
        *(f"  {name:<{width}}  {value:.4f}" for name, value in figures.items()),
    ]
