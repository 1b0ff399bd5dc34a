"""The JSON Schema: every key of the contract, explained; what it refuses is never a sound spec."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import launcher
from launcher.load import load_spec, spec_keys
from launcher.schema import DESCRIPTIONS, run_spec_schema
from launcher.templates import template_names
from launcher.yaml_tree import Listing, Node, Table, compose
from trainer.spec.options import DATA_OPTIONS, MODEL_OPTIONS
from trainer.spec.run import RunSpec

Schema = dict[str, Any]

SCHEMA = run_spec_schema()

CONTRACT = {
    "": "name seed run_root model data train checkpoint resources retry tracking",
    "model": "kind options",
    "data": "kind options num_workers prefetch_factor",
    "train": "strategy replicate epochs max_steps global_batch_size per_device_batch_size "
    "max_per_device_batch_size learning_rate weight_decay betas max_grad_norm lr_scheduler_type "
    "warmup_ratio freeze_steps min_lr_ratio action_model_learning_rate action_model_weight_decay "
    "enable_gradient_checkpointing enable_mixed_precision_training mixed_precision_dtype "
    "reduce_in_full_precision repeated_diffusion_steps deterministic",
    "checkpoint": "uri save_interval keep_last keep_every async_save init_from storage_options",
    "resources": "nodes gpus_per_node tasks_per_node cpus_per_task mem_gb time partition account "
    "qos constraint exclude nodelist reservation gpu_request signal_lead_s additional_parameters "
    "setup env container",
    "resources.nodes": "min max",
    "resources.container": "runtime image mounts",
    "retry": "restart_on max_error_restarts max_no_progress hang_timeout_s",
    "tracking": "wandb log_interval sample_ids",
    "tracking.wandb": "project entity mode tags",
}

MINIMAL: dict[str, Any] = {
    "name": "a",
    "model": {"kind": "vla"},
    "data": {"kind": "synthetic"},
    "train": {"global_batch_size": 8, "max_steps": 10},
}


def faults(schema: Schema, value: Any, where: str = "") -> Iterator[str]:
    """What a validator says of `value`; knows the keywords that this schema uses, and no others."""
    known = {
        *("$schema", "$defs", "title", "description", "default"),
        *("$ref", "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "pattern", "required", "properties", "patternProperties"),
        *("additionalProperties", "items", "prefixItems", "minItems", "maxItems"),
        *("anyOf", "allOf", "if", "then"),
    }
    assert schema.keys() <= known, schema.keys() - known
    if "$ref" in schema:
        yield from faults(SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, where)
    types = schema.get("type", [])
    if types and not any(
        is_of_type(value, t) for t in (types if isinstance(types, list) else [types])
    ):
        yield f"{where}: {value!r} is not of type {types}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is not one of {schema['enum']}"
    if "const" in schema and (value != schema["const"] or type(value) is not type(schema["const"])):
        yield f"{where}: {value!r} is not {schema['const']!r}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = schema.get("minimum"), schema.get("maximum")
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        if (low is not None and value < low) or (high is not None and value > high):
            yield f"{where}: {value} is out of bounds"
        if (above is not None and value <= above) or (below is not None and value >= below):
            yield f"{where}: {value} is out of bounds"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{where}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{where}: {len(value)} items"
        parts = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        for number, (part, item) in enumerate(zip(parts, value, strict=False)):
            yield from faults(part, item, f"{where}[{number}]")
    if isinstance(value, dict):
        yield from (f"{where}: no {key}" for key in schema.get("required", []) if key not in value)
        for key, item in value.items():
            below_ = [schema["properties"][key]] if key in schema.get("properties", {}) else []
            below_ += [
                s for p, s in schema.get("patternProperties", {}).items() if key[:2] == p[1:]
            ]
            rest = schema.get("additionalProperties", True)
            if not below_ and rest is False:
                yield f"{where}: unknown key {key}"
            elif not below_ and isinstance(rest, dict):
                below_ = [rest]
            for part in below_:
                yield from faults(part, item, f"{where}.{key}")
    if "anyOf" in schema and all(list(faults(s, value, where)) for s in schema["anyOf"]):
        yield f"{where}: {value!r} is none of {schema['anyOf']}"
    for part in schema.get("allOf", []):
        yield from faults(part, value, where)
    if "if" in schema and not list(faults(schema["if"], value, where)):
        yield from faults(schema["then"], value, where)


def is_of_type(value: Any, name: str) -> bool:
    if name == "integer":
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return whole and not isinstance(value, bool)
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[name])


def refused(document: dict[str, Any]) -> list[str]:
    return list(faults(SCHEMA, document))


def data_of(node: Node) -> Any:
    """Plain data with YAML 1.2's meaning, as vitra and editors read it."""
    if isinstance(node, Table):
        return {key: data_of(entry.node) for key, entry in node.entries.items()}
    return [data_of(n) for n in node.items] if isinstance(node, Listing) else node.value


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(MINIMAL)
    *above, key = path.split(".")
    table = document
    for part in above:
        table = table.setdefault(part, {})
    table[key] = value
    return document


