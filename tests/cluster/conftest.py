"""Hands tests a clean Slurm cluster. Every test in this directory is slow.

`cluster` is clean at the start of each test that uses it; `module_cluster` at the start of each
module, for tests that look at one run together (do not mix the two in a module).

In the environment:

    SC_*                     which cluster, as for `slurm/cluster`
    VITRA_REQUIRE_CLUSTER=1  where the cluster cannot run, tests fail; otherwise they are skipped
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurm.cluster import Cluster, why_impossible
from slurm.settings import Settings, current_settings, state_directory
from tests.cluster.handle import ClusterHandle, cluster_command
from tests.cluster.paced import Paced, SharedServer, SideBySide
from tests.conftest import wait_until
from tests.e2e.runs import results

#: Less than a test's time-out: another session's tests are waited for that long.
_TURN_WITHIN_S = 240.0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here as slow, before those are deselected."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the cluster looked like, in the report of a test that failed."""
    report = yield
    handle = item.stash.get(_HANDLE, None)
    if report.failed and handle is not None:
        report.sections.append(("Slurm cluster", handle.describe()))
    return report


_HANDLE = pytest.StashKey[ClusterHandle]()


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Settings]:
    """A cluster that runs and is this session's alone; stopped at the end if started here."""
    if (why := why_impossible()) is not None:
        if os.environ.get("VITRA_REQUIRE_CLUSTER") == "1":
            pytest.fail(why)
        pytest.skip(why)
    state = state_directory(os.environ)
    with state.with_name(f"{state.name}.tests-lock").open("w") as lock:
        wait_until(lambda: _locked(lock.fileno()), "another session's tests", _TURN_WITHIN_S)
        ours = not _runs(state)
        cluster_command("start")
        settings = current_settings()
        for old in (settings.state / "share").iterdir():
            shutil.rmtree(old)
        yield settings
        if ours:
            cluster_command("stop")


@pytest.fixture
def cluster(running_cluster: Settings, request: pytest.FixtureRequest) -> ClusterHandle:
    """The cluster without jobs, all nodes up, connected and idle; a new `share`."""
    handle = _clean_handle(running_cluster, request.node.name)
    request.node.stash[_HANDLE] = handle
    return handle


@pytest.fixture(scope="module")
def module_cluster(running_cluster: Settings, request: pytest.FixtureRequest) -> ClusterHandle:
    """The same, for all tests of a module together."""
    return _clean_handle(running_cluster, request.node.name)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """For commands of scenarios that run side by side."""
    server = SharedServer(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def undisturbed(
    running_cluster: Settings, shared_server: SharedServer
) -> dict[int, dict[str, Any]]:
    """Results of a paced run that nothing has happened to, by the number of its processes."""
    cluster = _clean_handle(running_cluster, "undisturbed")

    def train(tasks: int) -> dict[str, Any]:
        run = Paced(cluster, shared_server, f"whole-{tasks}", tasks=tasks, forward_s=0)
        assert run.wait_until_finished() == "completed", run.account()
        assert run.verdicts() == ["completed"]
        return results(run.dir.path)

    with SideBySide() as both:
        for tasks in (2, 1):
            both.add(str(tasks), partial(train, tasks))
        return {2 * tasks: both[str(tasks)] for tasks in (2, 1)}


@pytest.fixture(autouse=True)
def _report_module_cluster(request: pytest.FixtureRequest) -> None:
    """Has a test that fails on `module_cluster` report it, too."""
    if "module_cluster" in request.fixturenames:
        request.node.stash[_HANDLE] = request.getfixturevalue("module_cluster")


def _clean_handle(settings: Settings, name: str) -> ClusterHandle:
    cluster_command("clear")
    label = re.sub(r"\W+", "-", Path(name).stem)[:60]
    share = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=settings.state / "share"))
    share.chmod(0o777)
    return ClusterHandle(settings, share)


def _runs(state: Path) -> bool:
    if not (state / "settings.json").exists():
        return False
    status = Cluster(Settings.load(state), say=lambda _line: None).status()
    return status["slurmctld"] is not None


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
