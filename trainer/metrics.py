"""The figures of a step, on their way to metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.records import RunRecords


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, over the whole global batch.

    `loss` is the mean over every valid element of the global batch, `lr` the rate by role,
    `grad_norm` the global norm before clipping, `step_time_s` the wall time with the wait for data.
    """

    step: int
    epoch: int
    loss: float
    lr: dict[str, float]
    grad_norm: float
    step_time_s: float
    samples_seen: int
    attempt: int


class VLAMetrics:
    """Takes each step's figures and passes them on; the records decide what is due."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records

    def push(self, metrics: StepMetrics) -> None:
        """Record one finished step."""
        self._records.step({**vars(metrics), "step_time_s": round(metrics.step_time_s, 6)})
