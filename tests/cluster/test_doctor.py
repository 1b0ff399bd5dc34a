"""`vitra doctor` on a real cluster: a sound one, and requests and places that do not fit it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.runs import SlurmVitra
from tests.conftest import VitraServer, tiny_spec


@pytest.fixture(scope="module")
def vitra(module_cluster: ClusterHandle, vitra_server: VitraServer) -> SlurmVitra:
    module_cluster.share.chmod(0o755)
    return SlurmVitra(module_cluster, vitra_server)


def findings(
    vitra: SlurmVitra, *words: str, code: int = 0, **spec: object
) -> dict[str, tuple[str, str]]:
    """Level and text by what was looked at."""
    path = vitra.directory / "spec.yaml"
    path.write_text(tiny_spec(**spec))
    answer: dict[str, Any] = vitra("doctor", path, *words, "--json", code=code).json
    assert answer["ready"] is (code == 0)
    return {one["check"]: (one["level"], one["text"]) for one in answer["findings"]}


def test_a_sound_cluster(vitra: SlurmVitra, module_cluster: ClusterHandle) -> None:
    found = findings(vitra, resources__partition="low")
    assert {level for level, _ in found.values()} == {"ok"}, found
    assert "20 s of grace" in found["preemption"][1]
    assert "is UP" in found["slurm"][1]
    assert str(vitra.directory) in found["node"][1]
    assert set(found) >= {"torch", "checkpoints", "accounting", "request", "clock", "network"}
    assert not list(vitra.directory.glob(".vitra-doctor*"))
    assert not (vitra.directory / "runs").exists()
    assert module_cluster.queue() == []


def test_what_does_not_fit(vitra: SlurmVitra) -> None:
    found = findings(vitra, code=3, resources__partition="nosuch")
    assert found["request"][0] == "fault"
    assert "there is none" in found["request"][1]
    found = findings(vitra, resources__partition="nograce")
    assert found["preemption"][0] == "warning"
