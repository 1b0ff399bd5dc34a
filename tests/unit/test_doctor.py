"""What `vitra doctor` finds: each fault made, found, and told with what helps."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher import doctor
from launcher.drafting import draft
from launcher.findings import Finding, Level
from launcher.slurm import Slurm
from tests.conftest import tiny_spec
from tests.unit.fake_slurm import FakeSlurm
from tests.unit.findings import only

UP = [{"out": "slurm-wlm 22.05.8\n"}, {"out": "Slurmctld(primary) at head is UP\n"}]


def spec(directory: Path, **changes: object) -> Any:
    path = directory / "spec.yaml"
    path.write_text(tiny_spec(**changes))
    return draft(path, [], run_root=str(directory / "runs"), environ=os.environ)


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    """A cluster where all is well, whose nodes see this machine's files."""
    commands = tmp_path / "commands"
    commands.mkdir()
    fake = FakeSlurm(commands)
    fake.play("scontrol", *UP)
    node_says(fake)
    return fake


def node_says(fake: FakeSlurm, **changes: object) -> None:
    """Have srun run what it is told to, and change what comes of it."""
    (fake.directory / "srun").write_text(
        f"#!{sys.executable} -IS\n"
        "import json, subprocess, sys\n"
        "words = [w for w in sys.argv[1:] if not w.startswith('--')]\n"
        "seen = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)\n"
        f"print(json.dumps(seen | json.loads({json.dumps(changes)!r})))\n"
    )


def srun_fails(fake: FakeSlurm, words: str) -> None:
    (fake.directory / "srun").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")


def slurm_findings(fake: FakeSlurm, tmp_path: Path) -> list[Finding]:
    return list(doctor.slurm_findings(None, tmp_path, fake.slurm()))


def test_a_cluster_where_all_is_well(fake: FakeSlurm, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    findings = slurm_findings(fake, tmp_path)
    assert [f.check for f in findings] == ["slurm", "accounting", "node", "clock"]
    assert {f.level for f in findings} == {Level.OK}
    assert doctor.first_exit_code(findings) == 0
    assert doctor.doctor_facts(findings)["ready"] is True
    assert sorted(tmp_path.iterdir()) == before


def test_no_commands_at_all(tmp_path: Path) -> None:
    slurm = Slurm({"PATH": str(tmp_path)})
    found = only(doctor.slurm_findings(None, tmp_path, slurm), Level.WARNING)
    assert "only --local" in found.text


def test_some_commands_missing(fake: FakeSlurm, tmp_path: Path) -> None:
    (fake.directory / "srun").unlink()
    slurm = Slurm({"PATH": str(fake.directory)})
    found = only(doctor.slurm_findings(None, tmp_path, slurm), Level.FAULT)
    assert (found.text, found.exit_code) == ("not in PATH: srun", 3)


def test_a_controller_that_is_down(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.play("scontrol", UP[0], {"out": "Slurmctld(primary) at head is DOWN\n"})
    found = only(slurm_findings(fake, tmp_path), Level.FAULT)
    assert "no controller is up" in found.text
    assert found.exit_code == 3


def test_accounting_that_does_not_answer(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.play("sacct", {"err": "sacct: error: Problem talking to the database\n", "rc": 1})
    found = only(slurm_findings(fake, tmp_path), Level.WARNING)
    assert (found.check, "Problem talking" in found.text) == ("accounting", True)


def test_no_node_is_free(fake: FakeSlurm, tmp_path: Path) -> None:
    srun_fails(fake, "srun: error: Unable to allocate resources: Requested nodes are busy")
    assert only(slurm_findings(fake, tmp_path), Level.WARNING).check == "node"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"read": None, "written": False, "problem": "/x: No such file"}, "/x: No such file"),
        ({"read": "other"}, "another directory"),
        ({"written": False, "problem": "/x: Read-only file system"}, "Read-only"),
    ],
)
def test_a_run_root_that_nodes_do_not_share(
    changes: dict[str, object], words: str, fake: FakeSlurm, tmp_path: Path
) -> None:
    node_says(fake, **changes)
    found = only(slurm_findings(fake, tmp_path), Level.FAULT)
    assert words in found.text
    assert (found.check, found.exit_code) == ("node", 6)


