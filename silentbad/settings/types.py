"""What an option may be: its type, and beside it in the annotation its range.

One check serves the fields of dataclasses and the keyword options of registered functions.

    rate: Annotated[float, Range(above=0)] = 1e-4
    steps: list[Count] = field(default_factory=list)

A number is always finite. `problem(value, annotation)` says what would be right, where the value is not.
"""

import dataclasses
import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from silentbad.errors import UserError, brief

LONGEST_TEXT = 10_000  # characters of a text option
LONGEST_NAME = 255  # bytes of a file name, on every file system in use
LARGEST = 10**12  # no option of this program is larger; more is a slip, or would not fit in memory


HERE = "here"  # where the name of a flag comes from: this project


def flag(default: Any, help: str, source: str = "diffusers") -> Any:
    """A field with its help line and where its name comes from."""
    metadata = {"help": help, "source": source}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# ---------------------------------------------------------------- ranges
@dataclass(frozen=True)
class Range:
    """The numbers that an option takes: `at_least` and `at_most` belong to them, `above` and `below` do not.

    `limit` is a bound of common sense on the size, named only where it is passed.
    """

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    limit: float = LARGEST

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
        return None if abs(value) <= self.limit else f"must be at most {self.limit:,.0f}"

    def __str__(self) -> str:
        low, high = (self.at_least, self.above), (self.at_most, self.below)
        if low == (None, None) or high == (None, None):
            if self.above == 0:
                return "positive and finite"
            words = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
            return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)
        if None not in (self.at_least, self.at_most):
            return f"from {self.at_least:g} to {self.at_most:g}"
        left = f"({self.above:g}" if self.above is not None else f"[{self.at_least:g}"
        return f"in {left}, " + (f"{self.below:g})" if self.below is not None else f"{self.at_most:g}]")


@dataclass(frozen=True)
class PathText:
    """Of a text: it names a file, a folder or a repository, so it is not empty and each part fits a file name."""

    def problem(self, value: str) -> str | None:
        if not value.strip():
            return "must name a path, not be empty"
        if value == "~" or value.startswith("~/"):
            return "must be the whole path; the shell did not expand ~"
        if variable := re.search(r"\$(\w+|\{\w+\})", value):
            return f"must be the whole path; nothing expands {variable[0]} here"
        if any(len(part.encode(errors="surrogatepass")) > LONGEST_NAME for part in value.split("/")):
            return f"must be a path whose names have at most {LONGEST_NAME} bytes"
        return None


Count = Annotated[int, Range(at_least=1, limit=10**9)]
Natural = Annotated[int, Range(at_least=0, limit=10**9)]  # zero too
Small = Annotated[int, Range(at_least=1, limit=10**5)]  # of what lies in memory at once
Side = Annotated[int, Range(at_least=1, limit=8000)]  # of a square, in pixels: 64 million of them, as in data.images
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Ratio = Annotated[float, Range(at_least=0, at_most=1000)]  # of one kind of record to another: an epoch holds so many
Unit = Annotated[float, Range(at_least=0, at_most=1)]
Share = Annotated[float, Range(above=0, at_most=1)]  # more than nothing
Rate = Annotated[float, Range(above=0, below=1)]
Cosine = Annotated[float, Range(at_least=-1, at_most=1)]
Decay = Annotated[float, Range(at_least=0, below=1)]
Strength = Annotated[float, Range(at_least=-100, at_most=100)]  # of an element, about 0 to 1; -100 keeps a gate open
Seed = Annotated[int, Range(at_least=0, limit=2**63 - 1)]
Weight = Annotated[float, Range(at_least=-100, at_most=100)]  # of a logarithm
Location = Annotated[str, PathText()]


