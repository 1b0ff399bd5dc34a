"""Ranks that fail by themselves: who is blamed, and what is tried again."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Vitra
from trainer.spec.rundir import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMPONENTS = Path(__file__).parent / "components"
#: Not written out, since the code that a run copies may be this very file.
SECRET = secrets.token_hex(16)


@pytest.fixture
def train(vitra: Vitra) -> Callable[..., dict[str, Any]]:
    """Train with a data set that makes `trouble`; returns the run's status."""

    def run(trouble: str, code: int, **changes: object) -> dict[str, Any]:
        (vitra.directory / "counter").write_text("")
        vitra.environ = {"PYTHONPATH": str(COMPONENTS), "WANDB_API_KEY": SECRET}
        options = {"samples": 64, "holdout": 8, "trouble": trouble, "counter": "counter"}
        spec = {"data__kind": "troubled:build", "data__options": options, **changes}
        vitra.spec(**spec)
        answer = vitra("submit", "spec.yaml", "--local", code=code)
        status = vitra("status", "tiny", "--json").json
        assert status["reason"] in answer.stderr
        # Tracebacks and reports of a failure show no more than logs of a success.
        written = [path.read_bytes() for path in vitra.directory.rglob("*") if path.is_file()]
        assert not any(SECRET.encode() in data for data in written)
        assert SECRET not in answer.stderr
        return status

    return run


TROUBLES = {
    "exit 0": ("error", 0, "left with exit code 0 before the last step"),
    "exit 3": ("error", 3, "exited with code 3"),
    "no memory": ("out_of_memory", 1, "MemoryError"),
    "raise": ("error", 5, "cannot be read"),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_rank_to_blame(
    train: Callable[..., dict[str, Any]], trouble: str, workers: int
) -> None:
    verdict, exit_code, named = TROUBLES[trouble]
    if workers and trouble.startswith("exit"):
        # It is the data worker that leaves, and the rank that says so, in torch's words.
        exit_code, named = 1, "Error: "
    status = train(trouble, 5, data__num_workers=workers)
    assert status["state"] == "failed"
    (attempt,) = status["attempts"]
    assert (attempt["verdict"], attempt["failed_rank"]) == (verdict, 1)
    assert attempt["exit_code"] == exit_code
    assert named in status["reason"]
    assert "\n" not in status["reason"]
    assert 5 <= attempt["last_step"] <= 6


def test_tried_again_within_the_budget(train: Callable[..., dict[str, Any]], vitra: Vitra) -> None:
    status = train("raise once", 0, retry__restart_on=["error"], retry__max_error_restarts=1)
    assert status["state"] == "completed"
    first, second = status["attempts"]
    assert (first["verdict"], second["verdict"]) == ("error", "completed")
    assert "ValueError: only this once" in first["reason"]
    assert second["first_step"] == 6, "from the checkpoint of step 5"
    path = Path(status["run_dir"])
    assert [r["step"] for r in read_lines(path / "metrics.jsonl")] == list(range(1, 21))
    assert any(e["event"] == "requeued" for e in read_lines(path / "events.jsonl"))
    vitra("checkpoints", "tiny", "--verify")


def test_given_up_when_the_budget_is_used_up(train: Callable[..., dict[str, Any]]) -> None:
    status = train("raise", 5, retry__restart_on=["error"], retry__max_error_restarts=1)
    assert status["state"] == "failed"
    assert [a["verdict"] for a in status["attempts"]] == ["error", "error"]
    assert "retry.max_error_restarts=1 is used up" in status["reason"]


def test_given_up_without_progress(train: Callable[..., dict[str, Any]]) -> None:
    status = train(
        "raise",
        5,
        retry__restart_on=["error"],
        retry__max_error_restarts=9,
        retry__max_no_progress=2,
        checkpoint__save_interval=50,
    )
    assert len(status["attempts"]) == 2
    assert "retry.max_no_progress" in status["reason"]


def test_never_tried_again(train: Callable[..., dict[str, Any]], vitra: Vitra) -> None:
    """The same samples would give the same loss."""
    status = train("not finite", 5, retry__restart_on=["error"], retry__max_error_restarts=9)
    (attempt,) = status["attempts"]
    assert attempt["verdict"] == "error"
    assert "NonFiniteLoss" in status["reason"]
    assert status["last_checkpoint_step"] == 5
    vitra("checkpoints", "tiny", "--verify")


def test_where_a_run_was_submitted_its_ranks_run(
    train: Callable[..., dict[str, Any]], vitra: Vitra, tmp_path: Path
) -> None:
    """A relative path in the options means the same when it is resumed from elsewhere."""
    status = train("raise", 5)
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Vitra(tmp_path / "elsewhere", vitra.server, vitra.environ)
    elsewhere("resume", status["run_dir"], "-o", "train.max_steps=8")
    status = vitra("status", "tiny", "--json").json
    assert status["attempts"][1]["first_step"] == 6
