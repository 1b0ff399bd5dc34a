"""YAML text -> a tree of nodes that know where they stand.

The parser is PyYAML's; what a scalar means is YAML 1.2's core schema, not the 1.1 that PyYAML
implements: `1e-4` is a number, `010` is ten, `no` is text. Nothing is ever constructed from a tag.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import yaml

from trainer.spec.fields import Loc, shorten

MOST_BYTES = 2**20
MOST_DEPTH = 64
#: Nodes of the document with every alias written out.
MOST_NODES = 100_000
#: Characters of a number.
LONGEST_NUMBER = 100

# libyaml's parser is ten times as fast, where PyYAML was built with it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_CORE = "tag:yaml.org,2002:"
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")

# What YAML cannot hold. U+0085, U+2028 and U+2029 are left out too: 1.1 ends a line (and so a
# comment) there and 1.2 does not, so that two readers would see two different files. So is a byte
# order mark in mid-file: nobody sees it, and a key that it is glued to is another key.
_UNREADABLE = re.compile(
    "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile(r"\r\n|\r|\n")


class Place(NamedTuple):
    """Where a node begins: in which text (0: the file, n: the n-th override, -n: the n-th profile
    from above), line and column from 1."""

    source: int
    line: int
    column: int


@dataclass(slots=True, eq=False)
class Scalar:
    """One value. `plain`: without quotes or tag."""

    place: Place
    text: str
    plain: bool
    value: bool | int | float | str | None
    faulty: bool = False


@dataclass(slots=True, eq=False)
class Listing:
    """A sequence."""

    place: Place
    items: list[Node]
    faulty: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """A key's place and its value."""

    key_place: Place
    node: Node


@dataclass(slots=True, eq=False)
class Table:
    """A mapping: explicit keys first, then those that merges contributed. Do not change in place:
    an alias is the very node that it stands for."""

    place: Place
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    faulty: bool = False


#: A node is `faulty` where a fault already says what is wrong with it, so that no other needs to.
Node = Scalar | Listing | Table


class YamlFault(NamedTuple):
    """One thing wrong in the text, at a place; `path` leads to the node, as far as it is known."""

    place: Place
    path: Loc
    problem: str


class NotReadable(Exception):
    """The text is not YAML, or more of it than is allowed; `fault` is the one thing to say."""

    def __init__(self, fault: YamlFault) -> None:
        super().__init__(fault.problem)
        self.fault = fault


@dataclass(slots=True, eq=False)
class _Open:
    """A collection whose end has not been read. A mapping's children alternate: key, value."""

    place: Place
    is_table: bool
    anchor: str | None
    nodes_before: int
    faulty: bool
    height: int = 1
    children: list[Node] = field(default_factory=list["Node"])


class _Anchored(NamedTuple):
    """What an alias adds to the document: its node, how many nodes that is, how deep."""

    node: Node
    nodes: int
    height: int


def compose(text: str, source: int = 0) -> tuple[Node | None, list[YamlFault]]:
    """Read one document: its root (None: there is none) and what is wrong in it.

    The faults are those that leave the rest readable: duplicate keys, keys that are not text,
    foreign tags, bad merges.

    Raises:
        NotReadable: a syntax error, a second document, an alias without its anchor or within
            itself, too deep, or too many nodes.
    """
    unreadable = _UNREADABLE.search(text)
    if unreadable:
        place = _place_of(text, unreadable.start(), source)
        what = f"the character U+{ord(unreadable[0]):04X} cannot stand in a spec; remove it"
        raise NotReadable(YamlFault(place, (), what))
    composer = _Composer(source)
    try:
        parser = _LOADER(text)
        while parser.check_event():
            composer.take(parser.get_event())
    except yaml.YAMLError as err:
        raise NotReadable(_syntax_fault(err, text, source)) from err
    return composer.root, composer.faults


