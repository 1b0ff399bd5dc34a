"""What the documents point to is there, and the commands that they show can be typed."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
import pytest
import typer.main

from launcher.cli import app
from tests.documents import ROOT, Document, documents

DOCUMENTS = documents()
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TOP = ("launcher", "trainer", "slurm", "docker", "tests", ".github", ".ci")


def each(document: Document) -> str:
    return document.name


def test_the_documents_are_found() -> None:
    names = {document.name for document in DOCUMENTS}
    assert {"README.md", "launcher/docs/recipes.md", "slurm/README.md"} <= names


@pytest.mark.parametrize("document", DOCUMENTS, ids=each)
def test_links_and_anchors_exist(document: Document) -> None:
    for link in document.links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.path.parent / path).resolve() if path else document.path
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in Document(target).anchors, link


@pytest.mark.parametrize("document", DOCUMENTS, ids=each)
def test_files_that_are_named_exist(document: Document) -> None:
    for span in document.code_spans:
        if re.fullmatch(rf"({'|'.join(map(re.escape, TOP))})/[\w./-]+", span):
            near = document.path.parent / span
            assert (ROOT / span).exists() or near.exists(), span


def words_of_vitra(line: str) -> list[str] | None:
    """The words after `vitra` in a shell's command, wherever it stands; None: it is not there."""
    words = shlex.split(line, comments=True)
    for place, word in enumerate(words):
        following = words[place + 1 : place + 2]
        is_command = following and (following[0] in COMMANDS or following[0][0] == "-")
        if word.rpartition("/")[2] == "vitra" and (place == 0 or is_command):
            rest = words[place + 1 :]
            ends = [i for i, w in enumerate(rest) if w in ("&&", "||", "|", ";") or w[0] == ">"]
            return rest[: ends[0]] if ends else rest
    return None


def shown_commands(document: Document) -> list[list[str]]:
    lines = [c for block in document.blocks if block.language == "bash" for c in block.commands]
    return [words for line in lines if (words := words_of_vitra(line))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=each)
def test_commands_in_blocks_parse(document: Document) -> None:
    for name, *words in shown_commands(document):
        if name == "--install-completion":
            continue
        assert name in COMMANDS, f"vitra {name}"
        try:
            COMMANDS[name].make_context(name, list(words))
        except click.UsageError as err:
            pytest.fail(f"vitra {name} {shlex.join(words)}: {err.format_message()}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=each)
def test_commands_in_sentences_have_these_options(document: Document) -> None:
    for span in document.code_spans:
        words = re.sub(r"[\[\]|>]", " ", span).split()
        if words[:1] != ["vitra"] or len(words) < 2 or words[1].startswith("--install"):
            continue
        assert words[1] in COMMANDS, span
        known = {o for parameter in COMMANDS[words[1]].params for o in parameter.opts}
        options = [word for word in words[2:] if word.startswith("-") and len(word) > 1]
        assert {*options} <= known | {"--help"}, span


def test_the_readme_shows_how_to_set_up() -> None:
    """The two commands that others run from there, each a block of its own."""
    (readme,) = (document for document in DOCUMENTS if document.name == "README.md")
    blocks = [block.text.strip() for block in readme.blocks if block.language == "bash"]
    quickstart, tests = (
        "bash .ci/venv && .venv/bin/vitra submit --local launcher/examples/quickstart.yaml",
        "bash .ci/venv test && .venv/bin/python -m pytest",
    )
    assert blocks[0] == quickstart
    assert tests in blocks
    assert len(readme.text.split()) <= 2300
