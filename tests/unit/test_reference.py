"""The spec reference is what `vitra schema --markdown` prints, and says what the models do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import launcher
from launcher.reference import spec_reference
from launcher.schema import DESCRIPTIONS
from trainer.spec.container import ContainerSpec
from trainer.spec.fields import SpecModel
from trainer.spec.options import DATA_OPTIONS, MODEL_OPTIONS
from trainer.spec.run import NodeRange, RunSpec, WandbSpec

FILE = Path(launcher.__file__).parent / "docs" / "spec.md"


def test_the_file_is_what_the_schema_says() -> None:
    assert FILE.read_text() == spec_reference(), (
        "renew it: vitra schema --markdown > launcher/docs/spec.md"
    )


def defaults(model: type[SpecModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """(path, default) of every key of a model; `...` where it is required."""
    for name, field in model.model_fields.items():
        path = f"{above}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, SpecModel):
            yield from defaults(field.annotation, f"{path}.")
        else:
            yield path, ... if field.is_required() else field.get_default(call_default_factory=True)


def written(document: str) -> Iterator[tuple[str, Any]]:
    """(path, default) of every key that a reader of the document finds, read as YAML."""
    section = ""
    text = re.sub(r"\n  +", " ", document)
    for line in text.splitlines():
        if heading := re.fullmatch(r"##+ ([a-z]+(?:\.[a-z]+)*)(?: of (\w+))?", line):
            section = f"{heading[1]}:{heading[2]}." if heading[2] else f"{heading[1]}."
        if line == "## The top level":
            section = ""
        key = re.match(r"- (?:\*\*)?`(\w+)`(?:\*\*)?: ", line)
        if key and "; required" in line:
            yield section + key[1], ...
        elif key:
            default = re.search(r"; default `([^`]*)`", line)
            assert default, line
            yield section + key[1], yaml.safe_load(re.sub(r"^(\d+)e-", r"\1.0e-", default[1]))


def test_every_key_is_there_with_its_default() -> None:
    expected = dict(defaults(RunSpec))
    within = {
        "resources.nodes": NodeRange,
        "resources.container": ContainerSpec,
        "tracking.wandb": WandbSpec,
    }
    for path, model in within.items():
        expected |= dict(defaults(model, f"{path}."))
    assert expected.keys() <= DESCRIPTIONS.keys()
    for section, options in (("model", MODEL_OPTIONS), ("data", DATA_OPTIONS)):
        for kind, model in options.items():
            expected |= dict(defaults(model, f"{section}.options:{kind}."))
    # Lists are tuples in a spec.
    expected = {k: list(v) if isinstance(v, tuple) else v for k, v in expected.items()}
    found = list(written(spec_reference()))
    assert dict(found) == expected
    assert len(found) == len(expected)