class _Composer:
    """Builds the tree from the parser's events, counting as it goes, without recursion."""

    def __init__(self, source: int) -> None:
        self.root: Node | None = None
        self.faults: list[YamlFault] = []
        self._source = source
        self._open: list[_Open] = []
        self._anchors: dict[str, _Anchored | None] = {}  # None: its node is still open
        self._nodes = 0
        self._documents = 0

    def take(self, event: Any) -> None:
        """Digest one event of the parser."""
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    self._stop(event, "a second document begins here; a spec is one document")
            case yaml.AliasEvent():
                self._add_alias(event)
            case yaml.ScalarEvent():
                self._count(event, 1, 0)
                node = self._scalar(event)
                if event.anchor is not None:
                    self._anchors[event.anchor] = _Anchored(node, 1, 0)
                self._add(node)
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._count(event, 1, 1)
                is_table = isinstance(event, yaml.MappingStartEvent)
                place = self._place(event)
                faulty = event.tag not in (None, "!", _CORE + ("map" if is_table else "seq"))
                if faulty:
                    self._fault(place, _foreign(event.tag))
                self._open.append(_Open(place, is_table, event.anchor, self._nodes - 1, faulty))
                if event.anchor is not None:
                    self._anchors[event.anchor] = None
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._close()
            case _:
                pass

    def _close(self) -> None:
        done = self._open.pop()
        node = self._table(done) if done.is_table else Listing(done.place, done.children)
        node.faulty = done.faulty
        if done.anchor is not None:
            size = self._nodes - done.nodes_before
            self._anchors[done.anchor] = _Anchored(node, size, done.height)
        self._add(node, done.height)

    def _add_alias(self, event: Any) -> None:
        if event.anchor not in self._anchors:
            self._stop(event, f"no anchor &{shorten(event.anchor)} stands above this alias")
        target = self._anchors[event.anchor]
        if target is None:
            self._stop(event, f"the alias *{shorten(event.anchor)} stands within its own anchor")
        self._count(event, target.nodes, target.height)
        node = target.node
        # A lone value is looked for where it is used; a block, where it is written.
        self._add(
            replace(node, place=self._place(event)) if isinstance(node, Scalar) else node,
            target.height,
        )

    def _add(self, node: Node, height: int = 0) -> None:
        if self._open:
            parent = self._open[-1]
            parent.children.append(node)
            parent.height = max(parent.height, height + 1)
        else:
            self.root = node

    def _count(self, event: Any, nodes: int, height: int) -> None:
        self._nodes += nodes
        if self._nodes > MOST_NODES:
            self._stop(event, f"more than {MOST_NODES} values, aliases written out")
        if len(self._open) + height > MOST_DEPTH:
            self._stop(event, f"nested more than {MOST_DEPTH} levels deep")

    def _scalar(self, event: Any) -> Scalar:
        text: str = event.value
        plain: bool = event.style in (None, "") and event.tag is None
        node = Scalar(self._place(event), text, plain, text)
        problem: str | None = None
        if _SURROGATE.search(text):
            problem = "holds half a character (a lone surrogate)"
        elif event.tag == "!" or (event.tag is None and not plain):
            pass  # text, whatever it looks like
        elif len(text) > LONGEST_NUMBER and _is_number(text):
            problem = f"a number of more than {LONGEST_NUMBER} characters"
        elif event.tag is None:
            node.value = _core_value(text)
        else:
            try:
                node.value = _tagged_value(event.tag, text)
            except ValueError as err:
                problem = str(err)
        if problem:
            node.faulty = True
            self._fault(node.place, problem)
        return node

    def _table(self, done: _Open) -> Table:
        table = Table(done.place)
        merges: list[tuple[Scalar, Node]] = []
        for key, node in zip(done.children[::2], done.children[1::2], strict=True):
            if not isinstance(key, Scalar):
                self._fault(key.place, "a key must be text, not a mapping or a list")
            elif not isinstance(key.value, str):
                self._fault(key.place, f'a key must be text; quote it: "{shorten(key.text)}"')
            elif key.text == "<<" and key.plain:
                if merges:
                    self._fault(key.place, "`<<` stands twice; give it one list of mappings")
                merges.append((key, node))
            elif earlier := table.entries.get(key.value):
                self._fault(
                    key.place,
                    f"written twice, on line {earlier.key_place.line} and on line "
                    f"{key.place.line}; keep one",
                    key.value,
                )
            else:
                table.entries[key.value] = Entry(key.place, node)
        for key, node in merges:
            sources = node.items if isinstance(node, Listing) else [node]
            for merged in sources:
                if isinstance(merged, Table):
                    # What is there already wins: explicit keys, then earlier mappings.
                    for name, entry in merged.entries.items():
                        table.entries.setdefault(name, entry)
                else:
                    self._fault(key.place, "`<<` takes a mapping or a list of mappings")
                    break
        return table

    def _place(self, event: Any) -> Place:
        return _place(event.start_mark, self._source)

    def _path(self) -> Loc:
        """The path to the node that is being read."""
        path: list[str | int] = []
        for parent in self._open:
            children = parent.children
            if not parent.is_table:
                path.append(len(children))
            elif len(children) % 2 and isinstance(children[-1], Scalar):
                path.append(children[-1].text)
        return tuple(path)

    def _fault(self, place: Place, problem: str, *key: str) -> None:
        self.faults.append(YamlFault(place, (*self._path(), *key), problem))

    def _stop(self, event: Any, problem: str) -> NoReturn:
        raise NotReadable(YamlFault(self._place(event), (), problem))


