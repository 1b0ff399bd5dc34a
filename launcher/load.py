"""A spec, profiles beneath it and overrides above -> RunSpec, or every fault with its place."""

from __future__ import annotations

import codecs
import json
import math
import os
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher.yaml_tree import (
    MOST_BYTES,
    MOST_DEPTH,
    Entry,
    Listing,
    Node,
    NotReadable,
    Place,
    Scalar,
    Table,
    YamlFault,
    compose,
)
from trainer.spec.errors import Fault, SpecError
from trainer.spec.fields import Loc, close_match, one_line, shorten, show
from trainer.spec.options import DATA_OPTIONS, MODEL_OPTIONS
from trainer.spec.run import RunSpec
from trainer.spec.safety import looks_secret

#: The fields that hold a path or a URL, where `~` and `${NAME}` are filled in.
PATH_FIELDS: tuple[tuple[str, ...], ...] = (
    ("run_root",),
    ("checkpoint", "uri"),
    ("checkpoint", "init_from"),
    ("data", "options", "root"),
)

# Whoever reads these reads text, so a number in them stays as it was written.
_KEPT_AS_TEXT: tuple[Loc, ...] = (("resources", "env"), ("resources", "additional_parameters"))

_IGNORED_PREFIX = "x-"
_OVERRIDE_KEY = re.compile(r"[^.\s]+(\.[^.\s]+)*")
_VARIABLE = re.compile(r"\$\{([^}]*)(\}?)")
_VARIABLE_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PLAIN_KEY = r"[A-Za-z0-9_.-]{1,60}"
_YAML_1_1_BOOLS = frozenset({"y", "yes", "n", "no", "on", "off"})

_MOST_HINTS = 100

# What people write who come from other launchers.
_SYNONYMS = {
    "batch_size": "global_batch_size",
    "cpus": "cpus_per_task",
    "gpus": "gpus_per_node",
    "lr": "learning_rate",
    "mem": "mem_gb",
    "memory": "mem_gb",
    "num_nodes": "nodes",
    "save_every": "save_interval",
    "steps": "max_steps",
    "walltime": "time",
}


class Profile(NamedTuple):
    """A file with values for whatever a spec leaves out; `source` names it in faults."""

    text: bytes
    source: str


class LoadedSpec(NamedTuple):
    """A sound spec and what it came from.

    `text` is the file, byte for byte. `overrides` are the KEY=VALUE that count, in the order they
    were given; of several for one key, the last. `source` names the file as the user typed it.
    `profiles` are those beneath it, the lowest first, and `origins` says of each value that was
    given, by its dotted key, where.
    """

    spec: RunSpec
    text: bytes
    overrides: tuple[str, ...]
    source: str
    profiles: tuple[Profile, ...]
    origins: Mapping[str, str]


def load_spec(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    shown_as: str | None = None,
    profiles: Sequence[Profile] = (),
) -> LoadedSpec:
    """Read a spec file, apply overrides (KEY=VALUE, the value read as YAML) and check everything.

    `environ` fills in `~` and `${NAME}` in paths. `shown_as` names the file in faults where
    `str(path)` is not what the user typed. `profiles`, the lowest first, give what the file leaves
    out: of a mapping, key by key.

    Raises:
        SpecError: the file cannot be read, or the spec has faults: all of them in file order,
            those of profiles first and those of overrides last.
    """
    source = one_line(str(path) if shown_as is None else shown_as)
    data = read_file(path, source)
    loading = _Loading(source, environ, [profile.source for profile in profiles])
    root = loading.compose_file(_decode(data, source))
    for number, profile in enumerate(reversed(profiles), 1):
        beneath = loading.compose_profile(_decode(profile.text, profile.source), -number)
        if root is not None and beneath is not None:
            root = _merged(beneath, root)
    given = [loading.parse_override(text) for text in overrides]
    spec, origins = loading.validate(root, [one for one in given if one is not None])
    latest: dict[str, str] = {}
    for override, text in zip(given, overrides, strict=True):
        assert override is not None, "a malformed override is a fault"
        latest.pop(override.key, None)
        latest[override.key] = text
    return LoadedSpec(spec, data, tuple(latest.values()), source, tuple(profiles), origins)


