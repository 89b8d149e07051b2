"""Reads and checks the lines of metadata, targets, redraws and prompts: pydantic checks each field
against its annotation.

A schema maps keys to annotations. A value that they do not admit is a UserError, one line that
names file, line and key."""

import codecs
import csv
import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval
from pydantic import AfterValidator, BeforeValidator, StringConstraints

from silentbad.errors import UserError, brief, first_line, iterate_reader, user_errors
from silentbad.files import from_json
from silentbad.settings.memory import ROLES as ROLES
from silentbad.settings.types import matching, validated

HEADERS = {"prompt", "prompts", "text", "caption", "phrase", "phrases", "seed", "negative", "image"}
LONGEST = 100_000  # characters of a text


# ---------------------------------------------------------------- fields
def _needed(value: Any) -> Any:
    if value in (None, "", []):
        raise ValueError("is missing")
    return value


def _id_text(value: Any) -> Any:
    """A number becomes its digits, a missing id the empty text."""
    if value is None:
        return ""
    return str(value) if type(value) is int else value


NEEDED = BeforeValidator(_needed)
Text = Annotated[
    str, StringConstraints(max_length=LONGEST), matching(r"(?s)[^\0]*", "text without NUL")
]
Words = Annotated[Text, matching(r"(?s).*\S.*", "text with more than blanks in it")]
Caption = Annotated[Words, NEEDED]
Phrases = Annotated[list[Words], BeforeValidator(lambda value: [] if value is None else value)]
Role = Annotated[str, matching("|".join(ROLES), f"one of {', '.join(ROLES)}")]
Id = Annotated[Text, BeforeValidator(_id_text)]
Places = Annotated[list[Annotated[int, Interval(ge=0, lt=10_000)]], AfterValidator(tuple)]

Schema = Mapping[str, Any]  # key -> annotation
RECORD: Schema = {
    "text": Caption,
    "phrases": Phrases,
    "role": Role,
    "target_id": Id,
    "element_id": Id,
}
UNCAPTIONED: Schema = {**RECORD, "text": Text}
TARGET: Schema = {
    "target_id": Annotated[Id, NEEDED],
    "image": Annotated[Any, NEEDED],  # a file name, checked against its folder
    "phrases": Annotated[Phrases, NEEDED],
    "prompt": Words | None,
    "description": Words | None,
    "paraphrases": Phrases,
}
REDRAW: Schema = {
    "target_id": Annotated[Id, NEEDED],
    "image": Annotated[Any, NEEDED],
    # without one it is a redraw of the caption
    "kind": Annotated[Words, BeforeValidator(lambda value: "redraw" if value is None else value)],
    "changed": Places | None,  # numbers of elements
}


def row(
    where: str,
    picture: Path | dict[str, Any],
    text: Any,
    *,
    mask: Path | None = None,
    phrases: Any = None,
    role: str | None = None,
    target_id: Any = None,
    element_id: Any = None,
    shuffle: bool = False,
    captioned: bool = True,
) -> dict[str, Any]:
    """A record as its reader found it, unchecked; `picture` is a file, or {"path", "bytes"}. One
    that is not `captioned` may have no text."""
    return {
        "where": where,
        "image": picture if isinstance(picture, dict) else {"path": str(picture), "bytes": None},
        "mask": str(mask or ""),
        "text": text,
        "phrases": phrases,
        "role": role or ("element" if phrases else "clean"),
        "target_id": target_id,
        "element_id": element_id,
        "shuffle": shuffle,
        "captioned": captioned,
    }


def element_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an entry that name the element it shows."""
    return {key: entry.get(key) for key in ("phrases", "role", "target_id", "element_id")}


def admit(value: Any, hint: Any, key: str, where: str) -> Any:
    """The value, converted by its annotation. Raises UserError if the annotation does not admit
    it."""
    try:
        return validated(value, hint)
    except ValueError as wrong:
        got = "" if value is None else f", got {brief(value)}"
        raise UserError(f"{where}: {key} {wrong}{got}") from None


def admitted(entry: Mapping[str, Any], schema: Schema, where: str) -> dict[str, Any]:
    """The schema's fields of an entry; a missing one is checked as None."""
    return {key: admit(entry.get(key), hint, key, where) for key, hint in schema.items()}


