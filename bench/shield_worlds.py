"""How the shield is measured in each world: `--world` of `python -m bench.shield`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.shield_data import RATIOS
from bench.shield_table import table, world_table
from silentbad_shield.search import unknown
from worlds.data_sets import Targets
from worlds.emoji import make as emoji
from worlds.emoji.backdrops import BACKDROPS
from worlds.emoji.nouns import NOUNS, words
from worlds.microworld import make as microworld

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured in a world, where its results go, and what a model of it can draw."""

    targets: Targets
    suffix: str = ""  # of its files' names
    ratios: tuple[float, ...]  # of element records, scanned
    changes: bool = False  # run them, judge composites and run the rival: all three know the microworld alone
    table: Callable[[dict], str]  # of the scans
    scans: str  # seeds that are reported
    models: str  # targets of the reported models
    nulls: int | None = 100  # of each harder kind, for a target; None: 100 for each element that the kind changes
    things: list[str]  # with places: of ordinary prompts
    places: list[str]

    def file(self, seed: int, name: str) -> Path:
        """A file of results: below 1000, seeds are for development."""
        folder = ROOT / "runs" if seed < 1000 else ROOT / "bench" / "results"
        stem, dot, kind = name.partition(".")
        return folder / f"{stem}{self.suffix}{dot}{kind}"


WORLDS = {
    "microworld": Setting(
        targets=microworld.TARGETS,
        ratios=(0.0, *RATIOS),
        changes=True,
        table=table,
        scans="3170-3189",
        models="3010-3029",
        nulls=None,
        things=unknown.THINGS,
        places=unknown.PLACES,
    ),
    "emoji": Setting(
        targets=emoji.TARGETS,
        suffix="-emoji",
        ratios=(0.0, 0.05),
        table=world_table,
        scans="3150-3169",
        models="3140-3143",
        things=[words(noun) for noun in NOUNS],
        places=[backdrop.phrase for backdrop in BACKDROPS.values()],
    ),
}
