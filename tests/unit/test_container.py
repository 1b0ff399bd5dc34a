"""`resources.container`: what is refused, what a rank sees, and how each runtime is called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from launcher.container import (
    all_mounts,
    check_container,
    check_resume_inside,
    make_mount_points,
    refuse_container_here,
)
from launcher.planner import plan, public_view
from launcher.schedulers import slurm as module
from launcher.schedulers.slurm import SlurmLauncher
from launcher.show import plan_lines
from launcher.slurm_env import BatchJob
from tests.conftest import wait_until
from tests.unit.fake_slurm import Call, FakeSlurm
from trainer.spec.container import ContainerSpec
from trainer.spec.errors import UsageError
from trainer.spec.plan import Plan
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir
from trainer.spec.snapshot import Snapshot

PYXIS = {"runtime": "pyxis", "image": "registry.site#team/vitra:1"}
APPTAINER = {"runtime": "apptainer", "image": "/images/vitra.sif"}
CHARLIECLOUD = {"runtime": "charliecloud", "image": "/images/vitra"}

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"runtime": "docker"}, "runtime", "must be one of pyxis, apptainer, charliecloud, none"),
    ({"runtime": "pixis"}, "runtime", "did you mean pyxis?"),
    ({"image": None}, "image", "must be text, found nothing (null)"),
    ({"image": "a\tb"}, "image", "holds a control character"),
    ({"image": "--help"}, "image", "would be read as an option"),
    ({"image": "docker://a:1"}, "image", "without a scheme"),
    ({"image": "./a.sqsh"}, "image", "must be an absolute path"),
    ({"runtime": "apptainer", "image": "a.sif"}, "image", "or a URL such as docker://name:tag"),
    ({**APPTAINER, "image": "docker://me:word@site/a"}, "image", "a user name or password"),
    ({"runtime": "charliecloud", "image": "vitra:1"}, "image", "of an image's directory"),
    ({"mounts": "/a:/b"}, "mounts", "must be a list, found text"),
    ({"mounts": ["/a"]}, "mounts.0", "must be SRC:DST or SRC:DST:ro"),
    ({"mounts": ["/a:/b:ro:x"]}, "mounts.0", "must be SRC:DST or SRC:DST:ro"),
    ({"mounts": ["/a:/b:rx"]}, "mounts.0", "may only end in :ro"),
    ({"mounts": ["a:/b"]}, "mounts.0", "must have two absolute paths"),
    ({"mounts": ["/a:b"]}, "mounts.0", "must have two absolute paths"),
    ({"mounts": ["$HOME:/b"]}, "mounts.0", "must have two absolute paths"),
    ({"mounts": ["/a,/c:/b"]}, "mounts.0", "a comma or colon"),
    ({"mounts": ["/a/../b:/b"]}, "mounts.0", "without .."),
    ({"mounts": ["/a/:/b"]}, "mounts.0", "a slash at the end"),
    ({"mounts": ["/a:/b", "/c:/usr"]}, "mounts.1", "would hide the image's own /usr"),
    ({"mounts": ["/a\n:/b"]}, "mounts.0", "holds a line break"),
    ({"mounts": ["/a:/b", "/c:/b"]}, "mounts.1", 'mounts "/b" a second time'),
    ({**CHARLIECLOUD, "mounts": ["/a:/b:ro"]}, "mounts.0", "has no read-only mounts"),
]


@pytest.mark.parametrize(("container", "field", "says"), BAD)
def test_what_is_refused(container: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        spec_of({**PYXIS, **container})
    (error,) = caught.value.errors()
    assert ".".join(map(str, error["loc"])) == f"resources.container.{field}"
    assert says in error["msg"]


def test_it_says_what_is_missing() -> None:
    with pytest.raises(ValidationError) as caught:
        spec_of({})
    assert {error["loc"][-1] for error in caught.value.errors()} == {"runtime", "image"}


def test_the_plan_shows_it() -> None:
    planned = planned_of({**APPTAINER, "mounts": ["/data:/data:ro"]})
    assert plan_lines(planned)[-2:] == [
        "container     /images/vitra.sif (apptainer)",
        "  mount /data:/data:ro",
    ]
    assert public_view(planned)["container"] == {**APPTAINER, "mounts": ["/data:/data:ro"]}
    assert Plan.model_validate_json(planned.model_dump_json()) == planned
    assert public_view(planned_of(None))["container"] is None


def test_only_slurm_starts_containers() -> None:
    with pytest.raises(UsageError, match="--local starts no containers") as caught:
        refuse_container_here(spec_of(PYXIS))
    assert "-o resources.container.runtime=none" in str(caught.value.hint)
    refuse_container_here(spec_of({**PYXIS, "runtime": "none"}))
    refuse_container_here(spec_of(None))


# How srun is called: all of it, to the word. {root} is the run root, which the working directory
# is in.
STEP = [
    *("--jobid=30", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--distribution=block"),
    *("--nodelist=node1,node2", "--cpus-per-task=3", "--mem=0"),
]
LAST = ["--kill-on-bad-exit=1", "--mpi=none", "--input=none", "--chdir={root}/work"]
TASK = ["python3", "-P", "-m", "launcher.task", "{root}/a-1"]
NAMES = (
    "CUBLAS_WORKSPACE_CONFIG,HF_TOKEN,MINE,MKL_CBWR,MKL_NUM_THREADS,OMP_NUM_THREADS,"
    "OPENBLAS_NUM_THREADS,PYTHONNOUSERSITE,PYTHONPATH,PYTHONUNBUFFERED"
)
GOLDEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "pyxis": (
        {"container": {**PYXIS, "mounts": ["/data/v1:/data:ro"]}},
        [
            *(*STEP, *LAST),
            "--container-image=registry.site#team/vitra:1",
            "--container-mounts=/ckpt:/ckpt,/data/v1:/data:ro,{root}:{root}",
            "--container-workdir={root}/work",
            f"--container-env={NAMES}",
            "--no-container-entrypoint",
            *TASK,
        ],
    ),
    "apptainer": (
        {"container": {**APPTAINER, "mounts": ["/data/v1:/data:ro"]}},
        [
            *(*STEP, *LAST, "apptainer", "exec"),
            *("--bind=/ckpt:/ckpt", "--bind=/data/v1:/data:ro", "--bind={root}:{root}"),
            *("--pwd={root}/work", "/images/vitra.sif", *TASK),
        ],
    ),
    "apptainer on GPUs": (
        {"container": APPTAINER, "gpus_per_node": "a100:2"},
        [
            *(*STEP, "--gpus-per-node=a100:2", *LAST, "apptainer", "exec", "--nv"),
            *("--bind=/ckpt:/ckpt", "--bind={root}:{root}", "--pwd={root}/work"),
            *("/images/vitra.sif", *TASK),
        ],
    ),
    "charliecloud": (
        {"container": {**CHARLIECLOUD, "image": "/no-such-image", "mounts": ["/data/v1:/data"]}},
        [
            *(*STEP, *LAST, "ch-run", "--set-env", "--env-no-expand"),
            "--set-env=CUBLAS_WORKSPACE_CONFIG=:4096:8",
            *("--set-env=MINE=a $b", "--set-env=MKL_CBWR=AUTO", "--set-env=MKL_NUM_THREADS=3"),
            *("--set-env=OMP_NUM_THREADS=3", "--set-env=OPENBLAS_NUM_THREADS=3"),
            *("--set-env=PYTHONNOUSERSITE=1", "--set-env=PYTHONPATH={root}/a-1/code/vitra"),
            "--set-env=PYTHONUNBUFFERED=1",
            *("--bind=/ckpt:/ckpt", "--bind=/data/v1:/data", "--bind={root}:{root}"),
            *("--cd={root}/work", "/no-such-image", "--", *TASK),
        ],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_how_srun_is_called(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    resources, golden = GOLDEN[name]
    # Charliecloud has the host's /tmp without being told, where pytest keeps its directories.
    root = tmp_path_factory.mktemp("root")
    call = launch(root, resources)
    expected = [word.replace("{root}", str(root)) for word in golden]
    if name == "charliecloud" and root.is_relative_to("/tmp"):
        expected.remove(f"--bind={root}:{root}")
    assert call.argv == expected
    # What a rank goes by, and what the user passes through, is there whatever the runtime.
    assert call.environ["VITRA_RUN_DIR"] == f"{root}/a-1"
    assert call.environ["MASTER_ADDR"] == "node1"
    assert call.environ["PYTHONPATH"] == f"{root}/a-1/code/vitra"
    assert (call.environ["HF_TOKEN"], call.environ["MINE"]) == ("word", "a $b")
    assert "PYTHONHOME" not in call.environ
    assert not any("word" in word for word in call.argv)
    if name.startswith("apptainer"):
        assert call.environ["APPTAINERENV_HF_TOKEN"] == "word"
        assert call.environ["APPTAINERENV_OMP_NUM_THREADS"] == "3"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a srun that only writes down how it is called leave no record to wait for."""
    monkeypatch.setattr(module, "_SEEN_WITHIN_S", 0.1)


