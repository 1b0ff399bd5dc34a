"""What a run writes about itself: metrics, sample ids and events, exact across all resumes."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.spec.errors import StorageError
from trainer.spec.ranks import RankInfo
from trainer.spec.rundir import LineLog, RunDir, append_event, json_line, read_lines, write_atomic


class RunRecords:
    """The record files of one attempt, as one rank writes them.

    Metrics are written by the primary rank only, to metrics.jsonl of the run and of the attempt;
    sample ids by each rank to its own file. Lines of steps beyond the resume step belong to work
    that no longer counts: `rebuild` drops them before the attempt's first step.

    All but `sync` raise StorageError, which names the file, where one cannot be written: what a
    run says of itself is part of its result, so it ends there and can be resumed.
    """

    def __init__(
        self, run_dir: RunDir, ranks: RankInfo, *, log_interval: int, sample_ids: bool
    ) -> None:
        self._run_dir = run_dir
        self._ranks = ranks
        self._log_interval = log_interval
        self._sample_ids = sample_ids
        self._metrics: list[LineLog] = []
        self._samples: LineLog | None = None

    def rebuild(self, resume_step: int) -> None:
        """Cut all records back to `resume_step`: on the primary rank, before any opens its files.

        Files of ranks beyond the present world are cut as well: they hold what an attempt of
        another size trained.
        """
        with _written():
            for path in (self._run_dir.metrics, *self._run_dir.sample_files()):
                _keep_up_to(path, resume_step)

    def open(self) -> None:
        """Open the files for appending; after `rebuild` has finished on the primary rank."""
        with _written():
            if self._ranks.is_primary:
                attempt = self._run_dir.attempt(self._ranks.attempt)
                self._metrics = [LineLog(self._run_dir.metrics), LineLog(attempt.metrics)]
            if self._sample_ids:
                self._samples = LineLog(self._run_dir.samples(self._ranks.rank))

    def step(self, record: dict[str, Any]) -> None:
        """Append one step's metrics, when it is due by the log interval."""
        if record["step"] % self._log_interval == 0:
            with _written():
                for log in self._metrics:
                    log.append(record)

    def samples(self, step: int, ids: list[int]) -> None:
        """Append the ids of the samples that this rank trained in `step`."""
        if self._samples is not None:
            with _written():
                self._samples.append({"step": step, "ids": ids})

    def sync(self) -> None:
        """Make everything written durable: a checkpoint must not outlive the records before it."""
        for log in (*self._metrics, *([self._samples] if self._samples else [])):
            log.sync()

    def event(self, event: str, **details: Any) -> None:
        """Append one event to events.jsonl, on the primary rank."""
        if self._ranks.is_primary:
            with _written():
                append_event(self._run_dir, event, attempt=self._ranks.attempt, **details)


@contextmanager
def _written() -> Generator[None]:
    try:
        yield
    except OSError as err:
        raise StorageError(
            f"{err.filename or 'a record'} cannot be written: {err.strerror}",
            "nothing that was saved is lost: make room, then go on with `vitra resume`",
        ) from err


def _keep_up_to(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept: list[bytes] = []
    last = -math.inf
    for record in read_lines(path):
        number = record.get("step")
        # Steps increase strictly; a line that does not fit is not of the work that counts.
        if isinstance(number, int) and last < number <= step:
            kept.append(json_line(record))
            last = number
    write_atomic(path, b"".join(kept))
