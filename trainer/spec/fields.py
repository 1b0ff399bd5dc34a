"""The value types of the spec's fields.

Each type is strict where YAML or pydantic would guess (text for a number, true for 1, nan), and
says in one sentence what it wants, what it found and how to write it. A refusal is a
`PydanticCustomError` of type "refused" whose context holds `problem`, the sentence; `template`, the
sentence with `{found}` where the value is shown, so that a caller who knows how the value was
written can show it that way; and `at_key`, true where the name is at fault and not the value.
"""

from __future__ import annotations

import difflib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from trainer.spec.safety import has_user_info, looks_secret, text_problem

#: The largest count of anything (steps, samples): beyond all use, small enough for arithmetic.
LARGEST_COUNT = 2**31
#: Characters of a value that a message shows.
SHOWN = 60

Loc = tuple[str | int, ...]

SECRET = (
    "looks like a secret, and a spec holds none; leave it out and give it through the environment "
    "or a credential file"
)

_NUMBER = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
_GROUPED = r"[-+]?[0-9]+([_,' ][0-9]+)+(\.[0-9]*)?"
_YAML_1_1_BOOLS = frozenset({"y", "yes", "n", "no", "on", "off", "true", "false"})


class SpecModel(BaseModel):
    """The base of all parts of a spec: immutable, no unknown keys, no values in error texts."""

    # The command line starts sooner when only the models that it uses are compiled (defer_build),
    # when pydantic finds types and no text where they are annotated (their modules do not postpone
    # annotations), and when small records beside them are NamedTuples: a frozen dataclass takes
    # four times as long to make. Patterns that a sound spec never meets are compiled when met.
    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True
    )


def one_line(text: str) -> str:
    """`text` with everything escaped that cannot be printed on one line of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str) -> str:
    """`text` on one line, cut to about SHOWN characters."""
    return one_line(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


def show(value: object) -> str:
    """A value as a message shows it: short, on one line, without credentials in URLs."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 200 else "a huge integer"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        if has_user_info(value):
            return "a URL with a user name or password in it"
        return f'"{shorten(value)}"'
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"a {type(value).__name__}"


def refusal(template: str, value: object = None, *, at_key: bool = False) -> PydanticCustomError:
    """The error of a field; `{found}` in `template` stands for the value.

    `at_key`: the name is at fault, not the value.
    """
    problem = template.replace("{found}", show(value))
    context = {"problem": problem, "template": template, "at_key": at_key}
    return PydanticCustomError("refused", "{problem}", context)


def refuse_all(faults: Iterable[tuple[Loc, PydanticCustomError]]) -> None:
    """Raise all of a mapping's faults at once, each at its own place; no faults: return."""
    details = [InitErrorDetails(type=error, loc=loc, input=None) for loc, error in faults]
    if details:
        raise ValidationError.from_exception_data("spec", details, hide_input=True)