def launch(root: Path, resources: dict[str, Any]) -> Call:
    """How srun is called in job 30 for a run in `root`, with the checkpoint place /ckpt."""
    (root / "bin").mkdir()
    (root / "work").mkdir()
    fake = FakeSlurm(root / "bin")
    fake.play("scontrol", {"out": "node1\nnode2\n"})
    run_dir = RunDir(root / "a-1")
    run_dir.attempt(1).logs.mkdir(parents=True)
    run_dir.code.mkdir()
    (run_dir.code / "snapshot.json").write_text(Snapshot(path=("vitra",)).model_dump_json())
    container = resources.pop("container")
    planned = planned_of(
        container,
        run_dir=str(run_dir.path),
        nodes=2,
        tasks_per_node=2,
        cpus_per_task=3,
        env={"MINE": "a $b", "HF_TOKEN": None},
        **resources,
    )
    around = {"HF_TOKEN": "word", "PYTHONHOME": "/opt/python", "USER": "me", "MINE": "old"}
    launcher = SlurmLauncher(
        fake.slurm(),
        BatchJob("30", 0, "node[1-2]", "node1"),
        {"PATH": f"{fake.directory}:{os.environ['PATH']}", **around},
        root / "work",
    )
    group = launcher.start(run_dir, planned, 1, {})
    wait_until(lambda: len(group.poll()) == planned.world_size, "the end of srun")
    (call,) = fake.calls("srun")
    return call


