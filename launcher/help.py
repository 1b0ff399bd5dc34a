"""The help of every command: in panels on a terminal, as plain text elsewhere.

It is the first that a person sees of vitra, so it is drawn here: the library that would draw it
takes longer to load than all the rest.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

#: Longer lines are hard to read, however wide the terminal is.
_WIDEST = 100
_NARROWEST = 40
#: A longer name has its text below it.
_LONGEST_NAME = 28

_BORDER, _NAME, _USAGE = "2", "1;36", "1;33"

#: The rows of a section: what can be typed, and what it does.
Rows = Sequence[tuple[str, str]]


class HelpfulCommand(TyperCommand):
    """A command whose help is drawn here."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Called for --help; `formatter` takes the text."""
        formatter.write(_help_text(self, ctx, {}))


class HelpfulGroup(TyperGroup):
    """The commands as a whole: their help names each, with its first sentences."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Called for --help; `formatter` takes the text."""
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        rows = [(name, _first_paragraph(c.help)) for name, c in commands if not c.hidden]
        formatter.write(_help_text(self, ctx, {"Commands": rows}))


def _help_text(command: HelpfulCommand | HelpfulGroup, ctx: Any, more: Mapping[str, Rows]) -> str:
    found: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        if (row := parameter.get_help_record(ctx)) is not None:
            is_option = parameter.param_type_name == "option"
            found["Options" if is_option else "Arguments"].append(row)
    sections: dict[str, Rows] = {**found, **more}
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    width = max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST))
    pieces = _panels if _takes_panels() else _plain
    text = "\n".join(pieces(usage, command.help or "", sections, width))
    return f"{text}\n"


def _plain(usage: str, description: str, sections: Mapping[str, Rows], width: int) -> Iterator[str]:
    yield f"Usage: {usage}"
    yield ""
    yield from _description(description, width)
    for title, rows in sections.items():
        if rows:
            yield ""
            yield f"{title}:"
            yield from (f"  {name}{text}" for name, text in _laid_out(rows, width - 2))


def _panels(
    usage: str, description: str, sections: Mapping[str, Rows], width: int
) -> Iterator[str]:
    paint = _painted if _in_colour() else _unpainted
    edge = paint("│", _BORDER)
    yield ""
    yield f" {paint('Usage:', _USAGE)} {paint(usage, '1')}"
    yield ""
    yield from _description(description, width)
    yield ""
    for title, rows in sections.items():
        if rows:
            yield paint(f"╭─ {title} {'─' * (width - len(title) - 5)}╮", _BORDER)
            for name, text in _laid_out(rows, width - 4):
                blanks = " " * (width - 4 - len(name) - len(text))
                yield f"{edge} {paint(name, _NAME)}{text}{blanks} {edge}"
            yield paint(f"╰{'─' * (width - 2)}╯", _BORDER)


def _description(text: str, width: int) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ""
        yield from (f" {line}" for line in textwrap.wrap(paragraph, width - 2))


def _laid_out(rows: Rows, width: int) -> Iterator[tuple[str, str]]:
    """Lines of at most `width` characters in two columns: the name, padded, and its text."""
    column = 2 + max((len(name) for name, _ in rows if len(name) <= _LONGEST_NAME), default=0)
    for name, text in rows:
        lines = textwrap.wrap(text, width - column) or [""]
        if len(name) > column - 2:
            yield name, ""
        else:
            yield f"{name:<{column}}", lines.pop(0)
        yield from ((" " * column, line) for line in lines)


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())


def _takes_panels() -> bool:
    """Whether standard output is a terminal that can show their corners."""
    try:
        "╭│─╯".encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return False
    return sys.stdout.isatty()


def _in_colour() -> bool:
    return os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


def _painted(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m"


def _unpainted(text: str, style: str) -> str:
    del style
    return text
