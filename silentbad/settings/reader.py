"""A dataclass of settings from YAML files and command-line flags, read strictly.

`read` merges the files in order, then the flags; whatever is wrong is one line that names the key,
the nearest valid one, and the file and line it stood in (`UserError`). Nested dataclasses are
dotted keys."""

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Annotated, Any

import yaml

from silentbad import bundled
from silentbad.errors import UserError, brief, first_line
from silentbad.settings.types import items_of, name_of, nearest, off_default, refusal, validated

FLAGS = "command line"
LARGEST_FILE = 256 * 1024  # bytes of a configuration file
TRUTHS = {  # words that are true or false where a key takes that, and text where it takes text
    **dict.fromkeys(("yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("no", "No", "NO", "off", "Off", "OFF"), False),
}


@dataclass
class Given:
    """What files and flags set: a tree of plain values, and {dotted key: where it was set}."""

    values: dict[str, Any]
    sources: dict[str, str]
    asked: str | None = None  # "help", "print_config" or "print_config=skip_default"


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
        r"[-+]?((\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$",
    ),
):
    Loader.add_implicit_resolver(
        TAG + _kind, re.compile(_pattern, re.ASCII), list("-+.0123456789tTfF")
    )


class Dumper(yaml.SafeDumper):
    """YAML's safe dumper; text that `Loader`, or another reader of YAML 1.1, takes for something
    else is quoted."""


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


# ---------------------------------------------------------------- reading
def read(
    cls: type,
    argv: list[str],
    *,
    renamed: dict[str, str] | None = None,
    secret: tuple[str, ...] = (),
    positional: str = "",
) -> tuple[Any, dict[str, str], str | None]:
    """(settings, {dotted key: where it was set}, what was asked for instead of a run: Given.asked).

    `renamed` maps keys of the past to what to use instead; the values of `secret` keys appear in no
    message. Words that follow no flag are those of the key `positional`, where there is one."""
    given = gather(cls, argv, renamed or {}, secret, positional)
    config = built(cls(), given.values, "", given.sources, secret)
    return config, given.sources, given.asked


def gather(
    cls: type,
    argv: list[str],
    renamed: dict[str, str],
    secret: tuple[str, ...],
    positional: str = "",
) -> Given:
    """What the files that --config names and the flags set, files first."""
    keys, given, flags = Keys(cls, renamed), Given({}, {}), []
    for name, words in split(argv, positional):
        if name in ("help", "print_config"):
            given.asked = name if not words else f"{name}={words[0]}"
            if given.asked not in ("help", "print_config", "print_config=skip_default"):
                raise UserError(
                    f"--{name}: takes no {' '.join(words)!r}; --print_config=skip_default there is"
                )
        elif name == "config":
            if not words:
                raise UserError("--config: needs a YAML file")
            for path in words:
                if not path.strip():
                    raise UserError("--config: is empty; name a YAML file")
                if path.startswith("-"):
                    raise UserError(f"stray word {brief(path)} ({FLAGS}): flags begin with --")
                values, lines = read_file(path)
                keys.merge(given, values, lines, path)
        else:
            flags.append((name, words))
    for name, words in flags:
        keys.put(given, name, words, secret)
    return given


def split(argv: list[str], positional: str = "") -> list[tuple[str, list[str]]]:
    """(flag, its words) in order; `--key=value` is one word, and words before any flag are of
    `positional`."""
    flags: list[tuple[str, list[str]]] = []
    if positional and argv and not argv[0].startswith("-"):
        flags.append((positional, []))
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


def placed(message: str, sources: dict[str, str]) -> str:
    """A message that begins with a key, with where the key, its name or all that stands below it
    was set."""
    found = re.match(r"[a-z]\w*(\.\w+)*(?=: )", message)
    if not found:
        return message
    key = found[0]
    below = {at for name, at in sources.items() if name.startswith(f"{key}.")}
    where = (
        sources.get(key) or sources.get(f"{key}.name") or (below.pop() if len(below) == 1 else None)
    )
    return f"{key} ({where}){message[len(key) :]}" if where else message


def built(
    default: Any,
    values: dict[str, Any],
    prefix: str,
    sources: dict[str, str],
    secret: tuple[str, ...],
) -> Any:
    """A dataclass like `default`, with the values of a tree, each as its annotation takes it."""
    hints = typing.get_type_hints(type(default), include_extras=True)
    changes = {}
    for name, value in values.items():
        key, here = f"{prefix}{name}", getattr(default, name)
        if dataclasses.is_dataclass(here):
            changes[name] = built(here, value, f"{key}.", sources, secret)
            continue
        try:
            changes[name] = validated(value, hints[name])
        except ValueError as wrong:
            raise UserError(refusal(key, str(wrong), value, sources, secret)) from None
    return dataclasses.replace(default, **changes)


