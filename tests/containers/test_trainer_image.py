"""The image of docker/Dockerfile on its own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import tiny_spec
from tests.containers.images import TRAINER, Images

#: As little as a cluster's most careful administrator leaves to it.
CONFINED = (
    *("--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL"),
    "--security-opt=no-new-privileges",
)


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
