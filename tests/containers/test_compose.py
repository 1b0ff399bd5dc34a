"""The laptop's cluster of compose.yaml: it comes up, and a run there saves to its S3 server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import tiny_spec, wait_until
from tests.containers.images import CHECKOUT, Images

PROJECT = "vitra-test"
COMPOSE = ["podman-compose", "-p", PROJECT, "-f", str(CHECKOUT / "docker" / "compose.yaml")]
HEAD = f"{PROJECT}_head_1"


@pytest.fixture
def composed(images: Images) -> Iterator[Images]:
    """The cluster of compose.yaml, all nodes idle."""
    try:
        images.run([*COMPOSE, "up", "-d", "--no-build"])
        idle = ["podman", "exec", HEAD, "sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D"]
        wait_until(lambda: images.run(idle, code=None).stdout.strip() == "2", "idle nodes")
        yield images
    finally:
        images.run([*COMPOSE, "down", "--volumes", "-t", "2"], code=None)


def test_a_run_on_the_laptop_s_cluster(composed: Images, tmp_path: Path) -> None:
    spec = tiny_spec(
        checkpoint={"uri": "s3://runs/{run_id}", "save_interval": 5},
        resources={"nodes": 2, "tasks_per_node": 1, "time": 10},
    )
    (tmp_path / "spec.yaml").write_text(spec)
    composed.run(["podman", "cp", str(tmp_path / "spec.yaml"), f"{HEAD}:/home/vitra/spec.yaml"])
    vitra = ["podman", "exec", "--user=vitra", HEAD, "vitra"]
    submitted = json.loads(composed.run([*vitra, "submit", "spec.yaml", "--wait", "--json"]).stdout)
    status = json.loads(composed.run([*vitra, "status", submitted["run_id"], "--json"]).stdout)
    assert (status["state"], status["last_checkpoint_step"]) == ("completed", 20)
    place = f"s3://runs/{submitted['run_id']}"
    checked = json.loads(composed.run([*vitra, "checkpoints", place, "--verify", "--json"]).stdout)
    assert [one["step"] for one in checked["complete"]] == [20, 15]