# ---------------------------------------------------------------- files
def read_file(path: str) -> tuple[dict[str, Any], dict[str, int]]:
    """(what a YAML file holds, {dotted key: its line})."""
    lines: dict[str, int] = {}
    values, node = read_yaml(path, lambda node: key_lines(node, "", path, lines))
    if node is None:
        return {}, {}
    if not isinstance(values, dict):
        raise UserError(
            f"configuration file {path}: must hold key: value pairs, holds {type(values).__name__}"
        )
    return values, lines


def read_yaml(
    path: str, look: Callable[[yaml.Node], None] = lambda node: None
) -> tuple[Any, yaml.Node | None]:
    """(what a YAML file holds, its node or None where it is empty), after a `look` at the node."""
    text = read_text(path)
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        look(node)
        return loader.construct_document(node), node
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = (
            getattr(error, "problem", None) or getattr(error, "reason", None) or first_line(error)
        )
        raise UserError(f"configuration file {path}{line}: not YAML: {reason}") from None
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as error:  # of a constructor, as !!int of a word
        raise UserError(
            f"configuration file {path}: holds a value that cannot be read ({first_line(error)})"
        ) from None


def read_text(path: str) -> str:
    """The text of a configuration file."""
    try:
        place = Path(bundled(path))
        mode = place.stat().st_mode
        if not S_ISREG(mode) and not S_ISDIR(mode):
            raise UserError(f"configuration file {path}: is no regular file")
        with place.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise UserError(f"configuration file {path}: is larger than {LARGEST_FILE // 1024} KiB")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"configuration file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"configuration file {path}: not UTF-8 text") from None
    except ValueError:  # a NUL in the name
        raise UserError(f"configuration file {path!r}: no such name") from None


