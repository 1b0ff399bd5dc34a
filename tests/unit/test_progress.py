"""Progress: what a watcher is told, on a terminal and in a log, and that he may leave."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import select
from pathlib import Path

import pytest

from launcher.planner import plan
from launcher.progress import Tail, follow, write
from trainer.spec.plan import Plan
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir, append_event


def test_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.records() == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert tail.records() == [{"step": 1}]
    assert tail.records() == []
    with path.open("ab") as file:
        file.write(b'ep": 2}\nno json\n{"step": 3}\n')
    assert tail.records() == [{"step": 2}, {"step": 3}]


class Gone(io.StringIO):
    """A stream whose reader has gone; its descriptor is one end of a broken pipe."""

    def __init__(self, descriptor: int, number: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._number = number

    def write(self, _: str) -> int:
        raise OSError(self._number, os.strerror(self._number))

    def fileno(self) -> int:
        return self._descriptor


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_a_reader_that_has_gone(number: int) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    write(Gone(write_end, number), "text")
    # Silent from now on: what is written to the descriptor itself goes nowhere.
    assert os.write(write_end, b"more") == 4
    os.close(write_end)


def test_a_full_disk_is_not_passed_over() -> None:
    with pytest.raises(OSError, match="No space"):
        write(Gone(2, errno.ENOSPC), "text")


@pytest.fixture
def planned(tmp_path: Path) -> tuple[RunDir, Plan]:
    spec = RunSpec.model_validate(
        {
            "name": "a",
            "model": {"kind": "vla"},
            "data": {"kind": "synthetic"},
            "train": {"global_batch_size": 8, "per_device_batch_size": 2, "max_steps": 10},
            "resources": {"tasks_per_node": 2},
        }
    )
    run_dir = RunDir(tmp_path)
    run_dir.attempt(2).path.mkdir(parents=True)
    return run_dir, plan(spec, run_id="a", run_dir=str(tmp_path)).with_samples(100)


def _train(run_dir: RunDir, steps: range) -> None:
    with run_dir.attempt(2).metrics.open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 0.5, "step_time_s": 0.1}) + "\n")


def test_plain_lines(planned: tuple[RunDir, Plan], capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, plan_ = planned
    append_event(run_dir, "checkpoint_skipped", step=1, reason="of an attempt long ago")
    progress = follow(run_dir)
    progress.attempt(plan_, run_dir.attempt(2), 2, 4)
    append_event(run_dir, "checkpoint_skipped", step=6, reason="torn")
    _train(run_dir, range(5, 6))
    progress.poll()
    progress.poll()
    _train(run_dir, range(6, 8))
    progress.poll()
    append_event(run_dir, "saved", step=10)
    append_event(run_dir, "save_failed", step=9, reason="no space")
    append_event(run_dir, "evaluated", step=10, attempt=2, mse=0.25, longer_name=1.0)
    _train(run_dir, range(8, 11))
    progress.poll()
    progress.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line.partition(" ")[2] for line in captured.err.splitlines()]
    assert lines == [
        "attempt 2: 2 ranks, batch 2 x 2 x 2 = 8, from the checkpoint of step 4",
        "checkpoint of step 6 passed over: torn",
        "step 5/10  loss 0.5000  80 samples/s  ETA 0 s  checkpoint 4",
        "WARNING: step 9 was not saved: no space",
        "on held-out data:",
        "  mse          0.2500",
        "  longer_name  1.0000",
        "step 10/10  loss 0.5000  80 samples/s  ETA 0 s  checkpoint 10",
    ]


def test_a_terminal_gets_a_live_line(
    planned: tuple[RunDir, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, plan_ = planned
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        progress = follow(run_dir)
        progress.attempt(plan_, run_dir.attempt(2), 2, None)
        _train(run_dir, range(1, 5))
        append_event(run_dir, "checkpoint_skipped", step=6, reason="[bold]torn[/bold]")
        progress.poll()
        said = ""
        while "step 4/10" not in said and select.select([ours], [], [], 2.0)[0]:
            said += os.read(ours, 1 << 16).decode(errors="replace")
        assert "from the beginning" in said
        assert "step 4/10" in said
        assert "[bold]torn[/bold]" in said

        # The terminal is closed: the run has to save all the same.
        os.close(ours)
        progress.message("stopping")
        append_event(run_dir, "checkpoint_skipped", step=7, reason="torn")
        progress.poll()
        progress.close()
