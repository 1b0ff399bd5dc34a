"""Components of a user's own, in a project outside the package: trained, killed and resumed.

A run goes on with the code that it was submitted with, whatever has become of the project since.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import launcher
from tests.conftest import Vitra, tree
from tests.e2e.runs import Run, spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMPONENT = (Path(__file__).parent / "components" / "line.py").read_text()
MARK = "marker-of-a-secret"


def project(root: Path, files: Mapping[str, str]) -> Path:
    """A project with a git repository of its own."""
    root.mkdir(parents=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "work"]):
        subprocess.run(["git", "-C", str(root), *author, *words], check=True)
    return root


def own_spec(model: str = "line:Line", data: str = "line:Points", **train: Any) -> dict[str, Any]:
    return spec(
        2,
        model={"kind": model, "options": {"width": 8}},
        data={"kind": data, "options": {"samples": 320}},
        train={"learning_rate": 0.03, **train},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the undisturbed run."""
    root = tmp_path_factory.mktemp("whole")
    run = Run(root / "run", own_spec(), cwd=project(root / "project", {"line.py": COMPONENT}))
    run.finish()
    return run.results()


def test_it_learns(whole: dict[str, Any]) -> None:
    losses = [record["loss"] for record in whole["metrics"]]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_killed_edited_and_deleted_equals_whole(whole: dict[str, Any], tmp_path: Path) -> None:
    top = project(tmp_path / "project", {"line.py": COMPONENT, "notes.txt": ""})
    run = Run(tmp_path / "run", own_spec(), cwd=top)
    chance = random.Random(3)
    run.kill_at(6, chance)
    (top / "line.py").write_text("raise RuntimeError('another version')\n")
    run.kill_at(24, chance)
    shutil.rmtree(top)
    run.cwd = tmp_path
    run.finish()
    results = run.results()
    assert len(run.events("attempt")) == 3
    assert results["samples"] == whole["samples"]
    assert results["metrics"] == whole["metrics"]
    assert results["state"] == whole["state"]


def test_an_editable_install_and_a_run_root_in_the_tree(tmp_path: Path) -> None:
    top = project(
        tmp_path / "project",
        {"src/own/__init__.py": "", "src/own/line.py": COMPONENT, ".env": f"TOKEN={MARK}"},
    )
    (top / ".env").write_text(f"TOKEN={MARK} changed")
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # What pip leaves there for an editable install; and the packages of the tests' environment.
    lines = [f"{top}/src", sysconfig.get_path("purelib"), str(Path(launcher.__path__[0]).parent)]
    (site / "__editable__.own.pth").write_text("\n".join(lines))
    document = own_spec("own.line:Line", "own.line:Points", max_steps=8)
    run = Run(
        top / "results",
        document,
        env={"PYTHONPATH": ""},
        cwd=tmp_path,
        python=environment / "bin" / "python",
    )
    run.finish()
    code = run.dir / "code"
    assert (code / "project" / "src" / "own" / "line.py").exists()
    assert not (code / "project" / "results" / "runs").exists()
    assert "project/.env: a secret's name" in (code / "skipped.txt").read_text()
    terminal = (top / "results" / "terminal.log").read_text()
    assert "not copied (code/skipped.txt says why): project/.env" in terminal
    assert not [p for p, (_, data) in tree(run.dir).items() if MARK.encode() in data]

    (top / "src" / "own" / "line.py").write_text("raise RuntimeError('another version')\n")
    resumed = subprocess.run(
        [
            environment / "bin" / "python",
            "-P",
            "-m",
            "launcher.cli",
            "resume",
            run.dir,
            "-o",
            "train.max_steps=12",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stdout
    assert run.results()["step"] == 12


def test_a_component_that_escapes_its_copy_is_refused(vitra: Vitra) -> None:
    top = vitra.directory / "project"
    away = f"import sys\nsys.path.insert(0, {str(top)!r})\n"
    project(top, {"line.py": COMPONENT, "points.py": COMPONENT + away})
    vitra.directory = top
    vitra.spec(
        model={"kind": "line:Line", "options": {"width": 8}},
        data={"kind": "points:Points", "options": {"samples": 64}, "num_workers": 0},
    )
    vitra("submit", "spec.yaml", "--local", code=5)
    reason = vitra("status", "tiny", "--json").json["reason"]
    assert "SnapshotError: model.kind: module line was" in reason
    assert f"is {top}/line.py now, not the copy in {top}/runs/tiny-" in reason


def test_too_large_a_tree_is_refused_and_nothing_left(vitra: Vitra) -> None:
    top = project(vitra.directory / "project", {"line.py": COMPONENT})
    (top / "data").mkdir()
    with (top / "data" / "frames.bin").open("wb") as file:
        file.truncate(300_000_000)
    vitra.directory = top
    vitra.environ = {"PYTHONDONTWRITEBYTECODE": "1"}
    vitra.spec(
        model={"kind": "line:Line", "options": {"width": 8}},
        data={"kind": "line:Points", "options": {"samples": 64}},
    )
    before = tree(top).keys()
    answer = vitra("submit", "spec.yaml", "--local", code=2)
    assert "the code to copy has 300.0 MB, the limit is 200.0 MB" in answer.stderr
    assert "project/data/frames.bin (300.0 MB)" in answer.stderr
    assert tree(top).keys() == before


def test_what_is_wrong_with_a_component_is_said_at_submit(vitra: Vitra) -> None:
    wrong = COMPONENT.replace("return len(batch", "return 1.0 * len(batch")
    vitra.directory = project(vitra.directory / "project", {"line.py": wrong})
    vitra.spec(
        model={"kind": "line:Line", "options": {"width": 8}},
        data={"kind": "line:Points", "options": {"samples": 64}},
    )
    answer = vitra("submit", "spec.yaml", "--local", code=2)
    assert (
        "model.kind: 'line:Line': Line.loss_count(batch) gave a float, not an int" in answer.stderr
    )
    assert not (vitra.directory / "runs").exists()
