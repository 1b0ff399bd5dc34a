"""Lines for people: durations, sizes, what to type next, and lines that fit a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.wording import clock_time, folded, next_lines, size_text, table


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (34_000, "33.2 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def test_what_to_type_next_begins_its_line() -> None:
    assert next_lines(("vitra status a", "one"), ("vitra logs a -f", "two")) == [
        "next: vitra status a    one",
        "      vitra logs a -f   two",
    ]


def test_columns_are_aligned() -> None:
    assert table([("A", "BB"), ("ccc", "d")]) == ["A    BB", "ccc  d"]


def test_folded_beside_its_label() -> None:
    lines = ["state       queued: it waits for its turn", "directory   /a/path/that/is/longer"]
    assert folded(lines, 30) == [
        "state       queued: it waits",
        "            for its turn",
        "directory   /a/path/that/is/longer",
    ]
    assert folded(["no label but long"], 10) == ["no label", "  but long"]
    assert folded(lines, None) == lines
    assert folded(["", "            "], 5)[0] == ""


@given(st.lists(st.text(st.sampled_from("ab-/ "), max_size=60)), st.integers(1, 90))
def test_folding_loses_no_word_and_tears_none(lines: list[str], width: int) -> None:
    found = folded(lines, width)
    assert [w for line in found for w in line.split()] == [w for x in lines for w in x.split()]
    for line in found:
        assert len(line) <= width or len(line.split()) <= 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-3, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3600, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (86400, "24 h 0 min"),
    ],
)
def test_clock_time(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text
