"""Whole runs with the real wandb: its troubles change nothing here, and kills cost it no step."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.e2e.runs import Run, read_lines, spec
from tests.wandb_server import (
    API_KEY,
    black_hole,
    closed_port,
    failing_server,
    python_path,
    wandb_server,
    wandb_sync,
)
from trainer.wandb_journal import records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_NO_WANDB = Path(__file__).parents[1] / "contract" / "no_wandb"
#: Puts a file where wandb's directory would be, as each process of the run starts.
_IN_THE_WAY = """
import os, pathlib
if "VITRA_RUN_DIR" in os.environ:
    pathlib.Path(os.environ["VITRA_RUN_DIR"], "wandb").write_text("in the way")
"""

TROUBLES = {
    "refused": "not everything was sent",
    "black hole": "not everything was sent",
    "HTTP 500": "not everything was sent",
    "no key": "No API key",
    "not installed": "No module named 'wandb'",
    "unwritable": "cannot write to",
}


def environment(root: Path, url: str, *hooks: Path) -> dict[str, str]:
    """As in a shell with a key; `hooks` are directories with a sitecustomize module."""
    return {
        "HOME": str(root),
        "PYTHONPATH": python_path(*hooks),
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": API_KEY,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL": "0.2",
        "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "0.5",
    }


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One run for each trouble, and one without wandb; all at once, since most of it is waiting."""
    root = tmp_path_factory.mktemp("troubled")
    (root / "hook").mkdir()
    (root / "hook" / "sitecustomize.py").write_text(_IN_THE_WAY)
    with ExitStack() as stack:
        closed = stack.enter_context(closed_port())
        environments = {
            "refused": environment(root, closed),
            "black hole": environment(root, stack.enter_context(black_hole())),
            "HTTP 500": environment(root, stack.enter_context(failing_server())),
            "no key": environment(root, closed) | {"WANDB_API_KEY": ""},
            "not installed": environment(root, closed, _NO_WANDB),
            "unwritable": environment(root, closed, root / "hook"),
        }
        runs = {"none": Run(root / "none", spec(1, train={"max_steps": 12}))}
        for trouble, env in environments.items():
            document = spec(1, train={"max_steps": 12}, tracking={"wandb": {"project": "p"}})
            runs[trouble] = Run(root / trouble.replace(" ", "-"), document, env)
        processes = {trouble: run.start() for trouble, run in runs.items()}
        codes = {trouble: process.wait(timeout=300) for trouble, process in processes.items()}
    assert set(codes.values()) == {0}, codes
    return runs


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_with_wandb_changes_nothing_and_is_said_once(
    troubled: dict[str, Run], trouble: str
) -> None:
    run = troubled[trouble]
    assert run.results() == troubled["none"].results()
    (event,) = run.events("tracking_failed")
    assert TROUBLES[trouble] in event["reason"]
    assert run.terminal().count("WARNING: wandb") == 1
    log = (run.dir / "attempts" / "1" / "logs" / "rank_0.log").read_text()
    assert log.count("WARNING: wandb") == 1
    # Training never waits: every step was done long before wandb was given up.
    assert [m["step"] for m in read_lines(run.dir / "metrics.jsonl")] == list(range(1, 13))
    (end,) = run.events("finished")
    assert end["state"] == "completed"


def test_every_step_once_over_two_kills_and_resumes(tmp_path: Path) -> None:
    """Four ranks on two cores; some steps are killed before wandb has written them."""
    document = spec(
        4,
        train={
            "max_steps": 100_000,
            "lr_scheduler_type": "linear-warmup+constant",
            "warmup_ratio": 0.0,
        },
        checkpoint={"save_interval": 50},
        tracking={"wandb": {"project": "p", "mode": "offline", "tags": ["t"]}},
    )
    with closed_port() as url:
        run = Run(tmp_path, document, environment(tmp_path, url))
        for attempt in (1, 2):
            process = run.start()
            wait_until(partial(written, tmp_path, attempt), "rows in wandb's file")
            process.kill()
            process.wait()
            wait_until(lambda: not run.processes(), "everything that it started to be gone")
        last = run.newest_step() + 30
        run.finish(more=["-o", f"train.max_steps={last}"])

        metrics = read_lines(run.dir / "metrics.jsonl")
        assert [m["step"] for m in metrics] == list(range(1, last + 1))
        directories = sorted((run.dir / "wandb").glob("offline-run-*"))
        assert len(directories) == 3, "one for each attempt, whatever the number of ranks"
        rows = [row for directory in directories for row in history(directory)]
        assert [row["_step"] for row in rows] == list(range(1, last + 1))
        # Steps that were trained again after a kill came out the same, so the first row stands.
        assert [row["VLA Train/Loss"] for row in rows] == [m["loss"] for m in metrics]
        assert [row["Other/Gradient Norm"] for row in rows] == [m["grad_norm"] for m in metrics]
        assert run.events("tracking_failed") == []

    # wandb's own reader finds the same, in the one run that all attempts are of.
    with wandb_server() as server:
        around = {**os.environ, **environment(tmp_path, server.url)}
        wandb_sync(directories, around, cwd=tmp_path)
        assert list(server.runs) == [run.dir.name]
        assert server.runs[run.dir.name].steps() == list(range(1, last + 1))


def written(root: Path, attempt: int) -> bool:
    """Has wandb written rows in a directory of the attempt's own?"""
    found = sorted((root / "runs").glob("*/wandb/offline-run-*"))
    return len(found) == attempt and bool(history(found[-1]))


def history(directory: Path) -> list[dict[str, Any]]:
    """The rows of one directory of wandb's."""
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, Any]] = []
    data = b"".join(path.read_bytes() for path in directory.glob("run-*.wandb"))
    for _, content in records(data, 7):
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.HasField("history"):
            rows.append(
                {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            )
    return rows
