"""How far a run is, how fast it goes, and how its loss has fallen: from a few small reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from trainer.spec.rundir import AttemptDir

#: The end of metrics.jsonl that is read: some 40 records.
_TAIL_BYTES = 16384
#: The steps whose mean time makes the estimate.
_RECENT_STEPS = 20
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Pace:
    """An attempt's last finished step and its recent mean step time; None for what is not known."""

    step: int | None
    step_time_s: float | None

    def to_go_s(self, total_steps: int | None) -> float | None:
        """How long the steps still to be trained take at this pace."""
        if self.step is None or self.step_time_s is None or total_steps is None:
            return None
        return max(0, total_steps - self.step) * self.step_time_s


def pace(files: AttemptDir) -> Pace:
    """How far an attempt is, and how fast it goes."""
    records = [
        (int(record["step"]), float(record["step_time_s"])) for record in _last_records(files)
    ]
    times = [taken for _, taken in records[-_RECENT_STEPS:]]
    step = records[-1][0] if records else None
    # Steps between two records are in the ranks' own reports only, which the outcome sums up.
    try:
        ended = json.loads(files.outcome.read_bytes())["last_step"]
    except (OSError, ValueError, TypeError, KeyError):
        ended = None
    return Pace(step if ended is None else ended, sum(times) / len(times) if times else None)


def _last_records(files: AttemptDir) -> Iterable[dict[str, Any]]:
    """The last records of an attempt's metrics, in order."""
    try:
        with files.metrics.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    # The first is cut off where the file is longer, the last where it is just being written.
    for line in lines[1 if start else 0 : -1]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield cast("dict[str, Any]", record)


def trend(values: Sequence[float], width: int) -> str:
    """The values as a line of block characters, from the least to the most of their means.

    At most `width` characters, each the mean of as many values; "" for fewer than two.
    """
    columns = min(width, len(values))
    if columns < 2:
        return ""
    edges = [len(values) * column // columns for column in range(columns + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    least, most = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (most - least) if most > least else 0.0
    return "".join(_BLOCKS[round((mean - least) * scale)] for mean in means)
