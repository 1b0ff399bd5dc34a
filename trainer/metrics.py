"""The figures of a step, on their way to metrics.jsonl and to a tracker.

Free of torch, whose threads the process that sends to a tracker can do without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.records import RunRecords
from trainer.spec.schedule import ACTION_MODEL, BACKBONE

if TYPE_CHECKING:
    from trainer.tracking import WandbTracker

_PREFIX = "VLA Train"
_RATE_NAMES = {BACKBONE: "Backbone Learning Rate", ACTION_MODEL: "Action Model Learning Rate"}


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, over the whole global batch.

    `loss` is the mean over every valid element of the global batch, `lr` the rate by role,
    `grad_norm` the global norm before clipping, `step_time_s` the wall time with the wait for data,
    which is `data_wait_s` of it. Both, and `memory_bytes` (`trainer.memory`), are this rank's.
    """

    step: int
    epoch: int
    loss: float
    lr: dict[str, float]
    grad_norm: float
    step_time_s: float
    data_wait_s: float
    memory_bytes: int
    samples_seen: int
    attempt: int


class VLAMetrics:
    """Takes each step's figures and passes them on; the records decide what is due.

    `tracker` reads the records itself; each step is only an opportunity to hear from it.
    """

    def __init__(self, records: RunRecords, tracker: WandbTracker | None = None) -> None:
        self._records = records
        self._tracker = tracker

    def push(self, metrics: StepMetrics) -> None:
        """Record one finished step."""
        times = {name: round(vars(metrics)[name], 6) for name in ("step_time_s", "data_wait_s")}
        self._records.step({**vars(metrics), **times})
        if self._tracker is not None:
            self._tracker.poll()


def tracker_metrics(record: dict[str, Any], global_batch_size: int) -> dict[str, float]:
    """A record of metrics.jsonl under the names of VITRA's dashboards.

    `Loss` and `Loss (Raw)` are one figure here, as they are there with the default window of one
    step: the mean over the global batch. Times are in seconds.
    """
    step_time_s = record["step_time_s"]
    figures: dict[str, float] = {
        f"{_PREFIX}/Step": record["step"],
        f"{_PREFIX}/Epoch": record["epoch"],
        f"{_PREFIX}/Loss": record["loss"],
        f"{_PREFIX}/Loss (Raw)": record["loss"],
        f"{_PREFIX}/Step Time": step_time_s,
        "Other/Gradient Norm": record["grad_norm"],
        "Other/Samples Seen": record["samples_seen"],
        "Other/Attempt": record["attempt"],
    }
    # A run that an older version began has records without them.
    if "data_wait_s" in record:
        figures["Other/Data Wait"] = record["data_wait_s"]
    if "memory_bytes" in record:
        figures["Other/Memory (GiB)"] = record["memory_bytes"] / 2**30
    for role, name in _RATE_NAMES.items():
        if role in record["lr"]:
            figures[f"{_PREFIX}/{name}"] = record["lr"][role]
    if step_time_s > 0:
        figures["Other/Samples per Second"] = global_batch_size / step_time_s
    return figures
