"""The specs to start from: the files in launcher/examples, for `vitra init`."""

from __future__ import annotations

import os
import shlex
from importlib.resources import files
from pathlib import Path

from launcher.registry import absolute
from trainer.spec.errors import StorageError, UsageError
from trainer.spec.fields import close_match

DEFAULT = "quickstart"

_SUFFIX = ".yaml"


def template_names() -> list[str]:
    """The names of all templates, the default first."""
    names = [
        entry.name.removesuffix(_SUFFIX)
        for entry in (files("launcher") / "examples").iterdir()
        if entry.name.endswith(_SUFFIX)
    ]
    return sorted(names, key=lambda name: (name != DEFAULT, name))


def about(name: str) -> str:
    """What a template says of itself: the first paragraph of its comment, as one line."""
    words: list[str] = []
    for line in _text(name).splitlines():
        comment = line.removeprefix("#").strip()
        if not line.startswith("#") or not comment:
            break
        words.append(comment)
    return " ".join(words)


def template(name: str, written_as: str) -> str:
    """The text of a template, its examples of commands naming the file `written_as`.

    Raises:
        UsageError: there is no such template.
    """
    names = template_names()
    if name not in names:
        near = close_match(name, names)
        raise UsageError(
            f"--template {name}: there is no such template",
            f"did you mean {near}?" if near else f"there are {', '.join(names)}",
        )
    return _text(name).replace(f"launcher/examples/{name}{_SUFFIX}", written_as)


def write_template(name: str, to: str) -> Path:
    """Write a template to a new file; returns its path.

    Raises:
        UsageError: there is no such template, or the file is there or cannot be made.
        StorageError: the disk failed; nothing is left.
    """
    if not to.strip():
        raise UsageError("PATH is empty", "name a file, such as spec.yaml")
    text = template(name, shlex.quote(to))
    path = absolute(to)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        what = "a directory" if path.is_dir() else "there already"
        raise UsageError(f"{to}: is {what}, and stays as it is", "name another file") from None
    except OSError as err:
        raise UsageError(f"{to}: cannot be made: {err.strerror}", "name another file") from err
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as err:
        path.unlink(missing_ok=True)
        raise StorageError(f"{to}: cannot be written: {err.strerror}") from err
    return path


def _text(name: str) -> str:
    return (files("launcher") / "examples" / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
