"""The entries of a registry, read from its source without imports: names, options, types and
defaults.

A registry is a dict display in a module, {"uniform": uniform, **MORE}; `from_source` follows its
names and imports to the functions, so a new rule is one function and one line in its dict. In
`Parts` a place, PATH.py:NAME, is a name too. The keyword-only parameters of a function (of a class,
those of `__init__`) are its options."""

import ast
import inspect
import math
import typing
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from silentbad.errors import UserError, user_errors, warn
from silentbad.settings import types, user_code
from silentbad.settings.types import MISSING, Option

# The names that annotations and defaults of options may use.
NAMESPACE = {**vars(typing), **vars(types), "math": math, "Any": Any}


@dataclass(frozen=True)
class Expected:
    """Checks the return value of a part: numbers of this shape, finite, at least `floor`, not all
    zero, with the sum `total`; with `floor` None only the shape."""

    shape: tuple[int, ...]
    floor: float | None = 0.0
    total: float | None = None
    varies: bool = True  # one number everywhere has no effect

    def fault(self, value: Any) -> str | None:
        """The fault of an array or a tensor, or None."""
        shape = getattr(value, "shape", None)
        if shape is None or tuple(shape) != self.shape:
            got = type(value).__name__ if shape is None else f"numbers of shape {tuple(shape)}"
            return f"{got}, not numbers of shape {self.shape}"
        if self.floor is None:
            return None
        if not float(abs(value).max()) < math.inf:
            return "NaN or infinite numbers"
        if (least := float(value.min())) < self.floor:
            return f"{least:g}; {self.floor:g} is the least"
        if not float(value.max()):
            return "zeros alone"
        total = float(value.sum())
        if self.total is not None and abs(total - self.total) > 1e-3 * self.total:
            return f"numbers whose sum is {total:g}, not {self.total:g}"
        return None


Examples = Iterable[tuple[tuple[Any, ...], Expected]]


class Parts(UserDict[str, Any]):
    """A dict of parts by name; a place, PATH.py:NAME, is a name too.

    `key` is the setting that chooses a part. `takes` names the arguments of a part. `examples`
    gives such arguments, each with the Expected of the value that a part returns for them."""

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        key: str,
        takes: str,
        examples: Callable[[], Examples] = tuple,
    ):
        super().__init__(parts)
        self.key = key
        self.takes = takes.split()
        self.examples = examples
        # {name and options: (part that passed its examples, whether a warning called it constant)}
        self.tried: dict[str, tuple[Any, bool]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.data or user_code.is_place(str(name))

    def __getitem__(self, name: str) -> Any:
        """Raises UserError where a place defines no function, or one with other arguments."""
        if not user_code.is_place(name):
            return self.data[name]
        part = user_code.load(self.key, name)
        if not callable(part):
            raise UserError(f"{self.key}: {name} is no function")
        signature = inspect.signature(part)
        needed = [p.kind for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        if needed != [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(self.takes):
            raise UserError(
                f"{self.key}: {name} takes {signature}; "
                f"it must take {', '.join(self.takes)}, and after a * its options"
            )
        return part

    def try_part(
        self, name: str, options: Mapping[str, Any], examples: Examples | None = None
    ) -> None:
        """Refuse a part that fails on the examples or returns values other than expected; warn
        where it returns one number everywhere. Its own examples run once a start, although the
        command and the objects that it builds both call this."""
        part = self[name]
        asked = f"{name} {dict(options)}"
        tried, warned = self.tried.get(asked, (None, False))
        if examples is None and tried is part:
            return
        varies = False
        may_vary = False
        for arguments, expected in self.examples() if examples is None else examples:
            with user_errors(f"{self.key}: {name} fails"):
                value = part(*arguments, **options)
            if wrong := expected.fault(value):
                raise UserError(f"{self.key}: {name} returns {wrong}")
            may_vary = may_vary or expected.varies
            varies = varies or expected.varies and float(value.min()) < float(value.max())
        flat = may_vary and not varies and user_code.is_place(name)
        if flat and not (tried is part and warned):
            warn(f"{self.key}: {name} returns one number everywhere: it changes nothing")
        if examples is None:
            self.tried[asked] = (part, flat)


class Offered(dict[str, Mapping[str, Option]]):
    """{name: its options} of `Parts`. Options of a place are read from its file; nothing runs."""

    def __init__(self, options: Mapping[str, Mapping[str, Option]], key: str):
        super().__init__(options)
        self.key = key

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or user_code.is_place(str(name))

    def __missing__(self, place: str) -> Mapping[str, Option]:
        return _options(definition_at(self.key, place))


@dataclass(frozen=True)
class Definition:
    """A function or a class in a module that was read."""

    module: "Module"
    node: ast.FunctionDef | ast.ClassDef

    def parameters(self) -> dict[str, Option]:
        """{name: Option} of all but `self`; for a class those of its `__init__`, or of a base's."""
        function = self.node if isinstance(self.node, ast.FunctionDef) else self.method("__init__")
        if function is None:
            return {}
        arguments = function.args
        needed = len(arguments.args) - len(arguments.defaults)
        defaults = [None] * needed + arguments.defaults + arguments.kw_defaults
        pairs = zip(arguments.args + arguments.kwonlyargs, defaults, strict=True)
        return {
            argument.arg: Option(
                _evaluated(argument.annotation, Any),
                MISSING if default is None else _evaluated(default, None),
                keyword_only=argument in arguments.kwonlyargs,
            )
            for argument, default in pairs
            if argument.arg != "self"
        }

    def method(self, name: str) -> ast.FunctionDef | None:
        """A method of a class, its own or of the nearest base that was found."""
        assert isinstance(self.node, ast.ClassDef), f"{self.node.name} is a function"
        for statement in self.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                return statement
        parents = filter(None, map(self.module.definition, self.node.bases))
        return next(filter(None, (parent.method(name) for parent in parents)), None)


class Module:
    """A module's top level as its source shows it."""

    def __init__(self, path: Path, package: str):
        self.package = package  # what relative imports start from
        # {name: its definition or value; of an import (module, name there, or "" for a module)}
        self.names: dict[str, ast.AST | tuple[str, str]] = {}
        for statement in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
            self._enter(statement)

    def _enter(self, statement: ast.stmt) -> None:
        match statement:
            case ast.ImportFrom(module=module, names=aliases, level=level):
                above = self.package.split(".")[: 1 - level or None] if level else []
                place = ".".join([*above, *filter(None, [module])])
                for alias in aliases:
                    self.names[alias.asname or alias.name] = (place, alias.name)
            case ast.Import(names=aliases):
                for alias in aliases:
                    first = alias.name.partition(".")[0]
                    self.names[alias.asname or first] = (alias.name if alias.asname else first, "")
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self.names[name] = statement
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.names[name] = value
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.names[name] = value
            case ast.Assign(targets=[ast.Subscript(ast.Name(id=name), key)], value=value):
                if isinstance(earlier := self.names.get(name), ast.expr):  # one more entry
                    self.names[name] = ast.Dict([None, key], [earlier, value])

    def find(self, expression: ast.AST) -> "tuple[Module, ast.AST] | None":
        """(module, node) of the definition that an expression names; None where it is not found."""
        match expression:
            case ast.Attribute(value=owner, attr=name):  # torch.optim.AdamW
                first, _, rest = ast.unparse(owner).partition(".")
                imported = self.names.get(first)
                if not isinstance(imported, tuple):
                    return None
                return _find(".".join(filter(None, [*imported, rest])), name)
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))):
                module, inner = self.entries(owner)[key]
                return module.find(inner)
            case ast.Name(id=name):
                binding = self.names.get(name)
                if binding is None or isinstance(binding, tuple):
                    return None if binding is None else _find(*binding)
                return self.find(binding)
        return self, expression

    def definition(self, expression: ast.AST) -> Definition | None:
        """The function or class that an expression names."""
        place = self.find(expression)
        if place is None or not isinstance(place[1], (ast.FunctionDef, ast.ClassDef)):
            return None
        return Definition(place[0], place[1])

    def entries(self, expression: ast.AST) -> "dict[str, tuple[Module, ast.AST]]":
        """{key: the module and expression of its value} of a dict display."""
        place = self.find(expression)
        if place is None:
            raise LookupError(f"no dict display: {ast.unparse(expression)}")
        module, node = place
        if isinstance(node, ast.Call):  # Parts({...}, ...)
            return module.entries(node.args[0])
        assert isinstance(node, ast.Dict), f"no dict display: {ast.unparse(expression)}"
        entries: dict[str, tuple[Module, ast.AST]] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                entries[str(key.value)] = (module, value)
            else:  # **another
                entries |= module.entries(value)
        return entries


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module's top level, those under `if` and `try` too."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _statements(statement.body)
        else:
            yield statement


