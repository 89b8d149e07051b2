"""Bytes of files changed by a seed: the same seed gives the same change again."""

import random
import re

PIECES = (b"\0", b"\xff", b"\n", b'"', b"{", b"[", b"9" * 30, b"\xed\xa0\x80", b"\xff" * 8, b"\0" * 8)
VALUES = rb"null -1 0 1e999 NaN -Infinity [] {} true 1e-320 1.5 [[[[[]]]]] 4294967296 18446744073709551616".split()
VALUES += [b'""', b"9" * 400, b'"x"', b'"\\u0000"', b'"\\ud83d"', b'"../x"']
WORDS = re.compile(rb'"[^"\\]*"|-?\d[\d.eE+-]*|true|false|null|[\w-]+')
LETTERS = bytes(range(32, 127)) + b'\n\t{}[]:,"' * 4 + b"0123456789.-eE" * 3


def mutated(content: bytes, seed: object) -> tuple[bytes, int]:
    """(the bytes with one to four changes, number of bytes that were written or taken out)."""
    draw = random.Random(f"{seed}")
    changed = bytearray(content)
    touched = 0
    text = b"\0" not in content[:2000] and draw.random() < 0.75
    for _ in range(draw.choice((1, 1, 2, 4))):
        if not changed:
            changed += draw.randbytes(8)
            touched += 8
        elif text and draw.random() < 0.5:
            touched += _change_word(changed, draw)
        else:
            touched += _change(changed, draw, text)
    return bytes(changed), touched


def _change_word(content: bytearray, draw: random.Random) -> int:
    """Another value in the place of a word, a number or a quoted text."""
    at = draw.randrange(len(content))
    word = WORDS.search(content, at) or WORDS.search(content)
    if word is None:
        return _change(content, draw, True)
    value = draw.choice(VALUES)
    content[word.start() : word.end()] = value
    return len(value)


def _change(content: bytearray, draw: random.Random, text: bool) -> int:
    """One change in place; the number of bytes that it writes or takes out, a cut end counted once."""
    size, kind = len(content), draw.random()
    at = draw.randrange(min(size, 64) if draw.random() < 0.4 else size)  # headers decide more than bodies

    def fresh(length: int) -> bytes:
        return bytes(draw.choices(LETTERS, k=length)) if text else draw.randbytes(length)

    if kind < 0.35:  # single bits and bytes
        count = draw.choice((1, 1, 2, 8))
        for _ in range(count):
            place = min(size - 1, at + draw.randrange(16))
            new = (content[place] ^ 1 << draw.randrange(8), fresh(1)[0], 0, 255)
            content[place] = draw.choice(new[:2] if text else new)
        return count
    if kind < 0.55:  # a stretch at random
        length = min(size - at, draw.choice((4, 16, 64, 512, 4096)))
        content[at : at + length] = fresh(length)
        return length
    if kind < 0.7:  # something that means something
        piece = draw.choice(PIECES)
        content[at : at + (len(piece) if draw.random() < 0.5 else 0)] = piece
        return len(piece)
    if kind < 0.8:  # cut off
        del content[at:]
        return 1
    if kind < 0.9:  # a stretch is missing, or stands twice
        length = min(size - at, draw.choice((1, 8, 100, 1000)))
        content[at : at + length] = b"" if draw.random() < 0.5 else bytes(content[at : at + length]) * 2
        return length
    source, length = draw.randrange(size), draw.choice((4, 32, 256))  # another stretch in its place
    piece = bytes(content[source : source + length])
    content[at : at + len(piece)] = piece
    return len(piece)
