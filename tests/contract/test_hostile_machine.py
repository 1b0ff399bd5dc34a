"""What a machine does to a run: processes killed, files damaged, disks full, clocks set back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import Vitra, VitraServer, wait_until
from tests.contract.live import LiveRun, runs_into_a_full_place
from trainer.data.lerobot import packaged_root
from trainer.spec.rundir import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_data_worker_killed(vitra: Vitra) -> None:
    live = LiveRun(vitra, data__num_workers=2)
    try:
        live.wait_for_step(6)
        rank = live.trainer_of(1)
        worker = next(pid for pid in live.processes("-m trainer") if _parent(pid) == rank)
        os.kill(worker, signal.SIGKILL)
        assert live.ends(within_s=60) == 5
        wait_until(lambda: not live.processes(), "all processes to be gone", within_s=10)
        (attempt,) = live.status()["attempts"]
    finally:
        live.end()
    assert (attempt["verdict"], attempt["failed_rank"], attempt["exit_code"]) == ("error", 1, 1)
    said = f"data worker (process {worker}) was killed by signal: Killed"
    assert said in attempt["reason"]
    assert said in vitra.terminal()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_damaged_video(vitra: Vitra) -> None:
    root = vitra.directory / "demonstrations"
    shutil.copytree(packaged_root(), root)
    (video,) = root.rglob("*.mp4")
    middle = video.stat().st_size // 2
    with video.open("r+b") as file:
        file.seek(middle)
        file.write(b"\xa5" * 4000)
    vitra.spec(
        data__kind="lerobot",
        data__options={"root": str(root), "cache_mb": 0},
        train__max_steps=1000,
    )
    vitra("submit", "spec.yaml", "--local", code=5)
    status = vitra("status", "tiny", "--json").json
    (attempt,) = status["attempts"]
    assert attempt["verdict"] == "error"
    assert "DataError: sample " in attempt["reason"]
    assert f"{video}: frame " in attempt["reason"]


_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t back(void) {
    const char *sign = getenv("SET_BACK");
    return sign && access(sign, F_OK) == 0 ? 600 : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(clock, now);
    if (!answer && clock == CLOCK_REALTIME) now->tv_sec -= back();
    return answer;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int answer = real(now, zone);
    if (!answer) now->tv_sec -= back();
    return answer;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


def test_a_clock_set_back(vitra: Vitra) -> None:
    """By ten minutes while it trains: nothing of what is trained, judged or resumed follows it."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler to make a clock of our own")
    source, library = vitra.directory / "clock.c", vitra.directory / "clock.so"
    source.write_text(_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    sign = vitra.directory / "set-back"
    vitra.environ = {"LD_PRELOAD": str(library), "SET_BACK": str(sign)}
    live = LiveRun(vitra, retry__hang_timeout_s=20)
    try:
        live.wait_for_step(6)
        sign.touch()
        live.wait_for_step(live.step() + 20)
        live.command.send_signal(signal.SIGTERM)
        assert live.ends() == 143
        saved = live.status()["last_checkpoint_step"]
        live.resume("-o", f"train.max_steps={saved + 5}")
        assert live.ends() == 0
        status = live.status()
    finally:
        live.end()
    at = [datetime.fromisoformat(event["at"]) for event in read_lines(live.dir.events)]
    assert min(b - a for a, b in pairwise(at)) < timedelta(minutes=-9), "it was set back"
    assert [a["verdict"] for a in status["attempts"]] == ["cancelled", "completed"]
    assert status["attempts"][1]["first_step"] == saved + 1
    assert live.steps() == list(range(1, saved + 6))
    assert all(0 < r["step_time_s"] < 60 for r in read_lines(live.dir.metrics))
    vitra("checkpoints", live.run_id, "--verify")


# -- Odd names -------------------------------------------------------------------------------------

LINE = Path(__file__).parent / "components" / "line.py"
POINTS = {"kind": "line:Points", "options": {"samples": 64}}
#: What shells, format strings, Slurm and URLs make something else of.
ODD = """it's "q" 100% %j $HOME `touch owned` $(touch owned) ;& täst 日本 {run_id} #?"""
LONG = "q" * 200


@pytest.mark.parametrize("odd", [ODD, LONG], ids=["odd", "long"])
def test_every_directory_has_an_odd_name(
    tmp_path: Path, vitra_server: VitraServer, odd: str
) -> None:
    """Where it is submitted, where its code, its data and its checkpoints lie."""
    place = tmp_path / odd
    place.mkdir()
    vitra = Vitra(place, vitra_server)
    (place / "line.py").write_text(LINE.read_text())
    vitra.spec(
        model={"kind": "line:Line", "options": {"width": 8}},
        data=POINTS,
        train__max_steps=4,
        checkpoint__save_interval=2,
        checkpoint__uri=str(tmp_path / f"checkpoints {odd}" / odd),
        run_root=f"./{odd}",
    )
    run_dir = Path(vitra("submit", "spec.yaml", "--local", "--json").json["run_dir"])
    assert run_dir.parent == place / odd
    (place / "line.py").unlink()
    answer = vitra("resume", run_dir, "-o", "train.max_steps=6")
    assert "completed: all 2 ranks reached step 6" in answer.stderr
    checked = vitra("checkpoints", run_dir, "--verify", "--json").json
    assert [one["step"] for one in checked["complete"]] == [6, 4]
    filled = odd.replace("{run_id}", run_dir.name)
    assert checked["uri"] == str(tmp_path / f"checkpoints {filled}" / filled)
    assert not list(tmp_path.rglob("owned"))


def test_data_in_an_odd_directory(vitra: Vitra) -> None:
    root = vitra.directory / ODD
    shutil.copytree(packaged_root(), root)
    vitra.spec(data__kind="lerobot", data__options={"root": str(root)}, train__max_steps=1)
    vitra("submit", "spec.yaml", "--local")


def test_a_working_directory_with_a_line_break(tmp_path: Path, vitra_server: VitraServer) -> None:
    """No run root of its own can be there; with another one it is a directory like any other."""
    place = tmp_path / "new\nline"
    place.mkdir()
    vitra = Vitra(place, vitra_server)
    vitra.spec(train__max_steps=2)
    assert "control character" in vitra("submit", "spec.yaml", "--local", code=2).stderr
    answer = vitra("submit", "spec.yaml", "--local", "--run-root", tmp_path / "runs", "--json")
    assert f"next: vitra status {answer.json['run_dir']}" in answer.stderr


# -- Full disks ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory with room for some megabytes and no more."""
    if os.geteuid():
        pytest.skip("mounting a small disk takes root")
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """Leave so much room on a disk; returns the file that takes the rest."""
    ballast = disk / "ballast"
    rest = os.statvfs(disk)
    room = rest.f_bavail * rest.f_frsize
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(room - leave_bytes, 1))
    return ballast


