"""Processes that are killed while they save to S3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).parents[1] / "unit" / "store_child.py"
ROUNDS = int(os.environ.get("VITRA_TORTURE_ROUNDS", "20"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 + 8 * ROUNDS)]


def test_kill_9_in_the_save_window(s3_uri: str) -> None:
    """Each process checks what the one killed before it left: nothing lost, nothing left over."""
    words = [sys.executable, CHILD, "rounds", s3_uri, ROUNDS, 20260101]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["rounds"] == ROUNDS
    # The moments are spread over one and a half times the save: most must have hit it.
    assert told["hits"] >= ROUNDS // 4
