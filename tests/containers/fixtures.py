"""Hands tests the images of this checkout's Dockerfile.

In the environment:

    VITRA_CONTAINERS=DIRECTORY  use those that `python -m tests.containers.images DIRECTORY` has
                                made there, or is about to make
    VITRA_REQUIRE_CONTAINERS=1  without them, make them here; otherwise tests are skipped
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.images import BUILD_WITHIN_S, Images


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    """All of them, and the commands to use them. The first test that asks may wait for minutes."""
    if (directory := os.environ.get("VITRA_CONTAINERS")) is not None:
        made = Images(Path(directory))
        deadline = time.monotonic() + BUILD_WITHIN_S
        while (outcome := made.outcome()) is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert outcome == "", f"the images could not be made: {outcome or 'it takes too long'}"
        yield made
        return
    if os.environ.get("VITRA_REQUIRE_CONTAINERS") != "1":
        pytest.skip("needs VITRA_CONTAINERS or VITRA_REQUIRE_CONTAINERS=1, and minutes")
    made = Images(Path(tempfile.mkdtemp(prefix="vitra-images-", dir="/var/tmp")))
    try:
        made.prepare()
        yield made
    finally:
        made.remove()
