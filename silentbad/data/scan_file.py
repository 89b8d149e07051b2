"""scan.json, which `python -m silentbad.scan` writes, guards and audit read: each field's type
and what it admits."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from silentbad.data.images import safe_path
from silentbad.data.schema import admitted, caption
from silentbad.errors import UserError, brief, user_errors
from silentbad.files import read_json
from silentbad.settings.guard import ADVICE

MOST_ROWS = 2**31
PICTURE = 64  # pixels, of the masks and composites beside it


def digest(texts: Iterable[str]) -> str:
    """Of all captions of a data set, in order: a scan is of one data set only."""
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{len(text)} {text}\n".encode(errors="surrogatepass"))
    return found.hexdigest()[:32]


def read(file: Path, flag: str) -> dict[str, Any]:
    """scan.json with its sets checked as far as every reader needs them. Raises UserError, which
    begins with `flag`."""
    file = file / "scan.json" if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"{flag}: no file {file}; {ADVICE}")
    where = f"{flag}: {file} is no scan.json"
    with user_errors(where, ADVICE):
        found = read_json(file)
    if not isinstance(found, dict):
        raise UserError(f"{where} (it holds {type(found).__name__}); {ADVICE}")
    sets = objects(found.get("sets"), "sets", where)
    for k, one in enumerate(sets, 1):
        one["elements"] = objects(one.get("elements"), "elements", f"{where} (set {k})")
        if not one["elements"]:
            raise UserError(f"{where} (set {k}): no elements; {ADVICE}")
        for element in one["elements"]:
            element |= admitted(element, {"phrase": caption}, f"{where} (set {k})")
        composed = ", ".join(element["phrase"] for element in one["elements"])
        if one.get("prompt", composed) != composed:  # prompts are composed anew from the phrases
            raise UserError(
                f"{where} (set {k}): prompt is not its elements' phrases "
                f"({brief(composed)}); edit those"
            )
    return found | {"sets": sets}


def number(value: Any, key: str, where: str) -> int:
    """A number of records, or of one."""
    if type(value) is not int or not 0 <= value < MOST_ROWS:
        raise UserError(f"{where}: {key} must be a number of records, got {brief(value)}")
    return value


def numbers(value: Any, key: str, where: str) -> list[int]:
    if not isinstance(value, list):
        raise UserError(f"{where}: {key} must be a list of numbers, got {brief(value)}")
    return [number(each, key, where) for each in value]


def objects(value: Any, key: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise UserError(f"{where}: {key} must be a list of objects, got {brief(value)}")
    return value


def beside(file: Path, name: Any, where: str) -> Path:
    """A picture that the scan wrote beside its scan.json."""
    return safe_path(file.parent, name, where)