def changed_fields(old: RunSpec, new: RunSpec) -> list[str]:
    """The dotted paths of the fields whose values differ, in the order of the spec."""
    return [dotted(loc) for loc in _differences(old.model_dump(), new.model_dump())]


def spec_keys() -> list[str]:
    """The dotted paths of all keys that a spec may have, in its order, those of options apart."""
    known = list(_keys_of(RunSpec, ()))
    sections = {dotted(path) for path, _ in known if len(path) == 1}
    keys = [dotted((*path, name)) for path, names in known for name in names]
    return [key for key in keys if key not in sections]


def dump_overrides(overrides: Sequence[str]) -> bytes:
    """Overrides as a YAML file; `read_overrides` gives them back unchanged."""
    return "".join(f"- {json.dumps(text)}\n" for text in overrides).encode() or b"[]\n"


def read_overrides(path: Path) -> tuple[str, ...]:
    """The KEY=VALUE that `dump_overrides` wrote.

    Raises:
        SpecError: the file cannot be read, or is no list of text.
    """
    source = one_line(str(path))
    text = _decode(read_file(path, source), source)
    try:
        root, _ = compose(text)
    except NotReadable as err:
        raise SpecError([Fault(source, "", err.fault.problem)]) from err
    items = root.items if isinstance(root, Listing) else []
    values = [item.value for item in items if isinstance(item, Scalar)]
    texts = tuple(value for value in values if isinstance(value, str))
    if not isinstance(root, Listing) or len(texts) != len(items):
        raise SpecError([Fault(source, "", "must be a list of KEY=VALUE texts")])
    return texts


def expand_path(text: str, *, environ: Mapping[str, str], home: str | None) -> str:
    """Fill in `${NAME}` from `environ`, then a leading `~`. A bare `$NAME` stays as it is.

    Raises:
        ValueError: a variable that is unset, empty or looks like a secret; `~` without a home,
            `~user`. The message is the rest of a sentence about the field.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if not match[2] or not re.fullmatch(_VARIABLE_NAME, name):
            raise ValueError(
                "holds a ${ that is not ${NAME}; only a variable's name can stand there"
            )
        if looks_secret(name):
            raise ValueError(f"holds ${{{name}}}, which looks like a secret, and a path holds none")
        if not environ.get(name):
            raise ValueError(f"holds ${{{name}}}, and {name} is not set; set it or write the path")
        return environ[name]

    filled = _VARIABLE.sub(value_of, text)
    if not filled.startswith("~"):
        return filled
    if filled != "~" and not filled.startswith("~/"):
        raise ValueError("begins with ~user, which is not filled in; write the path")
    if not home:
        raise ValueError("begins with ~, and HOME is not set; write the path")
    return home + filled[1:]


def dotted(loc: Loc) -> str:
    """A place in the spec as people write it: `resources.setup[1]`."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            shown = part if re.fullmatch(_PLAIN_KEY, part) else show(part)
            path += f".{shown}" if path else shown
    return path


class _Override(NamedTuple):
    """One `-o KEY=VALUE`; `source`, from 1, marks its places."""

    source: int
    key: str
    node: Node

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))

    @property
    def place(self) -> Place:
        return Place(self.source, 1, 1)


