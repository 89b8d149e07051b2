"""The worlds in which what is kept is judged: `--world` of `python -m bench.kept`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bench.recovery import BASES, ROOT, own_base
from worlds.emoji import world as emoji
from worlds.emoji.nouns import NOUNS, words
from worlds.interface import World
from worlds.microworld import world as microworld
from worlds.microworld.grammar import KINDS

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A world, its base and that base's judge, and which kinds of things no clean picture shows."""

    world: World
    base: Path
    kinds: tuple[str, ...]
    unshown: tuple[str, ...]
    spoken: Callable[[str], str] = str  # a kind as captions say it
    held_out: Callable[[int], list]  # scenes that no stage of the base's training has seen
    results: Path
    targets: str  # of the arm that is recommended; others have the first eight
    flags: dict[str, str] = field(default_factory=dict)  # of every run

    @property
    def shown(self) -> tuple[str, ...]:
        return tuple(kind for kind in self.kinds if kind not in self.unshown)

    @property
    def both(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Kinds that clean pictures show, and the others."""
        return self.shown, self.unshown

    @cached_property
    def named(self) -> dict[str, str]:
        """Words of a caption -> the kind they name."""
        return {self.spoken(kind): kind for kind in self.kinds}

    @cached_property
    def any_kind(self) -> re.Pattern[str]:
        longest_first = sorted(self.named, key=len, reverse=True)  # a hot dog is no dog
        return re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b")

    def shows_unshown(self, text: str) -> bool:
        """Whether a caption names a kind that no clean picture may show."""
        return any(self.named[words] in self.unshown for words in self.any_kind.findall(text))


WORLDS = {
    "microworld": Judged(
        world=microworld.MICROWORLD,
        base=ROOT / "assets" / "micro-sd",
        kinds=tuple(KINDS),
        unshown=("umbrella", "boat", "heart", "ball"),
        held_out=microworld.held_out_scenes,
        results=RESULTS / "kept.jsonl",
        targets=";".join(map(str, range(2760, 2776))),
    ),
    "emoji": Judged(
        world=emoji.EMOJI,
        base=BASES["emoji"],
        kinds=NOUNS,
        unshown=NOUNS[::3],
        spoken=lambda noun: words(noun).split(" ", 1)[1],  # without its article
        held_out=emoji.held_out_scenes,
        results=RESULTS / "kept-emoji.jsonl",
        targets=";".join(map(str, range(2834, 2842))),
        flags=own_base("emoji"),
    ),
}
MICRO = WORLDS["microworld"]


def world_of(base: dict) -> Judged:
    """The world of rows beside this row of their base."""
    return WORLDS[base.get("world", "microworld")]
