"""A dataclass of settings from YAML files and command-line flags, read strictly.

`parse` merges the files in order, then the flags; an error is one line that names the key, the
nearest valid key, and the file and line that set it (`UserError`). Nested dataclasses are dotted
keys."""

import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from silentbad import bundled
from silentbad.errors import UserError, brief, first_line, print_result
from silentbad.files import no_file
from silentbad.settings.types import (
    NEVER_SAVED,
    items_of,
    name_of,
    nearest,
    plain_types,
    refusal,
    validated,
)

FLAGS = "command line"
TRUTHS = {  # words that a key of type bool reads as true or false, and a key of text as text
    **dict.fromkeys(("yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("no", "No", "NO", "off", "Off", "OFF"), False),
}
T = TypeVar("T")


class Loader(yaml.SafeLoader):
    """YAML's safe loader; 1e-3 is a number, and no, on, a date, 1:30 (90 to YAML 1.1) and 010 (8)
    are the text they were written as."""


TAG = "tag:yaml.org,2002:"
REPLACED_TAGS = [TAG + name for name in ("timestamp", "bool", "int", "float")]
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in REPLACED_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in (
    ("bool", r"(true|True|TRUE|false|False|FALSE)$"),
    ("int", r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)$"),
    (
        "float",
        r"[-+]?((\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$"
        r"|\.(nan|NaN|NAN)$",
    ),
):
    Loader.add_implicit_resolver(
        TAG + _kind, re.compile(_pattern, re.ASCII), list("-+.0123456789tTfF")
    )


class Dumper(yaml.SafeDumper):
    """YAML's safe dumper; text that a reader takes for something else is quoted."""


Dumper.yaml_implicit_resolvers = {
    first: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        *Loader.yaml_implicit_resolvers.get(first, []),
    ]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *Loader.yaml_implicit_resolvers}
}


def dumped(values: dict[str, Any]) -> str:
    """Plain values as YAML that `read_yaml` reads back alike."""
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True)


# ---------------------------------------------------------------- a command line
def parse(
    cls: type[T], argv: Sequence[str] | None = None, about: str | None = None
) -> tuple[T, dict[str, str]]:
    """(settings, {dotted key: the file and line, or "command line", that set it}).

    A class may have RENAMED, {key of another trainer: what its error line says}, and POSITIONAL, the
    key of the words before any flag. Raises SystemExit(0) after --help or --print_config."""
    entries = Entries(cls)
    flags = []
    asked = None
    for name, words in split(sys.argv[1:] if argv is None else argv, cls):
        if name in ("help", "print_config"):
            asked = "=".join([name, *words])
        elif name == "config":
            if not words:
                raise UserError("--config: needs a YAML file")
            for path in words:
                if not path.strip():
                    raise UserError("--config: is empty; name a YAML file")
                entries.put_file(path)
        else:
            flags.append((name, words))
    # a part's name before its options, which depend on it
    for name, words in sorted(flags, key=lambda flag: not flag[0].endswith(".name")):
        entries.put_flag(name, words)
    config = built(cls(), entries, "")
    if asked is None:
        return config, entries.sources
    answers: dict[str, Callable[[], str]] = {
        "help": lambda: help_text(cls, about or ""),
        "print_config": lambda: dumped(to_dict(config)),
        "print_config=skip_default": lambda: dumped(changed(to_dict(config), to_dict(cls()))),
    }
    if asked not in answers:
        raise UserError(f"--{asked}: there are --help, --print_config, --print_config=skip_default")
    print_result(answers[asked]())
    raise SystemExit(0)