def _evaluated(expression: ast.expr | None, unknown: Any) -> Any:
    """The value of an annotation or a default; `unknown` where it names a type of torch."""
    if expression is None:
        return unknown
    try:  # the source that will run
        return eval(ast.unparse(expression), dict(NAMESPACE))  # noqa: S307
    except Exception:
        return unknown


def _find(dotted: str, name: str) -> tuple[Module, ast.AST] | None:
    module = module_of(dotted)
    return None if module is None else module.find(ast.Name(name))


@cache
def module_of(dotted: str) -> Module | None:
    """The source of a module; None where there is none."""
    file = user_code.module_file(dotted)
    if file is None:
        return None
    return Module(file, dotted if file.name == "__init__.py" else dotted.rpartition(".")[0])


def definition_of(path: str) -> Definition | None:
    """The function or class of an import path such as torch.optim.AdamW."""
    dotted, _, name = path.rpartition(".")
    module = module_of(dotted)
    return None if module is None else module.definition(ast.Name(name))


def _options(definition: Definition | None) -> dict[str, Option]:
    parameters = definition.parameters() if definition else {}
    return {name: option for name, option in parameters.items() if option.keyword_only}


@cache
def from_source(place: str) -> Mapping[str, Mapping[str, Option]]:
    """{name: its options} of the registry that "module:EXPRESSION" names, such as
    "memory_reinforce:AUXILIARY['retention']"."""
    dotted, _, expression = place.partition(":")
    module = module_of(dotted)
    assert module is not None, f"no module {dotted}"
    entries = module.entries(ast.parse(expression, mode="eval").body)
    return {name: _options(where.definition(value)) for name, (where, value) in entries.items()}


def definition_at(key: str, place: str) -> Definition | None:
    """The function or class at PATH.py:NAME, nothing run; None where the name is neither."""
    user_code.check_place(key, place)
    file = user_code.file_of(place)
    name = place.rpartition(":")[2]
    try:
        module = Module(file, "")
    except SyntaxError as error:
        raise UserError(
            f"{key}: {file}, line {error.lineno} does not run (SyntaxError: {error.msg})"
        ) from None
    if name not in module.names:
        raise UserError(f"{key}: {file} defines no {name}")
    return module.definition(ast.Name(name))
