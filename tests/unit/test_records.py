"""Records over any number of attempts: exactly the steps that count, each once, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.metrics import StepMetrics, VLAMetrics
from trainer.records import RunRecords
from trainer.spec.errors import StorageError
from trainer.spec.ranks import RankInfo
from trainer.spec.rundir import RunDir, json_line, read_lines


def rank_info(rank: int = 0, attempt: int = 1) -> RankInfo:
    return RankInfo(
        rank=rank,
        world_size=4,
        local_rank=0,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        run_id="run",
        attempt=attempt,
    )


def opened(
    root: Path,
    *,
    attempt: int = 1,
    rank: int = 0,
    resume_step: int = 0,
    log_interval: int = 1,
    sample_ids: bool = True,
) -> RunRecords:
    """The records of one rank, rebuilt and opened as the worker does."""
    run_dir = RunDir(root)
    run_dir.attempt(attempt).path.mkdir(parents=True, exist_ok=True)
    ranks = rank_info(rank, attempt)
    records = RunRecords(run_dir, ranks, log_interval=log_interval, sample_ids=sample_ids)
    if rank == 0:
        records.rebuild(resume_step)
    records.open()
    return records


def train(records: RunRecords, first: int, last: int, *, loss: float = 0.1) -> None:
    for step in range(first, last + 1):
        records.samples(step, [step, step + 1])
        records.step({"step": step, "loss": loss * step})


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_lines(path)]


def test_live_records_are_in_the_run_and_in_the_attempt(tmp_path: Path) -> None:
    train(opened(tmp_path), 1, 3)
    run_dir = RunDir(tmp_path)
    assert steps(run_dir.metrics) == steps(run_dir.attempt(1).metrics) == [1, 2, 3]
    assert list(read_lines(run_dir.samples(0))) == [
        {"step": step, "ids": [step, step + 1]} for step in (1, 2, 3)
    ]


def test_other_ranks_write_their_samples_only(tmp_path: Path) -> None:
    records = opened(tmp_path, rank=2)
    train(records, 1, 2)
    records.event("saved", step=2)
    run_dir = RunDir(tmp_path)
    assert steps(run_dir.samples(2)) == [1, 2]
    assert not run_dir.metrics.exists()
    assert not run_dir.events.exists()


def test_without_sample_ids_there_is_no_file_of_them(tmp_path: Path) -> None:
    train(opened(tmp_path, sample_ids=False), 1, 2)
    assert RunDir(tmp_path).sample_files() == []


@pytest.mark.parametrize("resume_step", [0, 2, 5])
def test_lines_beyond_the_resume_step_are_dropped(tmp_path: Path, resume_step: int) -> None:
    train(opened(tmp_path), 1, 5)
    train(opened(tmp_path, rank=3), 1, 5)  # a rank that the next, smaller world does not have
    train(opened(tmp_path, attempt=2, resume_step=resume_step), resume_step + 1, 6, loss=0.2)
    run_dir = RunDir(tmp_path)
    assert steps(run_dir.metrics) == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in read_lines(run_dir.metrics)] == [
        (0.1 if step <= resume_step else 0.2) * step for step in range(1, 7)
    ]
    assert steps(run_dir.samples(0)) == [1, 2, 3, 4, 5, 6]
    assert steps(run_dir.samples(3)) == list(range(1, resume_step + 1))
    # What an attempt did remains in its own directory.
    assert steps(run_dir.attempt(1).metrics) == [1, 2, 3, 4, 5]
    assert steps(run_dir.attempt(2).metrics) == list(range(resume_step + 1, 7))


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    train(opened(tmp_path), 1, 3)
    for path in (RunDir(tmp_path).metrics, RunDir(tmp_path).samples(0)):
        path.write_bytes(path.read_bytes()[:-4])
    train(opened(tmp_path, attempt=2, resume_step=2), 3, 3)
    assert steps(RunDir(tmp_path).metrics) == [1, 2, 3]
    assert steps(RunDir(tmp_path).samples(0)) == [1, 2, 3]


def test_the_steps_increase_strictly_whatever_was_there(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 1.0},
        {"step": 1, "loss": 9.0},
        {"step": 3, "loss": 3.0},
        {"step": 2, "loss": 9.0},
        {"loss": 9.0},
        {"step": "4"},
        {"step": 4, "loss": 4.0},
        {"step": 7, "loss": 9.0},
    ]
    RunDir(tmp_path).metrics.write_bytes(b"".join(map(json_line, lines)) + b'{"step": 5')
    opened(tmp_path, resume_step=6)
    assert [r["loss"] for r in read_lines(RunDir(tmp_path).metrics)] == [1.0, 3.0, 4.0]


def test_rebuilding_twice_changes_no_bit(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1e-7, 2.0**53 + 2]
    records = opened(tmp_path)
    for step, value in enumerate(values, start=1):
        records.step({"step": step, "loss": value})
    path = RunDir(tmp_path).metrics
    before = path.read_bytes()
    for attempt in (2, 3):
        opened(tmp_path, attempt=attempt, resume_step=len(values))
        assert path.read_bytes() == before
    assert [repr(record["loss"]) for record in read_lines(path)] == list(map(repr, values))


def test_an_older_attempt_that_lives_on_writes_into_no_file_of_the_newer(tmp_path: Path) -> None:
    cut_off = opened(tmp_path)
    train(cut_off, 1, 3)
    newer = opened(tmp_path, attempt=2, resume_step=2)
    train(cut_off, 4, 5, loss=9.0)
    train(newer, 3, 4)
    assert [(r["step"], r["loss"]) for r in read_lines(RunDir(tmp_path).metrics)] == [
        (step, 0.1 * step) for step in range(1, 5)
    ]


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (9, [])]
)
def test_metrics_are_written_every_so_many_steps(
    tmp_path: Path, interval: int, expected: list[int]
) -> None:
    train(opened(tmp_path, log_interval=interval), 1, 7)
    run_dir = RunDir(tmp_path)
    assert steps(run_dir.metrics) == steps(run_dir.attempt(1).metrics) == expected
    assert steps(run_dir.samples(0)) == [1, 2, 3, 4, 5, 6, 7]


def test_the_interval_counts_steps_of_the_run_not_of_the_attempt(tmp_path: Path) -> None:
    train(opened(tmp_path, log_interval=3), 1, 4)
    train(opened(tmp_path, attempt=2, resume_step=4, log_interval=3), 5, 9)
    assert steps(RunDir(tmp_path).metrics) == [3, 6, 9]


def test_a_record_has_the_fields_of_the_contract(tmp_path: Path) -> None:
    VLAMetrics(opened(tmp_path)).push(
        StepMetrics(
            step=1,
            epoch=0,
            loss=1 / 3,
            lr={"backbone": 0.0, "action_model": 1e-4},
            grad_norm=2.0,
            step_time_s=0.123456789,
            data_wait_s=0.0234567891,
            memory_bytes=2**30,
            samples_seen=8,
            attempt=1,
        )
    )
    assert list(read_lines(RunDir(tmp_path).metrics)) == [
        {
            "step": 1,
            "epoch": 0,
            "loss": 1 / 3,
            "lr": {"backbone": 0.0, "action_model": 1e-4},
            "grad_norm": 2.0,
            "step_time_s": 0.123457,
            "data_wait_s": 0.023457,
            "memory_bytes": 2**30,
            "samples_seen": 8,
            "attempt": 1,
        }
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples-rank0.jsonl", "events.jsonl"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    records = RunRecords(RunDir(tmp_path), rank_info(), log_interval=1, sample_ids=True)
    RunDir(tmp_path).attempt(1).path.mkdir(parents=True)
    records.open()
    with pytest.raises(StorageError, match=r"cannot be written: No space left") as caught:  # noqa: PT012
        train(records, 1, 1)
        records.event("saved", step=1)
    assert str(tmp_path / name) in caught.value.message
    assert caught.value.exit_code == 6


def test_events_carry_their_attempt(tmp_path: Path) -> None:
    records = opened(tmp_path, attempt=7)
    records.event("saved", step=3)
    records.sync()
    (event,) = read_lines(RunDir(tmp_path).events)
    assert (event["event"], event["attempt"], event["step"]) == ("saved", 7, 3)
