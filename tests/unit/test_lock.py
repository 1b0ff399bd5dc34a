"""One supervisor a run, however the last one ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.lock import RunLock, lock_holder
from trainer.spec.errors import StorageError, UsageError

HOLDS = """
import sys, time
from pathlib import Path
from launcher.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "supervisor.lock"


@pytest.fixture(autouse=True)
def _made(path: Path) -> None:
    path.parent.mkdir()


def test_held_and_released(path: Path) -> None:
    assert lock_holder(path) is None
    with RunLock(path):
        holder = lock_holder(path)
        assert holder is not None
        assert (holder.pid, holder.host) == (os.getpid(), os.uname().nodename)
        expected = re.escape(f"run is being supervised by process {os.getpid()} on ")
        with pytest.raises(UsageError, match=expected), RunLock(path):
            pass
        assert lock_holder(path) == holder
    assert lock_holder(path) is None
    with RunLock(path):
        pass


def test_looking_does_not_let_go(path: Path) -> None:
    """As closing any descriptor of the file would, with classic record locks."""
    with RunLock(path):
        path.read_bytes()
        for _ in range(3):
            assert lock_holder(path) is not None


def test_released_after_an_error(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunLock(path):
        raise ZeroDivisionError
    assert lock_holder(path) is None


def test_ends_with_its_holder_however_that_dies(path: Path) -> None:
    argv = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        holder = lock_holder(path)
        assert holder is not None
        assert holder.pid == process.pid
        with pytest.raises(UsageError, match=f"process {process.pid} "), RunLock(path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert lock_holder(path) is None
    with RunLock(path):
        pass


def test_children_do_not_inherit_it(path: Path) -> None:
    """A rank that outlived its supervisor must not keep the run from being resumed."""
    with RunLock(path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        assert lock_holder(path) is None
    finally:
        child.kill()
        child.wait()


def test_holder_that_says_nothing(path: Path) -> None:
    with RunLock(path):
        path.write_text("{")
        assert str(lock_holder(path)) == "another process"


def test_a_reader_without_write_permission_sees_it(path: Path) -> None:
    with RunLock(path):
        asks = (
            "import os, sys; from pathlib import Path; from launcher.lock import lock_holder\n"
            "path = Path(sys.argv[1]); os.chdir(path.parent)\n"
            "os.geteuid() == 0 and os.setuid(65534)\n"
            "print(lock_holder(Path(path.name)))"
        )
        path.chmod(0o444)
        path.parent.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", asks, str(path)], capture_output=True, check=True
        )
    assert done.stdout.decode().startswith(f"process {os.getpid()} on ")


def test_place_that_cannot_be_locked(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "supervisor.lock"
    assert lock_holder(path) is None
    with pytest.raises(StorageError, match="No such file"), RunLock(path):
        pass
