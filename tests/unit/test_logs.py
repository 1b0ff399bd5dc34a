"""The ranks' logs as one stream: in order, whole, whatever the bytes, and while they grow."""

from __future__ import annotations

import io
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.logs import (
    Line,
    Printer,
    Selection,
    check_selection,
    log_lines,
    wait_for_more,
)
from trainer.spec.errors import NotFound, StorageError
from trainer.spec.rundir import RunDir

ALL = Selection()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def write(run_dir: RunDir, attempt: int, rank: int, data: bytes) -> None:
    """Append to a rank's log."""
    path = run_dir.attempt(attempt).log(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def read(run_dir: RunDir, selection: Selection = ALL) -> list[tuple[int, int | None, bytes]]:
    """All there is, without following."""

    def never() -> bool:
        raise AssertionError("waited for more")

    lines = log_lines(run_dir, selection, is_over=lambda: True, wait=never)
    return [(line.attempt, line.rank, line.text) for line in lines]


def texts(run_dir: RunDir, selection: Selection = ALL) -> list[bytes]:
    return [text for _, _, text in read(run_dir, selection)]


def test_ranks_are_merged_by_time_and_attempts_follow_each_other(run_dir: RunDir) -> None:
    write(run_dir, 2, 0, b"2026-01-01 00:00:00,000 the second attempt, clock set back\n")
    write(run_dir, 1, 0, b"2026-01-02 10:00:00,100 a\n2026-01-02 10:00:02,000 d\n")
    write(run_dir, 1, 1, b"2026-01-02 10:00:00,200 b\n2026-01-02T10:00:01.5 c\n")
    write(run_dir, 10, 0, b"the tenth\n")
    found = [(attempt, rank, text[-1:]) for attempt, rank, text in read(run_dir)]
    assert found == [
        *((1, 0, b"a"), (1, 1, b"b"), (1, 1, b"c"), (1, 0, b"d")),
        *((2, 0, b"k"), (10, 0, b"h")),
    ]


def test_lines_without_a_time_stay_with_those_before_them(run_dir: RunDir) -> None:
    write(run_dir, 1, 0, b"first\n2026-01-02 10:00:05 ERROR\nTraceback:\n  File x\nValueError\n")
    write(run_dir, 1, 1, b"2026-01-02 10:00:04 one\n2026-01-02 10:00:05 two\n")
    assert [(rank, text.split()[-1]) for _, rank, text in read(run_dir)] == [
        (0, b"first"),
        (1, b"one"),
        *((0, b"ERROR"), (0, b"Traceback:"), (0, b"x"), (0, b"ValueError")),
        (1, b"two"),
    ]


def test_without_any_time_rank_follows_rank(run_dir: RunDir) -> None:
    for rank in (10, 2, 0):
        write(run_dir, 1, rank, b"%d a\n%d b\n" % (rank, rank))
    assert texts(run_dir) == [b"0 a", b"0 b", b"2 a", b"2 b", b"10 a", b"10 b"]


def test_a_clock_that_is_set_back_reorders_no_rank(run_dir: RunDir) -> None:
    write(run_dir, 1, 0, b"2026-01-02 10:00:05 a\n2026-01-02 09:00:00 b\n2026-01-02 10:00:06 c\n")
    write(run_dir, 1, 1, b"2026-01-02 10:00:04 x\n2026-01-02 10:00:07 y\n")
    assert [text[-1:] for text in texts(run_dir)] == [b"x", b"a", b"b", b"c", b"y"]


@pytest.mark.parametrize("stamp", [b"2026-13-45 10:00:00", b"0001-01-01 00:00:00", b"9999-99-99 9"])
def test_a_time_that_is_none_is_text(run_dir: RunDir, stamp: bytes) -> None:
    write(run_dir, 1, 0, b"2026-01-02 10:00:05 a\n" + stamp + b" b\n")
    assert texts(run_dir)[1] == stamp + b" b"


def test_odd_bytes_pass_through(run_dir: RunDir) -> None:
    write(run_dir, 1, 0, b"\xff\xfe caf\xe9 \x00 \x1b[31m\n\n t\xc3\xa4st \r\n 10%\r 20%\r\n\rtorn")
    assert texts(run_dir) == [
        *(b"\xff\xfe caf\xe9 \x00 \x1b[31m", b"", b" t\xc3\xa4st "),
        *(b" 10%", b" 20%", b"torn"),
    ]


def test_selection(run_dir: RunDir) -> None:
    for attempt in (1, 2):
        for rank in (0, 1, 2):
            write(run_dir, attempt, rank, b"%d/%d\n" % (attempt, rank))
    run_dir.attempt(2).supervisor_log.write_text(
        '{"at": "2026-01-01T00:00:00.000Z", "note": "verdict"}\n{"torn'
    )
    ranks, two = frozenset({0, 2}), frozenset({2})
    assert texts(run_dir, Selection(ranks=ranks)) == [b"1/0", b"1/2", b"2/0", b"2/2"]
    assert texts(run_dir, Selection(ranks=ranks, attempts=two)) == [b"2/0", b"2/2"]
    noted = read(run_dir, Selection(ranks=frozenset({1}), attempts=two, supervisor=True))
    assert noted == [
        (2, 1, b"2/1"),
        (2, None, b"2026-01-01T00:00:00.000Z verdict"),
        (2, None, b'{"torn'),
    ]


def test_what_there_is_not_is_named(run_dir: RunDir) -> None:
    with pytest.raises(NotFound, match="has no attempt 1; it has not started yet"):
        check_selection(run_dir, Selection(attempts=frozenset({1})), world_size=None)
    for rank in (0, 1, 2, 5):
        write(run_dir, 1, rank, b"x\n")
    with pytest.raises(NotFound, match="no log of rank 3; there are ranks 0 to 2 and 5"):
        check_selection(run_dir, Selection(ranks=frozenset({0, 3})), world_size=None)
    with pytest.raises(NotFound, match="has no attempt 2; it has 1"):
        check_selection(run_dir, Selection(attempts=frozenset({2})), world_size=None)
    # When following, more may come: but no rank beyond the world, and no attempt of the past.
    check_selection(run_dir, Selection(frozenset({7}), frozenset({2})), world_size=8)
    with pytest.raises(NotFound, match="rank 8"):
        check_selection(run_dir, Selection(ranks=frozenset({8})), world_size=8)
    write(run_dir, 3, 0, b"x\n")
    with pytest.raises(NotFound, match="has no attempt 2; it has 1 and 3"):
        check_selection(run_dir, Selection(attempts=frozenset({2})), world_size=8)


def test_a_log_that_cannot_be_read(run_dir: RunDir) -> None:
    run_dir.attempt(1).log(0).mkdir(parents=True)
    with pytest.raises(StorageError, match=r"rank_0\.log"):
        read(run_dir)


def test_memory_stays_small(run_dir: RunDir) -> None:
    """Of 12 MiB, half of it one line."""
    size = 6 << 20
    write(run_dir, 1, 0, (b"x" * 255 + b"\n") * (size // 256))
    write(run_dir, 1, 1, b"y" * size)
    tracemalloc.start()
    try:
        total = sum(
            len(line.text)
            for line in log_lines(run_dir, ALL, is_over=lambda: True, wait=lambda: False)
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == size + 255 * (size // 256)
    assert peak < 5 << 20


class Script:
    """A run that goes on each time that the reader waits for more."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        self._steps = list(steps)

    def is_over(self) -> bool:
        return not self._steps

    def wait(self) -> bool:
        self._steps.pop(0)()
        return True

    def lines(self, run_dir: RunDir) -> Iterator[Line]:
        return log_lines(run_dir, ALL, is_over=self.is_over, wait=self.wait)


def test_following_through_attempts_loses_nothing_and_repeats_nothing(run_dir: RunDir) -> None:
    script = Script(
        lambda: None,
        lambda: write(run_dir, 1, 0, b"a\nb\nhalf"),
        lambda: write(run_dir, 1, 1, b"another rank\n"),
        lambda: write(run_dir, 1, 0, b" a line\nlast words, torn"),
        # Between two looks one attempt ends and two others come and go.
        lambda: (write(run_dir, 1, 1, b"late\n"), write(run_dir, 2, 0, b"two"))[0],
        lambda: write(run_dir, 3, 0, b"three\nthe end"),
    )
    found = [(line.attempt, line.rank, line.text) for line in script.lines(run_dir)]
    assert found == [
        *((1, 0, b"a"), (1, 0, b"b"), (1, 1, b"another rank"), (1, 0, b"half a line")),
        *((1, 0, b"last words, torn"), (1, 1, b"late"), (2, 0, b"two")),
        *((3, 0, b"three"), (3, 0, b"the end")),
    ]


def test_printed_lines() -> None:
    stream = io.BytesIO()
    for colour in (False, True):
        printer = Printer(stream, colour=colour)
        printer(Line(2, 3, b"\xff text"))
        printer(Line(2, None, b"noted"))
        printer(Line(2, 3, b"\x1b[31mleft on"))
    plain, noted, as_it_is, coloured, _, put_out = stream.getvalue().splitlines()
    assert plain == b"[2/3] \xff text"
    assert noted == b"[2/supervisor] noted"
    assert coloured.startswith(b"\x1b[")
    assert coloured.endswith(b"m[2/3]\x1b[0m \xff text")
    assert as_it_is.endswith(b"\x1b[31mleft on")
    assert put_out.endswith(b"\x1b[31mleft on\x1b[0m")


def test_nobody_waits_for_a_reader_that_has_gone() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as stream:
        assert wait_for_more(stream, 0.01)
        os.close(read_end)
        assert not wait_for_more(stream, 3600)