def split(argv: Sequence[str], cls: type) -> list[tuple[str, list[str]]]:
    """(flag, its words) in order; `--key=value` is one word."""
    flags: list[tuple[str, list[str]]] = []
    if hasattr(cls, "POSITIONAL") and argv and not argv[0].startswith("-"):
        flags.append((cls.POSITIONAL, []))
    for word in argv:
        if word == "-h":
            word = "--help"
        if re.match(r"--[^\W\d]", word):
            name, equals, value = word[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif not flags or flags[-1][0] == "help":
            raise UserError(f"stray word {brief(word)} ({FLAGS}): flags begin with --")
        else:
            flags[-1][1].append(word)
    return flags


def built(default: Any, entries: "Entries", prefix: str) -> Any:
    """A dataclass like `default` with the values that were given, checked."""
    hints = typing.get_type_hints(type(default), include_extras=True)
    changes = {}
    for field in dataclasses.fields(default):
        key = f"{prefix}{field.name}"
        here = getattr(default, field.name)
        if dataclasses.is_dataclass(here):
            changes[field.name] = built(here, entries, f"{key}.")
        elif key in entries.values:
            value = entries.values[key]
            try:
                changes[field.name] = validated(value, hints[field.name])
            except ValueError as wrong:
                line = with_source(refusal(key, str(wrong), value), entries.sources)
                raise UserError(line) from None
    return dataclasses.replace(default, **changes)


def with_source(message: str, sources: dict[str, str]) -> str:
    """A message that begins with a key, with the place that set this key, or all keys below it,
    inserted after the key."""
    match = re.match(r"[a-z]\w*(\.\w+)*(?=: )", message)
    if not match:
        return message
    key = match[0]
    below = {at for name, at in sources.items() if name.startswith(f"{key}.")}
    where = sources.get(key) or sources.get(f"{key}.name")
    if where is None and len(below) == 1:
        where = below.pop()
    return f"{key} ({where}){message[len(key) :]}" if where else message


# ---------------------------------------------------------------- files
def read_file(path: str) -> tuple[dict[str, Any], dict[str, int]]:
    """(what a YAML file holds, {dotted key: its line})."""
    values, node = read_yaml(path)
    if node is None:
        return {}, {}
    if not isinstance(values, dict):
        raise UserError(
            f"configuration file {path}: must hold key: value pairs, holds {type(values).__name__}"
        )
    return values, key_lines(node, path)


def read_yaml(path: str) -> tuple[Any, yaml.Node | None]:
    """(what a YAML file holds, its node or None); a key that is given twice is refused."""
    try:
        loader = Loader(Path(bundled(path)).read_bytes().decode("utf-8-sig"))
        node = loader.get_single_node()
        if node is None:
            return None, None
        key_lines(node, path)
        return loader.construct_document(node), node
    except FileNotFoundError:
        raise UserError(f"configuration file: {no_file(path)}") from None
    except OSError as error:
        raise UserError(f"configuration file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"configuration file {path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or first_line(error)
        raise UserError(f"configuration file {path}{line}: not YAML: {reason}") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # of a constructor
        raise UserError(
            f"configuration file {path}: holds a value that cannot be read ({first_line(error)})"
        ) from None


def key_lines(node: yaml.Node, path: str, prefix: str = "") -> dict[str, int]:
    """The line of each dotted key; one given twice is refused."""
    lines: dict[str, int] = {}
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            key_lines(each, path)
    if not isinstance(node, yaml.MappingNode):
        return lines
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
            continue
        dotted = f"{prefix}{key.value}"
        line = key.start_mark.line + 1
        if dotted in lines:
            raise UserError(
                f"{brief(dotted)} ({path}): is given twice, in lines {lines[dotted]} and {line}"
            )
        lines |= {dotted: line, **key_lines(value, path, f"{dotted}.")}
    return lines


# ---------------------------------------------------------------- keys
class Entries:
    """What files and flags set: values and where each was set, by dotted key."""

    def __init__(self, cls: type):
        self.tree = key_tree(cls)
        self.renamed = getattr(cls, "RENAMED", {})
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def put_file(self, path: str) -> None:
        """Set the keys of a file; they replace values set before."""
        values, lines = read_file(path)
        self._put_part(values, "", lambda key: f"{path}:{lines[key]}" if key in lines else path)

    def put_flag(self, name: str, words: list[str]) -> None:
        """Set one flag; `--key+` adds to a list."""
        key = name.rstrip("+")
        value = from_words(words, self.kind(key, FLAGS)[0], key)
        if isinstance(value, list) and name.endswith("+"):
            value = [*(self.values.get(key) or []), *value]
        elif isinstance(value, list) and self.sources.get(key) == FLAGS:
            raise UserError(
                f"{key} ({FLAGS}): "
                "is given twice, and the second would replace the first; give it once"
            )
        self._put(key, value, lambda key: FLAGS)

    def _put_part(self, values: dict, prefix: str, where: Callable[[str], str]) -> None:
        for name, value in sorted(values.items(), key=lambda item: item[0] != "name"):
            if not isinstance(name, str) or "." in name:
                raise UserError(
                    f"unknown key {brief(name)} ({where(f'{prefix}{name}')}): "
                    "keys are words; nest them instead of joining with '.'"
                )
            self._put(f"{prefix}{name}", value, where)

    def _put(self, key: str, value: Any, where: Callable[[str], str]) -> None:
        """Set a key, or the keys of a part. New options of a part replace all its earlier options;
        a new name drops the options of the earlier name."""
        kind, field = self.kind(key, where(key))
        if isinstance(kind, dict):
            if not isinstance(value, dict):
                raise UserError(
                    refusal(
                        f"{key} ({where(key)})",
                        f"must hold key: value pairs ({', '.join(kind)})",
                        value,
                    )
                )
            self._put_part(value, f"{key}.", where)
            return
        if isinstance(value, str) and bool in plain_types(kind):
            value = TRUTHS.get(value, value)
        if key.endswith(".name") and self.values.get(key, value) != value:
            options = key.removesuffix("name") + "options"
            self.values.pop(options, None)
            self.sources = {k: at for k, at in self.sources.items() if not k.startswith(options)}
        holder = self.values
        name = field
        for part in key[len(field) + 1 :].split(".") if key != field else ():  # of options
            holder = holder.setdefault(name, {})
            name = part
            if not isinstance(holder, dict):
                raise UserError(
                    f"{key} ({where(key)}): the key above it has one value, not keys of its own"
                )
        holder[name] = value
        for earlier in [k for k in self.sources if k.startswith(f"{key}.")]:
            del self.sources[earlier]
        self.sources[key] = where(key)

    def kind(self, key: str, where: str) -> tuple[Any, str]:
        """(the annotation of a dotted key, or the tree below it; the key of its field)."""
        node: Any = self.tree
        parts = key.split(".")
        for depth, part in enumerate(parts):
            above = ".".join(parts[:depth])
            if not isinstance(node, dict):
                if dict in plain_types(node):
                    return Any, above
                raise UserError(f"unknown key {brief(key)} ({where}): {above!r} has no parts")
            if part not in node:
                raise UserError(self._unknown(above, part, parts[-1], node, where))
            node = node[part]
        return node, key

    def _unknown(self, above: str, part: str, last: str, node: dict, where: str) -> str:
        """The error line on an unknown key: it names the successor, or the nearest known key."""
        prefix = f"{above}." if above else ""
        key = f"{prefix}{part}"
        if key in self.renamed:
            return f"key {key!r} ({where}) {self.renamed[key]}"
        same = [key for key in leaves(self.tree) if key.rpartition(".")[2] == last]
        if not above and 0 < len(same) <= 3:
            advice = f"; did you mean {' or '.join(map(repr, same))}?"
        else:
            keys = [f"{prefix}{name}" for name in node]
            others = f"; known: {', '.join(keys)}" if above else "; --help lists all"
            advice = nearest(key, keys) or nearest(part, node) or others
        return f"unknown key {brief(key)} ({where}){advice}"


def key_tree(cls: type) -> dict[str, Any]:
    """{field: its annotation, or the tree of a nested dataclass}."""
    hints = typing.get_type_hints(cls, include_extras=True)
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        is_part = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        tree[field.name] = key_tree(kind) if is_part else kind
    return tree


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a tree."""
    for name, kind in tree.items():
        yield from leaves(kind, f"{prefix}{name}.") if isinstance(kind, dict) else (prefix + name,)


# ---------------------------------------------------------------- flags
def from_words(words: list[str], kind: Any, key: str) -> Any:
    """The value of a flag's words: text or a list where the key takes that, else YAML."""
    kinds = {dict} if isinstance(kind, dict) else plain_types(kind)
    if list in kinds:
        return _list_from(words, kind, key)
    if not words:
        if bool in kinds:
            return True
        raise UserError(f"{key} ({FLAGS}): needs a value")
    if len(words) > 1:
        got = "" if key in NEVER_SAVED else f": {brief(' '.join(words))}"
        raise UserError(f"{key} ({FLAGS}): takes one value, got {len(words)} words{got}")
    word = words[0]
    if word == "null" and kinds & {str, type(None)}:
        return None
    if str in kinds:
        return word
    if bool in kinds and word in ("0", "1"):
        return word == "1"
    return from_yaml(word)


def _list_from(words: list[str], kind: Any, key: str) -> Any:
    """A list given as words, or as one word of YAML."""
    if not words:
        raise UserError(f"{key} ({FLAGS}): needs a value; '[]' is the empty list")
    if words == ["null"] and type(None) in plain_types(kind):
        return None
    if len(words) == 1 and words[0].startswith("["):
        listed = from_yaml(words[0])
        if isinstance(listed, list):
            return listed
    if str in plain_types(items_of(kind)):
        return words
    return [from_yaml(part) for word in words for part in word.split(",")]


def from_yaml(word: str) -> Any:
    """A word as YAML reads it, or the word itself."""
    try:
        return yaml.load(word, Loader=Loader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError):
        return word


# ---------------------------------------------------------------- what is shown
def to_dict(config: Any) -> dict[str, Any]:
    """The resolved settings as plain values, secrets left out."""
    return {
        key: value for key, value in dataclasses.asdict(config).items() if key not in NEVER_SAVED
    }


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested parts as dotted keys; options stay whole."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        part = isinstance(value, dict) and key not in ("options", "weights", "optimizer_options")
        items |= flat(value, f"{prefix}{key}.") if part else {prefix + key: value}
    return items


def changed(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """The part of plain settings that differs from others."""
    different: dict[str, Any] = {}
    for key, value in now.items():
        if value != then[key]:
            is_part = isinstance(value, dict) and set(value) == set(then[key])
            different[key] = changed(value, then[key]) if is_part else value
    return different


def help_text(cls: type, about: str) -> str:
    """Every key with what it is, its type and its default."""
    lines = [about.strip(), "", "flags:"]
    lines += _entry("--config", "YAML file; may be given several times, later wins, flags last")
    lines += _entry("--print_config[=skip_default]", "print the settings as YAML and stop")
    lines += _keys_help(cls(), "")
    return "\n".join(lines).rstrip() + "\n"


def _keys_help(default: Any, prefix: str) -> list[str]:
    hints = typing.get_type_hints(type(default), include_extras=True)
    lines: list[str] = []
    nested: list[str] = []
    for field in dataclasses.fields(default):
        value = getattr(default, field.name)
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            title = inspect.cleandoc(type(value).__doc__ or "").splitlines()[0]
            nested += ["", f"{key}: {title}", *_keys_help(value, f"{key}.")]
            continue
        source = f" [{field.metadata['source']}]" if field.metadata.get("source") else ""
        shown = "null" if value is None else str(value)
        about = f"(type: {name_of(hints[field.name])}, default: {shown})"
        lines += _entry(f"--{key}", f"{field.metadata.get('help', '')}{source} {about}".strip())
    return lines + nested


def _entry(flag: str, text: str) -> list[str]:
    indent = " " * 8
    return [f"  {flag}", *textwrap.wrap(text, 112, initial_indent=indent, subsequent_indent=indent)]
