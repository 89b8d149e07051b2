"""What an option may be: its type, and beside it in the annotation its range.

One check serves the fields of dataclasses and the keyword options of registered functions.

    rate: Annotated[float, Range(above=0)] = 1e-4
    steps: list[Count] = field(default_factory=list)

A number is always finite. `problem(value, annotation)` says what would be right, where the value is
not."""

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from silentbad.errors import UserError, brief

LONGEST_TEXT = 10_000  # characters of a text option
LONGEST_NAME = 255  # bytes of a file name, on every file system in use
LARGEST = 10**12  # no option of this program is larger; more is a slip, or would not fit in memory


HERE = "here"  # where the name of a flag comes from: this project


def option(
    default: Any, help: str = "", *, needs: str = "", idle: str = "refused", source: str = ""
) -> Any:
    """A field with its help line.

    `needs` is the condition (`silentbad.settings.rules`) under which it has an effect. A value that
    has none is refused; with `idle` "said" a file may hold it, with a warning, and with "kept"
    without one."""
    metadata = {"help": help, "source": source, "needs": needs, "idle": idle}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag(
    default: Any, help: str, source: str = "diffusers", *, needs: str = "", idle: str = "refused"
) -> Any:
    """A flat training flag: an option that says where its name comes from."""
    return option(default, help, needs=needs, idle=idle, source=source)


# ---------------------------------------------------------------- ranges
class Mark:
    """Beside a type in an annotation: what else a value must be. `problem` says so where it is
    not."""

    def problem(self, value: Any) -> str | None:
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return AfterValidator(self._checked).__get_pydantic_core_schema__(source, handler)

    def _checked(self, value: Any) -> Any:
        wrong = self.problem(value)
        if wrong is not None:
            raise ValueError(wrong)
        return value


@dataclass(frozen=True)
class Range(Mark):
    """The numbers that an option takes: `at_least` and `at_most` belong to them, `above` and
    `below` do not.

    `limit` is a bound of common sense on the size, named only where it is passed."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    limit: int = LARGEST

    def problem(self, value: float) -> str | None:
        """What is right, where `value` is not."""
        inside = (
            (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        if not inside:
            return f"must be {self}"
        return None if abs(value) <= self.limit else f"must be at most {self.limit:,}"

    def __str__(self) -> str:
        low, high = (self.at_least, self.above), (self.at_most, self.below)
        if low == (None, None) or high == (None, None):
            if self.above == 0:
                return "positive and finite"
            words = {
                "at least": self.at_least,
                "above": self.above,
                "at most": self.at_most,
                "below": self.below,
            }
            return " and ".join(
                f"{word} {bound:g}" for word, bound in words.items() if bound is not None
            )
        if None not in (self.at_least, self.at_most):
            return f"from {self.at_least:g} to {self.at_most:g}"
        left = f"({self.above:g}" if self.above is not None else f"[{self.at_least:g}"
        return f"in {left}, " + (
            f"{self.below:g})" if self.below is not None else f"{self.at_most:g}]"
        )


@dataclass(frozen=True)
class PathText(Mark):
    """Of a text: it names a file, a folder or a repository, so it is not empty and each part
    fits a file name."""

    def problem(self, value: str) -> str | None:
        if not value.strip() or "\0" in value:
            return "must name a path, not be empty or hold a NUL"
        if value == "~" or value.startswith("~/"):
            return "must be the whole path; the shell did not expand ~"
        if variable := re.search(r"\$(\w+|\{\w+\})", value):
            return f"must be the whole path; nothing expands {variable[0]} here"
        if any(
            len(part.encode(errors="surrogatepass")) > LONGEST_NAME for part in value.split("/")
        ):
            return f"must be a path whose names have at most {LONGEST_NAME} bytes"
        return None


@dataclass(frozen=True)
class Matching(Mark):
    """Of a text: it matches a regular expression, which `words` describe."""

    pattern: str
    words: str

    def problem(self, value: str) -> str | None:
        return None if re.fullmatch(self.pattern, value) else f"must be {self.words}"


@dataclass(frozen=True)
class Inside(Mark):
    """Of a path: it stays inside output_dir, and has so many parts at most."""

    parts: int | None = None

    def problem(self, value: str) -> str | None:
        parts = Path(value).parts
        leaves = ".." in parts or parts[:1] == ("/",)
        too_deep = self.parts is not None and len(parts) > self.parts
        return "must be a name inside output_dir" if leaves or too_deep else None


Count = Annotated[int, Range(at_least=1, limit=10**9)]
Natural = Annotated[int, Range(at_least=0, limit=10**9)]  # zero too
Small = Annotated[int, Range(at_least=1, limit=10**5)]  # of what lies in memory at once
# of a square, in pixels: 64 million of them, as in data.images
Side = Annotated[int, Range(at_least=1, limit=8000)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]
# of one kind of record to another: an epoch holds so many
Ratio = Annotated[float, Range(at_least=0, at_most=1000)]
Unit = Annotated[float, Range(at_least=0, at_most=1)]
Share = Annotated[float, Range(above=0, at_most=1)]  # more than nothing
Rate = Annotated[float, Range(above=0, below=1)]
Cosine = Annotated[float, Range(at_least=-1, at_most=1)]
Decay = Annotated[float, Range(at_least=0, below=1)]
# of an element, about 0 to 1; -100 keeps a gate open
Strength = Annotated[float, Range(at_least=-100, at_most=100)]
Seed = Annotated[int, Range(at_least=0, limit=2**63 - 1)]
Weight = Annotated[float, Range(at_least=-100, at_most=100)]  # of a logarithm
Location = Annotated[str, PathText()]


# ---------------------------------------------------------------- a value against an annotation
STRICT = ConfigDict(strict=True, allow_inf_nan=False, str_max_length=LONGEST_TEXT)


@cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=STRICT)


def validated(value: Any, hint: Any) -> Any:
    """A value as its annotation takes it, such as 1 as 1.0 where that is float.

    Raises ValueError, which says what would be right ("must be float").
    """
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        raise ValueError(_what_is_right(error.errors()[0], hint)) from None


def problem(value: Any, hint: Any) -> str | None:
    """What `hint` asks for ("must be float"), where `value` is not of it; None where it is."""
    try:
        validated(value, hint)
    except ValueError as error:
        return str(error)
    return None


def _what_is_right(error: Any, hint: Any) -> str:
    """pydantic's complaint in the words of the other messages."""
    kind = error["type"]
    inner = hint
    for _ in error["loc"]:  # of a list or a dict
        inner = items_of(inner)
    if kind == "value_error":  # of a Range and its like
        right = str(error["ctx"]["error"])
    elif kind == "finite_number":
        right = "must be a finite number"
    elif kind == "string_too_long":
        right = f"must be text of at most {LONGEST_TEXT:,} characters"
    elif kind == "string_unicode":
        right = "must be text without NUL characters and broken Unicode"
    else:
        right = f"must be {name_of(inner)}"
    return f"each value {right}" if _is_list(hint) and error["loc"] else right


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(part) is list for part in (hint, *typing.get_args(hint)))


