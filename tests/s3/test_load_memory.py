"""How much memory a load takes beside the state that it fills."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MOST_BYTES = 256 << 20


@pytest.fixture(params=["disk", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        yield request.getfixturevalue("s3_uri")
        return
    yield str(tmp_path / "place")
    shutil.rmtree(tmp_path / "place")


def child(act: str, uri: str) -> str:
    words = [sys.executable, "-W", "ignore", "-m", "tests.s3.load_child", act, uri]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_load_needs_little_beside_the_state(uri: str) -> None:
    """512 MiB of it. What is read ahead, and what has to be turned round, is bounded."""
    child("save", uri)
    assert int(child("load", uri)) <= MOST_BYTES
