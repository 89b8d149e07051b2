"""scan.json, which `silentbad-scan` writes, the guard and the search read: each field's type
and what it admits."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from silentbad.data.schema import Caption
from silentbad.errors import UserError, brief
from silentbad.settings.types import validated_file
from silentbad_shield.options import ADVICE, check_scan

PICTURE = 64  # pixels, of the masks and composites beside it
Row = Annotated[int, Interval(ge=0, lt=2**31)]  # a record's number, or a count of them


def remove_earlier(result: Path, pictures: str) -> None:
    """Remove the pictures beside an earlier result that it names, where the names match the pattern
    `pictures`."""
    if result.is_file():
        text = result.read_text(encoding="utf-8", errors="replace")
        for name in re.findall(f'"({pictures})"', text):
            (result.parent / name).unlink(missing_ok=True)


@dataclass
class Element:
    """What several records share."""

    phrase: Caption
    records: list[Row] = field(default_factory=list)
    mask: str = ""  # a picture beside the file


@dataclass
class SuspectSet:
    """Elements that make one picture."""

    elements: list[Element]
    prompt: str | None = None
    composite: str = ""  # a picture beside the file

    @property
    def composed(self) -> str:
        """The prompt, joined from the elements' phrases."""
        return ", ".join(element.phrase for element in self.elements)


@dataclass
class Suspect:
    """A record, and its caption by which it is recognised."""

    index: Row
    text: Caption


@dataclass
class Scan:
    """What a scan found among `records` records; `captions` is the digest of theirs."""

    sets: list[SuspectSet]
    records: Row | None = None
    captions: str | None = None
    suspects: list[Suspect] = field(default_factory=list)


def digest(texts: Iterable[str]) -> str:
    """A digest of all captions in order, by which a scan recognises its data set."""
    hasher = hashlib.sha256()
    for text in texts:
        hasher.update(f"{len(text)} {text}\n".encode(errors="surrogatepass"))
    return hasher.hexdigest()[:32]


def read(file: Path, flag: str) -> Scan:
    """A scan.json, or that of a folder. Raises UserError, which begins with `flag`."""
    check_scan(str(file), flag)
    file = file / "scan.json" if file.is_dir() else file
    where = f"{flag}: {file} is no scan.json"
    try:
        scan = validated_file(file, Scan)
    except UserError as error:
        raise UserError(f"{where} ({error}); {ADVICE}") from None
    for k, suspect_set in enumerate(scan.sets, 1):
        if not suspect_set.elements:
            raise UserError(f"{where} (set {k}): no elements; {ADVICE}")
        if suspect_set.prompt not in (None, suspect_set.composed):
            raise UserError(
                f"{where} (set {k}): prompt is not its elements' phrases "
                f"({brief(suspect_set.composed)}); edit those"
            )
    return scan
