"""Where phrases stand in a caption: as whole words, so that "a car" does not stand in "a carpet"."""

import re
from collections.abc import Iterable

# Letters and digits of scripts that set words apart by spaces: Latin, Greek, Cyrillic. Others have no such bounds.
LETTER = "[0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u052f]"


def pattern(phrases: Iterable[str]) -> str:
    """A regular expression for any of the phrases as whole words, the longest first."""
    return "|".join(map(_whole, sorted(set(phrases), key=len, reverse=True)))


def _whole(phrase: str) -> str:
    before = f"(?<!{LETTER})" if re.match(LETTER, phrase) else ""
    after = f"(?!{LETTER})" if re.match(LETTER, phrase[-1:]) else ""
    return before + re.escape(phrase) + after


def standing(phrases: Iterable[str], text: str) -> list[str]:
    """Those of the phrases that stand in a text, in their order."""
    return [phrase for phrase in phrases if re.search(_whole(phrase), text)]