def test_it_has_the_keys_of_the_contract_each_explained() -> None:
    keys = {
        f"{section}.{key}".removeprefix(".")
        for section, names in CONTRACT.items()
        for key in names.split()
    }
    assert set(DESCRIPTIONS) == keys
    sections = {"model", "data", "train", "checkpoint", "resources", "retry", "tracking"}
    assert set(spec_keys()) == keys - sections
    assert SCHEMA["properties"].keys() == set(CONTRACT[""].split())
    for section, part in (("train", "TrainSpec"), ("tracking.wandb", "WandbSpec")):
        properties = SCHEMA["$defs"][part]["properties"]
        assert properties.keys() == set(CONTRACT[section].split())
        assert all(place["description"] for place in properties.values())


def test_no_object_is_loose() -> None:
    for name, part in {"": SCHEMA, **SCHEMA["$defs"]}.items():
        assert part["additionalProperties"] is False, name
    for model in (*MODEL_OPTIONS.values(), *DATA_OPTIONS.values()):
        assert SCHEMA["$defs"][model.__name__]["properties"].keys() == model.model_fields.keys()


@pytest.mark.parametrize("name", template_names())
def test_every_template_validates(name: str) -> None:
    path = Path(launcher.__file__).with_name("examples") / f"{name}.yaml"
    root, _ = compose(path.read_text())
    assert root is not None
    assert refused(data_of(root)) == []
    # With every default filled in it is still the same spec.
    filled = load_spec(path, environ={}).spec.model_dump(mode="json")
    assert refused(filled) == []


SOUND = {
    "x-anything": {"a": [1]},
    "train.max_steps": 1e4,
    "train.betas": [0.8, 0.9],
    "train.strategy": "full-shard",
    "resources.nodes": {"min": 1, "max": 4},
    "resources.gpus_per_node": "a100:4",
    "resources.time": 90,
    "resources.env": {"A": "x", "B": 1, "C": None},
    "resources.additional_parameters": {"nice": 5, "hold": True, "mail-user": "x"},
    "resources.container": {"runtime": "pyxis", "image": "r#i:1", "mounts": ["/a:/b:ro"]},
    "model.kind": "pkg.module:factory",
    "data.options": {"samples": 9},
    "tracking.wandb": {"project": "p", "tags": ["a"]},
    "checkpoint.storage_options": {"client_kwargs": {"n": [1, None]}},
}


@pytest.mark.parametrize("path", SOUND)
def test_what_is_sound_passes(path: str) -> None:
    document = changed(path, SOUND[path])
    RunSpec.model_validate({k: v for k, v in document.items() if k[:2] != "x-"})
    assert refused(document) == []


UNSOUND = {
    "name": "a b",
    "seed": -1,
    "train.max_steps": "100",
    "train.max_step": 3,
    "train.learning_rate": 0,
    "train.betas": [0.9],
    "train.strategy": "fsdp",
    "train.global_batch_size": None,
    "checkpoint.keep_last": 1,
    "resources.nodes": {"min": 1},
    "resources.env": {"A": [1]},
    "resources.additional_parameters": {"hold": False},
    "resources.container": {"runtime": "docker", "image": "i"},
    "model.kind": "no-such-model",
    "model.options": {"dims": 3},
    "data.options": {"samples": 0},
    "tracking.wandb": {"projekt": "p"},
    "retry.restart_on": ["boredom"],
}


@pytest.mark.parametrize("path", UNSOUND)
def test_what_is_not_is_refused_by_both(path: str) -> None:
    document = changed(path, UNSOUND[path])
    with pytest.raises(ValidationError):
        RunSpec.model_validate(document)
    assert refused(document)


def test_the_length_of_the_training_is_required() -> None:
    for train in ({}, {"max_steps": None}, {"epochs": None, "max_steps": None}):
        document = {**MINIMAL, "train": {"global_batch_size": 8, **train}}
        assert refused(document)
    assert refused({**MINIMAL, "train": {"global_batch_size": 8, "epochs": 0.5}}) == []
