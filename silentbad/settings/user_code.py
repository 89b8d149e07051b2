"""Code of your own in place of a registered name: a setting takes PATH.py:NAME too, or
package.module:NAME of a package.

    --gradient_control.name mine.py:my_rule    --hooks mine.py:MyHook

`check_place` looks at the file alone; `load` runs it. Each file is read once a start: the bytes
that run are the ones whose SHA-256 is recorded. Files that it imports are not recorded.
"""

import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from silentbad.errors import UserError, first_line, user_errors
from silentbad.files import check_file

PLACE = re.compile(r"(?P<file>.+\.py|\w+(\.\w+)+):(?P<name>\w+)")

# file -> (SHA-256 of its bytes, what they define)
_modules: dict[Path, tuple[str, ModuleType]] = {}


def is_place(name: str) -> bool:
    """Whether a name is PATH.py:NAME or package.module:NAME."""
    return PLACE.fullmatch(name) is not None


def check_place(key: str, place: str) -> None:
    """Refuse a place whose file is not there; runs nothing. `key` is the setting that names it."""
    file = file_of(place)
    name = place.rpartition(":")[0]
    if not name.endswith(".py") and not file.is_file():
        raise UserError(f"{key}: no module {name}; is its package installed?")
    check_file(key, str(file), "PATH.py:NAME names what a Python file defines")


def load(key: str, place: str) -> Any:
    """The object that the file defines under that name; read once, until `forget`. Raises UserError
    where it does not run."""
    file = file_of(place).resolve()
    if file not in _modules:
        with user_errors(f"{key}: {file}", kinds=OSError):
            source = file.read_bytes()
        digest = hashlib.sha256(source).hexdigest()
        _modules[file] = (digest, _run(key, file, source, digest))
    _, module = _modules[file]
    name = place.rpartition(":")[2]
    if not hasattr(module, name):
        raise UserError(f"{key}: {file} defines no {name}")
    return getattr(module, name)


def forget() -> None:
    """Read the files anew from now on, as a start does."""
    _modules.clear()


# settings, and options of placebos, whose value may be a place
NAMING = ("name", "of", "error", "optimizer", "hooks", "embedder", "judge")


def places_in(settings: Mapping[str, Any]) -> Iterator[str]:
    """The places that nested settings name."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from places_in(value)
        elif key in NAMING and isinstance(value, (str, list, tuple)):
            names = value.split("+") if isinstance(value, str) else value
            yield from (name for name in names if isinstance(name, str) and is_place(name))


def record(places: list[str]) -> dict[str, dict[str, str]]:
    """{place: its file and that file's SHA-256}, of files that `load` has run."""
    files = {place: file_of(place).resolve() for place in places}
    return {
        place: {"file": str(file), "sha256": _modules[file][0]} for place, file in files.items()
    }


def short(name: str) -> str:
    """The name without the folders of its files: a file may move."""
    return "+".join(Path(part).name if is_place(part) else part for part in name.split("+"))


def file_of(place: str) -> Path:
    """The file of a place, there or not; nothing is imported."""
    name = place.rpartition(":")[0]
    if name.endswith(".py"):
        return Path(name)
    return module_file(name) or Path(f"{name.replace('.', '/')}.py")


def module_file(dotted: str) -> Path | None:
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
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _run(key: str, file: Path, source: bytes, digest: str) -> ModuleType:
    module = ModuleType(f"{file.stem}_{digest[:8]}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses and annotations look it up there
    try:
        exec(compile(source, str(file), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise UserError(
            f"{key}: {file}{_line_of(error, str(file))} does not run "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None
    return module


def _line_of(error: BaseException, file: str) -> str:
    """ ", line N", where the file itself raised."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f", line {lines[-1]}" if lines else ""