def close_match(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` is most likely a misspelling of."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return matches[0] if matches else None


def _number_hint(text: str) -> str:
    """The end of a sentence that refuses `text` where a number belongs."""
    if re.fullmatch(_NUMBER, text):
        return "the text {found}; remove the quotes"
    if len(text) <= SHOWN and re.fullmatch(_GROUPED, text):
        return "the text {found}; write " + re.sub("[_,' ]", "", text)
    return "{found}"


class _Checked(ABC):
    """An annotation by which pydantic has `check` see a value before anything else does."""

    @abstractmethod
    def check(self, value: object) -> object:
        """The value as the field holds it. Raises what `refusal` makes."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))


@dataclass(frozen=True)
class Whole(_Checked):
    """An integer within bounds. Takes a float without a fraction (1e4); no text, no true."""

    at_least: int = 1
    at_most: int = LARGEST_COUNT

    def check(self, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, str):
            raise refusal(f"must be a whole number, found {_number_hint(value)}", value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise refusal("must be a whole number, found {found}", value)
        if value < self.at_least:
            raise refusal(f"must be at least {self.at_least}, found {{found}}", value)
        if value > self.at_most:
            raise refusal(f"must be at most {self.at_most}, found {{found}}", value)
        return value

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema) | {"minimum": self.at_least, "maximum": self.at_most}


@dataclass(frozen=True)
class Real(_Checked):
    """A finite float within bounds. Takes an integer; no text, no true, no nan."""

    more_than: float | None = None
    at_least: float | None = None
    less_than: float | None = None
    at_most: float | None = None

    def check(self, value: object) -> float:
        if isinstance(value, str):
            raise refusal(f"must be a number, found {_number_hint(value)}", value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refusal("must be a number, found {found}", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise refusal("must be a finite number, found {found}", value)
        if self.more_than is not None and number <= self.more_than:
            raise refusal(f"must be more than {self.more_than:g}, found {{found}}", value)
        if self.at_least is not None and number < self.at_least:
            raise refusal(f"must be at least {self.at_least:g}, found {{found}}", value)
        if self.less_than is not None and number >= self.less_than:
            raise refusal(f"must be less than {self.less_than:g}, found {{found}}", value)
        if self.at_most is not None and number > self.at_most:
            raise refusal(f"must be at most {self.at_most:g}, found {{found}}", value)
        return number

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        bounds = {
            "exclusiveMinimum": self.more_than,
            "minimum": self.at_least,
            "exclusiveMaximum": self.less_than,
            "maximum": self.at_most,
        }
        return handler(schema) | {k: v for k, v in bounds.items() if v is not None}


@dataclass(frozen=True)
class Choice(_Checked):
    """One of a few words; aliases are turned into the word they stand for."""

    words: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])

    def check(self, value: object) -> str:
        if isinstance(value, str):
            word = self.aliases.get(value, value)
            if word in self.words:
                return word
            near = close_match(value, (*self.words, *self.aliases))
            hint = f"; did you mean {near}?" if near else ""
            raise refusal(f"must be one of {', '.join(self.words)}, found {{found}}{hint}", value)
        raise refusal(f"must be one of {', '.join(self.words)}, found {{found}}", value)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        del schema, handler
        return {"type": "string", "enum": [*self.words, *self.aliases]}


def check_flag(value: object) -> bool:
    """A boolean; not 1, not "true", not yes."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _YAML_1_1_BOOLS:
        raise refusal("must be true or false, found the text {found}; write true or false", value)
    raise refusal("must be true or false, found {found}", value)


def check_text(value: object) -> str:
    """Text of one line, not empty; a number is refused, since YAML may have changed it."""
    text = check_any_text(value)
    if not text:
        raise refusal("is empty text; write null, or leave the key out, for the default")
    return text


def check_any_text(value: object) -> str:
    """Text of one line, perhaps empty."""
    if isinstance(value, str):
        problem = text_problem(value)
        if problem:
            raise refusal(problem)
        return value
    if isinstance(value, (bool, int, float)):
        raise refusal("must be text, found {found}; quote it", value)
    raise refusal("must be text, found {found}", value)


def items_of(value: object) -> list[object] | None:
    """The items of a list or tuple; None for anything else."""
    return list(cast("Iterable[object]", value)) if isinstance(value, (list, tuple)) else None


def check_list(value: object) -> object:
    """A list; nothing at all after the key is an empty one."""
    if value is None:
        return ()
    items = items_of(value)
    if items is None:
        raise refusal(
            f"must be a list, found {_kind(value)}; write [...], or an item a line after -"
        )
    return items


def check_mapping(value: object) -> object:
    """A mapping or a model; nothing at all after the key is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, (Mapping, BaseModel)):
        raise refusal(f"must be a mapping, found {_kind(value)}")
    return cast("object", value)


def _kind(value: object) -> str:
    """What a value is, without the value: in the place of a mapping it could be a credential."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    return "text" if isinstance(value, str) else show(value)


def data_faults(
    value: object, loc: Loc = (), *, secrets: bool
) -> Iterator[tuple[Loc, PydanticCustomError]]:
    """What is wrong in free data (options, storage options), each fault at its place below `loc`.

    Allowed is what JSON can hold and `text_problem` lets pass. With `secrets`, a name that looks
    like a secret may only have null, true or false as its value.
    """
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            if not isinstance(key, str):
                yield loc, refusal("must have text as its keys, found {found}", key)
            elif problem := text_problem(key):
                yield (*loc, key), refusal(f"the key {problem}", at_key=True)
            elif secrets and looks_secret(key) and not isinstance(item, (bool, type(None))):
                yield (*loc, key), refusal(SECRET, at_key=True)
            else:
                yield from data_faults(item, (*loc, key), secrets=secrets)
    elif (items := items_of(value)) is not None:
        for index, item in enumerate(items):
            yield from data_faults(item, (*loc, index), secrets=secrets)
    elif isinstance(value, str):
        if problem := text_problem(value):
            yield loc, refusal(problem)
    elif isinstance(value, float) and not math.isfinite(value):
        yield loc, refusal("must be a finite number, found {found}", value)
    elif value is not None and not isinstance(value, (bool, int, float)):
        yield loc, refusal("must be text, a number, true, false or null, found {found}", value)


Count = Annotated[int, Whole()]
CountOrZero = Annotated[int, Whole(at_least=0)]
Positive = Annotated[float, Real(more_than=0)]
NotNegative = Annotated[float, Real(at_least=0)]
#: From 0 to 1, both allowed.
Share = Annotated[float, Real(at_least=0, at_most=1)]
#: From 0 to below 1.
Fraction = Annotated[float, Real(at_least=0, less_than=1)]
Flag = Annotated[bool, BeforeValidator(check_flag)]
Text = Annotated[str, BeforeValidator(check_text)]
Listed = BeforeValidator(check_list)
Mapped = BeforeValidator(check_mapping)
