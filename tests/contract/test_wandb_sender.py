"""The real sender and the real wandb beside a rank that does not train: every way it can go wrong.

The test process plays the rank: it writes metrics, looks for news as with each step, and ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.load import load_spec
from launcher.planner import plan
from tests.conftest import tiny_spec, wait_until
from tests.wandb_server import API_KEY, closed_port, python_path, wandb_server, wandb_sync
from trainer.records import RunRecords
from trainer.spec.ranks import RankInfo
from trainer.spec.rundir import RunDir, read_lines, write_atomic
from trainer.tracking import WandbTracker, start_tracker

DIED = "wandb: the sending process ended with code -9; it is tried again"
_NO_WANDB = Path(__file__).parent / "no_wandb"


class Rank:
    """One attempt of the primary rank; starting it rebuilds the records, as a rank does."""

    def __init__(
        self,
        root: Path,
        environ: Mapping[str, str],
        *,
        mode: str = "online",
        attempt: int = 1,
        resume_step: int = 0,
    ) -> None:
        self.dir = RunDir(root / "tiny-20260101-000000-abcd")
        files = self.dir.attempt(attempt)
        files.logs.mkdir(parents=True)
        spec_path = root / "spec.yaml"
        spec_path.write_text(tiny_spec(tracking__wandb={"mode": mode, "project": "p"}))
        self.plan = plan(
            load_spec(spec_path, [], environ={}).spec,
            run_id=self.dir.path.name,
            run_dir=str(self.dir.path),
            base_dir=str(root),
        )
        write_atomic(files.plan, self.plan.model_dump_json().encode())
        ranks = RankInfo(
            rank=0,
            world_size=2,
            local_rank=0,
            local_world_size=2,
            master_addr="127.0.0.1",
            master_port=1,
            run_id=self.plan.run_id,
            attempt=attempt,
        )
        self._attempt = attempt
        self.log = files.logs / "wandb.log"
        self._records = RunRecords(self.dir, ranks, log_interval=1, sample_ids=False)
        self._records.rebuild(resume_step)
        self._records.open()
        tracker = start_tracker(self.dir, self.plan, ranks, self._records, environ)
        assert tracker is not None
        self.tracker: WandbTracker = tracker

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The sender that runs now."""
        found = self.tracker._process
        assert found is not None
        return found

    @property
    def pid(self) -> int:
        return self.process.pid

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self._records.step(
                {
                    "step": step,
                    "epoch": 0,
                    "loss": 1 / step,
                    "lr": {"backbone": 1e-4, "action_model": 1e-4},
                    "grad_norm": 1.0,
                    "step_time_s": 0.1,
                    "samples_seen": 8 * step,
                    "attempt": self._attempt,
                }
            )
            self.tracker.poll()

    def warnings(self) -> list[str]:
        """What the user is told; heard when the rank finishes a step, so it is asked here."""
        self.tracker.poll()
        return [e["reason"] for e in read_lines(self.dir.events) if e["event"] == "tracking_failed"]

    def remembered(self) -> int:
        try:
            return int(json.loads((self.dir.path / "wandb" / "sent.json").read_bytes())["step"])
        except FileNotFoundError:
            return 0

    def kill(self) -> None:
        """End sender and service as a node that dies does."""
        process = self.process
        for pid in (*children(process.pid), process.pid):
            os.kill(pid, signal.SIGKILL)
        # Only then: one that ends while the rank waits for it is started once more.
        process.wait()
        self.tracker.close(1)

    def connected(self) -> bool:
        return any((self.dir.path / "wandb").glob("*run-*/run-*.wandb"))


