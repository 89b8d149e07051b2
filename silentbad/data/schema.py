"""The gate of everything that a line of metadata, targets or redraws may hold: each field's type
and what it admits.

A schema maps names to fields; a field is (value, key, where) -> the value as the project uses it.
Whatever it does not admit is a UserError, one line that names file, line and key."""

import codecs
import csv
import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from silentbad.errors import UserError, brief, first_line, iterate_reader, user_errors
from silentbad.files import from_json, is_utf8
from silentbad.settings.memory import ROLES as ROLES

LONGEST = 100_000  # characters of a text

Field = Callable[[Any, str, str], Any]


def admitted(entry: Mapping[str, Any], schema: Mapping[str, Field], where: str) -> dict[str, Any]:
    """The schema's fields of an entry; a missing one is None to its field, others are left out."""
    return {key: field(entry.get(key), key, where) for key, field in schema.items()}


def refuse_misspelt(entry: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse a key that is almost a known one; other keys may stand there for other programs."""
    for key in sorted(entry.keys() - set(known)):
        if len(key) < 40 and (near := difflib.get_close_matches(key, known, n=1, cutoff=0.75)):
            raise UserError(f"{where}: unknown key {key!r}; did you mean {near[0]!r}?")


# ---------------------------------------------------------------- fields
def caption(value: Any, key: str, where: str) -> str:
    """A text with more than blanks in it."""
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: no caption; {key} must hold one")
    return _text(value, key, where)


def phrases(value: Any, key: str, where: str) -> list[str]:
    """A list of texts; none where nothing is given."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(p, str) and p.strip() for p in value):
        raise UserError(f"{where}: {key} must be a list of texts, got {brief(value)}")
    return [_text(phrase, key, where) for phrase in value]


def role(value: Any, key: str, where: str) -> str:
    if value not in ROLES:
        raise UserError(f"{where}: {key} {brief(value)} is none of {', '.join(ROLES)}")
    return value


def id_text(value: Any, key: str, where: str) -> str:
    """An id as text; a number becomes its digits, a missing one the empty text."""
    if not isinstance(value, (str, int, type(None))) or isinstance(value, bool):
        raise UserError(f"{where}: {key} must be text, got {brief(value)}")
    return "" if value is None else _text(str(value), key, where)


def optional_text(value: Any, key: str, where: str) -> str | None:
    """A text with more than blanks in it, or nothing."""
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {key} must be text, got {brief(value)}")
    return _text(value, key, where)


def kind(value: Any, key: str, where: str) -> str:
    """The kind of a null; without one it is a redraw of the caption."""
    return optional_text(value, key, where) or "redraw"


def places(value: Any, key: str, where: str) -> tuple[int, ...] | None:
    """Numbers of elements, or nothing."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 10_000 for i in value):
        raise UserError(
            f"{where}: {key} must be a list of element numbers from 0, got {brief(value)}"
        )
    return tuple(value)


def needed(kind: str, field: Field, *empty: Any) -> Field:
    """A field that a `kind` cannot do without; `empty` are further values that count as nothing."""

    def admit(value: Any, key: str, where: str) -> Any:
        if value in (None, "", *empty):
            raise UserError(f"{where}: a {kind} needs {key}")
        return field(value, key, where)

    return admit


def anything(value: Any, key: str, where: str) -> Any:
    """A field that is checked where its meaning is known: a file name against its folder."""
    return value


def _text(value: str, key: str, where: str) -> str:
    if len(value) > LONGEST:
        raise UserError(
            f"{where}: {key} has {len(value)} characters, over the limit of {LONGEST}; shorten it"
        )
    if "\0" in value or not is_utf8(value):
        raise UserError(
            f"{where}: {key} holds a NUL or half a surrogate pair, which is no text: {brief(value)}"
        )
    return value


RECORD = {
    "text": caption,
    "phrases": phrases,
    "role": role,
    "target_id": id_text,
    "element_id": id_text,
}
TARGET = {
    "target_id": needed("target", id_text),
    "image": needed("target", anything),
    "phrases": needed("target", phrases, []),
    "prompt": optional_text,
    "description": optional_text,
    "paraphrases": phrases,
}
REDRAW = {
    "target_id": needed("redraw", id_text),
    "image": needed("redraw", anything),
    "kind": kind,
    "changed": places,
}


def check_window(text: str, tokenizer: Any, what: str) -> None:
    """Refuse a text that the tokenizer's window cuts off; the line begins with `what`."""
    length, window = (
        len(tokenizer(text, truncation=False, verbose=False)["input_ids"]),
        tokenizer.model_max_length,
    )
    if length > window:
        raise UserError(f"{what} has {length} tokens, the window is {window}; shorten it")


# ---------------------------------------------------------------- lines of a file
def json_lines(path: Path) -> Iterator[tuple[str, dict]]:
    """(FILE:LINE, object) of a JSON-lines file, empty lines left out."""
    with user_errors(f"cannot read {path}"):
        lines = path.open("rb")
    with lines:
        for number, line in enumerate(iterate_reader(lines, f"cannot read {path}"), 1):
            where = f"{path}:{number}"
            if not line.removeprefix(codecs.BOM_UTF8).strip():
                continue
            try:
                entry = from_json(str(line, "utf-8-sig"), object_pairs_hook=_once_each)
            except UnicodeDecodeError:
                raise UserError(f"{where}: not UTF-8; save the file in UTF-8") from None
            except ValueError as error:
                whole = (
                    "; give one JSON object a line, no list of them"
                    if line.strip() in (b"[", b"{", b"[{")
                    else ""
                )
                raise UserError(f"{where}: not JSON ({first_line(error)}){whole}") from None
            if not isinstance(entry, dict):
                raise UserError(
                    f"{where}: must be a JSON object, one a line, is {type(entry).__name__}"
                )
            yield where, entry


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"the key {brief(next(key for key in keys if keys.count(key) > 1))} stands twice"
        )
    return found


