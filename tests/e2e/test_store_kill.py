"""Processes that die while they use a checkpoint place, and processes that race for it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).parents[1] / "unit" / "store_child.py"
ROUNDS = int(os.environ.get("VITRA_TORTURE_ROUNDS", "20"))


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILD), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = child.communicate(timeout=200)
    assert child.returncode == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_death_at_any_system_call_costs_nothing_that_was_reported() -> None:
    """Each call by which a save, its retention, a claim or a sweep changes the disk, one by one."""
    memory = Path("/dev/shm")  # thousands of files, none of which needs to last
    fast = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=fast) as place:
        done = finish(start("die", place))
    assert done["points"] > 60
    # All kinds of calls that there are: if the store's code moves to others, the hook must follow.
    kinds = ["fsync", "link", "open", "replace", "rmdir", "unlink", "write"]
    assert [kind for kind in done["kinds"] if kind != "mkdir"] == kinds


def test_racing_processes_never_share_an_attempt(tmp_path: Path) -> None:
    racers = [start("claim", tmp_path / "place", 15) for _ in range(3)]
    claimed = [finish(racer)["claimed"] for racer in racers]
    assert sorted(number for one in claimed for number in one) == list(range(1, 46))
    assert all(one == sorted(one) for one in claimed)
    files = {int(path.stem[8:]): path for path in (tmp_path / "place").glob("attempt-*.json")}
    assert {number: json.loads(path.read_text())["attempt"] for number, path in files.items()} == {
        number: number for number in range(1, 46)
    }


@pytest.mark.slow
@pytest.mark.timeout(60 + 5 * ROUNDS)
def test_kill_9_in_the_save_window(tmp_path: Path) -> None:
    """Round after round at one place: each process checks what the one killed before it left."""
    moments = random.Random(20260101)
    last, ever, hit = 0, 0, 0
    for number in range(1, ROUNDS + 1):
        child = start("train", tmp_path / "place", last, ever)
        assert child.stdout is not None
        passing = moments.randint(2, 5)
        began = time.monotonic()
        took, completed = 0.0, 0
        for line in child.stdout:
            told = json.loads(line)
            if "attempt" in told:
                assert told["attempt"] == number
            elif "saving" in told:
                began = time.monotonic()
                if passing == 0:
                    time.sleep(moments.uniform(0, 1.5) * took)
                    child.kill()
                passing -= 1
            else:
                took = time.monotonic() - began
                last, ever = told["saved"], ever + 1
                completed += passing < 0
        hit += completed == 0
        _, err = child.communicate()
        assert child.returncode == -9, f"round {number}: {err}"
    # The moments are spread over one and a half times the save: most must have hit it.
    assert hit >= ROUNDS // 4
