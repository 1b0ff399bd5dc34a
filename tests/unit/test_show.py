"""Facts as lines for people: whole, aligned, and with what to type next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.outcomes import Ending
from launcher.pace import trend
from launcher.planner import plan
from launcher.show import (
    checkpoint_lines,
    ending_lines,
    local_lines,
    loss_lines,
    plan_lines,
    status_lines,
)
from trainer.spec.outcome import RunState, Verdict
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir


def spec_of(**sections: dict[str, Any]) -> RunSpec:
    document: dict[str, Any] = {
        "name": "a",
        "model": {"kind": "vla"},
        "data": {"kind": "synthetic"},
        "train": {"global_batch_size": 16, "max_steps": 10, **sections.pop("train", {})},
    }
    return RunSpec.model_validate(document | sections)


def test_plan_lines() -> None:
    spec = spec_of(resources={"nodes": 2, "tasks_per_node": 2}, train={"warmup_ratio": 0.2})
    lines = plan_lines(plan(spec, run_id="a", run_dir="/runs/a"))
    assert "world size    2 nodes x 2 processes = 4  (on CPUs)" in lines
    assert "global batch  4 per device x 4 x 1 accumulation = 16" in lines
    assert "checkpoints   every 2500 steps in /runs/a/checkpoints" in lines


def test_plan_lines_of_an_elastic_run_that_epochs_decide() -> None:
    spec = spec_of(
        resources={"nodes": {"min": 1, "max": 3}}, train={"max_steps": None, "epochs": 1}
    )
    lines = plan_lines(plan(spec, run_id="a", run_dir="/runs/a"))
    assert "steps         decided by epochs, known at submit" in lines
    assert "  on 2 nodes  8 x 2 x 1 = 16" in lines
    assert any(line.startswith("note: ") and "3" in line for line in lines)


def test_local_lines_stay_short() -> None:
    spec = spec_of(resources={"tasks_per_node": 16})
    lines = local_lines(plan(spec, run_id="a", run_dir="/runs/a"))
    assert len(lines) == 10
    assert lines[-1] == "  ... and 8 more"


STATUS: dict[str, Any] = {
    "run_id": "a-20260101-000000-abcd",
    "run_dir": "/runs/a-20260101-000000-abcd",
    "name": "a",
    "state": "failed",
    "reason": "rank 1 was killed",
    "job_id": None,
    "job_state": None,
    "step": 7,
    "total_steps": None,
    "last_checkpoint_step": None,
    "eta_s": None,
    "attempts": [
        {"attempt": 1, "verdict": "error", "first_step": 1, "last_step": 7, "reason": "killed"},
        {"attempt": 2, "verdict": None, "first_step": None, "last_step": None, "reason": "runs"},
    ],
    "goodput": {
        "wall_s": 326.0,
        "queued_s": 143.0,
        "starting_s": 50.0,
        "restoring_s": 0.0,
        "training_s": 80.0,
        "saving_s": 6.0,
        "lost_s": 25.0,
        "other_s": 15.0,
        "ratio": 0.4372,
    },
    "budgets": {
        "preempted": {"used": 3, "left": None},
        "time_limit": {"used": 0, "left": 2},
        "node_failure": {"used": 0, "left": None},
        "hang": {"used": 0, "left": 2},
        "error": {"used": 1, "left": 0},
        "out_of_memory": {"used": 0, "left": 0},
    },
}


def test_status_lines() -> None:
    lines = status_lines(STATUS)
    assert "state       failed: rank 1 was killed" in lines
    assert "step        7 of ?" in lines
    assert "checkpoint  none" in lines
    assert (
        "goodput     44% of 5 min 26 s: training 1 min 20 s, saving 6 s, starting 50 s, "
        "queued 2 min 23 s, lost 25 s, other 15 s"
    ) in lines
    never_ran = {**STATUS["goodput"], "ratio": None}
    assert not any("goodput" in line for line in status_lines({**STATUS, "goodput": never_ran}))
    retries = lines.index("retries     preempted 3 (no limit), time_limit 0 (2 left)")
    assert lines[retries + 1 : retries + 3] == [
        "            node_failure 0 (no limit), hang 0 (2 left)",
        "            error 1 (0 left), out_of_memory 0 (0 left)",
    ]
    # A plan that cannot be read has no policy.
    assert not any("left)" in line for line in status_lines({**STATUS, "budgets": None}))
    assert lines[-2:] == [
        "attempt 1   error, steps 1-7: killed",
        "attempt 2   running, no step finished: runs",
    ]
    assert not any(line.startswith("job") for line in lines)


def test_status_lines_of_a_run_that_trains() -> None:
    lines = status_lines({**STATUS, "state": "running", "total_steps": 9, "eta_s": 305.0})
    assert "step        7 of 9, about 5 min 5 s to go" in lines


@pytest.mark.parametrize("width", [0, 30, 80, 100])
def test_loss_lines(tmp_path: Path, width: int) -> None:
    run_dir = RunDir(tmp_path)
    assert loss_lines(run_dir, width=width) == []
    losses = [2.0 / step for step in range(1, 201)]
    run_dir.metrics.write_text("".join(f'{{"loss": {loss}}}\n' for loss in losses))
    (line,) = loss_lines(run_dir, width=width)
    assert line.startswith("loss        2.0000 ")
    assert line.endswith(" 0.0100")
    drawn = line.split()[2]
    if width == 0:
        assert drawn == "->"
    else:
        assert len(line) == width
        assert (drawn[0], drawn[-1]) == ("█", "▁")
        assert list(drawn) == sorted(drawn, reverse=True)


def test_a_loss_that_does_not_change_is_a_line() -> None:
    assert trend([3.0, 3.0, 3.0], 10) == "▁▁▁"
    assert trend([3.0], 10) == ""
    assert trend([1.0, 2.0], -5) == ""


def test_status_lines_of_a_job() -> None:
    assert "job         17  PENDING" in status_lines(
        {**STATUS, "job_id": "17", "job_state": "PENDING"}
    )
    assert "job         17  gone" in status_lines({**STATUS, "job_id": "17"})


def test_checkpoint_lines() -> None:
    facts: dict[str, Any] = {
        "uri": "/c",
        "run_id": "a",
        "complete": [
            {
                "step": 20,
                "attempt": 1,
                "size_bytes": 3 << 20,
                "files": 3,
                "created_at": "now",
                "verified": True,
            }
        ],
        "damaged": [{"step": 15, "attempt": 1, "reason": "shard differs"}],
        "incomplete": [{"step": 25, "attempt": None, "reason": "no manifest"}],
    }
    first, *lines = checkpoint_lines(facts)
    assert first == "/c  (run a)"
    assert "every byte checked, 3.0 MiB in 3 files, attempt 1" in lines[0]
    assert lines[1] == "step       15  DAMAGED: shard differs"
    assert lines[2] == "step       25  incomplete: no manifest"
    empty = {**facts, "complete": [], "damaged": [], "incomplete": []}
    assert checkpoint_lines(empty) == [first, "no checkpoint yet"]


@pytest.mark.parametrize(
    ("state", "hint"),
    [
        (RunState.COMPLETED, "vitra checkpoints R --verify"),
        (RunState.CANCELLED, "vitra resume R "),
        (RunState.FAILED, "vitra status R "),
    ],
)
def test_ending_lines(tmp_path: Path, state: RunState, hint: str) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.attempt(3).path.mkdir(parents=True)
    lines = ending_lines(run_dir, Ending(state, Verdict.ERROR, "why"), "R")
    assert lines[0] == f"{state}: why"
    assert any(hint in line for line in lines)
    if state is RunState.FAILED:
        assert f"logs: {tmp_path / 'attempts' / '3' / 'logs'}" in lines


def test_ending_lines_say_what_was_learned(tmp_path: Path) -> None:
    losses = [1.0] * 10 + [0.7] * 5 + [0.5] * 10
    lines = [json.dumps({"step": n, "loss": loss}) for n, loss in enumerate(losses, start=1)]
    ending = Ending(RunState.COMPLETED, Verdict.COMPLETED, "why")
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:19]))
    assert not any("loss" in line for line in ending_lines(RunDir(tmp_path), ending, "R"))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert any("loss 1.0000 -> 0.5000" in t for t in ending_lines(RunDir(tmp_path), ending, "R"))
