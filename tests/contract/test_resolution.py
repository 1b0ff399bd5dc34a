"""How RUN is understood, and where runs are looked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Vitra


def make_run(root: Path, run_id: str, created_at: str = "2026-01-01T00:00:00.000Z") -> Path:
    """A run that was submitted and has not started."""
    path = root / run_id
    path.mkdir(parents=True)
    record = {
        "run_id": run_id,
        "name": run_id.rsplit("-", 3)[0],
        "scheduler": "local",
        "created_at": created_at,
        "user": "someone",
        "host": "somewhere",
        "python": "python",
        "working_dir": "/",
        "versions": {},
        "spec_digest": "0" * 32,
    }
    (path / "run.json").write_text(json.dumps(record))
    return path


OLD = "policy-20260101-100000-aaaa"
NEW = "policy-20260201-090000-bbbb"
LONG = "policy-large-20260301-090000-cccc"
#: Its id sorts first, and its name is that of no other.
ODD = "a-b-20270101-090000-dddd"


@pytest.fixture
def runs(vitra: Vitra) -> Vitra:
    for run_id in (OLD, NEW, LONG, ODD):
        make_run(vitra.directory / "runs", run_id)
    # None of these is a run.
    (vitra.directory / "runs" / "policy-20260401-090000-eeee").mkdir()
    (vitra.directory / "runs" / "notes.txt").write_text("")
    return vitra


def found(vitra: Vitra, *words: str | Path) -> str:
    return str(vitra("status", *words, "--json").json["run_id"])


def test_path(runs: Vitra) -> None:
    assert found(runs, f"runs/{OLD}") == OLD
    assert found(runs, f"./runs/{OLD}/") == OLD
    assert found(runs, runs.directory / "runs" / NEW) == NEW
    (runs.directory / "link").symlink_to(runs.directory / "runs" / OLD)
    assert found(runs, "link") == OLD


def test_id_name_prefix(runs: Vitra) -> None:
    assert found(runs, OLD) == OLD
    assert found(runs, "policy") == NEW
    assert found(runs, "policy-large") == LONG
    assert found(runs, "a-b") == ODD
    assert found(runs, "policy-202601") == OLD
    assert found(runs, "policy-l") == LONG
    assert found(runs, "a") == ODD


def test_an_exact_id_comes_before_a_name(runs: Vitra) -> None:
    make_run(runs.directory / "runs", f"{OLD}-20280101-000000-ffff")
    assert found(runs, OLD) == OLD


def test_a_path_comes_before_all_else(runs: Vitra) -> None:
    make_run(runs.directory / "elsewhere", "other-20260101-000000-gggg")
    (runs.directory / "policy").symlink_to("elsewhere/other-20260101-000000-gggg")
    assert found(runs, "policy") == "other-20260101-000000-gggg"


def test_two_of_one_second(runs: Vitra) -> None:
    later = "twin-20260101-000000-aaaa"
    make_run(runs.directory / "runs", later, created_at="2026-01-01T00:00:00.900Z")
    earlier = "twin-20260101-000000-zzzz"
    make_run(runs.directory / "runs", earlier, created_at="2026-01-01T00:00:00.100Z")
    assert found(runs, "twin") == later


def test_ambiguous_prefix(runs: Vitra) -> None:
    (line,) = runs("status", "policy-2", code=2).stderr.splitlines()
    assert OLD in line
    assert NEW in line
    assert LONG not in line


@pytest.mark.parametrize("command", ["status", "resume", "checkpoints"])
def test_none(runs: Vitra, command: str) -> None:
    answer = runs(command, "polizy", "--json", code=4)
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    assert "did you mean policy" in line
    (line,) = runs(command, "something-else", code=4).stderr.splitlines()
    assert "--run-root" in line


def test_path_that_is_no_run(runs: Vitra) -> None:
    (line,) = runs("status", "runs/policy-20260401-090000-eeee", code=4).stderr.splitlines()
    assert "run.json" in line
    runs("status", "x" * 5000, code=4)
    runs("status", "", code=2)


def test_damaged_record(runs: Vitra) -> None:
    (runs.directory / "runs" / OLD / "run.json").write_text("{")
    (line,) = runs("status", OLD, code=6).stderr.splitlines()
    assert "run.json" in line


def test_where_runs_are_looked_for(vitra: Vitra) -> None:
    for root, letters in (("option", "aaaa"), ("variable", "bbbb"), ("runs", "cccc")):
        make_run(vitra.directory / root, f"policy-20260101-000000-{letters}")
    assert found(vitra, "policy").endswith("cccc")
    vitra.environ = {"VITRA_RUN_ROOT": str(vitra.directory / "variable")}
    assert found(vitra, "policy").endswith("bbbb")
    vitra.environ = {"VITRA_RUN_ROOT": "variable"}
    assert found(vitra, "policy").endswith("bbbb")
    assert found(vitra, "policy", "--run-root", "option").endswith("aaaa")
    assert "nowhere" in vitra("status", "policy", "--run-root", "nowhere", code=4).stderr


def test_where_a_run_would_go(vitra: Vitra) -> None:
    vitra.spec(run_root="in-spec")

    def goes_to(*words: str) -> str:
        uri = vitra("plan", "spec.yaml", "--json", *words).json["checkpoint_uri"]
        return str(Path(uri).parent.parent.relative_to(vitra.directory))

    vitra.environ = {"VITRA_RUN_ROOT": "variable"}
    assert goes_to() == "in-spec"
    assert goes_to("-o", "run_root=override") == "override"
    assert goes_to("-o", "run_root=override", "--run-root", "option") == "option"
    vitra.spec()
    assert goes_to() == "variable"
    vitra.environ = {}
    assert goes_to() == "runs"


def test_status_of_a_run_that_never_started(runs: Vitra) -> None:
    status = runs("status", OLD, "--json").json
    assert (status["state"], status["attempt"], status["attempts"]) == ("unknown", 0, [])
    assert status["last_checkpoint_step"] is None
