"""The wheel: all that is needed is in it, nothing else, and it runs where no checkout is."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path

import pytest

from tests.wheel import CHECKOUT, install, run_to_end, tracked_files

pytestmark = pytest.mark.slow


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith("/METADATA"))
    about = {name for name in names if re.match(r"vitra_launcher-[^/]+\.dist-info/", name)}
    assert sorted({*names} - about) == sorted(tracked_files("launcher", "trainer"))
    assert any(name.endswith("/licenses/LICENSE") for name in about)
    # What it says of itself is what the changelog's newest entry is about.
    (version,) = re.findall(r"^Version: (\S+)$", metadata, re.MULTILINE)
    entries = re.findall(r"^## \[?(\d[^\s\]]*)", (CHECKOUT / "CHANGELOG.md").read_text(), re.M)
    assert entries[0] == version


def test_the_quickstart_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    commands = install(wheel, tmp_path / "venv")
    home = tmp_path / "home"
    home.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ |= {"HOME": str(home), "PATH": f"{commands}:/usr/bin:/bin"}

    def run(*argv: str) -> str:
        return run_to_end(argv, environ=environ, cwd=home)

    python = "import json, sys, launcher, trainer\n"
    python += "print(json.dumps([launcher.__file__, trainer.__file__, *sys.path]))"
    places = json.loads(run("python", "-c", python))
    assert all(Path(place).is_relative_to(tmp_path / "venv") for place in places[:2]), places
    assert not [place for place in places if place == str(CHECKOUT)], places

    assert re.fullmatch(r"vitra \d+\.\d+\S*\n", run("vitra", "--version"))
    assert json.loads(run("vitra", "schema"))["properties"]
    assert "next: vitra plan spec.yaml" in run("vitra", "init")
    # As the README has it, and a hundredth as long; nothing of it is left out.
    shorter = ("train.max_steps=10", "checkpoint.save_interval=5", "model.options.eval_samples=1")
    overrides = [word for override in shorter for word in ("-o", override)]
    said = run("vitra", "submit", "spec.yaml", "--local", *overrides)
    assert "completed: all 2 ranks reached step 10" in said
    assert "mse_wrong_instruction" in said
    assert "every byte checked" in run("vitra", "checkpoints", "quickstart", "--verify")
