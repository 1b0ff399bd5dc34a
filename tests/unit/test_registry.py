"""Run ids, run roots and records, below the command line (tests/contract has that)."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher import submit
from launcher.drafting import draft
from launcher.registry import absolute, as_argument, choose_run_root, new_run_id, read_plan, runs
from tests.conftest import tiny_spec
from trainer.spec.errors import UsageError
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_run_id() -> None:
    run_id = new_run_id("my.run-1", NOW)
    assert re.fullmatch(r"my\.run-1-20260102-030405-[a-z]{4}", run_id)
    assert len({new_run_id("a", NOW) for _ in range(50)}) > 45


def test_newest_first_by_the_time_in_the_id(tmp_path: Path) -> None:
    ids = ["b-20260101-000000-aaaa", "a-20260301-000000-bbbb", "c-20260201-000000-cccc", "odd"]
    for run_id in ids:
        (tmp_path / run_id).mkdir()
        (tmp_path / run_id / "run.json").write_text("{}")
    (tmp_path / "no-run").mkdir()
    assert list(runs(tmp_path)) == [ids[1], ids[2], ids[0], "odd"]
    assert list(runs(tmp_path / "absent")) == []


@example("~\0")
@given(st.text(min_size=1, max_size=20))
def test_a_run_root_is_absolute_and_sound_or_refused(text: str) -> None:
    try:
        root = choose_run_root(None, text, {})
    except UsageError:
        return
    assert root.is_absolute()
    assert ".." not in root.parts
    assert not re.search(r"[\x00-\x1f\x7f]", str(root))
    assert str(root).encode()


def test_home_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert absolute("~/runs") == Path("/home/somebody/runs")
    assert choose_run_root("~", None, {}) == Path("/home/somebody")


def test_as_argument() -> None:
    """What is printed to type next finds the run again."""
    run_dir = RunDir(Path("/data/my runs/a-20260101-000000-abcd"))
    assert as_argument(run_dir, {"VITRA_RUN_ROOT": "/data/my runs"}) == run_dir.path.name
    by_path = "'/data/my runs/a-20260101-000000-abcd'"
    assert as_argument(run_dir, {}) == by_path
    # Where nothing could be submitted to by default, the end of a run is told all the same.
    assert as_argument(run_dir, {"VITRA_RUN_ROOT": "/a\nb"}) == by_path


def test_runs_of_one_second_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submit makes the directory to take the id: one that is taken already is drawn again."""
    drawn = iter("aaaa" + "aaaa" + "aaab")
    monkeypatch.setattr("secrets.choice", lambda _: next(drawn))
    (tmp_path / "spec.yaml").write_text(tiny_spec(name="a"))
    ready = draft(tmp_path / "spec.yaml", (), run_root=str(tmp_path), environ={})
    made = [submit._new_directory(ready, NOW).path.name for _ in range(2)]
    assert made == ["a-20260102-030405-aaaa", "a-20260102-030405-aaab"]


def test_a_plan_that_was_moved(tmp_path: Path) -> None:
    place = "s3://bucket/x"
    for uri, expected in (
        ("/old/a/checkpoints", str(tmp_path / "checkpoints")),
        ("/old/a-b/checkpoints", "/old/a-b/checkpoints"),
        (place, place),
    ):
        plan = Plan.model_validate(
            {
                "run_id": "a",
                "run_dir": "/old/a",
                "spec": {
                    "name": "a",
                    "model": {"kind": "vla"},
                    "data": {"kind": "synthetic"},
                    "train": {"global_batch_size": 8, "max_steps": 10},
                },
                "spec_digest": "",
                "nodes": 1,
                "tasks_per_node": 1,
                "world_size": 1,
                "per_device_batch_size": 8,
                "grad_accumulation_steps": 1,
                "time_limit_min": 1,
                "threads_per_rank": 1,
                "checkpoint_uri": uri,
            }
        )
        (tmp_path / "plan.json").write_text(plan.model_dump_json())
        moved = read_plan(RunDir(tmp_path))
        assert (moved.run_dir, moved.checkpoint_uri) == (str(tmp_path), expected)