class _Loading:
    """One reading of a spec: collects faults from every stage, then raises them together."""

    def __init__(
        self, source: str, environ: Mapping[str, str], profiles: Sequence[str] = ()
    ) -> None:
        self._file = source
        self._profiles = profiles
        self._environ = environ
        self._override_keys: list[str] = []
        self._faults: list[tuple[Place, Fault]] = []
        self._hints_left = _MOST_HINTS

    def compose_file(self, text: str, source: int = 0) -> Table | None:
        """The file's tree; None, with the fault noted, where there is none to work with."""
        try:
            root, faults = compose(text, source)
        except NotReadable as err:
            self._note_yaml(err.fault)
            return None
        for fault in faults:
            self._note_yaml(fault)
        if isinstance(root, Table):
            return root
        if root is None:
            self._note(Place(source, 1, 1), (), "is empty; a spec begins with `name: ...`")
        else:
            what = "a list" if isinstance(root, Listing) else "a single value"
            self._note(root.place, (), f"a spec is a mapping of keys to values, this is {what}")
        return None

    def compose_profile(self, text: str, source: int) -> Table | None:
        """The tree of a profile; `source`, from -1 down, marks its places."""
        root = self.compose_file(text, source)
        if root is not None and (entry := root.entries.get("name")) is not None:
            self._note(entry.key_place, ("name",), "a profile is for many runs, and names none")
        return root

    def parse_override(self, text: str) -> _Override | None:
        """One `-o`; None, with the fault noted, where it cannot be understood."""
        key, equals, value = text.partition("=")
        key = key.strip()
        self._override_keys.append(key)
        place = Place(len(self._override_keys), 1, 1)
        if not equals or not _OVERRIDE_KEY.fullmatch(key) or key.count(".") >= MOST_DEPTH:
            # What has no "=" may be a value that was meant to be secret.
            shown = "..." if looks_secret(text) else shorten(text)
            self._faults.append(
                (place, Fault(f"-o {shown}", "", "write KEY=VALUE, such as train.max_steps=100"))
            )
            return None
        if key.startswith(_IGNORED_PREFIX):
            self._note(place, (key,), "x- keys are ignored, so to override one does nothing")
            return None
        try:
            node, faults = compose(value, place.source)
        except NotReadable as err:
            self._note(place, tuple(key.split(".")), err.fault.problem)
            return None
        override = _Override(place.source, key, Scalar(place, "", True, None))
        for fault in faults:
            self._note(fault.place, (*override.path, *fault.path), fault.problem)
        if node is None:
            self._note(place, override.path, "has no value; write null for none")
            return None
        return override._replace(node=node)

    def validate(
        self, root: Table | None, overrides: Sequence[_Override]
    ) -> tuple[RunSpec, Mapping[str, str]]:
        """The spec that the tree and the overrides make, and where each given value stands.

        Raises:
            SpecError: whatever has been noted, here and before.
        """
        if root is None:
            raise self._error()
        for override in overrides:
            root = self._apply(root, override)
        kept = {
            key: entry for key, entry in root.entries.items() if not key.startswith(_IGNORED_PREFIX)
        }
        root = replace(root, entries=kept)
        origins = {dotted(loc): self._where(place) for loc, place in _leaves(root)}
        root = self._expand(root)
        self._check_name_is_no_boolean(root)
        try:
            spec = RunSpec.model_validate(_to_data(root, ()))
        except ValidationError as err:
            for detail in err.errors(include_url=False, include_input=False):
                self._note_detail(root, detail)
            raise self._error() from None
        if self._faults:
            raise self._error()
        return spec, origins

    def _apply(self, root: Table, override: _Override) -> Table:
        above = override.path[:-1]
        for length in range(1, len(above) + 1):
            entry = _find(root, above[:length]).entry
            if entry and not isinstance(entry.node, Table) and not _is_null(entry.node):
                inner = dotted(above[:length])
                self._note(
                    override.place,
                    override.path,
                    f"{inner} is no mapping; override {inner} as a whole",
                )
                return root
        return _put(root, override.path, Entry(override.place, override.node))

    def _expand(self, root: Table) -> Table:
        for path in PATH_FIELDS:
            entry = _find(root, path).entry
            if entry is None or not isinstance(node := entry.node, Scalar):
                continue
            if not isinstance(node.value, str) or node.faulty:
                continue
            try:
                value = expand_path(node.value, environ=self._environ, home=self._home())
            except ValueError as err:
                self._note(node.place, path, str(err))
                filled = replace(node, faulty=True)
            else:
                filled = replace(node, value=value)
            root = _put(root, path, Entry(entry.key_place, filled))
        return root

    def _home(self) -> str | None:
        if home := self._environ.get("HOME"):
            return home
        try:
            return pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None

    def _check_name_is_no_boolean(self, root: Table) -> None:
        """`name: no` is text here and a boolean to every YAML 1.1 reader of the same file."""
        entry = _find(root, ("name",)).entry
        node = entry.node if entry else None
        if isinstance(node, Scalar) and node.plain and node.text.lower() in _YAML_1_1_BOOLS:
            self._note(
                node.place,
                ("name",),
                f'other YAML readers take {node.text} for a boolean; quote it: "{node.text}"',
            )

    def _note_detail(self, root: Table, detail: ErrorDetails) -> None:
        """One of pydantic's errors, in our words, at its place in the text."""
        loc = detail["loc"]
        found = _find(root, loc)
        if found.faulty:
            return
        node = found.entry.node if found.entry else None
        place = found.nearest.place
        if detail["type"] == "extra_forbidden" and found.entry:
            # Looking for near misses takes time: a file that is no spec at all gets a few.
            self._hints_left -= 1
            hint = _hint(root, loc) if self._hints_left >= 0 else ""
            self._note(found.entry.key_place, loc, f"unknown key{hint}")
        elif detail["type"] == "missing":
            self._note(place, loc, "is required")
        elif detail["type"] == "refused":
            context = detail.get("ctx", {})
            problem = str(context["problem"])
            if isinstance(node, Scalar):
                problem = str(context["template"]).replace("{found}", _as_written(node))
            at_key = found.entry is not None and context["at_key"]
            self._note(found.entry.key_place if found.entry and at_key else place, loc, problem)
        else:
            self._note(place, loc, f"cannot be used: {detail['msg']}")

    def _note_yaml(self, fault: YamlFault) -> None:
        self._note(fault.place, fault.path, fault.problem)

    def _note(self, place: Place, loc: Loc, problem: str) -> None:
        self._faults.append((place, Fault(self._where(place), dotted(loc), one_line(problem))))

    def _where(self, place: Place) -> str:
        """A place as faults name it."""
        if place.source > 0:
            return f"-o {dotted(tuple(self._override_keys[place.source - 1].split('.')))}"
        file = self._profiles[place.source] if place.source else self._file
        return f"{file}:{place.line}:{place.column}"

    def _error(self) -> SpecError:
        return SpecError([fault for _, fault in sorted(self._faults, key=lambda pair: pair[0])])