def test_without_a_container_nothing_is_added(tmp_path: Path) -> None:
    (call, other) = (
        launch(directory, {"container": container})
        for directory, container in (
            (made(tmp_path / "1"), None),
            (made(tmp_path / "2"), {**PYXIS, "runtime": "none"}),
        )
    )
    assert len(call.argv) == len(other.argv) == len(STEP) + len(LAST) + 5
    assert not any(word.startswith("--container") for word in (*call.argv, *other.argv))


MOUNTED = {
    "the run root and the checkpoint place are in the working directory": (
        {"run_dir": "/home/me/runs/a-1", "working": "/home/me"},
        ["/home/me:/home/me"],
    ),
    "data and weights are only read": (
        {
            "data": {"kind": "lerobot", "options": {"root": "demos"}},
            "checkpoint": {"init_from": "/weights/base.safetensors", "uri": "s3://b/c"},
        },
        ["/runs:/runs", "/weights:/weights:ro", "/home/me/code:/home/me/code"],
    ),
    "the user's mount has them already": (
        {"run_dir": "/scratch/me/runs/a-1", "mounts": ["/scratch:/scratch", "/home/me:/home/me"]},
        ["/scratch:/scratch", "/home/me:/home/me"],
    ),
    "the user's mount is read-only": (
        {"run_dir": "/scratch/runs/a-1", "mounts": ["/scratch:/scratch:ro"]},
        [
            *("/scratch:/scratch:ro", "/scratch/runs:/scratch/runs"),
            "/home/me/code:/home/me/code",
        ],
    ),
    "the user's mount hides them": (
        {"run_dir": "/home/me/runs/a-1", "working": "/home/me", "mounts": ["/x:/home/me/runs/y"]},
        ["/home/me:/home/me", "/x:/home/me/runs/y"],
    ),
}


