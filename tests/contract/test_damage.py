"""A trained run whose checkpoints were damaged, or that is to train longer."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import Vitra, VitraServer
from trainer.spec.rundir import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, vitra_server: VitraServer) -> Path:
    """A finished run of 20 steps with checkpoints of steps 15 and 20."""
    vitra = Vitra(tmp_path_factory.mktemp("trained"), vitra_server)
    vitra.spec(train__warmup_ratio=0.1)
    return Path(vitra("submit", "spec.yaml", "--local", "--json").json["run_dir"])


@pytest.fixture
def run_dir(trained: Path, vitra: Vitra) -> Path:
    path = vitra.directory / "runs" / trained.name
    shutil.copytree(trained, path)
    return path


def flip_a_byte(run_dir: Path, step: int, name: str) -> None:
    path = run_dir / "checkpoints" / f"step-{step:08d}" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["shard-a1-r1.bin", "index-a1.json", "manifest.json"])
def test_a_damaged_one_is_passed_over(vitra: Vitra, run_dir: Path, name: str) -> None:
    flip_a_byte(run_dir, 20, name)
    answer = vitra("resume", "tiny", "-o", "train.max_steps=24")
    (line,) = (t for t in answer.stderr.splitlines() if "passed over" in t)
    assert "checkpoint of step 20 passed over: " in line
    status = vitra("status", "tiny", "--json").json
    assert (status["state"], status["step"]) == ("completed", 24)
    assert status["attempts"][1]["first_step"] == 16
    assert [r["step"] for r in read_lines(run_dir / "metrics.jsonl")] == list(range(1, 25))
    document = vitra("checkpoints", "tiny", "--verify", "--json").json
    assert document["complete"][0]["step"] == 24


def test_all_damaged(vitra: Vitra, run_dir: Path) -> None:
    before = (run_dir / "metrics.jsonl").read_bytes()
    for step in (15, 20):
        flip_a_byte(run_dir, step, "shard-a1-r0.bin")
    answer = vitra("resume", "tiny", "-o", "train.max_steps=24", code=6)
    last = next(t for t in answer.stderr.splitlines() if t.startswith("failed: "))
    assert "step 15" in last
    assert "step 20" in last
    assert vitra("status", "tiny", "--json").json["state"] == "failed"
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    steps = [p.name for p in (run_dir / "checkpoints").glob("step-*")]
    assert sorted(steps) == ["step-00000015", "step-00000020"]


def test_training_longer(vitra: Vitra, run_dir: Path) -> None:
    answer = vitra("resume", "tiny", "-o", "train.max_steps=26", "--json")
    assert answer.json == {"run_id": run_dir.name, "run_dir": str(run_dir), "job_id": None}
    assert "changed: train.max_steps: 20 -> 26" in answer.stderr
    found = re.search(r"learning rate of step 21 is (\S+), it would have been", answer.stderr)
    assert found, answer.stderr
    records = {r["step"]: r for r in read_lines(run_dir / "metrics.jsonl")}
    assert list(records) == list(range(1, 27))
    assert all(r["attempt"] == (1 if step <= 20 else 2) for step, r in records.items())
    peak, floor, warmup, total = 1e-3, 1e-4, int(0.1 * 26), 26
    for step in range(21, 27):
        turn = math.pi * (step - warmup) / (total - warmup)
        rate = floor + (peak - floor) * (1 + math.cos(turn)) / 2
        for value in records[step]["lr"].values():
            assert value == pytest.approx(rate, rel=1e-9)
        if step == 21:
            assert float(found[1]) == pytest.approx(rate, rel=1e-5)

    # The override is the run's own from now on.
    answer = vitra("resume", "tiny", code=0)
    assert "already complete: step 26 of 26" in answer.stderr
    vitra("resume", "tiny", "-o", "checkpoint.keep_last=3", "-o", "train.max_steps=27")
    assert vitra("status", "tiny", "--json").json["total_steps"] == 27


def test_fewer_steps_than_are_trained(vitra: Vitra, run_dir: Path) -> None:
    shutil.rmtree(run_dir / "attempts" / "1" / "logs")
    events = (run_dir / "events.jsonl").read_text().splitlines()
    kept = [line for line in events if '"finished"' not in line]
    (run_dir / "events.jsonl").write_text("\n".join(kept) + "\n")
    plan = (run_dir / "plan.json").read_bytes()
    (line,) = vitra("resume", "tiny", "-o", "train.max_steps=10", code=2).stderr.splitlines()
    assert "10" in line
    assert "20" in line
    assert (run_dir / "plan.json").read_bytes() == plan
    # Killed between the last save and its judgement: nothing is left to train.
    vitra("resume", "tiny")
    status = vitra("status", "tiny", "--json").json
    assert (status["state"], status["step"]) == ("completed", 20)
    assert status["attempts"][1]["first_step"] is None


def test_more_ranks_than_before(vitra: Vitra, run_dir: Path) -> None:
    answer = vitra(
        *("resume", "tiny", "-o", "train.max_steps=22"),
        *("-o", "resources.tasks_per_node=1", "-o", "resources.env={A_B: c}"),
    )
    assert "changed: resources.tasks_per_node: 2 -> 1" in answer.stderr
    assert "attempt 2: 1 ranks, batch 2 x 1 x 4 = 8" in answer.stderr
    assert [r["step"] for r in read_lines(run_dir / "metrics.jsonl")] == list(range(1, 23))