def test_a_python_that_nodes_do_not_have(fake: FakeSlurm, tmp_path: Path) -> None:
    srun_fails(fake, "slurmstepd: error: execve(): python: No such file or directory")
    found = only(slurm_findings(fake, tmp_path), Level.FAULT)
    assert "No such file" in found.text
    assert found.exit_code == 3


def test_clocks_that_differ(fake: FakeSlurm, tmp_path: Path) -> None:
    node_says(fake, time=time.time() - 3600)
    found = only(slurm_findings(fake, tmp_path), Level.WARNING)
    assert found.check == "clock"
    assert "3600 s apart" in found.text or "3601 s apart" in found.text


def test_a_run_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = only(doctor.run_root_findings(tmp_path / "file" / "runs"), Level.FAULT)
    assert found.exit_code == 6


def test_a_run_root_that_belongs_to_everybody(tmp_path: Path) -> None:
    (finding,) = doctor.run_root_findings(tmp_path / "new" / "runs")
    assert finding.level is Level.OK
    tmp_path.chmod(0o777)
    assert "everybody" in only(doctor.run_root_findings(tmp_path), Level.WARNING).text
    tmp_path.chmod(0o1777)
    (finding,) = doctor.run_root_findings(tmp_path)
    assert finding.level is Level.OK
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LITTLE_SPACE", 1 << 60)
    assert only(doctor.run_root_findings(tmp_path), Level.WARNING).check == "disk"


def test_a_checkpoint_place_of_another_run(tmp_path: Path) -> None:
    place = tmp_path / "place"
    fitting = spec(tmp_path, checkpoint__uri=str(place))
    (finding,) = doctor.checkpoint_findings(fitting)
    assert finding.level is Level.OK
    assert not place.exists()
    place.mkdir()
    (place / "owner.json").write_text('{"run_id": "another-20260101-000000-abcd"}')
    found = only(doctor.checkpoint_findings(fitting), Level.FAULT)
    assert "another-20260101-000000-abcd" in found.text
    assert found.exit_code == 6


def test_wandb(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    assert "no API key" in only(doctor.wandb_findings("online", environ), Level.WARNING).text
    with_key = {**environ, "WANDB_API_KEY": "secret-marker"}
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret-marker\n")
    (tmp_path / ".netrc").chmod(0o600)
    for mode, around in (("online", with_key), ("online", environ), ("offline", {})):
        (finding,) = doctor.wandb_findings(mode, around)
        assert finding.level is Level.OK
        assert "secret-marker" not in finding.text


def test_wandb_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _name: None)
    found = only(doctor.wandb_findings("online", {"WANDB_API_KEY": "k"}), Level.WARNING)
    assert "not installed" in found.text


def test_a_torch_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    found = only(doctor.torch_findings(None, environ), Level.FAULT)
    assert "libcudart" in found.text


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_this_torch_cannot_use(tmp_path: Path) -> None:
    *_, last = doctor.torch_findings(spec(tmp_path, resources__gpus_per_node=2), os.environ)
    assert last.level is Level.OK if torch.version.cuda else Level.FAULT
    (finding,) = doctor.torch_findings(spec(tmp_path), os.environ)
    assert finding.level is Level.OK
    assert torch.__version__ in finding.text
    # Ranks in an image have its torch, and not this one.
    image = {"runtime": "apptainer", "image": "/images/vitra.sif"}
    inside = spec(tmp_path, resources__gpus_per_node=2, resources__container=image)
    (finding,) = doctor.torch_findings(inside, os.environ)
    assert (finding.level, "image's" in finding.text) == (Level.OK, True)


def test_lines_and_document() -> None:
    findings = [Finding("a", Level.OK, "fine"), Finding("b", Level.FAULT, "bad", "mend it", 3)]
    assert doctor.finding_lines(findings[0]) == ["ok       a: fine"]
    assert doctor.finding_lines(findings[1]) == ["fault    b: bad", "           fix: mend it"]
    assert doctor.first_exit_code(findings) == 3
    assert doctor.doctor_facts(findings) == {
        "ready": False,
        "findings": [
            {"check": "a", "level": "ok", "text": "fine", "fix": None},
            {"check": "b", "level": "fault", "text": "bad", "fix": "mend it"},
        ],
    }
