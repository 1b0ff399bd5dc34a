"""The suite itself: a test that nobody collects shows nothing."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest


def test_no_directory_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """pytest has names that it does not look into by default, `dist` among them."""
    passed_over = pytestconfig.getini("norecursedirs")
    tests = Path(__file__).parents[1]
    for path in tests.rglob("test_*.py"):
        for directory in path.relative_to(tests.parent).parts[:-1]:
            assert not any(fnmatch(directory, pattern) for pattern in passed_over), path
