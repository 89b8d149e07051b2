"""The types of options, with their ranges in the annotation.

pydantic checks the fields of dataclasses and the keyword options of registered functions alike.

    rate: Annotated[float, Interval(gt=0)] = 1e-4
    steps: list[Count] = field(default_factory=list)

A number is always finite. `problem(value, annotation)` says what a valid value is, if the value is
invalid."""

import dataclasses
import difflib
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from silentbad.errors import UserError, brief
from silentbad.settings.moved import MOVED

LONGEST_TEXT = 10_000  # characters of a text option
LONGEST_NAME = 255  # bytes of a file name, on every file system in use
LARGEST = 10**12  # no option of this program is larger; more is a slip, or would not fit in memory
NEVER_SAVED = ("hub_token",)  # secrets: neither written nor printed


def option(
    default: Any, help: str = "", *, needs: str = "", idle: str = "refused", source: str = ""
) -> Any:
    """A field with its help line.

    `needs` is the condition (`silentbad.settings.rules`) under which it has an effect. A value
    without effect is refused on the command line. `idle` says what becomes of one in a file:
    "refused", "warned" (kept, with a warning) or "kept"."""
    metadata = {"help": help, "source": source, "needs": needs, "idle": idle}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# flat training flags, which say where their names come from
flag = partial(option, source="diffusers")
ours = partial(option, source="here")


# ---------------------------------------------------------------- what else a value must be
def path_text(path: str) -> str:
    """The name of a file, a folder or a repository: not empty, and each part fits a file name."""
    if not path.strip() or "\0" in path:
        raise ValueError("must name a path, not be empty or hold a NUL")
    if path == "~" or path.startswith("~/"):
        raise ValueError("must be the whole path; the shell did not expand ~")
    if variable := re.search(r"\$(\w+|\{\w+\})", path):
        raise ValueError(f"must be the whole path; nothing expands {variable[0]} here")
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in path.split("/")):
        raise ValueError(f"must be a path whose names have at most {LONGEST_NAME} bytes")
    return path


