"""Runs whose ranks live in the trainer's image, under Charliecloud."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import ALONE, Paced, SharedServer, SideBySide
from tests.cluster.runs import SlurmVitra
from tests.conftest import tiny_spec
from tests.containers.images import TEST_WITHIN_S, Images
from tests.e2e.runs import results

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


def test_preempted_in_it_and_equal(
    images: Images, cluster: ClusterHandle, shared_server: SharedServer
) -> None:
    start = partial(in_image, images.unpacked, cluster, shared_server)

    def undisturbed() -> Paced:
        run = start("whole", forward_s=0.0)
        assert run.wait_until_finished() == "completed", run.account()
        return run

    with SideBySide() as both:
        both.add("taken", lambda: preempted(start("taken")))
        both.add("whole", undisturbed)
        run: Paced = both["taken"]
        assert run.verdicts() == ["preempted", "completed"], run.account()
        # All ranks heard of it inside, and saved where they were.
        assert run.lost_steps() == [0]
        assert [attempt["exit_code"] for attempt in run.attempts()] == [75, 0]
        run.assert_equals(results(both["whole"].dir.path))


def preempted(run: Paced) -> Paced:
    """Have it preempted once, on the way to its end."""
    run.wait_for_step(5)
    # The ranks live in the image, and the supervisor does not.
    for module, inside in (("launcher.job", False), ("launcher.task", True), ("trainer", True)):
        found = [
            Path(f"/proc/{process.pid}/root/ch/environment").exists()
            for process in run.processes(module)
            if process.argv[0] != "srun"
        ]
        assert found == [inside] * (2 if inside else 1), module
    preemptor = run.cluster.preempt(2, nodes=[run.nodes()])
    run.cluster.scancel(preemptor)
    run.wait_until_finished()
    return run


def test_doctor_looks_into_it(
    images: Images, cluster: ClusterHandle, shared_server: SharedServer
) -> None:
    before = sorted(images.unpacked.iterdir())
    found = doctor(images.unpacked, cluster, shared_server)
    assert [found[check][0] for check in ("container", "image", "mounts")] == ["ok"] * 3, found
    # The image has what its constraints say, which may be older than what is installed here.
    level, text = found["in the image"]
    assert level == "ok" or (level == "warning" and "has other versions" in text), found
    assert sorted(images.unpacked.iterdir()) == before


def test_an_image_that_is_not_there(cluster: ClusterHandle, shared_server: SharedServer) -> None:
    missing = cluster.share / "no-image"
    if not Path("/usr/bin/ch-run").exists():
        pytest.skip("needs Charliecloud")
    found = doctor(missing, cluster, shared_server, code=2)
    assert (found["container"][0], found["image"][0]) == ("ok", "fault")
    assert f"{missing}, as node" in found["image"][1]
    run = in_image(missing, cluster, shared_server, "missing")
    assert run.wait_until_finished() == "failed"
    (attempt,) = run.attempts()
    assert "was not started: " in attempt["reason"]
    assert str(missing) in attempt["reason"]


def doctor(
    image: Path, cluster: ClusterHandle, server: SharedServer, *, code: int = 0
) -> dict[str, tuple[str, str]]:
    """What `vitra doctor` finds: level and text by what was looked at."""
    vitra = SlurmVitra(cluster, server)
    container = {"runtime": "charliecloud", "image": str(image)}
    path = vitra.directory / "spec.yaml"
    path.write_text(tiny_spec(resources__partition="low", resources__container=container))
    findings = vitra("doctor", path, "--json", code=code).json["findings"]
    return {one["check"]: (one["level"], one["text"]) for one in findings}


def in_image(
    image: Path,
    cluster: ClusterHandle,
    server: SharedServer,
    name: str,
    *,
    forward_s: float = 0.05,
) -> Paced:
    """Submit a run of two processes on two nodes, in the image."""
    container = {"runtime": "charliecloud", "image": str(image)}
    resources = {"partition": "low", "container": container, **ALONE}
    return Paced(cluster, server, name, resources=resources, forward_s=forward_s)