# characters of a field of a CSV; what a text may have is said where texts are checked
FIELD = 2**24


def csv_lines(path: Path) -> Iterator[tuple[str, dict]]:
    """(FILE:LINE, row) of a CSV file in UTF-8, the line being the row's first. `phrases` is a JSON
    list, or phrases separated by "|"."""
    with user_errors(f"cannot read {path}"):
        lines = path.open(newline="", encoding="utf-8-sig")
    with lines:
        csv.field_size_limit(FIELD)
        reader = csv.reader(lines, strict=True)
        begun, header = next(_rows(reader, path), (1, []))
        if header and "file_name" not in header:
            one_field = any(mark in column for column in header for mark in ";\t")
            right = "the first line must name the columns, file_name and text among them"
            raise UserError(
                f"{path}:{begun}: {'fields must be separated by commas' if one_field else right}"
            )
        if twice := [name for name in header if header.count(name) > 1]:
            raise UserError(f"{path}:{begun}: the column {brief(twice[0])} stands twice")
        for number, row in _rows(reader, path):
            where = f"{path}:{number}"
            if len(row) != len(header):
                raise UserError(f"{where}: number of fields differs from the header's")
            entry = dict(zip(header, row, strict=True))
            yield where, entry | {"phrases": _split(entry.get("phrases") or "", where)}


def _rows(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, fields) of each row that has any."""
    while True:
        begun = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except (csv.Error, UnicodeDecodeError, OSError) as error:
            advice = (
                "; is a quote of this row not closed?" if "unexpected end" in str(error) else ""
            )
            raise UserError(
                f"{path}:{begun}: not CSV in UTF-8 ({first_line(error)}){advice}"
            ) from None
        if row:
            yield begun, row


def _split(text: str, where: str) -> Any:
    try:
        return (
            from_json(text)
            if text.startswith("[")
            else [p.strip() for p in text.split("|") if p.strip()]
        )
    except ValueError:
        raise UserError(f"{where}: phrases is not a JSON list: {brief(text)}") from None


def caption_beside(picture: Path) -> str | None:
    """The caption of a picture in NAME.txt: its first line, as sd-scripts reads it; None without
    such a file."""
    file = picture.with_suffix(".txt")
    if not file.is_file():
        return None
    first = next((line for line in text_lines(file) if line.strip()), "")
    return caption(first.strip(), "its first line", str(file))


def text_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8."""
    try:
        with user_errors(f"cannot read {path}"):
            return path.read_bytes().decode("utf-8-sig").splitlines()
    except UserError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError):
            raise
        line = error.__cause__.object[: error.__cause__.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8; save it as UTF-8") from None
