"""Time limits: the minutes that Slurm gives, and the traps that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.spec.times import LONGEST_MINUTES, parse_slurm_time


@pytest.mark.parametrize(
    ("value", "minutes"),
    [
        ("1:30", 2),  # minutes and hours of the first five: measured on Slurm 22.05.8
        ("0:30", 1),
        ("30:00", 30),
        ("1-0", 1440),
        ("1-0:30", 1470),
        ("90", 90),
        ("24:00:00", 1440),
        ("100:00:00", 6000),
        ("0:0:1", 1),
        ("0:59", 1),
        ("1:00", 1),
        ("90:00", 90),
        ("2-12:30:15", 3631),
        ("007", 7),
        (1, 1),
        (1440, 1440),
        (LONGEST_MINUTES, LONGEST_MINUTES),
    ],
)
def test_minutes_are_those_of_slurm(value: str | int, minutes: int) -> None:
    assert parse_slurm_time(value).minutes == minutes


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "no limit"),
        ("0", "no limit"),
        ("0:00", "no limit"),
        ("0-0", "no limit"),
        (-5, "negative"),
        ("-5", "not a time"),
        ("", "empty"),
        ("  ", "empty"),
        ("1:90", "has 90 for its seconds"),
        ("1:60:00", "has 60 for its minutes"),
        ("1-24", "has 24 for its hours"),
        ("1-0:60", "has 60 for its minutes"),
        ("90s", "not a time"),
        ("1h30m", "not a time"),
        ("1.5", "not a time"),
        ("+5", "not a time"),
        (" 5", "not a time"),
        ("5\n", "not a time"),
        ("1:2:3:4", "not a time"),
        ("1-", "not a time"),
        ("-1-0", "not a time"),
        ("1--0", "not a time"),
        (":30", "not a time"),
        ("1:", "not a time"),
        ("\u0661:\u0663\u0660", "not a time"),
        ("UNLIMITED", "needs one"),
        ("infinite", "needs one"),
        ("-1", "needs one"),
        (LONGEST_MINUTES + 1, "longer than"),
        (10**30, "longer than"),
        ("9" * 39, "longer than"),
        ("9" * 5000, "not a time"),
    ],
)
def test_refused(value: str | int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_slurm_time(value)


@pytest.mark.parametrize(
    ("value", "reading", "surprising"),
    [
        ("1:30", "1 min 30 s, rounded up to 2 min", True),
        ("30:00", "30 min", True),
        ("24:00:00", "1 day", False),
        ("2-1:00:05", "2 days 1 h 5 s, rounded up to 2941 min", True),
        (90, "1 h 30 min", False),
    ],
)
def test_reading_is_for_people(value: str | int, reading: str, surprising: bool) -> None:
    time = parse_slurm_time(value)
    assert (time.reading, time.surprising) == (reading, surprising)


@given(
    days=st.integers(0, 400),
    hours=st.integers(0, 23),
    minutes=st.integers(0, 59),
    seconds=st.integers(0, 59),
)
def test_all_six_forms_agree_and_never_round_down(
    days: int, hours: int, minutes: int, seconds: int
) -> None:
    def total(d: int = 0, h: int = 0, m: int = 0, s: int = 0) -> int:
        return ((d * 24 + h) * 60 + m) * 60 + s

    forms = {
        f"{minutes}": total(m=minutes),
        f"{minutes:02}:{seconds:02}": total(m=minutes, s=seconds),
        f"{hours}:{minutes:02}:{seconds:02}": total(h=hours, m=minutes, s=seconds),
        f"{days}-{hours}": total(days, hours),
        f"{days}-{hours:02}:{minutes}": total(days, hours, minutes),
        f"{days}-{hours}:{minutes:02}:{seconds:02}": total(days, hours, minutes, seconds),
    }
    for text, asked_s in forms.items():
        if asked_s == 0:
            with pytest.raises(ValueError, match="no limit"):
                parse_slurm_time(text)
        else:
            given_s = parse_slurm_time(text).minutes * 60
            assert asked_s <= given_s < asked_s + 60, text


@given(st.text(alphabet="0123456789:-+. hsmd\u0661\n", max_size=12) | st.text(max_size=20))
def test_any_text_is_a_time_or_refused(text: str) -> None:
    try:
        minutes = parse_slurm_time(text).minutes
    except ValueError:
        return
    assert 1 <= minutes <= LONGEST_MINUTES
