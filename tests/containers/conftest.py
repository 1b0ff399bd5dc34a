"""Hands tests the images. Every test in this directory is slow.

In the environment:

    VITRA_CONTAINERS=DIRECTORY  use those that `python -m tests.containers.images DIRECTORY` has
                                made there, or is about to make
    VITRA_REQUIRE_CONTAINERS=1  without them, make them here; otherwise tests are skipped
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import module_cluster, running_cluster, shared_server
from tests.conftest import wait_until
from tests.containers.images import BUILD_WITHIN_S, Images

__all__ = ["module_cluster", "running_cluster", "shared_server"]  # fixtures of the cluster's tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here as slow, before those are deselected; building takes its time."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(BUILD_WITHIN_S + 600))


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    """The trainer's image, built from docker/Dockerfile of this checkout."""
    if (directory := os.environ.get("VITRA_CONTAINERS")) is not None:
        made = Images(Path(directory))
        wait_until(lambda: made.outcome() is not None, "the images", BUILD_WITHIN_S)
        assert made.outcome() == "", f"the images could not be made: {made.outcome()}"
        yield made
        return
    if os.environ.get("VITRA_REQUIRE_CONTAINERS") != "1":
        pytest.skip("needs VITRA_CONTAINERS or VITRA_REQUIRE_CONTAINERS=1, and minutes")
    with tempfile.TemporaryDirectory(prefix="vitra-images-", dir="/var/tmp") as place:
        made = Images(Path(place) / "images")
        try:
            made.prepare()
            yield made
        finally:
            made.remove()
