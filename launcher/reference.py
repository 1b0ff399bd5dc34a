"""The spec reference, launcher/docs/spec.md: made from the JSON Schema, so that it cannot drift.

What a key means, what it may hold and its default come from `launcher.schema`; what is added here
are headings, and what no single key can say.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, cast

from launcher.schema import Schema, run_spec_schema
from trainer.spec.fields import LARGEST_COUNT, SpecModel
from trainer.spec.options import DATA_OPTIONS, MODEL_OPTIONS
from trainer.spec.run import SCHEDULE_ALIASES, STRATEGY_ALIASES

_WIDTH = 100
#: Stands for a space at which no line may end.
_HELD = "\0"

_INTRODUCTION = """\
# The spec

<!-- Made by `vitra schema --markdown` from launcher/schema.py and launcher/reference.py. -->

A run is one YAML file. Five keys are required: `name`, `model.kind`, `data.kind`,
`train.global_batch_size`, and one of `train.max_steps` and `train.epochs`. `vitra init` writes a
commented file to start from, `vitra plan` says what becomes of it, and `vitra schema` prints the
JSON Schema by which editors complete and check one.

- **Unknown keys are refused** at every level, with the nearest known one; so is a key that is there
  twice. Keys at the top that begin with `x-` are ignored: a place for YAML anchors.
- **YAML 1.2**: `1e-4` is a number, `no` is a word, `010` is ten. `1e4` may be a whole number. Where
  text is wanted a number is refused (quote it); infinity and not-a-number are refused everywhere.
- **Overrides**: `-o train.learning_rate=3e-4`, whose value is read as YAML. Of a key that is set in
  several places, `-o` counts for more than the spec, the spec more than the user's profile
  (`--profile NAME`: `~/.config/vitra/profiles/NAME.yaml`), and that more than the site's
  (`/etc/vitra/profiles/NAME.yaml`). `vitra plan` shows where each value came from.
- **Secrets have no place in a spec.** Names that look like one are refused with a value; write
  `resources.env: {WANDB_API_KEY: null}` to pass a variable of your shell through.
- **Bounds**: 1 MiB, 64 levels, 100,000 nodes after aliases.

All faults of a file are listed at once, each with its place, and nothing is written:

```
spec.yaml:14:3: resources.gpus_per_nod: unknown key; did you mean gpus_per_node?
spec.yaml:9:18: train.learning_rate: must be more than 0, found -0.1
```
"""

#: The lines that open a group of keys, by its first key.
_GROUPS: Mapping[str, str] = {
    "train.strategy": "How the model is laid out over ranks",
    "train.epochs": "How long, and how much at once",
    "train.learning_rate": "The optimizer, AdamW",
    "train.lr_scheduler_type": "The schedule",
    "train.action_model_learning_rate": "The action model, where it differs from the backbone",
    "train.enable_gradient_checkpointing": "Memory, precision, exactness",
    "resources.nodes": "How much",
    "resources.partition": "Where",
    "resources.gpu_request": "How it is asked for",
    "resources.setup": "What the processes find",
}

_GROUPED = frozenset(path.partition(".")[0] for path in _GROUPS)

_OPTIONS: Mapping[str, Mapping[str, type[SpecModel]]] = {
    "model": MODEL_OPTIONS,
    "data": DATA_OPTIONS,
}

#: What a section needs said beyond its keys.
_NOTES: Mapping[str, str] = {
    "train": """\
**The batch is exact.** `per_device_batch_size x world size x accumulation = global_batch_size`,
where the world size is `nodes x tasks_per_node`. Nothing is ever rounded: without a solution the
spec is refused, with the nearest values that work. Without `per_device_batch_size` it is the
largest divisor of `global_batch_size / world size` up to `max_per_device_batch_size`.

**Length.** `max_steps`, or else `epochs x samples / global_batch_size`, rounded up; submit counts
the samples, so `plan` does not know the steps of such a run. The stream of samples has no seams:
each epoch is an order without repetition, every step has exactly `global_batch_size` samples, and
a step may span two epochs.

**Schedules.** With step k from 1, total T and w = `warmup_ratio` x T rounded down: the peak x k/w
up to w; then the peak, or for the cosine floor + (peak - floor) x (1 + cos(pi x (k - w)/(T -
w)))/2, where floor = `min_lr_ratio` x peak. `backbone-freeze-warmup`: the backbone's rate is
exactly 0 for `freeze_steps` steps and its peak afterwards; the action model's is constant.
""",
    "resources": """\
**Time limits** have Slurm's forms: minutes, `minutes:seconds`, `hours:minutes:seconds`,
`days-hours`, `days-hours:minutes`, `days-hours:minutes:seconds`. `24:00:00` without quotes is 24
hours all the same; `1:30` is a minute and a half as in Slurm, rounded up to two, and `plan` says
so.

**Elastic runs** (`nodes: {min: 2, max: 8}`) are planned for every node count; this version does
not yet run them.
""",
    "retry": """\