def key_lines(node: yaml.Node, prefix: str, path: str, lines: dict[str, int]) -> None:
    """The line of each dotted key; one given twice is refused."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
            continue
        dotted, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if dotted in lines:
            raise UserError(
                f"{brief(dotted)} ({path}): stands twice, in lines {lines[dotted]} and {line}"
            )
        lines[dotted] = line
        key_lines(value, f"{dotted}.", path, lines)


# ---------------------------------------------------------------- keys
class Keys:
    """The keys of a dataclass and of those nested in it."""

    def __init__(self, cls: type, renamed: dict[str, str]):
        self.tree, self.renamed = key_tree(cls), renamed

    def kind(self, key: str, where: str) -> Any:
        """The type of a dotted key, or the tree below it; a `UserError` that names the nearest
        one."""
        node: Any = self.tree
        parts = key.split(".")
        for depth, part in enumerate(parts):
            if not isinstance(node, dict):
                if node is dict or typing.get_origin(node) is dict:
                    return Any
                raise UserError(
                    f"unknown key {brief(key)} ({where}): {'.'.join(parts[:depth])!r} has no parts"
                )
            if part not in node:
                prefix = ".".join(parts[:depth])
                if not prefix and part in self.renamed:
                    raise UserError(
                        f"key {key!r} ({where}) is of another script: {self.renamed[part]}"
                    )
                known = [f"{prefix}.{name}" if prefix else name for name in node]
                bad = ".".join(parts[: depth + 1])
                near = self.elsewhere(parts[-1]) if not prefix else ""
                near = (
                    near
                    or nearest(bad, known)
                    or nearest(part, [full.rsplit(".", 1)[-1] for full in known])
                )
                others = (
                    ""
                    if near
                    else f"; known: {', '.join(known)}"
                    if prefix
                    else "; --help lists all"
                )
                raise UserError(f"unknown key {brief(bad)} ({where}){near}{others}")
            node = node[part]
        return node

    def elsewhere(self, name: str) -> str:
        """ "; did you mean 'x'?", where keys elsewhere in the tree end in this very name."""
        found = [key for key in leaves(self.tree) if key.rsplit(".", 1)[-1] == name]
        return f"; did you mean {' or '.join(map(repr, found))}?" if 0 < len(found) <= 3 else ""

    def merge(self, given: Given, values: dict, lines: dict[str, int], path: str) -> None:
        """Lay a file over what is given. Options of a part replace the earlier ones whole."""
        self._merge(given.values, values, "", self.tree, given.sources, lines, path)

    def _merge(
        self,
        into: dict,
        values: dict,
        prefix: str,
        tree: dict,
        sources: dict[str, str],
        lines: dict[str, int],
        path: str,
    ) -> None:
        for name, value in values.items():
            key = f"{prefix}{name}"
            where = f"{path}:{lines[key]}" if key in lines else path
            below = (
                self.kind(key, where)
                if isinstance(name, str) and "." not in name
                else self._no_key(name, where)
            )
            if isinstance(below, dict):
                if not isinstance(value, dict):
                    shown = "null" if value is None else brief(value)
                    raise UserError(
                        f"{key} ({where}): must hold key: value pairs "
                        f"({', '.join(below)}), got {shown}"
                    )
                self._merge(
                    into.setdefault(name, {}), value, f"{key}.", below, sources, lines, path
                )
            else:
                into[name] = _word(value, below)
                for earlier in [set_ for set_ in sources if set_.startswith(f"{key}.")]:
                    del sources[earlier]
                sources[key] = where

    def _no_key(self, name: Any, where: str) -> Any:
        raise UserError(
            f"unknown key {brief(name)} ({where}): keys are words; nest them instead "
            f"of joining with '.'"
        )

    def put(self, given: Given, name: str, words: list[str], secret: tuple[str, ...]) -> None:
        """Set one flag."""
        key, adds = name.rstrip("+"), name.endswith("+")
        kind = self.kind(key, FLAGS)
        value = from_words(words, kind, key, secret)
        into, parts = given.values, key.split(".")
        if isinstance(kind, dict):
            self.merge(given, _nested(parts, value), {}, FLAGS)
            return
        for part in parts[:-1]:
            into = into.setdefault(part, {})
            if not isinstance(into, dict):
                raise UserError(f"{key} ({FLAGS}): stands below a value that has no parts")
        if isinstance(value, list) and not adds and given.sources.get(key) == FLAGS:
            raise UserError(
                f"{key} ({FLAGS}): stands twice, and the second would replace the "
                f"first; give it once"
            )
        if adds and isinstance(value, list):
            value = [*(into.get(parts[-1]) or []), *value]
        into[parts[-1]] = value
        given.sources[key] = FLAGS


def _word(value: Any, kind: Any) -> Any:
    """A value of a file; a word such as no is false where a key takes true or false, else that
    word."""
    return (
        TRUTHS.get(value, value) if isinstance(value, str) and bool in plain_types(kind) else value
    )


def _nested(parts: list[str], value: Any) -> dict:
    for part in reversed(parts):
        value = {part: value}
    return value


def key_tree(cls: type) -> dict[str, Any]:
    """{field: its annotation, or the tree of a nested dataclass}."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        f.name: key_tree(hints[f.name])
        if dataclasses.is_dataclass(hints[f.name])
        else hints[f.name]
        for f in dataclasses.fields(cls)
    }


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a tree."""
    for name, kind in tree.items():
        yield from leaves(kind, f"{prefix}{name}.") if isinstance(kind, dict) else (prefix + name,)


# ---------------------------------------------------------------- flags
def from_words(words: list[str], kind: Any, key: str, secret: tuple[str, ...] = ()) -> Any:
    """The value that a flag's words stand for: plain text where the key takes text, several words
    where it takes a list, YAML otherwise."""
    kinds = plain_types(kind)
    if list in kinds:
        return _list_from(words, kind, kinds, key)
    if not words:
        if bool in kinds:
            return True
        raise UserError(f"{key} ({FLAGS}): needs a value")
    if len(words) > 1:
        got = "" if key in secret else f": {brief(' '.join(words))}"
        raise UserError(f"{key} ({FLAGS}): takes one value, got {len(words)} words{got}")
    word = words[0]
    if word == "null" and type(None) in kinds:
        return None
    if str in kinds:
        return None if word == "null" else word
    if bool in kinds and word in ("0", "1"):
        return word == "1"
    return from_yaml(word)


def _list_from(words: list[str], kind: Any, kinds: set, key: str) -> Any:
    """A list given as words, or as one word of YAML."""
    if not words:
        raise UserError(f"{key} ({FLAGS}): needs a value; '[]' is the empty list")
    if len(words) == 1:
        if words[0] == "null" and type(None) in kinds:
            return None
        if words[0].startswith("[") and isinstance(listed := from_yaml(words[0]), list):
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


def plain_types(kind: Any) -> set:
    """The plain types that an annotation takes."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return plain_types(typing.get_args(kind)[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*(plain_types(argument) for argument in typing.get_args(kind)))
    if origin is typing.Literal:
        return {type(one) for one in typing.get_args(kind)}
    return {origin or kind} if not isinstance(kind, dict) else {dict}


# ---------------------------------------------------------------- help
def help_text(cls: type, description: str, epilogue: str = "") -> str:
    """Every key with what it is, its type and its default."""
    lines = [(description or "").strip(), "", "flags:"]
    lines += _entry("--config", "YAML file; may be given several times, later wins, flags last")
    lines += _entry("--print_config[=skip_default]", "print the settings as YAML and stop")
    lines += _keys_help(cls(), "")
    return "\n".join([*lines, "", epilogue]).rstrip() + "\n"


def _keys_help(default: Any, prefix: str) -> list[str]:
    hints, lines, nested = typing.get_type_hints(type(default), include_extras=True), [], []
    for field in dataclasses.fields(default):
        value, key = getattr(default, field.name), f"{prefix}{field.name}"
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
    return [
        f"  {flag}",
        *textwrap.wrap(text, 112, initial_indent=" " * 8, subsequent_indent=" " * 8),
    ]


def answer(asked: str, given: Any, description: str) -> None:
    """What --help or --print_config of a flat dataclass asks for, on stdout."""
    if asked == "help":
        print(help_text(type(given), description))
        return
    names = (
        [f.name for f in dataclasses.fields(given)]
        if asked == "print_config"
        else off_default(given)
    )
    values = {name: getattr(given, name) for name in names}
    print(dumped(values), end="")