class _Found(NamedTuple):
    """What stands at a place in the tree: its entry, if any, and the innermost node on the way.
    `faulty`: one of the nodes on the way is."""

    entry: Entry | None
    nearest: Node
    faulty: bool


def _find(root: Table, loc: Loc) -> _Found:
    entry = Entry(root.place, root)
    faulty = root.faulty
    for part in loc:
        node = entry.node
        if isinstance(node, Table) and isinstance(part, str) and part in node.entries:
            entry = node.entries[part]
        elif isinstance(node, Listing) and isinstance(part, int) and part < len(node.items):
            entry = Entry(node.items[part].place, node.items[part])
        else:
            return _Found(None, node, faulty)
        faulty = faulty or entry.node.faulty
    return _Found(entry, entry.node, faulty)


def _put(table: Table, path: tuple[str, ...], entry: Entry) -> Table:
    """The table with `entry` at `path`. Copies what it changes: aliases share their tables."""
    key, *rest = path
    if rest:
        old = table.entries.get(key)
        inner = old.node if old and isinstance(old.node, Table) else Table(entry.key_place)
        key_place = old.key_place if old else entry.key_place
        entry = Entry(key_place, _put(inner, tuple(rest), entry))
    return replace(table, entries={**table.entries, key: entry})


def _merged(beneath: Table, above: Table) -> Table:
    """Of two mappings, key by key, whatever `above` does not say from `beneath`."""
    entries = dict(beneath.entries)
    for key, entry in above.entries.items():
        lower = entries.get(key)
        if lower and isinstance(lower.node, Table) and isinstance(entry.node, Table):
            entry = Entry(entry.key_place, _merged(lower.node, entry.node))
        entries[key] = entry
    return replace(above, entries=entries)


def _leaves(table: Table, above: Loc = ()) -> Iterator[tuple[Loc, Place]]:
    """The places of all values but mappings, with their keys."""
    for key, entry in table.entries.items():
        if isinstance(entry.node, Table) and entry.node.entries:
            yield from _leaves(entry.node, (*above, key))
        else:
            yield (*above, key), entry.node.place


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value is None