Preemption and node failure start the run again without limit; time limits and hangs as long as it
gets anywhere in between. A resume by a person gives it all its starts back.
""",
}


def spec_reference() -> str:
    """The document, in Markdown, ending in a newline."""
    schema = run_spec_schema()
    parts: dict[str, Schema] = schema["$defs"]
    lines = [_INTRODUCTION, "## The top level", ""]
    for key, place in schema["properties"].items():
        if "$ref" not in place:
            lines += _entry(key, key, place, schema)
    for key, place in schema["properties"].items():
        if part := _part_of(place, parts):
            lines += ["", f"## {key}", "", place["description"]]
            lines += _section(key, part, parts)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: str, part: Schema, parts: Mapping[str, Schema]) -> Iterator[str]:
    """What is to be said of a section as a whole, its keys, and what stands in them."""
    if section in _NOTES:
        yield from ("", _NOTES[section].rstrip())
    if section not in _GROUPED:
        yield ""
    inner: list[str] = []
    for name, place in part["properties"].items():
        path = f"{section}.{name}"
        if path in _GROUPS:
            yield from ("", f"### {_GROUPS[path]}", "")
        yield from _entry(name, path, place, part)
        if below := _part_of(place, parts):
            inner += ["", f"### {path}", ""]
            for key, its in below["properties"].items():
                inner += _entry(key, f"{path}.{key}", its, below)
    yield from inner
    for kind, model in _OPTIONS.get(section, {}).items():
        options = parts[model.__name__]
        yield from ("", f"### {section}.options of {kind}", "", options["description"], "")
        for key, its in options["properties"].items():
            yield f"- `{key}`: {_values(its, key)}{_default(its, key, options)}"


def _part_of(place: Schema, parts: Mapping[str, Schema]) -> Schema | None:
    """The mapping that a key holds or may hold, where its keys are known."""
    for inner in (place, *cast("list[Schema]", place.get("anyOf", []))):
        if "$ref" in inner:
            return parts[inner["$ref"].rpartition("/")[2]]
    return None


def _entry(name: str, path: str, place: Schema, part: Schema) -> list[str]:
    """A key as an item of a list: what it means, what it holds, what it is unless it is written."""
    text = place["description"]
    held = f"{_values(place, path)}{_default(place, name, part)}"
    # What is code stays on one line, so that it can be searched for and copied.
    whole = re.sub("`[^`]*`", lambda code: code[0].replace(" ", _HELD), held[0].upper() + held[1:])
    lines = textwrap.wrap(
        f"- **`{name}`**: {text} *{whole}.*",
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_HELD, " ") for line in lines]


def _default(place: Schema, name: str, part: Schema) -> str:
    if name in part.get("required", ()):
        return "; required"
    if "default" in place:
        return f"; default `{_yaml(place['default'])}`"
    return "; default `{}`"


def _yaml(value: object) -> str:
    """A default as one would write it in a spec."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and 0 < value < 1e-3:
        mantissa, _, exponent = f"{value:e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, cast('list[object]', value)))}]"
    # Slurm's hours:minutes:seconds would be a number of another base to other readers of YAML.
    return f'"{value}"' if ":" in str(value) else str(value)


def _values(place: Schema, path: str) -> str:
    """What may be written, in words; null is left to the default and the meaning."""
    kinds = [k for k in cast("list[Schema]", place.get("anyOf", [place])) if k != {"type": "null"}]
    texts = [_kind(kind, path) for kind in kinds]
    if {"type": "null"} in place.get("anyOf", ()) and place.get("default") is not None:
        texts.append("`null`")
    return " or ".join(texts)


def _kind(kind: Schema, path: str) -> str:
    if "$ref" in kind:
        return "the mapping below"
    if "const" in kind:
        return f"`{_yaml(kind['const'])}`"
    if "enum" in kind:
        return _words(kind["enum"])
    if kind["type"] == "string":
        return "`package.module:factory`" if path.endswith(".kind") else "text"
    if kind["type"] == "array":
        return _list(kind)
    if kind["type"] == "object":
        return _mapping(kind)
    return {"boolean": "true or false"}.get(kind["type"]) or _number(kind)


def _words(words: list[str]) -> str:
    """The words that a key may be, then others that mean the same."""
    aliases = {a: w for a, w in (STRATEGY_ALIASES | SCHEDULE_ALIASES).items() if a in words}
    own = ", ".join(f"`{word}`" for word in words if word not in aliases)
    also = [
        " and ".join(f"`{alias}`" for alias, meant in aliases.items() if meant == word)
        + f" for `{word}`"
        for word in dict.fromkeys(aliases.values())
    ]
    return ("one of " if "," in own else "") + own + (f" (or {', '.join(also)})" if also else "")


def _list(kind: Schema) -> str:
    if "prefixItems" in kind:
        each: list[Schema] = kind["prefixItems"]
        return f"a list of {len(each)}, each {_number(each[0])}"
    items: Schema = kind["items"]
    if "enum" in items:
        return "a list of any of " + ", ".join(f"`{word}`" for word in items["enum"])
    return "a list of texts"


def _mapping(kind: Schema) -> str:
    """A free mapping; what its values may be, where not anything."""
    inside: Any = kind.get("additionalProperties")
    if inside is True:
        return "a mapping"
    types: list[str] = inside.get("type") or [*inside["anyOf"][0]["type"], "true"]
    names = {"string": "text", "number": "a number", "null": "`null`", "true": "`true`"}
    values = [names[one] for one in types]
    return f"a mapping of names to {', '.join(values[:-1])} or {values[-1]}"


def _number(kind: Schema) -> str:
    whole = "a whole number" if kind["type"] == "integer" else "a number"
    least, most = kind.get("minimum"), kind.get("maximum")
    if most is not None and most >= LARGEST_COUNT:
        most = None
    if "exclusiveMinimum" in kind:
        return f"{whole} above {kind['exclusiveMinimum']}"
    if "exclusiveMaximum" in kind:
        return f"{whole} from {least} to below {kind['exclusiveMaximum']}"
    if least is None:
        return whole
    return f"{whole} from {least}" + (f" to {most}" if most is not None else "")
