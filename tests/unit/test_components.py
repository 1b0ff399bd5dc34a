"""A `kind` becomes an object, or an error that names the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.components import (
    BUILT_IN_DATA,
    BUILT_IN_MODELS,
    Dataset,
    DrawsPerSample,
    Evaluates,
    Model,
    ModelContext,
    resolve,
)
from trainer.data.samples import DataMeta
from trainer.spec.errors import UsageError
from trainer.spec.options import DATA_OPTIONS, MODEL_OPTIONS


def test_built_in_names_are_those_of_the_spec() -> None:
    assert set(BUILT_IN_DATA) == set(DATA_OPTIONS)
    assert set(BUILT_IN_MODELS) == set(MODEL_OPTIONS)


@pytest.mark.parametrize("kind", sorted(BUILT_IN_DATA))
def test_built_in_data_is_there(kind: str) -> None:
    assert callable(resolve(kind, BUILT_IN_DATA, "data.kind"))


def test_built_in_components_offer_the_protocols() -> None:
    data = resolve("synthetic", BUILT_IN_DATA, "data.kind")({}, 1)
    assert isinstance(data, Dataset)
    assert isinstance(data.meta, DataMeta)
    model = resolve("vla", BUILT_IN_MODELS, "model.kind")({}, ModelContext(data.meta, 4))
    assert isinstance(model, Model)
    assert isinstance(model, DrawsPerSample)
    assert isinstance(model, Evaluates)


def test_own_components_by_module_and_attribute() -> None:
    assert resolve("collections:OrderedDict.fromkeys", {}, "data.kind")("a") == {"a": None}
    # A built-in name means the built-in, whatever else could be imported by it.
    assert resolve("json", {"json": "math:sqrt"}, "data.kind")(4) == 2.0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "no_such_package.data:build",
            "data.kind: 'no_such_package.data:build' cannot be imported",
        ),
        ("math:no_such", "data.kind: math has no 'no_such'"),
        ("collections:OrderedDict.no.such", "data.kind: collections has no 'OrderedDict.no.such'"),
        ("math:pi", "data.kind: 'math:pi' is float, not something to call"),
    ],
)
def test_what_cannot_be_found_is_named(kind: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(kind, {}, "data.kind")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [("def build(: pass\n", "SyntaxError"), ("\nbuild = None + 1\n", "TypeError")],
)
def test_a_module_that_fails_to_load_is_named(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{fault.lower()}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as caught:
        resolve(f"{name}:build", {}, "model.kind")
    assert f"model.kind: '{name}:build' cannot be imported: {fault}: " in caught.value.message
    assert name in str(caught.value)
