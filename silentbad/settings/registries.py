"""What a registry offers, read from its source: names, options, types and defaults, nothing
imported.

A registry is a dict display in a module, {"gsnr": gsnr, **experiments.RULES}; `from_source` follows
its names and imports to the functions, so a new rule is one function and one line in its dict. An
entry may also be text, "module:function". The keyword-only parameters of a function (of a class,
those of `__init__`) are its options."""

import ast
import importlib.util
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from silentbad.errors import UserError
from silentbad.settings import types
from silentbad.settings.types import MISSING, Option

# What annotations and defaults of options may name.
NAMESPACE = {**vars(typing), **vars(types), "math": math, "Any": Any}


@dataclass(frozen=True)
class Definition:
    """A function or a class in a module that was read."""

    module: "Module"
    node: ast.FunctionDef | ast.ClassDef

    def options(self, keyword_only: bool = True) -> dict[str, Option]:
        """Its parameters; those of a class are its `__init__`'s, inherited where it has none."""
        function = self.node if isinstance(self.node, ast.FunctionDef) else self.method("__init__")
        if function is None:
            return {}
        arguments = function.args
        options = {
            argument.arg: self._option(argument, default)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        }
        if keyword_only:
            return options
        required = len(arguments.args) - len(arguments.defaults)
        defaults = [None] * required + arguments.defaults
        positional = {
            argument.arg: self._option(argument, default)
            for argument, default in zip(arguments.args, defaults, strict=True)
            if argument.arg != "self"
        }
        return positional | options

    def _option(self, argument: ast.arg, default: ast.expr | None) -> Option:
        hint = _evaluated(argument.annotation, Any) if argument.annotation else Any
        return Option(hint, MISSING if default is None else _evaluated(default, None))

    def method(self, name: str) -> ast.FunctionDef | None:
        """A method of a class, its own or of the nearest base that was found."""
        assert isinstance(self.node, ast.ClassDef), f"{self.node.name} is a function"
        for statement in self.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                return statement
        for base in self.node.bases:
            parent = self.module.definition(base)
            if parent is not None and (found := parent.method(name)) is not None:
                return found
        return None


