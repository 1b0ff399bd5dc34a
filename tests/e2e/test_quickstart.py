"""The first thing that a user runs: it learns, survives a kill on the way, and says so."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest
import yaml

from tests.e2e.runs import Run, read_lines

QUICKSTART = Path(__file__).parents[2] / "launcher/examples/quickstart.yaml"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_learns_in_spite_of_a_kill(tmp_path: Path) -> None:
    run = Run(tmp_path, yaml.safe_load(QUICKSTART.read_text()))
    run.kill_at(120, random.Random(5), timeout_s=600)
    run.finish(timeout_s=900)

    losses = [record["loss"] for record in read_lines(run.dir / "metrics.jsonl")]
    assert len(losses) == 1000
    assert statistics.mean(losses[-10:]) < 0.6 * statistics.mean(losses[:10])

    (evaluated,) = run.events("evaluated")
    model = evaluated["mse_model"]
    # With room: by what happened to be drawn, the margins move by a few per cent.
    assert model < 0.6 * evaluated["mse_task_mean"]
    assert model < 0.6 * evaluated["mse_unconditioned"]
    assert model < 0.6 * evaluated["mse_wrong_instruction"]

    terminal = (tmp_path / "terminal.log").read_text()
    for figure in ("mse_model", "mse_task_mean", "mse_unconditioned", "mse_wrong_instruction"):
        assert figure in terminal
    assert "next: vitra" in terminal
