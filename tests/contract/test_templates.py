"""`vitra init` and `vitra schema`: every template is a sound spec, and no file is overwritten."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from launcher.templates import template_names
from tests.conftest import Vitra


def test_the_templates_that_there_are(vitra: Vitra) -> None:
    listed = vitra("init", "--list", "--json").json["templates"]
    names = [one["name"] for one in listed]
    assert names == template_names()
    assert names[0] == "quickstart"
    assert {"preemptible-cluster", "own-components"} <= set(names)
    for one in listed:
        assert one["about"].endswith("."), one
        assert one["name"] in vitra("init", "--list").stdout


@pytest.mark.parametrize("name", template_names())
def test_a_template_plans_and_dry_runs(vitra: Vitra, name: str) -> None:
    answer = vitra("init", "--template", name)
    path = vitra.directory / "spec.yaml"
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    comments = [line for line in text.splitlines() if "#" in line]
    assert len(comments) > 15
    # What the comments say to type is about the file that was written.
    assert "launcher/examples" not in text
    (step,) = (t for t in answer.stdout.splitlines() if t.startswith("next: "))
    assert vitra(*shlex.split(step.removeprefix("next: "))[1:]).stdout
    planned = vitra("plan", "spec.yaml", "--json").json
    assert planned["total_steps"]
    document = vitra("submit", "spec.yaml", "--dry-run", "--json").json
    done = subprocess.run(
        ["bash", "-n"], input=document["sbatch_script"], text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1" in vitra("submit", "spec.yaml", "--local", "--dry-run").stdout
    printed = vitra("init", "--template", name, "-")
    assert printed.stdout == text


def test_the_cluster_template_asks_for_what_it_says(vitra: Vitra) -> None:
    vitra("init", "cluster.yaml", "--template", "preemptible-cluster")
    document = vitra("submit", "cluster.yaml", "--dry-run", "--json").json
    assert (document["world_size"], document["grad_accumulation_steps"]) == (32, 4)
    for line in ("--nodes=4", "--gpus-per-node=8", "--partition=preemptible"):
        assert line in document["sbatch_script"]


def test_nothing_is_overwritten(vitra: Vitra) -> None:
    path = vitra.directory / "mine.yaml"
    path.write_text("mine")
    (line,) = vitra("init", "mine.yaml", code=2).stderr.splitlines()
    assert "mine.yaml" in line
    assert path.read_text() == "mine"
    (vitra.directory / "link.yaml").symlink_to("nowhere.yaml")
    vitra("init", "link.yaml", code=2)
    assert not (vitra.directory / "nowhere.yaml").exists()
    (vitra.directory / "directory").mkdir()
    assert "is a directory" in vitra("init", "directory", code=2).stderr
    vitra("init", "no/such/place.yaml", code=2)
    vitra("init", "", code=2)
    assert "did you mean quickstart" in vitra("init", "-t", "quikstart", code=2).stderr


def test_an_awkward_path_is_quoted_where_it_is_to_be_typed(vitra: Vitra) -> None:
    vitra("init", "my spec $(id).yaml")
    text = (vitra.directory / "my spec $(id).yaml").read_text()
    assert "vitra submit 'my spec $(id).yaml' --local" in text
    vitra("plan", "my spec $(id).yaml")


def test_schema_is_one_document(vitra: Vitra) -> None:
    schema = vitra("schema").json
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert "yaml-language-server" in vitra("schema", "--help").stdout


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
