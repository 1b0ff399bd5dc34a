"""What `--help` shows: on a terminal, in a pipe, and for every command."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from launcher.cli import app
from launcher.help import HelpfulCommand, HelpfulGroup
from tests.conftest import Vitra, vitra_command
from tests.terminal import on_terminal

_GROUP = typer.main.get_command(app)
assert isinstance(_GROUP, HelpfulGroup)
COMMANDS = _GROUP.commands


def test_in_a_pipe_it_is_plain_text(vitra: Vitra) -> None:
    said = vitra("--help", environ={"COLUMNS": "80"}).stdout
    assert said.startswith("Usage: vitra [OPTIONS] COMMAND [ARGS]...\n\n Submit a multi-node")
    assert said.isascii()
    assert max(map(len, said.splitlines())) <= 80
    assert {*COMMANDS} <= {line.split()[0] for line in said.splitlines() if line.strip()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_takes(name: str) -> None:
    command = COMMANDS[name]
    assert isinstance(command, HelpfulCommand)
    said = command.get_help(command.make_context(name, [], resilient_parsing=True))
    assert said.startswith(f"Usage: {name} ")
    for parameter in command.params:
        option = parameter.opts[-1] if parameter.param_type_name == "option" else None
        assert (option or str(parameter.metavar)) in said
    assert "<" not in said.partition("Options:")[2], "a metavar for it reads better"


@pytest.mark.parametrize(("columns", "width"), [(80, 80), (200, 100), (44, 44)])
def test_on_a_terminal_it_has_panels_that_fit(tmp_path: Path, columns: int, width: int) -> None:
    said = on_terminal(
        [vitra_command(), "logs", "-h"],
        columns=columns,
        cwd=tmp_path,
        environ={"NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
    )
    drawn = [line for line in said.splitlines() if line[:1] in {*"╭│╰"}]
    assert [line[3:-2].strip(" ─") for line in drawn if line[0] == "╭"] == ["Arguments", "Options"]
    assert {len(line) for line in drawn} == {width}
    assert {line[-1] for line in drawn} == {*"╮│╯"}
    assert "\x1b" not in said


def test_on_a_terminal_it_is_coloured_and_no_box_where_none_can_be_shown(tmp_path: Path) -> None:
    argv = [vitra_command(), "plan", "-h"]
    drawn = on_terminal(argv, columns=80, cwd=tmp_path, environ={"PYTHONIOENCODING": "utf-8"})
    assert "\x1b[1;36m--profile NAME" in drawn
    plain = on_terminal(argv, columns=80, cwd=tmp_path, environ={"PYTHONIOENCODING": "ascii"})
    assert plain.isascii()
    assert "\x1b" not in plain
    assert "--profile NAME" in plain