class Module:
    """A module's top level as its source shows it: imports, definitions and assignments."""

    def __init__(self, path: Path, package: str):
        self.package = package  # what relative imports start from
        self.imports: dict[str, tuple[str, str]] = {}  # name here -> (module, name there or "")
        self.nodes: dict[str, ast.FunctionDef | ast.ClassDef] = {}
        self.values: dict[str, ast.expr] = {}
        for statement in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
            self._enter(statement)

    def _enter(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ImportFrom):
            parents = (
                self.package.split(".")[: 1 - statement.level or None] if statement.level else []
            )
            place = ".".join([*parents, *filter(None, [statement.module])])
            for alias in statement.names:
                self.imports[alias.asname or alias.name] = (place, alias.name)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                name = alias.asname or alias.name.partition(".")[0]
                self.imports[name] = (alias.name if alias.asname else name, "")
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            self.nodes[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if statement.value is not None:
                self.values[statement.target.id] = statement.value
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                self._assign(target, statement.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """NAME = value, or NAME["key"] = value, which adds to a dict."""
        if isinstance(target, ast.Name):
            self.values[target.id] = value
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            name = target.value.id
            if name in self.values:
                added = ast.Dict(keys=[None, target.slice], values=[self.values[name], value])
                self.values[name] = added

    def lookup(self, expression: ast.expr) -> "tuple[Module, ast.AST] | None":
        """Where a name, `module.name` or text "module:name" is defined; None where it is not
        found."""
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            name, _, attribute = expression.value.partition(":")
            return _looked_up(module_of(name), attribute)
        if isinstance(expression, ast.Attribute):
            return _looked_up(self._module_named(ast.unparse(expression.value)), expression.attr)
        if not isinstance(expression, ast.Name):
            return self, expression
        name = expression.id
        if name in self.nodes:
            return self, self.nodes[name]
        if name in self.values:
            return self.lookup(self.values[name])
        if name in self.imports:
            place, attribute = self.imports[name]
            return _looked_up(module_of(place), attribute)
        return None

    def _module_named(self, dotted: str) -> "Module | None":
        """The module that a dotted expression means here, such as `experiments` or
        `torch.optim`."""
        first, _, rest = dotted.partition(".")
        if first not in self.imports:
            return None
        place, attribute = self.imports[first]
        return module_of(".".join(part for part in (place, attribute, rest) if part))

    def definition(self, expression: ast.expr) -> Definition | None:
        """The function or class that an expression names."""
        place = self.lookup(expression)
        if place is None or not isinstance(place[1], (ast.FunctionDef, ast.ClassDef)):
            return None
        return Definition(place[0], place[1])

    def entries(self, expression: ast.expr) -> "dict[str, tuple[Module, ast.expr]]":
        """{key: the module and expression of its value} of a dict display."""
        if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
            module, inner = self.entries(expression.value)[str(expression.slice.value)]
            return module.entries(inner)
        place = self.lookup(expression)
        if place is None or not isinstance(place[1], (ast.Dict, ast.Call, ast.Subscript)):
            raise LookupError(f"no dict display: {ast.unparse(expression)}")
        module, node = place
        if isinstance(node, ast.Subscript):
            return module.entries(node)
        if isinstance(node, ast.Call):  # a class of dicts around the display
            return module.entries(node.args[0])
        assert isinstance(node, ast.Dict)
        entries: dict[str, tuple[Module, ast.expr]] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                entries |= module.entries(value)
            elif isinstance(key, ast.Constant):
                entries[str(key.value)] = (module, value)
        return entries


def _looked_up(module: Module | None, name: str) -> tuple[Module, ast.AST] | None:
    return None if module is None else module.lookup(ast.Name(name))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module's top level, those under `if` and `try` too."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _statements(statement.body)
        else:
            yield statement


def _evaluated(expression: ast.expr, unknown: Any) -> Any:
    """The value of an annotation or a default; `unknown` where it names what is not known here."""
    try:
        return eval(ast.unparse(expression), dict(NAMESPACE))  # noqa: S307 (the source that will run)
    except Exception:  # a type of torch, say
        return unknown


@cache
def module_of(dotted: str) -> Module | None:
    """The source of a module, found without importing its packages; None where there is none."""
    first, *rest = dotted.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None:
        return None
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [Path(spec.origin)] if spec.origin else []
    for part in rest:
        files = [folder / f"{part}.py" for folder in folders]
        folders = [folder / part for folder in folders]
        files += [folder / "__init__.py" for folder in folders]
    file = next((file for file in files if file.suffix == ".py" and file.is_file()), None)
    if file is None:
        return None
    return Module(file, dotted if file.name == "__init__.py" else dotted.rpartition(".")[0])


def definition_of(path: str) -> Definition | None:
    """The function or class of an import path such as torch.optim.AdamW."""
    name, _, attribute = path.rpartition(".")
    module = module_of(name)
    return None if module is None else module.definition(ast.Name(attribute))


class SourceRegistry(Mapping[str, dict[str, Option]]):
    """{name: its options} of a registry of the project."""

    def __init__(self, module: str, expression: str):
        source = module_of(module)
        assert source is not None, f"no module {module}"
        self._entries = source.entries(ast.parse(expression, mode="eval").body)

    def __getitem__(self, name: str) -> dict[str, Option]:
        module, expression = self._entries[name]
        definition = module.definition(expression)
        return {} if definition is None else definition.options()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@cache
def from_source(place: str) -> SourceRegistry:
    """The registry that "module:EXPRESSION" names, such as
    "memory_reinforce:AUXILIARY['retention']"."""
    module, _, expression = place.partition(":")
    return SourceRegistry(module, expression)


def options_at(key: str, place: str) -> Mapping[str, Option]:
    """The options of a user's own rule, PATH.py:NAME; `key` names it in messages."""
    file, _, name = place.rpartition(":")
    try:
        module = Module(Path(file), "")
    except SyntaxError as error:
        raise UserError(
            f"{key}: {file}, line {error.lineno} does not run (SyntaxError: {error.msg})"
        ) from None
    if not (name in module.nodes or name in module.values or name in module.imports):
        raise UserError(f"{key}: {file} defines no {name}")
    definition = module.definition(ast.Name(name))
    return {} if definition is None else definition.options()
