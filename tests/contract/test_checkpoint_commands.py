"""`vitra checkpoints --prune`: what goes and what stays; and what `vitra export` refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher.lock import RunLock
from tests.conftest import Vitra
from tests.contract.test_many_runs import STARTED, a_run
from tests.unit.store_helpers import save
from trainer.spec.rundir import RunDir
from trainer.store.checkpoints import CheckpointStore
from trainer.store.storage import LocalStorage


@pytest.fixture
def run_dir(vitra: Vitra) -> RunDir:
    """A run of one attempt with checkpoints of steps 5, 10 ... 30, whose spec keeps two."""
    run_dir = a_run(vitra, "old-20260101-000000-aaaa", *STARTED)
    place = store(run_dir)
    place.own()
    place.claim_next(None, None)
    for step in range(5, 35, 5):
        save(place, step, attempt=1)
    return run_dir


def store(run_dir: RunDir) -> CheckpointStore:
    return CheckpointStore(LocalStorage(run_dir.path / "checkpoints"), run_dir.path.name)


def steps(run_dir: RunDir) -> list[int]:
    return sorted(ref.step for ref in store(run_dir).survey().complete)


def test_as_the_spec_says(vitra: Vitra, run_dir: RunDir) -> None:
    before = vitra("checkpoints", "old", "--json").json["complete"]
    document = vitra("checkpoints", "old", "--prune", "--json").json
    pruned = document["pruned"]
    assert (pruned["removed"], pruned["keep_last"], pruned["warnings"]) == ([5, 10, 15, 20], 2, [])
    assert pruned["freed_bytes"] == sum(one["size_bytes"] for one in before[2:])
    assert [one["step"] for one in document["complete"]] == [30, 25]
    assert steps(run_dir) == [25, 30]
    assert "nothing to remove" in vitra("checkpoints", "old", "--prune").stdout


def test_as_the_command_line_says(vitra: Vitra, run_dir: RunDir) -> None:
    words = ("--prune", "--keep-last", "3", "--keep-every", "10")
    text = vitra("checkpoints", "old", *words).stdout
    assert steps(run_dir) == [10, 20, 25, 30]
    removed = [line.split()[-1] for line in text.splitlines() if line.startswith("removed")]
    assert removed == ["5", "15"]
    place = str(run_dir.path / "checkpoints")
    assert "--keep-last" in vitra("checkpoints", place, "--prune", code=2).stderr
    vitra("checkpoints", place, "--prune", "--keep-last", "2")
    assert steps(run_dir) == [25, 30]


def test_beside_a_living_supervisor(vitra: Vitra, run_dir: RunDir) -> None:
    with RunLock(run_dir.lock):
        vitra("checkpoints", "old", "--prune")
    assert steps(run_dir) == [25, 30]


def test_what_is_damaged_does_not_count_as_kept(vitra: Vitra, run_dir: RunDir) -> None:
    shard = run_dir.path / "checkpoints" / "step-00000030" / "shard-a1-r0.bin"
    _flip(shard)
    vitra("checkpoints", "old", "--prune")
    assert steps(run_dir) == [20, 25, 30]
    for step in (20, 25):
        _flip(run_dir.path / "checkpoints" / f"step-{step:08d}" / "shard-a1-r1.bin")
    pruned = vitra("checkpoints", "old", "--prune", "--json").json["pruned"]
    assert pruned["removed"] == [], "nothing good is left to keep"
    assert steps(run_dir) == [20, 25, 30]


def test_what_is_refused(vitra: Vitra, run_dir: RunDir) -> None:
    vitra("checkpoints", "old", "--prune", "--keep-last", "1", code=2)
    vitra("checkpoints", "old", "--prune", "--keep-every", "0", code=2)
    vitra("checkpoints", "old", "--keep-last", "2", code=2)
    vitra("checkpoints", "nothing", "--prune", code=4)
    assert steps(run_dir) == [5, 10, 15, 20, 25, 30]


# -- export: whatever it refuses, no trainer is started for it ----------------------------------


def test_a_step_that_is_not_there(vitra: Vitra, run_dir: RunDir) -> None:
    words = ("export", "old", "--to", "x")
    (line,) = vitra(*words, "--step", "7", code=4).stderr.splitlines()
    assert "no checkpoint of step 7; there is step 5, 10, 15, 20, 25, 30" in line
    for step in (run_dir.path / "checkpoints").glob("step-*"):
        shutil.rmtree(step)
    assert "no complete checkpoint yet" in vitra(*words, code=4).stderr
    vitra("export", "nothing", "--to", "x", code=4)
    assert not (vitra.directory / "x").exists()


@pytest.mark.parametrize("name", ["shard-a1-r1.bin", "manifest.json"])
def test_damage_is_found_before_anything_is_written(
    vitra: Vitra, run_dir: RunDir, name: str
) -> None:
    _flip(run_dir.path / "checkpoints" / "step-00000030" / name)
    *_, line = vitra("export", "old", "--to", "x", "--step", "30", code=6).stderr.splitlines()
    assert "step 30 is damaged: " in line
    assert name.partition(".")[0] in line
    assert "there is step 5, 10, 15, 20, 25" in line
    assert not (vitra.directory / "x").exists()


@pytest.mark.parametrize("to", ["", "mine", "link", ".", "no/such/place"])
def test_places_that_are_taken_or_missing(vitra: Vitra, run_dir: RunDir, to: str) -> None:
    (vitra.directory / "mine").write_text("mine")
    (vitra.directory / "link").symlink_to("nowhere")
    (line,) = vitra("export", run_dir.path, "--to", to, code=2).stderr.splitlines()
    assert f"--to {to}".strip() in line
    assert (vitra.directory / "mine").read_text() == "mine"
    assert not (vitra.directory / "nowhere").exists()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
