"""How lines for people are worded and laid out: durations, sizes, what to type next, long lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

#: What two blanks set apart at the beginning of a line, as in "state       running", if anything.
_LABEL = re.compile(r"(?: *\S+(?: \S+)*?)?  +")
#: With less room beside it, a label has the text below it.
_NARROWEST = 16


def clock_time(seconds: float) -> str:
    """A duration as people say it: 45 s, 3 min 20 s, 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size_text(size_bytes: int) -> str:
    """A size as people say it: 12 bytes, 34.5 KiB, 3.0 MiB, 1.2 GiB."""
    if size_bytes < 1 << 10:
        return f"{size_bytes} bytes"
    for shift, unit in ((30, "GiB"), (20, "MiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes / (1 << 10):.1f} KiB"


def next_lines(*steps: tuple[str, str]) -> list[str]:
    """What to type next, a line for each (command, what it does)."""
    width = max(len(command) for command, _ in steps)
    return [
        f"{'next: ' if number == 0 else '      '}{command:<{width}}   {does}"
        for number, (command, does) in enumerate(steps)
    ]


def folded(lines: Iterable[str], width: int | None) -> list[str]:
    """Lines folded between words for a terminal of that width; None: as they are.

    What follows is indented to where the text of the line begins, after its label. A word that is
    too long, such as a path, stays whole, to be copied.
    """
    if width is None:
        return list(lines)
    return [piece for line in lines for piece in _pieces(line, width)]


def _pieces(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    match = _LABEL.match(line)
    label = match[0] if match else ""
    if width - len(label) < _NARROWEST:
        label = ""
    pieces = textwrap.wrap(
        line[len(label) :],
        width - len(label),
        subsequent_indent="" if label else "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [(label if n == 0 else " " * len(label)) + piece for n, piece in enumerate(pieces)]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
