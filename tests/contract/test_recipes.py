"""The recipes, as they stand in the document: their files planned, their commands run."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.load import spec_keys
from tests.conftest import PATIENCE_S, Vitra
from tests.documents import ROOT, Block, Document

RECIPES = Document(ROOT / "launcher" / "docs" / "recipes.md")
README = Document(ROOT / "README.md")
OWN = "Your own model and data in 30 lines"
BASE_CLASS = "Coming from VITRA's base class"


def write_files(blocks: list[Block], directory: Path) -> None:
    for block in blocks:
        if block.file_name is not None:
            (directory / block.file_name).write_text(block.text)


def commands(blocks: list[Block]) -> list[list[str]]:
    lines = [line for block in blocks if block.language == "bash" for line in block.commands]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def dry_runs(vitra: Vitra, title: str) -> list[dict[str, Any]]:
    """Do what a recipe shows as far as that needs no cluster: at least one dry run."""
    blocks = RECIPES.section(title)
    write_files(blocks, vitra.directory)
    found = [
        vitra(*words[1:], "--json").json
        for words in commands(blocks)
        if words[0] == "vitra" and "--dry-run" in words
    ]
    assert found
    return found


def test_a_preemptible_partition(vitra: Vitra) -> None:
    (plan,) = dry_runs(vitra, "A preemptible partition")
    assert (plan["world_size"], plan["per_device_batch_size"]) == (32, 16)
    assert (plan["grad_accumulation_steps"], plan["time_limit_min"]) == (4, 240)
    for line in ("--partition=preemptible", "--nodes=4", "--gpus-per-node=8", "--mem=0"):
        assert line in plan["sbatch_script"]


def test_checkpoints_on_s3(vitra: Vitra) -> None:
    (plan,) = dry_runs(vitra, "Checkpoints on S3")
    assert plan["checkpoint_uri"] == "s3://my-bucket/policies/bucket-DRYRUN"


def test_ranks_in_containers(vitra: Vitra) -> None:
    inside, without = dry_runs(vitra, "Ranks in containers")
    assert inside["container"]["runtime"] == "pyxis"
    assert without["container"]["runtime"] == "none"


def test_the_readme_has_the_same_thirty_lines() -> None:
    (code,) = (block for block in RECIPES.section(OWN) if block.file_name == "points.py")
    lines = [line for line in code.text.splitlines() if line.strip()]
    assert len(lines) - 1 <= 30  # without the name of the file
    assert code in README.blocks


def test_the_base_class_arguments_are_keys_of_the_spec() -> None:
    keys = {key for _, names in argument_rows() for key in names if "." in key}
    assert "train.max_steps" in keys
    assert keys - {"model.kind"} <= set(spec_keys())


def argument_rows() -> list[tuple[list[str], list[str]]]:
    """The table of VITRA's arguments: what stands in code in each of its two columns."""
    rows = [line.split("|")[1:3] for line in RECIPES.text.splitlines() if line.startswith("| `")]
    code = re.compile("`([^`]+)`")
    return [(code.findall(left), code.findall(right)) for left, right in rows]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_own_model_and_base_class_run(vitra: Vitra) -> None:
    own, base = RECIPES.section(OWN), RECIPES.section(BASE_CLASS)
    write_files([*own, *base], vitra.directory)
    for words in commands(own):
        assert words[0] == "vitra"
        vitra(*words[1:])
    status = vitra("status", "own", "--json").json
    assert (status["state"], status["step"]) == ("completed", 60)
    assert {name for names, _ in argument_rows() for name in names} >= set(vitras_arguments())
    (words,) = commands(base)
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=vitra.directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    saved = sorted((vitra.directory / words[-1]).iterdir())
    assert [path.name.partition("-")[0] for path in saved] == ["step=20", "step=40"]
    # The targets' variance is 3: it has learnt.
    assert float(saved[-1].stem.rpartition("=")[2]) < 1.0


def vitras_arguments() -> list[str]:
    """What VITRA's constructor takes: the positional arguments of the one here."""
    from trainer.strategies.base import TrainingStrategy

    parameters = inspect.signature(TrainingStrategy.__init__).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
