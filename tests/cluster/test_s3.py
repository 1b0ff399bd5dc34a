"""A run on the cluster whose checkpoints are on S3, on a server that the nodes reach by network."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import ALONE, Paced, SharedServer
from tests.conftest import tree
from tests.s3.fixtures import copied, look_at, running_server
from tests.s3.server import S3Server

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def server(
    cluster: ClusterHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Server]:
    """On the host's address in the cluster's network."""
    with running_server(S3Server(tmp_path / "s3", cluster.host_address)) as server:
        look_at(server, monkeypatch)
        yield server
    shutil.rmtree(tmp_path / "s3")


def test_preempted_twice_and_the_server_killed_once(
    undisturbed: dict[int, dict[str, Any]],
    cluster: ClusterHandle,
    shared_server: SharedServer,
    server: S3Server,
    tmp_path: Path,
) -> None:
    uri = f"s3://{server.bucket}/{{run_id}}"
    run = Paced(
        cluster,
        shared_server,
        "on-s3",
        tasks=2,
        environ=server.environ(),
        checkpoint={"uri": uri},
        resources={"partition": "low", **ALONE},
    )
    for attempt, step in enumerate((15, 35), 1):
        run.wait_for_attempt(attempt)
        run.wait_for_step(step)
        cluster.scancel(cluster.preempt(2, nodes=[run.nodes()]))
    run.wait_for_attempt(3)
    run.wait_for_step(run.step() + 5)
    server.kill()
    time.sleep(1.0)
    server.start()
    run.wait_until_finished()

    run.assert_equals(undisturbed[4], copied(uri.replace("{run_id}", run.id), tmp_path / "copy"))
    assert run.verdicts() == ["preempted", "preempted", "completed"]
    assert run.lost_steps() == [0, 0]
    assert not run.dir.path.joinpath("checkpoints").exists()
    secret = server.owner[1].encode()
    assert not any(secret in content for _, content in tree(run.dir.path).values())