def test_checkpoints_on_a_full_disk(vitra: Vitra, small_disk: Path) -> None:
    live = LiveRun(vitra, checkpoint__uri=str(small_disk / "{run_id}"))
    ballast = small_disk / "ballast"
    runs_into_a_full_place(
        live, lambda: fill(small_disk, leave_bytes=100_000), ballast.unlink, "No space left"
    )


def test_the_last_save_on_a_full_disk(vitra: Vitra, small_disk: Path) -> None:
    """All is trained, and nothing is saved: that is no success."""
    live = LiveRun(
        vitra,
        train__max_steps=150,
        checkpoint__save_interval=149,
        checkpoint__uri=str(small_disk / "{run_id}"),
    )
    try:
        live.wait_for_step(2)
        ballast = fill(small_disk, leave_bytes=100_000)
        assert live.ends() == 6
        failed = live.status()
        ballast.unlink()
        live.resume()
        assert live.ends() == 0
    finally:
        live.end()
    assert (failed["state"], failed["last_checkpoint_step"]) == ("failed", None)
    assert "No space left" in failed["reason"]
    assert live.status()["last_checkpoint_step"] == 150


def test_a_disk_too_small_for_the_code(vitra: Vitra, small_disk: Path) -> None:
    """The copy of the code does not fit, or not even the first file: refused, nothing left."""
    vitra.spec(model__kind="line:Line", model__options={"width": 8}, data=POINTS)
    (vitra.directory / "line.py").write_text(LINE.read_text())
    (vitra.directory / "large.bin").write_bytes(os.urandom(5_000_000))
    subprocess.run(["git", "init", "-q", str(vitra.directory)], check=True)
    (vitra.directory / ".gitignore").write_text("small\n")
    for leave_bytes, said in ((4_000_000, "checking data and model"), (0, None)):
        ballast = fill(small_disk, leave_bytes)
        answer = vitra("submit", "spec.yaml", "--local", "--run-root", small_disk, code=6)
        *before, line = answer.stderr.splitlines()
        assert "No space left on device" in line
        assert str(small_disk) in line
        assert (said in before) if said else not before
        assert list(small_disk.iterdir()) == [ballast]
        ballast.unlink()


def test_records_on_a_full_disk(vitra: Vitra, small_disk: Path) -> None:
    """The whole run directory is on it: metrics, logs, reports and outcomes fail as well."""
    run_root = vitra.directory / "runs"
    run_root.symlink_to(small_disk)
    live = LiveRun(vitra, tracking__sample_ids=True, checkpoint__save_interval=20)
    try:
        live.wait_for_event("saved")
        ballast = fill(small_disk)
        assert live.ends() in (5, 6)
        wait_until(lambda: not live.processes(), "all processes to be gone", within_s=10)
        good = live.status()["last_checkpoint_step"]
        vitra("checkpoints", live.run_id, "--verify")
        ballast.unlink()
        live.resume("-o", f"train.max_steps={good + 7}")
        assert live.ends() == 0
        status = live.status()
    finally:
        live.end()
    assert "No space left" in vitra.terminal()
    assert str(live.dir.path) in vitra.terminal()
    assert status["state"] == "completed"
    assert status["attempts"][-1]["first_step"] == good + 1
    assert live.steps() == list(range(1, good + 8))
    for path in live.dir.sample_files():
        assert [record["step"] for record in read_lines(path)] == live.steps()
    assert {e["event"] for e in read_lines(live.dir.events)} >= {"submitted", "saved", "finished"}
