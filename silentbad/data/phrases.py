"""Where phrases stand in a caption: as whole words, so that "a car" does not stand in "a carpet"."""

import re
from collections.abc import Iterable

# A letter or digit, but of Thai, Lao, Burmese, Khmer, Chinese, Japanese, Korean: there words are not set apart.
LETTER = r"(?![\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff])\w"


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
