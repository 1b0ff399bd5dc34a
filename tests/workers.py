"""How tests are shared out to the processes that pytest runs them in."""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

_CLUSTER = "tests/cluster/"


class Scheduling(LoadFileScheduling):
    """A file's tests run in one process, for what they share; so do all tests of the cluster.

    Of which there is one, and a test needs it for itself.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _CLUSTER if nodeid.startswith(_CLUSTER) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)