# ---------------------------------------------------------------- a value against an annotation
def problem(value: Any, hint: Any) -> str | None:
    """What `hint` asks for ("must be float"), where `value` is not of it; None where it is.

    Unknown annotations take anything that is finite.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return problem(value, arguments[0]) or next(
            (wrong for mark in arguments[1:] if hasattr(mark, "problem") and (wrong := mark.problem(value))), None
        )
    if origin in (typing.Union, types.UnionType):
        wrong = [problem(value, argument) for argument in arguments]
        of_type = [text for text, argument in zip(wrong, arguments, strict=True) if _fits_type(value, argument)]
        return None if None in wrong else next(iter(of_type), f"must be {name_of(hint)}")
    if not _fits_type(value, hint):
        return f"must be {name_of(hint)}"
    if isinstance(value, (list, tuple)):
        wrong_one = _first(problem(each, arguments[0] if arguments else Any) for each in value)
        return wrong_one and f"each value {wrong_one}"
    if isinstance(value, dict):
        of_values = arguments[1] if len(arguments) > 1 else Any
        return _first(problem(key, str) for key in value) or _first(problem(each, of_values) for each in value.values())
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and abs(value) > 2**63 - 1:
        return "must be a number of at most 63 bits"
    if isinstance(value, str):
        return _text_problem(value)
    return None


def _first(problems: Iterable[str | None]) -> str | None:
    return next((text for text in problems if text is not None), None)


def _text_problem(text: str) -> str | None:
    if len(text) > LONGEST_TEXT:
        return f"must be text of at most {LONGEST_TEXT:,} characters"
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        return "must be text without NUL characters and broken Unicode"
    return None


def _fits_type(value: Any, hint: Any) -> bool:
    """Whether a value is of the plain type of an annotation, whatever its range."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _fits_type(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return any(_fits_type(value, argument) for argument in arguments)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in arguments)
    kind = origin or hint
    if kind in (list, tuple):
        return isinstance(value, (list, tuple))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is type(None):
        return value is None
    return isinstance(value, kind) if kind in (str, bool, dict) else True


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


def _has_truth(value: Any) -> bool:
    """Whether a value is what YAML makes of no, yes, on and off, or a list of such."""
    return any(isinstance(each, bool) for each in (value if isinstance(value, list) else [value]))


# ---------------------------------------------------------------- dataclasses
def check_values(config: Any, prefix: str = "", sources: dict[str, str] | None = None, secret: tuple = ()) -> None:
    """Refuse a field of a dataclass, or of one nested in it, that its annotation does not take.

    `prefix` stands before each key in the message, such as "memory."; `sources` says where a key was set; the value of
    a `secret` key is not shown.
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            check_values(value, f"{key}.", sources, secret)
        elif (wrong := problem(value, hints[field.name])) is not None:
            where = f" ({_source(key, sources)})" if sources is not None else ""
            got = "" if key in secret else f", got {'null' if value is None else brief(value)}"
            got += "; a word such as no needs quotes" if "str" in wrong and _has_truth(value) else ""
            raise UserError(f"{key}{where}: {wrong}{got}")


def off_default(config: Any) -> list[str]:
    """The fields of a dataclass that are not at their defaults."""
    default = type(config)()
    return [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(default, f.name)]


def _source(key: str, sources: dict[str, str]) -> str:
    """Where a key, or an entry of it, was set."""
    return sources.get(key) or next((at for set_, at in sources.items() if set_.startswith(f"{key}.")), "default")


# ---------------------------------------------------------------- options of registered functions
Registry = Mapping[str, Callable[..., Any]]


def check_options(kind: str, registry: Registry, name: str, options: dict[str, Any]) -> None:
    """Refuse an unknown name, an unknown or missing option, or one of the wrong type or out of its range.

    The keyword-only parameters of `registry[name]` are its options. `kind` names the registry in the message, such as
    "gradient_control".
    """
    if name not in registry:
        raise UserError(
            f"{kind}: unknown name {brief(name)}{nearest(name, registry)}; there are: {', '.join(registry)}"
        )
    function = registry[name]
    parameters = {
        key: parameter
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    takes = "it takes: " + ", ".join(parameters) if parameters else "it takes no options"
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    for key, value in options.items():
        if key not in parameters and name == "none":
            raise UserError(f"{kind}.options: {brief(key)} has no effect without {kind}.name, which is none")
        if key not in parameters:
            near = nearest(str(key), parameters)
            raise UserError(f"{kind}.options: {name}: unknown option {brief(key)}{near or ';'} {takes}")
        if (wrong := problem(value, hints.get(key, Any))) is not None:
            raise UserError(f"{kind}.options: {name}: option {key!r} {wrong}, got {brief(value)}")
    missing = [k for k, p in parameters.items() if p.default is inspect.Parameter.empty and k not in options]
    if missing:
        raise UserError(f"{kind}.options: {name}: option {missing[0]!r} is missing; {takes}")


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?", where something known is like `name`."""
    match = difflib.get_close_matches(name[:200], list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
