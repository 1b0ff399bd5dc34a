"""`vitra ps` and `vitra cancel` on run directories in every state, and shell completion."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from typing import Any

import pytest
import yaml

from launcher.lock import RunLock
from launcher.planner import plan
from tests.conftest import Answer, Vitra, tiny_spec, wait_until
from tests.contract.test_resolution import make_run
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir, append_event, json_line


def a_run(vitra: Vitra, run_id: str, *events: tuple[str, dict[str, Any]]) -> RunDir:
    """A run of 20 steps that has come as far as its events say."""
    run_dir = RunDir(make_run(vitra.directory / "runs", run_id))
    spec = RunSpec.model_validate(yaml.safe_load(tiny_spec()))
    ready = plan(spec, run_id=run_id, run_dir=str(run_dir.path)).with_samples(64)
    run_dir.plan.write_text(ready.model_dump_json())
    append_event(run_dir, "submitted", scheduler="local")
    for name, details in events:
        append_event(run_dir, name, **details)
        if name == "attempt":
            run_dir.attempt(details["attempt"]).logs.mkdir(parents=True)
    return run_dir


def rows(vitra: Vitra, *words: str) -> dict[str, dict[str, Any]]:
    answer = vitra("ps", "--json", *words)
    assert answer.stderr == ""
    return {row["name"] or row["run_id"]: row for row in answer.json["runs"]}


def write_metrics(run_dir: RunDir, attempt: int, steps: range, step_time_s: float) -> None:
    records = [json_line({"step": step, "step_time_s": step_time_s}) for step in steps]
    run_dir.attempt(attempt).metrics.write_bytes(b"".join(records))


STARTED = (
    ("attempt", {"attempt": 1, "resume_step": None}),
    ("started", {"attempt": 1, "step": 0}),
)
SAVED = ("saved", {"attempt": 1, "step": 5})


def finished(state: str) -> tuple[str, dict[str, Any]]:
    return ("finished", {"state": state, "verdict": "error", "reason": "for a reason"})


def test_no_runs(vitra: Vitra) -> None:
    answer = vitra("ps", "--json")
    assert (answer.json["runs"], answer.json["more"]) == ([], False)
    answer = vitra("ps", "--run-root", "nowhere")
    assert answer.stdout == ""
    assert "no runs under" in answer.stderr
    (vitra.directory / "file").write_text("")
    vitra("ps", "--run-root", "file")


def test_ps_knows_every_state(vitra: Vitra) -> None:
    a_run(vitra, "fresh-20260101-000000-aaaa")
    ended = ("ended", {"attempt": 1, "verdict": "error", "reason": "x"})
    for state in ("completed", "failed", "cancelled"):
        a_run(vitra, f"{state}-20260102-000000-aaaa", *STARTED, SAVED, ended, finished(state))
    lost = a_run(vitra, "lost-20260103-000000-aaaa", *STARTED, SAVED)
    write_metrics(lost, 1, range(1, 8), 1.0)
    stopped = a_run(vitra, "stopped-20260104-000000-aaaa", *STARTED, SAVED)
    stopped.cancel.touch()
    between = a_run(vitra, "between-20260105-000000-aaaa", *STARTED, SAVED, ended)
    # A second attempt went back to step 5 after damage, and has not logged anything yet.
    running = a_run(
        vitra,
        "running-20260106-000000-aaaa",
        *(*STARTED, SAVED, ("saved", {"attempt": 1, "step": 10}), ended),
        ("attempt", {"attempt": 2, "resume_step": 10}),
        ("started", {"attempt": 2, "step": 5}),
    )
    write_metrics(running, 1, range(1, 12), 9.0)
    with RunLock(between.lock), RunLock(running.lock):
        found = rows(vitra)
        states = {name: row["state"] for name, row in found.items()}
        assert states == {
            **{name: name for name in ("completed", "failed", "cancelled", "running")},
            "fresh": "unknown",
            "lost": "unknown",
            "stopped": "cancelled",
            "between": "requeued",
        }
        assert list(found)[:3] == ["running", "between", "stopped"], "the newest first"
        row = found["running"]
        assert (row["attempt"], row["step"], row["last_checkpoint_step"]) == (2, 5, 5)
        assert (row["total_steps"], row["nodes"], row["eta_s"]) == (20, 1, None)
        write_metrics(running, 2, range(6, 9), 2.0)
        row = rows(vitra)["running"]
        assert (row["step"], row["eta_s"]) == (8, 24.0)
        (line,) = (t for t in vitra("ps").stdout.splitlines() if t.startswith("running-"))
        assert line.split() == [running.path.name, "running", "2", "8/20", "5", "1", "24", "s"]
    for name, row in found.items():
        if name in ("fresh", "lost", "stopped", "completed"):
            status = vitra("status", row["run_id"], "--json").json
            for key in ("run_dir", "name", "state", "attempt", "step", "total_steps", "job_id"):
                assert row[key] == status[key], (name, key)
    assert (found["fresh"]["attempt"], found["fresh"]["step"]) == (0, 0)
    assert (found["lost"]["step"], found["lost"]["eta_s"]) == (7, None)


def test_a_damaged_run_hides_no_other(vitra: Vitra) -> None:
    for number, letters in enumerate(("aaaa", "bbbb", "cccc", "dddd", "eeee"), start=1):
        a_run(vitra, f"r{number}-20260101-000000-{letters}", *STARTED, SAVED)
    runs = vitra.directory / "runs"
    (runs / "r1-20260101-000000-aaaa" / "run.json").write_text("{")
    (runs / "r2-20260101-000000-bbbb" / "plan.json").write_text("[]")
    (runs / "r3-20260101-000000-cccc" / "events.jsonl").write_text(
        '{"event": "finished", "state": "enchanted"}\n'
    )
    shutil.rmtree(runs / "r4-20260101-000000-dddd" / "attempts")
    (runs / "r4-20260101-000000-dddd" / "attempts").write_text("a file")
    found = {row["run_id"][:2]: row for row in vitra("ps", "--json").json["runs"]}
    assert [found[name]["problem"] is None for name in ("r1", "r2", "r3", "r4", "r5")] == [
        *(False, False, False, False, True)
    ]
    assert found["r1"]["state"] == found["r3"]["state"] == "unknown"
    assert (found["r2"]["last_checkpoint_step"], found["r2"]["total_steps"]) == (5, None)
    lines = vitra("ps").stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("r1")] == ["damaged"]
    assert len(lines) == 6


@pytest.mark.slow
def test_ten_thousand_runs(vitra: Vitra) -> None:
    """Only those that are asked for are looked at, so the others cost next to nothing."""
    a_run(vitra, "newest-20270101-000000-aaaa", *STARTED)
    runs = vitra.directory / "runs"
    made = make_run(vitra.directory / "made", "policy-20260101-000000-aaaa") / "run.json"
    for number in range(10_000):
        directory = runs / f"policy-20260101-{number:06d}-aaaa"
        directory.mkdir()
        # Every fourth is a run, and the newest of all is none.
        if number % 4 == 0:
            os.link(made, directory / "run.json")

    def within_5_s(*words: str, code: int = 0) -> Answer:
        started_at = time.monotonic()
        answer = vitra(*words, code=code)
        assert time.monotonic() - started_at < 5, words
        return answer

    document = within_5_s("ps", "--json").json
    assert len(document["runs"]) == 20
    assert document["more"] is True
    found = [row["run_id"] for row in document["runs"][:3]]
    newest = "policy-20260101-009996-aaaa"
    assert found == ["newest-20270101-000000-aaaa", newest, "policy-20260101-009992-aaaa"]
    assert "--all" in vitra("ps").stderr
    assert within_5_s("status", "policy", "--json").json["run_dir"] == str(runs / newest)
    assert within_5_s("status", newest[:-4], "--json").json["run_dir"] == str(runs / newest)
    assert newest in within_5_s("resume", "policy", code=6).stderr, "its plan is not there"
    assert "did you mean policy?" in within_5_s("cancel", "polizy", code=4).stderr
    assert "the beginning of 2500 runs" in within_5_s("logs", "policy-2", code=2).stderr
    everything = vitra("ps", "--all", "--json").json
    assert (len(everything["runs"]), everything["more"]) == (2501, False)
    shutil.rmtree(runs)


# -- cancel ------------------------------------------------------------------------------------


def test_cancel_where_nobody_supervises(vitra: Vitra) -> None:
    run_dir = a_run(vitra, "lost-20260101-000000-aaaa", *STARTED)
    document = vitra("cancel", "lost", "--json").json
    assert (document["was"], document["state"]) == ("unknown", "cancelled")
    assert document["stopped"] is True
    assert stat.S_IMODE(run_dir.cancel.stat().st_mode) == 0o640
    assert json.loads(run_dir.cancel.read_text()).keys() == {"at", "user", "host"}
    status = vitra("status", "lost", "--json").json
    assert status["state"] == "cancelled"
    assert "cancelled" in status["reason"]
    before = run_dir.cancel.read_bytes()
    assert "is already cancelled" in vitra("cancel", "lost").stdout
    assert run_dir.cancel.read_bytes() == before


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_cancel_of_a_run_that_has_ended_leaves_no_marker(vitra: Vitra, state: str) -> None:
    run_dir = a_run(vitra, "done-20260101-000000-aaaa", *STARTED, finished(state))
    assert f"is already {state}" in vitra("cancel", "done").stdout
    assert not run_dir.cancel.exists()


def test_cancel_waits_no_longer_than_it_is_told(vitra: Vitra) -> None:
    run_dir = a_run(vitra, "busy-20260101-000000-aaaa", *STARTED)
    with RunLock(run_dir.lock):
        document = vitra("cancel", "busy", "--wait", "0.2", "--json").json
        assert (document["state"], document["stopped"]) == ("running", False)
        assert run_dir.cancel.exists()
        run_dir.cancel.unlink()
        process = vitra.start("cancel", "busy")
        wait_until(run_dir.cancel.exists, "the marker")
        assert process.poll() is None
        name, details = finished("cancelled")
        append_event(run_dir, name, **details)
    assert process.wait(timeout=100) == 0
    assert "is cancelled" in vitra.terminal()


def test_cancel_of_what_is_not_there(vitra: Vitra) -> None:
    a_run(vitra, "damaged-20260101-000000-aaaa").record.write_text("{")
    vitra("cancel", "damaged", code=6)
    vitra("cancel", "nothing", code=4)
    vitra("cancel", "damaged", "--wait", "-1", code=2)


# -- completion --------------------------------------------------------------------------------


def completed(vitra: Vitra, text: str) -> list[str]:
    environ = {
        "_VITRA_COMPLETE": "complete_bash",
        "COMP_WORDS": text,
        "COMP_CWORD": str(len(text.split(" ")) - 1),
    }
    answer = vitra(environ=environ)
    assert answer.stderr == ""
    return answer.stdout.split()


def test_completion(vitra: Vitra) -> None:
    for run_id in ("policy-20260101-000000-aaaa", "policy-20260102-000000-bbbb"):
        make_run(vitra.directory / "runs", run_id)
    make_run(vitra.directory / "elsewhere", "other-20260101-000000-cccc")
    newest_first = ["policy-20260102-000000-bbbb", "policy-20260101-000000-aaaa"]
    for command in ("status", "logs", "cancel", "resume", "export", "checkpoints"):
        assert completed(vitra, f"vitra {command} pol") == newest_first, command
    assert completed(vitra, "vitra status --run-root elsewhere o") == ["other-20260101-000000-cccc"]
    assert completed(vitra, "vitra status --run-root nowhere o") == []
    assert completed(vitra, "vitra plan x.yaml -o train.max_s") == ["train.max_steps="]
    assert completed(vitra, "vitra init --template quick") == ["quickstart"]
    assert "checkpoints" in completed(vitra, "vitra ")