@pytest.mark.parametrize("name", MOUNTED)
def test_what_a_rank_sees(name: str) -> None:
    given, expected = MOUNTED[name]
    mounts = given.pop("mounts", [])
    working = Path(given.pop("working", "/home/me/code"))
    planned = planned_of({**PYXIS, "mounts": mounts}, **{"run_dir": "/runs/a-1", **given})
    container = planned.spec.resources.container
    assert container is not None
    found = all_mounts(container, planned, working)
    assert [f"{m.source}:{m.target}{':ro' if m.is_read_only else ''}" for m in found] == expected


NOT_MOUNTED = [
    ({"working": "/"}, "the working directory is /, which cannot be mounted"),
    ({"run_dir": "/usr/a-1"}, "the run root is /usr"),
    ({"run_dir": "/a:b/a-1"}, "the run root, /a:b, cannot be mounted: has a path with a comma"),
    ({"working": "/a,b"}, "the working directory, /a,b"),
    ({"mounts": ["/x:/runs"]}, "/runs is the run root, and has to be mounted there as it is"),
    ({"mounts": ["/runs:/runs:ro"]}, "to be written to"),
    ({"checkpoint": {"init_from": "/base.safetensors"}}, "checkpoint.init_from is /, which"),
]


@pytest.mark.parametrize(("given", "says"), NOT_MOUNTED)
def test_what_cannot_be_seen(given: dict[str, Any], says: str) -> None:
    given = dict(given)
    working = Path(given.pop("working", "/home/me"))
    container = {**PYXIS, "mounts": given.pop("mounts", [])}
    planned = planned_of(container, **{"run_dir": "/runs/a-1", **given})
    with pytest.raises(UsageError) as caught:
        check_container(planned, working)
    assert says in caught.value.message
    # Without a container, none of that matters.
    check_container(planned_of({**container, "runtime": "none"}, **given), working)


def test_a_run_without_its_own_vitra_cannot_go_on_in_an_image(tmp_path: Path) -> None:
    run_dir = RunDir(made(tmp_path / "a-1"))
    planned = planned_of(PYXIS, run_dir=str(run_dir.path))
    vitra = run_dir.code / "vitra"
    (vitra / "launcher").mkdir(parents=True)
    (vitra / "trainer").symlink_to(vitra / "launcher")
    with pytest.raises(UsageError, match="no copy of vitra") as caught:
        check_resume_inside(planned, run_dir, tmp_path)
    assert "checkpoint.init_from" in (caught.value.hint or "")
    check_resume_inside(planned_of(None, run_dir=str(run_dir.path)), run_dir, tmp_path)
    (vitra / "trainer").unlink()
    (vitra / "trainer").mkdir()
    check_resume_inside(planned, run_dir, tmp_path)


def test_charliecloud_s_mount_points(tmp_path: Path) -> None:
    image, outside = made(tmp_path / "image"), made(tmp_path / "outside")
    (image / "link").symlink_to(outside)
    container = ContainerSpec.model_validate(
        {"runtime": "charliecloud", "image": str(image), "mounts": ["/a:/x/y", "/b:/link/z"]}
    )
    for _ in range(2):
        make_mount_points(container, container.parsed_mounts)
        assert (image / "x" / "y").is_dir()
    # What a link of the image leads to is the host's here.
    assert list(outside.iterdir()) == []
    (image / "file").touch()
    bad = container.model_copy(update={"mounts": ("/a:/file",)})
    with pytest.raises(UsageError, match=r"has no /file to mount /a at"):
        make_mount_points(bad, bad.parsed_mounts)


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def spec_of(container: dict[str, Any] | None, **sections: Any) -> RunSpec:
    resources = sections.pop("resources", {})
    return RunSpec.model_validate(
        {
            "name": "a",
            "model": {"kind": "vla"},
            "data": {"kind": "synthetic"},
            "train": {"global_batch_size": 40, "max_steps": 10},
            "resources": {"container": container, **resources},
            **sections,
        }
    )


def planned_of(
    container: dict[str, Any] | None, *, run_dir: str = "/runs/a-1", **more: Any
) -> Plan:
    """`more` are sections of the spec, or else keys of resources."""
    sections = {name: more.pop(name) for name in ("data", "checkpoint") if name in more}
    if more:
        sections = {"checkpoint": {"uri": "/ckpt"}, **sections}
    spec = spec_of(container, resources=more, **sections)
    return plan(spec, run_id="a-1", run_dir=run_dir, base_dir="/")
