"""Saves in the background: training goes on meanwhile, and what is saved is the same."""

from __future__ import annotations

import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_helpers import Run, spoiled

from trainer.spec.rundir import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

EVERY_TWO: dict[str, Any] = {"checkpoint": {"save_interval": 2}}
_GATED_S = 40.0


def last_step(metrics: Path) -> int:
    return max((record["step"] for record in read_lines(metrics)), default=0)


def gate(step: int, until: int, before: int, metrics: Path, rank: int) -> None:
    """Rank 1 cannot open its shard of `step` before step `until` is trained.

    It fails if that does not come about, or if step `before` is trained meanwhile.
    """

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or f"step-{step:08d}/shard" not in str(arguments[0]):
            return
        deadline = time.monotonic() + _GATED_S
        while last_step(metrics) < until:
            if time.monotonic() > deadline:
                raise OSError(5, f"step {until} was not trained meanwhile")
            time.sleep(0.02)
        time.sleep(0.5)
        if last_step(metrics) >= before:
            raise OSError(5, f"step {before} was trained meanwhile")

    if rank == 1:
        sys.addaudithook(on_event)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp-full"])
def test_training_goes_on_until_the_next_save_is_due(tmp_path: Path, strategy: str) -> None:
    changes = {"train": {"strategy": strategy, "max_steps": 8}}
    run = Run(tmp_path / "background", 2, EVERY_TWO, changes)
    with run.start(prepare=partial(gate, 2, 4, 5, run.dir.metrics)) as ranks:
        assert ranks.wait() == [0, 0], ranks.logs()
    assert run.events("save_failed") == []
    assert run.saved_steps() == [2, 4, 6, 8]
    assert [event["step"] for event in run.events("saved")] == [2, 4, 6, 8]

    still = Run(tmp_path / "foreground", 2, EVERY_TWO, changes)
    assert still.train({"checkpoint": {"async_save": False}}) == [0, 0]
    for step in (2, 4, 6, 8):
        one, other = run.checkpoint(step), still.checkpoint(step)
        assert one.state == other.state
        assert one.manifest.samples_seen == other.manifest.samples_seen == 16 * step
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[n], other.tensors[n]) for n in one.tensors), step


def test_an_error_in_a_later_step_does_not_cost_the_save_in_flight(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, EVERY_TWO, spoiled("unreadable", step=4, rank=1, world=2))
    held = partial(gate, 2, 3, 10**6, run.dir.metrics)
    with run.start(prepare=held) as ranks:
        assert ranks.wait() == [1, 5], ranks.logs()
        assert {report.last_step for report in ranks.reports()} == {3}
    assert run.saved_steps() == [2]


def test_a_stop_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, EVERY_TWO)
    held = partial(gate, 2, 3, 10**6, run.dir.metrics)
    with run.start({"train": {"max_steps": 10**6}}, prepare=held) as ranks:
        ranks.wait_for_step(3)
        ranks.signal(0, signal.SIGTERM)
        assert ranks.wait() == [75, 75], ranks.logs()
        (last,) = {report.last_step for report in ranks.reports()}
    assert run.events("save_failed") == []
    saved = run.saved_steps()
    assert (saved[0], saved[-1]) == (2, last)
