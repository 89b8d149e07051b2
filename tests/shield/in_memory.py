"""The steps of the plan on records in memory, for cases with a known answer."""

import numpy as np

from silentbad_shield.scan.candidates import in_blocks, offsets, places, twice, window_pairs
from silentbad_shield.scan.captions import Captions, counted, numbers_of
from silentbad_shield.scan.regions import LEAST, Chance, centred, duplicates, gathered, linked, merged, starts_of


def candidates(views, words):
    """Pairs of records that share a word and two windows."""
    grids = offsets(0)
    return twice(
        window_pairs(in_blocks(views[:, at.rows, at.columns]), grids[at.y], words) for at in places(len(views))
    )


def groups(views, strong):
    """(groups from verified pairs, each record's first near duplicate (N,))."""
    first = duplicates(len(views), strong.copies)
    links = linked(strong.pairs, first)
    starts = starts_of(links, len(views))
    chance = Chance.among(np.diff(starts))

    def gather(centres):
        others = [links[starts[centre] : starts[centre + 1]] % len(views) for centre in centres]
        return [gathered(views, centre, near, chance.density) for centre, near in zip(centres, others, strict=True)]

    return merged(views, centred(np.diff(starts), gather, chance.fewest), chance.sure), first


def captions_of(texts):
    """Captions in one part."""
    numbers, ends = numbers_of(texts)
    totals = counted([numbers], [np.ones_like(numbers)])
    return Captions(texts, [(numbers, ends)], totals[:, totals[1] >= LEAST])
