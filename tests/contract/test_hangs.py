"""Real ranks that hang: found, shown, named, ended, and tried again; and slow ones that do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from launcher.drafting import draft
from launcher.hang import Limits
from launcher.job import Supervisor
from launcher.lock import RunLock
from launcher.outcomes import Ending
from launcher.progress import follow
from launcher.schedulers.local import LocalLauncher, Terminal
from launcher.submit import submit_local
from tests.conftest import Vitra, tiny_spec, wait_until
from tests.contract.live import LiveRun
from trainer.spec.rundir import RunDir, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMPONENTS = Path(__file__).parent / "components"
PATHS = os.pathsep.join([str(COMPONENTS), *filter(None, [os.environ.get("PYTHONPATH")])])
BLOCKED = "in a_call_that_never_returns"
#: Short, and far longer than a step takes.
TIMEOUT_S = 5
#: A rank that is still loading torch on a busy machine is not to be taken for one that hangs.
BEYOND_START_UP_S = 40


@pytest.fixture
def stalling(vitra: Vitra) -> Vitra:
    """The command, where a spec may name the components that stall."""
    (vitra.directory / "counter").write_text("")
    vitra.environ = {"PYTHONPATH": PATHS}
    return vitra


def stalling_spec(**stall: object) -> dict[str, Any]:
    """Changes of a tiny spec, so that data and model stall as `stall` says."""
    model = {"dim": 32, "layers": 1, "heads": 2, "action_width": 32, "action_layers": 1}
    return {
        "data__kind": "stalling:build_data",
        "data__options": {"samples": 64, "holdout": 8, **stall},
        "model__kind": "stalling:build_model",
        "model__options": {**model, "action_heads": 2, "eval_frames": 4, **stall},
        "retry__hang_timeout_s": TIMEOUT_S,
    }


def stack(run_dir: str | Path, attempt: int, rank: int) -> str:
    return RunDir(Path(run_dir)).attempt(attempt).stack(rank).read_text()


def assert_all_gone(run_dir: str | Path) -> None:
    mark = f"VITRA_RUN_ID={Path(run_dir).name}".encode()
    left = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and mark in _environ(entry)
    ]
    assert left == []


def _environ(entry: Path) -> bytes:
    try:
        return (entry / "environ").read_bytes()
    except OSError:
        return b""


def test_a_data_worker_that_never_delivers(stalling: Vitra) -> None:
    stalling.spec(**stalling_spec(stall=["sample"], after=30), data__num_workers=1)
    answer = stalling("submit", "spec.yaml", "--local")
    status = stalling("status", "tiny", "--json").json
    hung, completed = status["attempts"]
    assert (hung["verdict"], hung["failed_rank"]) == ("hang", 1)
    assert hung["failed_node"] == os.uname().nodename
    assert hung["exit_code"] == 128 + signal.SIGKILL
    assert "no step was finished within 5 s: rank 1 on" in hung["reason"]
    assert f"waiting for the data of step {hung['last_step'] + 1}" in hung["reason"]
    assert hung["reason"] in answer.stderr
    assert "their stacks are in" in answer.stderr
    # Tried again, from the newest checkpoint, as retry.restart_on has it by default.
    assert (status["state"], completed["verdict"]) == ("completed", "completed")
    assert completed["first_step"] == hung["last_step"] // 5 * 5 + 1
    assert [r["step"] for r in read_lines(Path(status["run_dir"]) / "metrics.jsonl")] == [
        *range(1, 21)
    ]
    waiting, blocked = (stack(status["run_dir"], 1, rank) for rank in (0, 1))
    assert "trainer/agree.py" in waiting
    assert BLOCKED not in waiting
    assert BLOCKED in blocked.partition("Data worker ")[2]
    assert not list(Path(status["run_dir"]).glob("attempts/2/logs/*.stack"))
    assert_all_gone(status["run_dir"])


def test_a_model_that_never_returns(stalling: Vitra) -> None:
    """Given up when it happens again and again without a new checkpoint in between."""
    stalling.spec(
        **stalling_spec(stall=["forward", "backward"], after=5),
        checkpoint__save_interval=50,
        retry__max_no_progress=2,
    )
    stalling("submit", "spec.yaml", "--local", code=5)
    status = stalling("status", "tiny", "--json").json
    assert status["state"] == "failed"
    assert "2 attempts in a row without a new checkpoint" in status["reason"]
    forward, backward = status["attempts"]
    for attempt in (forward, backward):
        assert (attempt["verdict"], attempt["last_step"]) == ("hang", 2)
        assert "computing step 3" in attempt["reason"]
        assert BLOCKED in stack(status["run_dir"], attempt["attempt"], 1)
        assert BLOCKED not in stack(status["run_dir"], attempt["attempt"], 0)
    assert forward["failed_rank"] == 1
    # In the backward pass a rank that waits for the others is where they may wait for it: nobody
    # is blamed for its place, and the stacks tell.
    assert backward["failed_rank"] is None
    assert_all_gone(status["run_dir"])


@pytest.fixture
def live(vitra: Vitra) -> Iterator[LiveRun]:
    run = LiveRun(
        vitra,
        data__num_workers=1,
        retry__hang_timeout_s=TIMEOUT_S,
        retry__restart_on=["preemption"],
        tracking__log_interval=1000,
        tracking__sample_ids=True,
        checkpoint__save_interval=100_000,
    )
    yield run
    run.end()


def test_a_stopped_process(live: LiveRun) -> None:
    live.wait_for_event("started")
    wait_until(lambda: len(trained(live, 1)) > 3, "some steps")
    os.kill(live.trainer_of(1), signal.SIGSTOP)
    assert live.ends() == 5
    assert not live.processes()
    status = live.status()
    (attempt,) = status["attempts"]
    assert (status["state"], attempt["verdict"]) == ("failed", "hang")
    assert attempt["failed_rank"] == 1
    assert "gives no sign of life" in attempt["reason"]
    assert "trainer/loop.py" in stack(live.dir.path, 1, 0)
    assert not live.dir.attempt(1).stack(1).exists()
    # Nothing was logged and nobody lived to report: the heartbeats tell how far it was.
    assert live.steps() == []
    assert attempt["last_step"] == max(trained(live, 0) + trained(live, 1))


def trained(live: LiveRun, rank: int) -> list[int]:
    return [record["step"] for record in read_lines(live.dir.samples(rank))]


# -- What takes its time ---------------------------------------------------------------------------


def test_slow_is_not_hung(stalling: Vitra) -> None:
    """Opening, each step and each save: longer than the limit only where another one holds."""
    long_s, step_s = 1.5 * TIMEOUT_S, 0.4 * TIMEOUT_S
    stalling.spec(
        **stalling_spec(
            slow_s={"open": long_s, "save": long_s, "forward": step_s},
        ),
        train__max_steps=4,
        train__global_batch_size=4,
    )
    stalling("submit", "spec.yaml", "--local")
    status = stalling("status", "tiny", "--json").json
    (attempt,) = status["attempts"]
    assert (attempt["verdict"], attempt["last_step"]) == ("completed", 4)
    took = datetime.fromisoformat(attempt["ended_at"]) - datetime.fromisoformat(
        attempt["started_at"]
    )
    assert took.total_seconds() > 2 * long_s + 4 * step_s


# -- Limits that are too long for a test -----------------------------------------------------------


class Deaf(LocalLauncher):
    """Its ranks cannot reach the supervisor over any network."""

    @property
    def address(self) -> str:
        return "no-such-host.invalid"


def supervised(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: Limits,
    launcher: type[LocalLauncher] = LocalLauncher,
    **changes: Any,
) -> tuple[RunDir, Ending]:
    """Run a spec here under limits of its own, all else as the command does it."""
    monkeypatch.chdir(directory)
    environ = {**os.environ, "PYTHONPATH": PATHS}
    (directory / "counter").write_text("")
    (directory / "spec.yaml").write_text(tiny_spec(**changes))
    drafted = draft(directory / "spec.yaml", [], run_root=None, environ=environ)
    run_dir = submit_local(
        drafted, environ=environ, say=lambda _: None, now=datetime.now(UTC).astimezone()
    )
    with RunLock(run_dir.lock):
        supervisor = Supervisor(
            run_dir, launcher(environ, directory), follow(run_dir), Terminal(), limits=limits
        )
        return run_dir, supervisor.run()


def test_hangs_beside_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First in start-up, then in a save; and at last a rank that is done does not leave."""
    run_dir, ending = supervised(
        tmp_path,
        monkeypatch,
        Limits(step_s=60, first_step_s=60, patience_s=BEYOND_START_UP_S, leave_s=4),
        **stalling_spec(stall=["open", "save", "leave"]),
        train__max_steps=8,
    )
    assert (ending.state, ending.verdict) == ("completed", "completed")
    reasons = [e["reason"] for e in read_lines(run_dir.events) if e["event"] == "ended"]
    node = os.uname().nodename
    assert reasons == [
        f"training did not begin within {BEYOND_START_UP_S} s: "
        f"rank 1 on {node} kept the others waiting; it was still starting up",
        f"step 5 was not saved within {BEYOND_START_UP_S} s: "
        f"rank 1 on {node} kept the others waiting; it was saving step 5",
        "all 2 ranks reached step 8",
    ]
    for attempt in (1, 2, 3):
        assert BLOCKED in stack(run_dir.path, attempt, 1)
    assert "init_process_group" in stack(run_dir.path, 1, 0)
    assert [r["step"] for r in read_lines(run_dir.metrics)] == list(range(1, 9))
    assert_all_gone(run_dir.path)


def test_without_any_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is logged is enough to find a hang, if later."""
    run_dir, ending = supervised(
        tmp_path,
        monkeypatch,
        Limits(step_s=1, first_step_s=1, patience_s=BEYOND_START_UP_S, leave_s=60),
        Deaf,
        **stalling_spec(stall=["sample"], after=30),
        retry__restart_on=["error"],
    )
    assert (ending.state, ending.verdict) == ("failed", "hang")
    assert ending.reason == (
        f"no heartbeat came, and no step was logged within {BEYOND_START_UP_S} s: "
        "all ranks stopped somewhere; their stacks say where"
    )
    assert [r["step"] for r in read_lines(run_dir.metrics)] == list(range(1, 8))
    assert BLOCKED in stack(run_dir.path, 1, 1)