def children(parent: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        state, of = stat.rpartition(")")[2].split()[:2] if stat else ("", "")
        # A zombie is nobody's service any more.
        if of == str(parent) and state not in ("Z", "X"):
            found.append(int(entry.name))
    return found


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """As in a shell with a key, whose server is a port where nobody listens."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("WANDB_", "VITRA_"))}
    with closed_port() as url:
        yield inherited | {
            "HOME": str(tmp_path),
            "WANDB_BASE_URL": url,
            "WANDB_API_KEY": API_KEY,
            "WANDB_ERROR_REPORTING": "false",
            # What is written appears in wandb's file soon, so that a kill finds some there.
            "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL": "0.2",
            "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "0.5",
        }


def offline_files(run_dir: RunDir) -> list[Path]:
    """wandb's files of the run, oldest first."""
    return sorted((run_dir.path / "wandb").glob("offline-run-*/run-*.wandb"))


def offline_steps(run_dir: RunDir) -> list[int]:
    """The steps of all of wandb's files together, in the order of the files."""
    from wandb.proto import wandb_internal_pb2

    from trainer.wandb_journal import records

    steps: list[int] = []
    for path in offline_files(run_dir):
        for _, content in records(path.read_bytes(), 7):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.HasField("history"):
                steps.append(record.history.step.num)
    return steps


@pytest.mark.slow
def test_offline_every_step_once_over_a_kill_and_a_rewind(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    first = Rank(tmp_path, environ, mode="offline")
    first.train(1, 30)
    wait_until(lambda: first.remembered() == 30, "30 steps in wandb's file")
    first.train(31, 33)
    first.kill()
    # The checkpoint was that of step 20: thirteen steps are trained again, ten of them were sent.
    second = Rank(tmp_path, environ, mode="offline", attempt=2, resume_step=20)
    second.train(21, 40)
    second.tracker.close(0)
    assert offline_steps(second.dir) == list(range(1, 41))
    assert second.remembered() == 40
    assert second.warnings() == [DIED]
    # `wandb sync --clean` removes the files; what was sent is remembered all the same.
    for path in (second.dir.path / "wandb").glob("offline-run-*/*.wandb"):
        path.unlink()
    third = Rank(tmp_path, environ, mode="offline", attempt=3, resume_step=35)
    third.train(36, 45)
    third.tracker.close(0)
    assert offline_steps(third.dir) == [41, 42, 43, 44, 45]


@pytest.mark.slow
def test_wandb_sync_sends_all_attempts_though_kills_tore_their_files(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """It gives up at a half record, and at a file that does not name its run."""
    first = Rank(tmp_path, environ, mode="offline")
    first.train(1, 10)
    wait_until(lambda: first.remembered() == 10, "ten steps in wandb's file")
    first.kill()
    (begun,) = offline_files(first.dir)
    with begun.open("ab") as file:
        file.write(bytes(4) + (100).to_bytes(2, "little") + b"\x01" + b"half a record")
    second = Rank(tmp_path, environ, mode="offline", attempt=2, resume_step=10)
    wait_until(lambda: len(offline_files(second.dir)) == 2, "another file")
    second.kill()
    os.truncate(offline_files(second.dir)[-1], 7)
    third = Rank(tmp_path, environ, mode="offline", attempt=3, resume_step=10)
    third.train(11, 20)
    third.tracker.close(0)
    with wandb_server() as server:
        directories = sorted((third.dir.path / "wandb").glob("offline-run-*"))
        wandb_sync(directories, {**environ, "WANDB_BASE_URL": server.url}, cwd=tmp_path)
        assert server.runs[third.dir.path.name].steps() == list(range(1, 21))


@pytest.mark.slow
def test_online_every_step_once_over_a_kill(tmp_path: Path, environ: dict[str, str]) -> None:
    with wandb_server() as server:
        environ["WANDB_BASE_URL"] = server.url
        first = Rank(tmp_path, environ)
        first.train(1, 12)
        run_id = first.plan.run_id
        wait_until(lambda: run_id in server.runs and server.runs[run_id].arrived, "rows to arrive")
        first.train(13, 15)
        first.kill()
        second = Rank(tmp_path, environ, attempt=2, resume_step=10)
        second.train(11, 20)
        second.tracker.close(0)
        run = server.runs[run_id]
        assert run.steps() == run.arrived == list(range(1, 21))
        rows = [run.history[line] for line in sorted(run.history)]
        assert [row["VLA Train/Loss"] for row in rows] == [1 / step for step in range(1, 21)]
        assert run.exit_codes == [0]
        assert list(server.runs) == [run_id]
        assert run.config["plan"]["value"]["world_size"] == 2
    assert second.warnings() == [DIED]
    written = [p for p in second.dir.path.rglob("*") if p.is_file()]
    assert not [p for p in written if API_KEY.encode() in p.read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_for_all_processes_of_a_job_costs_no_step(
    tmp_path: Path, environ: dict[str, str], number: int
) -> None:
    """wandb's service ends at some of them; that is no reason for a warning."""
    rank = Rank(tmp_path, environ, mode="offline")
    rank.train(1, 5)
    wait_until(rank.connected, "wandb's file")
    (service,) = children(rank.pid)
    os.kill(rank.pid, number)
    os.kill(service, number)
    rank.train(6, 9)
    rank.tracker.close(0)
    assert offline_steps(rank.dir) == list(range(1, 10))
    assert rank.warnings() == []
    wait_until(lambda: not Path(f"/proc/{service}/maps").exists(), "the service to end", 20)


@pytest.mark.slow
def test_a_stopped_attempt_is_marked_and_its_successor_sends_on(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    with wandb_server() as server:
        environ["WANDB_BASE_URL"] = server.url
        first = Rank(tmp_path, environ)
        run_id = first.plan.run_id
        wait_until(lambda: run_id in server.runs, "the run")
        first.train(1, 4)
        first.tracker.close(75)
        second = Rank(tmp_path, environ, attempt=2, resume_step=4)
        second.train(5, 8)
        second.tracker.close(0)
        assert server.runs[run_id].steps() == list(range(1, 9))
        assert server.runs[run_id].exit_codes[-1] == 0
    assert second.warnings() == []


@pytest.mark.slow
def test_a_server_that_comes_back_gets_every_step(tmp_path: Path, environ: dict[str, str]) -> None:
    with wandb_server() as server:
        server.failing = True
        environ |= {"WANDB_BASE_URL": server.url, "WANDB_INIT_TIMEOUT": "2"}
        rank = Rank(tmp_path, environ)
        rank.train(1, 5)
        wait_until(rank.warnings, "the warning")
        server.failing = False
        rank.train(6, 9)
        wait_until(lambda: rank.warnings() and server.runs, "the run")
        rank.tracker.close(0)
        assert server.runs[rank.plan.run_id].steps() == list(range(1, 10))
    assert len(rank.warnings()) == 1


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        pytest.param("no key", "No API key", marks=pytest.mark.slow),
        ("not installed", "cannot be imported: ModuleNotFoundError: No module named 'wandb'"),
        pytest.param("unwritable", "cannot write to", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_get_better_is_one_warning_and_given_up(
    tmp_path: Path, environ: dict[str, str], trouble: str, said: str
) -> None:
    mode = "online" if trouble == "no key" else "offline"
    match trouble:
        case "no key":
            del environ["WANDB_API_KEY"]
        case "not installed":
            environ["PYTHONPATH"] = python_path(_NO_WANDB)
        case _:
            # Where not even root could make a directory.
            (tmp_path / "tiny-20260101-000000-abcd").mkdir()
            (tmp_path / "tiny-20260101-000000-abcd" / "wandb").write_text("a file")
    rank = Rank(tmp_path, environ, mode=mode)
    rank.train(1, 3)
    wait_until(rank.warnings, "the warning")
    rank.tracker.close(0)
    (warning,) = rank.warnings()
    assert said in warning
    assert warning.endswith("training goes on without it")


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [0, 75, 1])
def test_a_sender_that_hangs_is_not_waited_for(
    tmp_path: Path, environ: dict[str, str], exit_code: int
) -> None:
    rank = Rank(tmp_path, environ, mode="offline")
    wait_until(rank.connected, "wandb's file")
    (service,) = children(rank.pid)
    os.kill(service, signal.SIGSTOP)
    rank.train(1, 3)
    began = time.monotonic()
    rank.tracker.close(exit_code)
    took_s = time.monotonic() - began
    os.kill(service, signal.SIGCONT)
    limit_s = {0: 30, 75: 5, 1: 2}[exit_code]
    assert limit_s - 1 < took_s < limit_s + 15
    assert len(rank.warnings()) == (exit_code == 0)


@pytest.mark.slow
def test_a_sender_that_is_stopped_altogether_is_killed(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    rank = Rank(tmp_path, environ, mode="offline")
    os.kill(rank.pid, signal.SIGSTOP)
    rank.train(1, 3)
    rank.tracker.close(1)
    assert rank.warnings() == ["wandb: the sending process did not end in time and was killed"]


@pytest.mark.slow
def test_an_attempt_that_is_fenced_off_leaves_the_sending_to_the_newer(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    rank = Rank(tmp_path, environ, mode="offline")
    rank.train(1, 3)
    rank.dir.attempt(2).path.mkdir()
    wait_until(rank.warnings, "the warning")
    (warning,) = rank.warnings()
    assert "a newer attempt" in warning
    rank.tracker.close(1)
