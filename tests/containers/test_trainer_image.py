"""The image of docker/Dockerfile: on its own, and as what a run on the cluster lives in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import ALONE, Paced, SharedServer
from tests.conftest import tiny_spec
from tests.containers.images import TRAINER, Images
from tests.e2e.runs import results

#: As little as a cluster's most careful administrator leaves to it.
CONFINED = (
    *("--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL"),
    "--security-opt=no-new-privileges",
)


@pytest.fixture(scope="module")
def whole(images: Images, module_cluster: ClusterHandle, shared_server: SharedServer) -> Paced:
    """A run in the image that nothing has happened to."""
    return in_image("whole", images.unpacked, module_cluster, shared_server, forward_s=0.0)


def in_image(
    name: str, image: Path, cluster: ClusterHandle, server: SharedServer, **more: Any
) -> Paced:
    """Submit a run of two processes on two nodes, in the image."""
    container = {"runtime": "charliecloud", "image": str(image)}
    resources = {"partition": "low", "container": container, **ALONE}
    return Paced(cluster, server, name, resources=resources, **more)


def test_it_trains_confined_and_as_nobody_special(images: Images, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o777)
    (tmp_path / "spec.yaml").write_text(tiny_spec())
    tmp_path.chmod(0o755)
    volume = f"--volume={tmp_path}:/work"
    where = "--workdir=/work"
    words = ("vitra", "submit", "spec.yaml", "--local")
    done = images.run(["podman", "run", *CONFINED, volume, where, TRAINER, *words])
    assert "completed: all 2 ranks reached step 20" in done.stderr, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run.stat().st_uid, run.stat().st_gid) == (1000, 1000)
    status = images.run(["podman", "run", *CONFINED, volume, where, TRAINER, "vitra", "ps"])
    assert run.name in status.stdout


def test_it_holds_what_it_should_and_no_more(images: Images) -> None:
    code = (
        "import json, os, torch; from importlib.metadata import version as v;"
        "print(json.dumps([torch.__version__, v('wandb'), os.listdir('/home/vitra')]))"
    )
    done = images.run(["podman", "run", *CONFINED, TRAINER, "python3", "-c", code])
    torch, wandb, home = json.loads(done.stdout.splitlines()[-1])
    pinned = dict(
        line.split("==")
        for line in (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert (torch.partition("+")[0], wandb) == (pinned["torch"], pinned["wandb"])
    assert all(name.startswith(".") for name in home)
    config = json.loads(images.run(["podman", "image", "inspect", TRAINER]).stdout)[0]["Config"]
    assert config["User"] == "1000:1000"
    names = {variable.split("=")[0] for variable in config["Env"]}
    assert names == {"PATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}


def test_preempted_and_killed_in_it_and_equal(
    whole: Paced,
    images: Images,
    module_cluster: ClusterHandle,
    shared_server: SharedServer,
) -> None:
    run = in_image("taken", images.unpacked, module_cluster, shared_server)
    run.wait_for_attempt(1)
    # The ranks live in the image, and the supervisor does not.
    for module, inside in (("launcher.job", False), ("launcher.task", True), ("trainer", True)):
        found = [
            lives_in_image(process.pid)
            for process in run.processes(module)
            if process.argv[0] != "srun"
        ]
        assert found == [inside] * (2 if inside else 1), module
    run.wait_for_step(25)
    preemptor = run.cluster.preempt(2, nodes=[run.nodes()])
    run.cluster.scancel(preemptor)
    run.wait_until_finished()
    assert run.verdicts() == ["preempted", "completed"], run.account()
    # All ranks heard of it inside, and saved where they were.
    assert run.lost_steps() == [0]
    assert [attempt["exit_code"] for attempt in run.attempts()] == [75, 0]
    assert whole.wait_until_finished() == "completed", whole.account()
    run.assert_equals(results(whole.dir.path))


def lives_in_image(pid: int) -> bool:
    return Path(f"/proc/{pid}/root/ch/environment").exists()


def test_an_image_that_is_not_there(
    module_cluster: ClusterHandle, shared_server: SharedServer
) -> None:
    missing = module_cluster.share / "no-image"
    run = in_image("missing", missing, module_cluster, shared_server)
    assert run.wait_until_finished() == "failed"
    (attempt,) = run.attempts()
    assert "was not started: " in attempt["reason"]
    assert str(missing) in attempt["reason"]
