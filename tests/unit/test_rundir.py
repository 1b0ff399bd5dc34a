"""The run directory's files: published whole or not at all, and logs that no kill can spoil."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.spec.rundir import (
    LineLog,
    RunDir,
    append_event,
    json_line,
    read_lines,
    utc_now,
    write_atomic,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- Files that are replaced -------------------------------------------------------------------


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomic(path, b"one")
    with path.open("rb") as reader:
        write_atomic(path, b"two")
        # Whoever has the old file open goes on reading the old file.
        assert reader.read() == b"one"
    assert path.read_bytes() == b"two"
    assert names(tmp_path) == ["plan.json"]
    # Readable by the group at most, as the run directory is.
    assert path.stat().st_mode & 0o137 == 0


def test_an_error_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomic(path, b"one")
    with pytest.raises(TypeError):
        write_atomic(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["plan.json"]


def test_what_cannot_be_renamed_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "plan.json", b"one")
    assert names(tmp_path) == ["plan.json"]
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "missing" / "plan.json", b"one")


# -- Logs --------------------------------------------------------------------------------------


def test_lines_are_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with LineLog(path) as log:
        log.append({"step": 1, "text": "ä\n"})
        log.append({"step": 2})
        log.sync()
    with LineLog(path) as log:
        log.append({"step": 3})
    assert [record["step"] for record in read_lines(path)] == [1, 2, 3]
    assert next(read_lines(path))["text"] == "ä\n"
    assert len(path.read_bytes().splitlines()) == 3


def test_each_line_is_there_once_it_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with LineLog(path) as log:
        log.append({"step": 1})
        assert path.read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_torn_line_is_passed_over_and_does_not_swallow_the_next(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log.jsonl"
    with LineLog(path) as log:
        log.append({"step": 1})
        log.append({"step": 2})
    path.write_bytes(path.read_bytes()[:-cut])
    assert [r["step"] for r in read_lines(path)] == ([1, 2] if cut == 1 else [1])
    with LineLog(path) as log:
        log.append({"step": 3})
        log.append({"step": 4})
    assert [r["step"] for r in read_lines(path)] == ([1, 2, 3, 4] if cut == 1 else [1, 3, 4])


def test_two_writers_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with LineLog(path) as one, LineLog(path) as other:
        for step in range(50):
            one.append({"step": step, "by": "one"})
            other.append({"step": step, "by": "other", "long": "x" * 5000})
    records = list(read_lines(path))
    assert len(records) == 100
    assert {by: [r["step"] for r in records if r["by"] == by] for by in ("one", "other")} == {
        "one": list(range(50)),
        "other": list(range(50)),
    }


def test_a_disk_that_fills_up_is_an_error_and_costs_one_line(tmp_path: Path) -> None:
    """A limit on the file's size acts as a full disk does: it takes a part of the last line."""
    path = tmp_path / "log.jsonl"
    program = f"""
import pathlib, resource, signal
from trainer.spec.rundir import LineLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
log = LineLog(pathlib.Path({str(path)!r}))
for step in range(100):
    try:
        log.append({{"step": step}})
    except OSError:
        raise SystemExit(step)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    full = done.returncode
    assert 0 < full < 100
    assert path.stat().st_size == 100
    assert path.read_bytes()[-1:] != b"\n"
    with LineLog(path) as log:
        log.append({"step": 1000})
    assert [record["step"] for record in read_lines(path)] == [*range(full), 1000]


def test_a_log_that_lives_on_after_a_full_disk(tmp_path: Path) -> None:
    """The line that did not fit is lost, and only that."""
    path = tmp_path / "log.jsonl"
    program = f"""
import pathlib, resource, signal
from trainer.spec.rundir import LineLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = LineLog(pathlib.Path({str(path)!r}))
log.append({{"step": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (20, -1))
for step in (2, 3):
    try:
        log.append({{"step": step}})
    except OSError as err:
        assert err.filename == {str(path)!r}, err
    else:
        raise SystemExit("written")
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
log.append({{"step": 4}})
log.append({{"step": 5}})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert [record["step"] for record in read_lines(path)] == [1, 4, 5]


def test_a_failed_replacement_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "plan.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_atomic(path, b"{}")
    assert caught.value.filename == str(path)


def test_no_file_has_no_lines_and_garbage_has_none_either(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "missing.jsonl")) == []
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'[1]\n\n3\n"x"\nnull\n\xff\xfe\n{"step": 1}\n\0\0\0\0')
    assert list(read_lines(path)) == [{"step": 1}]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_bit_equal(value: float) -> None:
    read = json.loads(json_line({"x": value}))["x"]
    assert math.copysign(1, read) == math.copysign(1, value)
    assert read == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_have_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_line({"x": value})


def test_an_event_has_its_time_and_its_name_first(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    before = utc_now()
    append_event(run_dir, "saved", step=4)
    event: dict[str, Any] = next(read_lines(run_dir.events))
    assert list(event) == ["at", "event", "step"]
    assert (event["event"], event["step"]) == ("saved", 4)
    assert before <= event["at"] <= utc_now()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["at"])


# -- Paths -------------------------------------------------------------------------------------


def test_attempts_are_ordered_by_number(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.attempt_numbers() == []
    for name in ("10", "9", "1", "x", "2.old", "²"):
        run_dir.attempts.joinpath(name).mkdir(parents=True)
    assert run_dir.attempt_numbers() == [1, 9, 10]


def test_paths_are_those_of_the_contract(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    attempt = run_dir.attempt(3)
    paths = [
        run_dir.record,
        run_dir.spec,
        run_dir.overrides,
        run_dir.plan,
        run_dir.script,
        run_dir.events,
        run_dir.metrics,
        run_dir.cancel,
        run_dir.samples(2),
        attempt.plan,
        attempt.outcome,
        attempt.metrics,
        attempt.supervisor_log,
        attempt.log(2),
        attempt.stack(2),
        attempt.exit(2),
    ]
    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        "run.json",
        "spec.yaml",
        "overrides.yaml",
        "plan.json",
        "submit.sbatch",
        "events.jsonl",
        "metrics.jsonl",
        "CANCEL",
        "samples-rank2.jsonl",
        "attempts/3/plan.json",
        "attempts/3/outcome.json",
        "attempts/3/metrics.jsonl",
        "attempts/3/supervisor.log",
        "attempts/3/logs/rank_2.log",
        "attempts/3/logs/rank_2.stack",
        "attempts/3/rank_2.exit",
    ]