def _core_value(text: str) -> bool | int | float | str | None:
    """The meaning of a plain scalar in YAML 1.2's core schema."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    number = _number(text)
    return text if number is None else number


def _is_number(text: str) -> bool:
    return any(form.fullmatch(text) for form in (_INT, _OCTAL, _HEX, _FLOAT))


def _number(text: str) -> int | float | None:
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INF.fullmatch(text):
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if _NAN.fullmatch(text) else None


def _tagged_value(tag: str, text: str) -> bool | int | float | str | None:
    """The value of a scalar with an explicit tag of the core schema.

    Raises:
        ValueError: another tag, or the text does not fit the tag.
    """
    name = tag.removeprefix(_CORE)
    if name == "str":
        return text
    if tag not in (f"{_CORE}{kind}" for kind in ("null", "bool", "int", "float")):
        raise ValueError(_foreign(tag))
    value = _core_value(text)
    fits = {
        "null": value is None,
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool),
    }
    if not fits[name]:
        raise ValueError(f"is tagged !!{name} and is none")
    return float(value) if name == "float" and isinstance(value, int) else value


def _foreign(tag: str) -> str:
    short = "!!" + tag.removeprefix(_CORE) if tag.startswith(_CORE) else tag
    return f"the tag {shorten(short)} means nothing in a spec; remove it"


def _place(mark: Any, source: int) -> Place:
    return Place(source, mark.line + 1, mark.column + 1)


def _place_of(text: str, index: int, source: int) -> Place:
    """Line and column of a character."""
    ends = [match.end() for match in _LINE_END.finditer(text, 0, index)]
    return Place(source, len(ends) + 1, index - (ends[-1] if ends else 0) + 1)


def _syntax_fault(err: yaml.YAMLError, text: str, source: int) -> YamlFault:
    if not isinstance(err, yaml.MarkedYAMLError) or err.problem_mark is None:
        return YamlFault(Place(source, 1, 1), (), f"not YAML: {shorten(str(err))}")
    place = _place(err.problem_mark, source)
    lines = _LINE_END.split(text)
    line = lines[place.line - 1] if place.line <= len(lines) else ""
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" in indent or line[place.column - 1 : place.column] == "\t":
        return YamlFault(place, (), "a tab in the indentation; YAML wants spaces there")
    problem = f"not YAML: {err.problem or err.context}"
    if err.context and err.problem and err.context_mark is not None:
        problem += f" {err.context} that begins on line {err.context_mark.line + 1}"
    return YamlFault(place, (), shorten(problem) if len(problem) > 200 else problem)
