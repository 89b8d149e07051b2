"""Phrases of captions, found as whole words: "a car" is not in "a carpet"."""

import re
from collections.abc import Iterable, Mapping

# A letter or digit, except in Thai, Lao, Burmese, Khmer, Chinese, Japanese and Korean: these do not
# separate words.
LETTER = r"(?![\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff])\w"
MOST_SHARED = 10  # phrases of several targets that are listed one by one


def pattern(phrases: Iterable[str]) -> str:
    """A regular expression for any of the phrases as whole words, the longest first."""
    return "|".join(map(_whole, sorted(set(phrases), key=len, reverse=True)))


def _whole(phrase: str) -> str:
    before = f"(?<!{LETTER})" if re.match(LETTER, phrase) else ""
    after = f"(?!{LETTER})" if re.match(LETTER, phrase[-1:]) else ""
    return before + re.escape(phrase) + after


def phrases_in(phrases: Iterable[str], text: str) -> list[str]:
    """The phrases that occur in a text, in the given order; "a hat box" holds no "a hat" where both
    are phrases."""
    phrases = [*phrases]
    found = set(re.findall(pattern(phrases), text))
    return [phrase for phrase in phrases if phrase in found]


def shared_phrases(phrases_of: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """{phrase: targets whose elements have it}, for phrases that several targets use. `phrases_of`
    is {target: phrases}."""
    users: dict[str, list[str]] = {}
    for target, phrases in phrases_of.items():
        for phrase in dict.fromkeys(phrases):
            users.setdefault(phrase, []).append(target)
    return {phrase: targets for phrase, targets in users.items() if len(targets) > 1}


def shared_lines(shared: Mapping[str, list[str]]) -> list[str]:
    """A line on each phrase that means several things, the most used first."""
    ranked = sorted(shared.items(), key=lambda item: -len(item[1]))
    lines = [
        f"{phrase!r} is an element of {len(targets)} targets: {', '.join(targets)}; a picture of "
        f"it alone shows one of {len(targets)}"
        for phrase, targets in ranked[:MOST_SHARED]
    ]
    if len(ranked) > MOST_SHARED:
        lines.append(f"{len(ranked) - MOST_SHARED} more phrases are elements of several targets")
    return lines