def refuse_misspelt(entry: Mapping[str, Any], known_keys: Collection[str], where: str) -> None:
    """Refuse a key that is almost a known one; other keys are allowed, for other programs."""
    for key in sorted(entry.keys() - set(known_keys)):
        if len(key) < 40 and (near := difflib.get_close_matches(key, known_keys, n=1, cutoff=0.75)):
            raise UserError(f"{where}: unknown key {key!r}; did you mean {near[0]!r}?")


def check_window(text: str, tokenizer: Any, what: str) -> None:
    """Refuse a text that the tokenizer's window cuts off; the line begins with `what`."""
    length = len(tokenizer(text, truncation=False, verbose=False)["input_ids"])
    window = tokenizer.model_max_length
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
                wrong = f"{where}: not JSON ({first_line(error)})"
                if line.strip() in (b"[", b"{", b"[{"):
                    wrong += "; give one JSON object a line, no list of them"
                raise UserError(wrong) from None
            if not isinstance(entry, dict):
                raise UserError(
                    f"{where}: must be a JSON object, one a line, is {type(entry).__name__}"
                )
            yield where, entry


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"the key {brief(twice[0])} is given twice")
    return dict(pairs)


# characters of a field of a CSV; texts are checked later, against a limit of their own
FIELD = 2**24


def csv_lines(path: Path, needed: str = "file_name") -> Iterator[tuple[str, dict]]:
    """(FILE:LINE, row) of a CSV file in UTF-8 with a column `needed`, the line being the row's
    first. `phrases` is a JSON list, or phrases separated by "|"."""
    with user_errors(f"cannot read {path}"):
        lines = path.open(newline="", encoding="utf-8-sig")
    with lines:
        csv.field_size_limit(FIELD)
        reader = csv.reader(lines, strict=True)
        begun, header = next(_rows(reader, path), (1, []))
        if header and needed not in header:
            one_field = any(mark in column for column in header for mark in ";\t")
            right = (
                f"the first line must name the columns, {needed} and text among them; it is "
                f"{brief(','.join(header))}; --image_column and --caption_column choose others"
            )
            raise UserError(
                f"{path}:{begun}: {'fields must be separated by commas' if one_field else right}"
            )
        if twice := [name for name in header if header.count(name) > 1]:
            raise UserError(f"{path}:{begun}: the column {brief(twice[0])} is given twice")
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
        if text.startswith("["):
            return from_json(text)
        return [phrase.strip() for phrase in text.split("|") if phrase.strip()]
    except ValueError:
        raise UserError(f"{where}: phrases is not a JSON list: {brief(text)}") from None


def caption_beside(picture: Path) -> str | None:
    """The caption of a picture: the first line of NAME.txt or NAME.caption; None without them."""
    beside = [picture.with_suffix(ending) for ending in (".txt", ".caption")]
    files = [file for file in beside if file.is_file()]
    if not files:
        return None
    if len(files) == 2:
        raise UserError(f"{picture}: has {files[0].name} and {files[1].name}; keep one of them")
    file = files[0]
    first = next((line for line in text_lines(file) if line.strip()), "")
    return admit(first.strip(), Caption, "its first line", str(file))


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


def prompt_lines(path: Path, right: str = "give one a line") -> list[tuple[str, str]]:
    """(FILE:LINE, text) of a text file of prompts or phrases, one a line, empty lines left out.

    Raises UserError, which ends with what is `right`, for a table or JSON in its place."""
    lines = [(f"{path}:{k}", line) for k, line in enumerate(text_lines(path), 1) if line.strip()]
    first = lines[0][1] if lines else ""
    header = {cell.strip(' "').casefold() for cell in re.split("[,;\t]", first)}
    if path.suffix.lower() in (".csv", ".tsv") or header <= HEADERS:
        raise UserError(f"{path}: a table's first line would be drawn as a prompt; {right}")
    for where, line in lines:
        if line.lstrip().startswith(("{", "[{", '["')):
            raise UserError(f"{where}: the JSON would be drawn as a prompt; {right}")
    return lines
