"""All that a resume needs beside tensors: three numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TrainState:
    """Where training stands. The only state of a run that changes while it trains.

    `step` is the last finished optimizer step (0: none yet), `epoch` the epoch of that step's first
    sample, `samples_seen` = step x global batch: the position in the endless stream of samples.
    """

    step: int = 0
    epoch: int = 0
    samples_seen: int = 0

    def advance(self, epoch: int, global_batch_size: int) -> None:
        """Count one more finished optimizer step."""
        self.step += 1
        self.epoch = epoch
        self.samples_seen += global_batch_size
