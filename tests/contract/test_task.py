"""The process that watches over one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def first_child_of(task: subprocess.Popen[bytes]) -> int:
    """The pid of a process's child, as soon as there is one."""
    children = Path(f"/proc/{task.pid}/task/{task.pid}/children")
    deadline = time.monotonic() + 60
    while not (found := children.read_text().split()):
        assert task.poll() is None, "it ended without having started a trainer"
        assert time.monotonic() < deadline, "no trainer within 60 s"
    return int(found[0])


def start_task(run_dir: Path, argv: list[str]) -> subprocess.Popen[bytes]:
    """Rank 0 of attempt 1, of one."""
    (run_dir / "attempts/1").mkdir(parents=True)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    return subprocess.Popen(
        [*argv, str(run_dir)],
        env={
            **os.environ,
            **dict(zip(names, ("0", "0", "1", "1", "1"), strict=True)),
            "MASTER_ADDR": "127.0.0.1",
            "VITRA_RUN_ID": "a",
            "VITRA_RUN_DIR": str(run_dir),
            "VITRA_ATTEMPT": "1",
            "VITRA_PARENT_PID": str(os.getpid()),
        },
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_cannot_kill_a_trainer_that_is_just_starting(
    number: signal.Signals, tmp_path: Path
) -> None:
    task = start_task(tmp_path, [sys.executable, "-P", "-m", "launcher.task"])
    # At once: the trainer's interpreter has hardly begun, and has no handlers.
    os.kill(first_child_of(task), number)
    assert task.wait(timeout=60) == 1
    record = json.loads((tmp_path / "attempts/1/rank_0.exit").read_text())
    # It came as far as finding that there is no plan to train.
    assert record["signal"] is None
    assert record["exit_code"] == 1


#: The task, but the kernel's count of what it has killed for lack of memory stands in a file.
_COUNTED = """
import sys
from pathlib import Path
from launcher import task
task.oom_kills = lambda: int(Path(sys.argv[1]).read_text())
sys.exit(task.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [7, 8])
def test_killed_by_the_kernel_for_lack_of_memory(kills: int, tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("7")
    task = start_task(tmp_path / "run", [sys.executable, "-P", "-c", _COUNTED, str(count)])
    trainer = first_child_of(task)
    count.write_text(str(kills))
    os.kill(trainer, signal.SIGKILL)
    assert task.wait(timeout=60) == 128 + signal.SIGKILL
    record = json.loads((tmp_path / "run/attempts/1/rank_0.exit").read_text())
    assert record["out_of_memory"] == (kills > 7)