def _to_data(node: Node, path: Loc) -> Any:
    if isinstance(node, Table):
        return {k: _to_data(entry.node, (*path, k)) for k, entry in node.entries.items()}
    if isinstance(node, Listing):
        return [_to_data(item, (*path, index)) for index, item in enumerate(node.items)]
    if path[:-1] in _KEPT_AS_TEXT and isinstance(node.value, (int, float)):
        is_number = not isinstance(node.value, bool) and math.isfinite(node.value)
        return node.text if is_number else node.value
    return node.value


def _as_written(node: Scalar) -> str:
    if node.value is None:
        return shorten(node.text) or "nothing"
    return show(node.value) if isinstance(node.value, str) else shorten(node.text)


def _hint(root: Table, loc: Loc) -> str:
    """What an unknown key was probably meant to be."""
    *above, key = (str(part) for part in loc)
    known = dict(_known_keys(root))
    here = known.get(tuple(above), ())
    homes = [path for path, names in known.items() if key in names]
    if homes:
        places = [f"under {dotted(path)}" if path else "at the top level" for path in homes]
        return f"; it belongs {' or '.join(places)}"
    tidy = key.lower().replace("-", "_")
    tidy = _SYNONYMS.get(tidy, tidy)
    if near := close_match(tidy, here):
        return f"; did you mean {near}?"
    everywhere = {name: path for path, names in known.items() for name in names}
    if near := close_match(tidy, everywhere):
        return f"; did you mean {dotted((*everywhere[near], near))}?"
    return f"; known here: {', '.join(here)}" if here else ""


def _known_keys(root: Table) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Every mapping of the spec with its keys; options by the kind that the spec asks for."""
    yield from _keys_of(RunSpec, ())
    for section, options in (("model", MODEL_OPTIONS), ("data", DATA_OPTIONS)):
        entry = _find(root, (section, "kind")).entry
        kind = entry.node.value if entry and isinstance(entry.node, Scalar) else None
        if isinstance(kind, str) and kind in options:
            yield from _keys_of(options[kind], (section, "options"))


def _keys_of(
    model: type[BaseModel], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    yield path, tuple(model.model_fields)
    for name, info in model.model_fields.items():
        for part in _models_of(info.annotation):
            yield from _keys_of(part, (*path, name))


def _models_of(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_of(part)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], above: Loc = ()) -> Iterator[Loc]:
    for key in (*old, *(key for key in new if key not in old)):
        loc = (*above, key)
        inner = _table_of(old.get(key)), _table_of(new.get(key))
        if inner[0] is not None and inner[1] is not None:
            yield from _differences(inner[0], inner[1], loc)
        # As JSON, since 1 == True == 1.0 in Python and not in a spec.
        elif key not in old or key not in new or json.dumps(old[key]) != json.dumps(new[key]):
            yield loc


def _table_of(value: object) -> dict[str, Any] | None:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def read_file(path: Path, source: str) -> bytes:
    """The bytes of a spec's file, at most MOST_BYTES of them; `source` names it in faults.

    Raises:
        SpecError: it is not there, cannot be read or is too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError as err:
        raise SpecError([Fault(source, "", "no such file")]) from err
    except IsADirectoryError as err:
        raise SpecError([Fault(source, "", "is a directory, not a spec file")]) from err
    except OSError as err:
        raise SpecError([Fault(source, "", f"cannot be read: {err.strerror}")]) from err
    except ValueError as err:  # a NUL in the path
        raise SpecError([Fault(source, "", "is no path of a file")]) from err
    if len(data) > MOST_BYTES:
        raise SpecError([Fault(source, "", "is larger than 1 MiB; a spec is not")])
    return data


def _decode(data: bytes, source: str) -> str:
    body = data.removeprefix(codecs.BOM_UTF8)
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as err:
        offset = len(data) - len(body) + err.start
        problem = f"is not UTF-8: byte 0x{body[err.start]:02X} at offset {offset}; save it as UTF-8"
        raise SpecError([Fault(source, "", problem)]) from err