def items_of(hint: Any) -> Any:
    """What a list or a dict holds."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) in (list, dict):
            return typing.get_args(part)[-1]
    return Any


def name_of(hint: Any) -> str:
    """An annotation in words: "float", "int or null", "lr or gradient"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return name_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(name_of(argument) for argument in arguments)
    if origin is Literal:
        *others, last = map(str, arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in (list, tuple):
        return f"a list of {name_of(arguments[0])}"
    if (origin or hint) is dict:
        return "key: value pairs"
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))


# ---------------------------------------------------------------- dataclasses
def check_values(config: Any, prefix: str = "") -> None:
    """Refuse a field of a dataclass, or of one nested in it, that its annotation does not take.

    `prefix` stands before each key in the message, such as "memory.".
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            check_values(value, f"{key}.")
        elif (wrong := problem(value, hints[field.name])) is not None:
            raise UserError(refusal(key, wrong, value))


def refusal(
    key: str,
    wrong: str,
    value: Any,
    sources: Mapping[str, str] | None = None,
    secret: Collection[str] = (),
) -> str:
    """The line on a value that its key does not take; that of a `secret` key is not shown."""
    where = f" ({_source(key, sources)})" if sources is not None else ""
    got = "" if key in secret else f", got {'null' if value is None else brief(value)}"
    return f"{key}{where}: {wrong}{got}"


def off_default(config: Any) -> list[str]:
    """The fields of a dataclass that are not at their defaults."""
    default = type(config)()
    return [
        f.name
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != getattr(default, f.name)
    ]


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Where a key, or an entry of it, was set."""
    return sources.get(key) or next(
        (at for set_, at in sources.items() if set_.startswith(f"{key}.")), "default"
    )


# ---------------------------------------------------------------- options of registered functions
MISSING = object()  # the default of an option that must be given


@dataclass(frozen=True)
class Option:
    """A keyword-only parameter of a registered function: its annotation and its default."""

    hint: Any
    default: Any


# name -> a function, or its options where only its source was read
Registry = Mapping[str, Callable[..., Any] | Mapping[str, Option]]


def options_of(entry: Callable[..., Any] | Mapping[str, Option]) -> Mapping[str, Option]:
    """The options of an entry of a registry."""
    if isinstance(entry, Mapping):
        return entry
    annotated = entry.__init__ if inspect.isclass(entry) else entry
    hints = typing.get_type_hints(annotated, include_extras=True)
    empty = inspect.Parameter.empty
    return {
        name: Option(
            hints.get(name, Any), MISSING if parameter.default is empty else parameter.default
        )
        for name, parameter in inspect.signature(entry).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def check_options(kind: str, registry: Registry, name: str, given: dict[str, Any]) -> None:
    """Refuse an unknown name, an unknown or missing option, or one of the wrong type or out of
    range.

    `kind` names the registry in the message, such as "gradient_control"."""
    if name not in registry:
        raise UserError(
            f"{kind}: unknown name {brief(name)}{nearest(name, registry)}; there are: "
            f"{', '.join(registry)}"
        )
    options = options_of(registry[name])
    takes = "it takes: " + ", ".join(options) if options else "it takes no options"
    for key, value in given.items():
        if key not in options and name == "none":
            raise UserError(
                f"{kind}.options: {brief(key)} has no effect without {kind}.name, which is none"
            )
        if key not in options:
            near = nearest(str(key), options)
            raise UserError(
                f"{kind}.options: {name}: unknown option {brief(key)}{near or ';'} {takes}"
            )
        wrong = problem(value, options[key].hint)
        if wrong is not None:
            raise UserError(f"{kind}.options: {name}: option {key!r} {wrong}, got {brief(value)}")
    missing = [k for k, option in options.items() if option.default is MISSING and k not in given]
    if missing:
        raise UserError(f"{kind}.options: {name}: option {missing[0]!r} is missing; {takes}")


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?", where something known is like `name`."""
    match = difflib.get_close_matches(name[:200], list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
