"""The rank's end of experiment tracking: Weights & Biases, kept at arm's length.

wandb runs in a process of its own beside the primary rank (trainer.wandb_sender), which reads
metrics.jsonl and sends what it finds there. Nothing that wandb or the network does can then delay,
stall or crash training: the rank starts a process, looks at a pipe with every step without waiting,
and at the end gives the process a bounded time to finish. Whatever was not sent is still in
metrics.jsonl, and the next attempt sends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from trainer.records import RunRecords
from trainer.spec.outcome import EXIT_SAVED
from trainer.spec.plan import Plan
from trainer.spec.ranks import RankInfo
from trainer.spec.rundir import RunDir
from trainer.wandb_sender import EXIT_FAILED, EXIT_GAVE_UP, EXIT_LATE

log = logging.getLogger(__name__)

#: How long the end of an attempt may wait for the last steps to be sent. One that was interrupted
#: or failed has no time to give: its successor, or a resume, sends what is missing.
_FINISH_S = 30.0
_FINISH_STOPPED_S = 5.0
_FINISH_FAILED_S = 2.0
#: The sender keeps to its time itself; this is for one that no longer runs at all.
_GRACE_S = 2.0
_FIRST_RETRY_S = 5.0
_LONGEST_RETRY_S = 1800.0

Process = subprocess.Popen[bytes]


class WandbTracker:
    """The sender of one attempt, as the rank sees it; one that failed is started again.

    No method raises, and none but `close` ever waits. If tracking fails there is one warning in the
    attempt, however many things went wrong: in the rank's log, and as an event `tracking_failed`.

    Args:
        start: starts a sender; may raise OSError.
        records: where the event goes.
        clock: seconds; never goes back.
    """

    def __init__(
        self,
        start: Callable[[], Process],
        records: RunRecords,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._records = records
        self._clock = clock
        self._process: Process | None = None
        self._unread = b""
        self._warned = False
        self._retry_s = _FIRST_RETRY_S
        self._start_at: float | None = self._clock()
        self.poll()

    def poll(self) -> None:
        """Hear what the sender has to say, and start one where it is time to."""
        if self._process is not None:
            self._hear(self._process)
        elif self._start_at is not None and self._clock() >= self._start_at:
            self._begin()

    def close(self, exit_code: int) -> None:
        """Have the rest sent, within the time that an attempt ending with `exit_code` has."""
        within_s = {0: _FINISH_S, EXIT_SAVED: _FINISH_STOPPED_S}.get(exit_code, _FINISH_FAILED_S)
        deadline = self._clock() + within_s
        self.poll()
        if self._process is None and exit_code != 0:
            return
        # A second try, where the first fails early, or where the time for one had not come yet.
        for _ in range(2):
            if self._process is None and self._start_at is not None:
                self._begin()
            if self._process is None:
                return
            self._end(self._process, exit_code, max(0.0, deadline - self._clock()))

    def _begin(self) -> None:
        try:
            self._process = self._start()
        except OSError as err:
            self._warn(f"cannot start the sending process: {err}; it is tried again")
            self._retry_later()
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _end(self, process: Process, exit_code: int, within_s: float) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone already; why, is heard below
            os.write(process.stdin.fileno(), f"{exit_code} {within_s:.3f}\n".encode())
        try:
            process.wait(within_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            self._warn("the sending process did not end in time and was killed")
            self._start_at = None
            self._forget(process)
        else:
            self._hear(process)

    def _hear(self, process: Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                data = os.read(process.stdout.fileno(), 4096)
            except BlockingIOError:
                return
            if not data:
                break
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._warn(line.decode(errors="replace"))
        code = process.poll()
        if code is None:  # it is about to end; there will be another look
            return
        self._forget(process)
        if code in (0, EXIT_GAVE_UP, EXIT_LATE):
            self._start_at = None
            return
        if code != EXIT_FAILED:  # then it has said why, if there is anything to say
            self._warn(f"the sending process ended with code {code}; it is tried again")
        self._retry_later()

    def _forget(self, process: Process) -> None:
        self._process = None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def _retry_later(self) -> None:
        self._start_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)

    def _warn(self, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        text = f"wandb: {reason}"
        log.warning("%s", text)
        try:
            self._records.event("tracking_failed", reason=text)
        except OSError as err:
            log.warning("cannot write the event: %s", err)


def start_tracker(
    run_dir: RunDir,
    plan: Plan,
    ranks: RankInfo,
    records: RunRecords,
    environ: Mapping[str, str],
) -> WandbTracker | None:
    """Start sending this attempt's metrics, if the spec asks for it; returns at once.

    After the records have been rebuilt and opened. None where nothing is asked for, and on every
    rank but the primary one of the whole run.
    """
    wanted = plan.spec.tracking.wandb
    if wanted is None or wanted.mode == "disabled" or not ranks.is_primary:
        return None
    # Set in a shell where some wandb process lives; ours must not send through that one.
    environ = {name: value for name, value in environ.items() if name != "WANDB_SERVICE"}
    attempt = str(ranks.attempt)

    def start() -> Process:
        # wandb prints a good deal, and it is not the training's.
        with (run_dir.attempt(ranks.attempt).logs / "wandb.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "trainer.wandb_sender", str(run_dir.path), attempt],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**environ, "VITRA_PARENT_PID": str(os.getpid())},
            )

    return WandbTracker(start, records)
