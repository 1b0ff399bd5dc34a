"""Every test in this directory is slow, and may have to wait for images that are being built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers.images import TEST_WITHIN_S


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, before slow tests are deselected."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(TEST_WITHIN_S))