def matching(pattern: str, words: str) -> AfterValidator:
    """A validator: the text matches a regular expression, which `words` describe."""

    def match(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {words}")
        return text

    return AfterValidator(match)


Count = Annotated[int, Interval(ge=1, le=10**9)]
Natural = Annotated[int, Interval(ge=0, le=10**9)]  # zero too
Small = Annotated[int, Interval(ge=1, le=10**5)]  # of what lies in memory at once
Side = Annotated[int, Interval(ge=1, le=8000)]  # of a square, in pixels: 64 million of them
Seed = Annotated[int, Interval(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Interval(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Interval(ge=0, le=LARGEST)]
Factor = Annotated[float, Interval(ge=1, le=LARGEST)]
Ratio = Annotated[float, Interval(ge=0, le=1000)]  # of one kind of record to another
Unit = Annotated[float, Interval(ge=0, le=1)]
Share = Annotated[float, Interval(gt=0, le=1)]  # more than nothing
Rate = Annotated[float, Interval(gt=0, lt=1)]
Cosine = Annotated[float, Interval(ge=-1, le=1)]
Decay = Annotated[float, Interval(ge=0, lt=1)]
Strength = Annotated[float, Interval(ge=-100, le=100)]  # of an element; -100 keeps a gate open
Weight = Annotated[float, Interval(ge=-100, le=100)]  # of a logarithm
Prompt = Annotated[str, matching(r"(?s).*\S.*", "a prompt, not empty")]
Location = Annotated[str, AfterValidator(path_text)]


# ---------------------------------------------------------------- a value against an annotation
STRICT = ConfigDict(strict=True, allow_inf_nan=False, str_max_length=LONGEST_TEXT)
WORDS = {  # of pydantic's kinds of errors
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "finite_number": "must be a finite number",
    "string_too_long": "must be text of at most {max_length} characters",
    "string_unicode": "must be text without broken Unicode",
    "value_error": "{error}",
    "missing": "is missing",
    "json_invalid": "is no JSON ({error})",
}


@cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=STRICT)


_file_adapter = cache(TypeAdapter)  # of dataclasses, to which pydantic gives no configuration


def validated(value: Any, hint: Any) -> Any:
    """The value, converted by its annotation. Raises ValueError, which says what a valid value
    is."""
    if isinstance(value, list) and tuple in plain_types(hint):  # YAML and JSON have lists alone
        value = tuple(value)
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        raise ValueError(_what_is_right(error.errors()[0], hint)) from None


def validated_file(file: Path, kind: Any) -> Any:
    """A JSON file as a dataclass, or as a list or dict of one; other keys are ignored. Raises
    UserError, which names the invalid value's place in the file and says what is valid."""
    try:
        return _file_adapter(kind).validate_json(file.read_bytes(), strict=True)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        wrong = _in_words(first, first["msg"].replace("Input should be", "must be"))
        raise UserError(f"{place} {wrong}") from None


def problem(value: Any, hint: Any) -> str | None:
    """The requirement of `hint` ("must be float") if `value` does not meet it, else None."""
    try:
        validated(value, hint)
    except ValueError as error:
        return str(error)
    return None


def _what_is_right(error: Any, hint: Any) -> str:
    """pydantic's complaint about a value, or about one in a list or a dict."""
    is_list = not plain_types(hint).isdisjoint((list, tuple))
    for _ in error["loc"]:
        hint = items_of(hint)
    right = _in_words(error, f"must be {name_of(hint)}")
    return f"each value {right}" if is_list and error["loc"] else right


def _in_words(error: Any, otherwise: str) -> str:
    """pydantic's complaint in the words of the other messages, where they have some."""
    context = dict(error.get("ctx", {}))
    for key, value in context.items():
        if isinstance(value, (int, float)):
            context[key] = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return WORDS[error["type"]].format(**context) if error["type"] in WORDS else otherwise


def plain_types(hint: Any) -> set:
    """The plain types that an annotation takes."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Annotated:
        return plain_types(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(plain_types, arguments))
    if origin is Literal:
        return set(map(type, arguments))
    return {origin or hint}


def items_of(hint: Any) -> Any:
    """The annotation of the items of a list, a tuple of any length or a dict."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is tuple:
            return typing.get_args(part)[0]
        if typing.get_origin(part) in (list, dict):
            return typing.get_args(part)[-1]
    return Any


def name_of(hint: Any) -> str:
    """An annotation in words: "float", "int or null", "lr or gradient"."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Annotated:
        return name_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(name_of, arguments))
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
    """Refuse a field, also of a nested part, that its annotation does not take."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            check_values(value, f"{key}.")
        elif (wrong := problem(value, hints[field.name])) is not None:
            raise UserError(refusal(key, wrong, value))


def refusal(key: str, wrong: str, value: Any) -> str:
    """The error line on a value that its key does not accept."""
    got = "" if key in NEVER_SAVED else f", got {'null' if value is None else brief(value)}"
    return f"{key}: {wrong}{got}"


def changed_fields(config: Any) -> list[str]:
    """The fields of a dataclass that are not at their defaults."""
    default = type(config)()
    return [
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    ]


# ---------------------------------------------------------------- options of registered functions
MISSING = object()  # the default of an option that must be given


@dataclass(frozen=True)
class Option:
    """A parameter of a registered function: its annotation and its default."""

    hint: Any
    default: Any
    keyword_only: bool = True


# name -> a function, or its options where only its source was read
Registry = Mapping[str, Callable[..., Any] | Mapping[str, Option]]


def options_of(entry: Callable[..., Any] | Mapping[str, Option]) -> Mapping[str, Option]:
    """The options of an entry of a registry."""
    if isinstance(entry, Mapping):
        return entry
    annotated = entry.__init__ if inspect.isclass(entry) else entry
    hints = typing.get_type_hints(annotated, include_extras=True)
    return {
        name: Option(
            hints.get(name, Any),
            MISSING if parameter.default is parameter.empty else parameter.default,
        )
        for name, parameter in inspect.signature(entry).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def check_options(
    kind: str, registry: Registry, name: str, values: dict[str, Any], key: str = ""
) -> None:
    """Refuse an unknown name of a registry `kind`, an unknown, missing or wrong option; `key` is
    the setting of the options, `kind`.options when empty."""
    key = key or f"{kind}.options"
    check_name(kind, registry, name)
    options = options_of(registry[name])
    takes = "it takes: " + ", ".join(options) if options else "it takes no options"
    for option, value in values.items():
        if option not in options and name == "none":
            raise UserError(
                f"{key}: {brief(option)} has no effect without {kind}.name, which is none"
            )
        if option not in options:
            raise UserError(
                f"{key}: {name}: unknown option {brief(option)}"
                f"{nearest(str(option), options) or ';'} {takes}"
            )
        wrong = problem(value, options[option].hint)
        if wrong is not None:
            raise UserError(f"{key}: {name}: option {option!r} {wrong}, got {brief(value)}")
    missing = [k for k, of in options.items() if of.default is MISSING and k not in values]
    if missing:
        raise UserError(f"{key}: {name}: option {missing[0]!r} is missing; {takes}")


def check_name(kind: str, registry: Registry, name: str) -> None:
    """Refuse an unknown name of a registry `kind`."""
    if name in registry:
        return
    if name in MOVED:
        raise UserError(
            f"{kind}: {name} is an experiment in a file of its own now; use {MOVED[name]}"
        )
    raise UserError(
        f"{kind}: unknown name {brief(name)}"
        f"{nearest(name, registry)}; there are: {', '.join(registry)}"
    )


def parse_combination(
    kind: str, registry: Registry, name: str, options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """{part: its options} of a name such as "prior+gsnr", checked as `check_options` does.

    `options` are the part's, or part -> options where several are combined."""
    parts = name.split("+")
    if len(set(parts)) < len(parts):
        raise UserError(f"{kind}.name: {name} names a part twice; once is enough")
    if len(parts) == 1:
        options = {name: options}
    for key in options:
        if key not in parts:
            raise UserError(
                f"{kind}.options: {key!r} is no part of {name}; give {parts[0]}: {{...}}"
            )
    for part in parts:
        check_options(kind, registry, part, options.get(part, {}))
    return {part: options.get(part, {}) for part in parts}


def nearest(name: str, choices: Iterable[str]) -> str:
    """ "; did you mean 'x'?", where one of the choices is like `name`."""
    match = difflib.get_close_matches(name[:200], list(choices), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
