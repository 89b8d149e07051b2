"""The steps of a scan: what one task of each does, and the plan that runs them on an engine.

    read      a part's pictures and captions: views, words, phrases        map over parts
    place     a part's views and word signatures among all                 map over parts
    several   phrases that several captions hold                           reduce by phrase
    windows   records that share a window of one place                     map over places
    pairs     records that share two windows, compared                     reduce by record
    links     strong pairs both ways, without near duplicates              map over ranges
    near      the records that each record has a strong pair with          reduce by record
    groups    about the records with most of them                          map over centres
    alarms    sets among permuted captions                                 map over draws

Sets, pictures and pages are made of what these return, by the process that runs the plan. What a
task writes depends on the data and the options alone, not on who runs it and when; the same holds
for results with other parts, since each reduce sorts what it gets."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from silentbad_shield.scan import candidates
from silentbad_shield.scan.captions import counted, numbers_of
from silentbad_shield.scan.engines import Engine, Steps
from silentbad_shield.scan.record_parts import RecordPart
from silentbad_shield.scan.regions import (
    LEAST,
    Chance,
    Group,
    centred,
    duplicates,
    gathered,
    linked,
    merged,
    starts_of,
    verified,
)
from silentbad_shield.scan.scan_folder import Store
from silentbad_shield.scan.suspect_sets import false_alarm, permuted_scores
from silentbad_shield.scan.views import Views, picture_of
from silentbad_shield.scan.words import signatures, word_counts

AT_ONCE = 1 << 20  # pairs of a task
CENTRES = 256  # of a task
DRAWS = 10  # permutations of a task


# -- tasks -----------------------------------------------------------------------------------------
def read(store: Store, number: int, part: RecordPart, key: str, skip: bool) -> dict[str, Any]:
    """Write a part's views and captions; returns how many, and what was left out."""
    views = Views(store.part(number), key)
    left_out = []
    if skip:
        left_out = views.fill_readable(part.rows, str(part.file or number))
    else:
        views.fill(part.rows)
    describe(store, number, views)
    return {"records": len(views.captions), "left_out": left_out}


def describe(store: Store, number: int, views: Views) -> None:
    """Write what a part's captions say, and its views by place in the frame."""
    name = f"part-{number}"
    numbers, ends = numbers_of(views.captions)
    values, counts = np.unique(numbers, return_counts=True)
    (store.part(number) / "words.json").write_text(json.dumps(word_counts(views.captions)))
    store.save(f"{name}/phrases", numbers)
    store.save(f"{name}/ends", ends)
    store.save(f"{name}/values", values)
    store.save(f"{name}/counts", counts)
    lines = [len(json.dumps(text)) + 1 for text in views.captions]
    store.save(f"{name}/lines", np.cumsum(lines, dtype=np.int64))
    store.save(f"{name}/columns", np.moveaxis(views.pixels, 0, 2))


def place(store: Store, number: int) -> None:
    """Write a part's views and signatures among those of all records."""
    if not store.sizes[number]:
        return
    folder = store.part(number)
    views = Views(folder, (folder / "key").read_text())
    counts = json.loads((store.folder / "words.json").read_text())
    store.place("signatures", number, signatures(views.captions, counts, len(store)))
    store.place("views", number, views.pixels)


def several(store: Store, task: int, low: int, high: int) -> None:
    """Of the phrases whose numbers lie in [low, high), those that LEAST captions hold."""
    values = []
    counts = []
    for number in range(len(store.sizes)):
        of_part = store.load(f"part-{number}/values")
        start, end = np.searchsorted(of_part, [low, high])
        values.append(np.asarray(of_part[start:end]))
        counts.append(np.asarray(store.load(f"part-{number}/counts")[start:end]))
    totals = counted(values, counts)
    store.save(f"several-{task}", totals[:, totals[1] >= LEAST])


def windows(store: Store, task: int, at: candidates.Places, seed: int) -> int:
    """Pairs of records that share windows of some places; returns how many."""

    def bands() -> Iterator[np.ndarray]:
        for number in range(len(store.sizes)):
            columns = store.load(f"part-{number}/columns")[at.rows, at.columns]
            yield from candidates.in_blocks(np.moveaxis(columns, 2, 0))

    grids = candidates.offsets(seed)[at.y]
    pairs = candidates.window_pairs(bands(), grids, store.signatures)
    store.save(f"windows-{task}", pairs)
    return len(pairs)


def pairs(store: Store, task: int, low: int, high: int, tasks: int) -> list[int]:
    """Compare the records [low, high) with later ones that share two windows with them; returns how
    many pairs are strong, and how many are near duplicates."""
    n = len(store)
    met = candidates.twice(store.sliced("windows", tasks, low * n, high * n))
    strong = verified(store.views, met, store.captions().share_rare_phrase)
    store.save(f"strong-{task}", strong.pairs)
    store.save(f"copies-{task}", strong.copies)
    return [len(met), len(strong.pairs), len(strong.copies)]


def links(store: Store, task: int) -> int:
    """The strong pairs of a range, both ways."""
    both = linked(np.asarray(store.load(f"strong-{task}")), np.asarray(store.load("first")))
    store.save(f"links-{task}", both)
    return len(both)


def near(store: Store, task: int, low: int, high: int, tasks: int) -> int:
    """All links of the records [low, high)."""
    n = len(store)
    all_links = np.unique(np.concatenate([*store.sliced("links", tasks, low * n, high * n)]))
    store.save(f"near-{task}", all_links)
    return len(all_links)


def groups(store: Store, centres: list[int], density: float) -> list[dict | None]:
    """The group about each record; `density` is that of `Chance`."""
    links = np.memmap(store.folder / "near", np.int64, "r")
    starts = store.load("starts")
    views = store.views
    rows = []
    for centre in centres:
        others = np.asarray(links[starts[centre] : starts[centre + 1]]) % len(store)
        group = gathered(views, centre, others, density)
        rows.append(None if group is None else group.as_json())
    return rows


def alarms(store: Store, draws: list[int], seed: int) -> list[float]:
    """The score of the surest set among permuted captions, by draw."""
    rows = json.loads((store.folder / "groups.json").read_text())
    return permuted_scores([*map(Group.from_json, rows)], store.captions(), draws, seed)


def pictures(part: RecordPart, wanted: dict[int, bool], left_out: list[str]) -> dict[int, Any]:
    """Where some records of a part come from, and their pictures (64,64,3) where they are to be
    opened: `wanted` maps a record's number in the part to whether it is."""
    records = dict[int, Any]()
    number = 0
    rows = part.rows()
    while len(records) < len(wanted):
        row = next(rows)
        if row["where"] in left_out:
            continue
        if (opens := wanted.get(number)) is not None:
            records[number] = [row["where"], picture_of(row).tolist() if opens else None]
        number += 1
    return records


# -- the plan --------------------------------------------------------------------------------------
class Plan:
    """Runs the steps on an engine, in a folder that all its workers see."""

    def __init__(self, folder: Path, engine: Engine, seed: int = 0):
        self.steps = Steps(folder, engine)
        self.store = Store(folder)
        self.seed = seed

    def read(self, parts: list[RecordPart], key: str, skip: bool = False) -> list[dict[str, str]]:
        """Views and captions of all parts; returns what was left out. Raises UserError at a row
        that is no record, unless it may `skip` them."""
        calls = [(self.store, number, part, key, skip) for number, part in enumerate(parts)]
        results = self.steps.run("read", read, calls)
        self.index([result["records"] for result in results])
        return [left_out for result in results for left_out in result["left_out"]]

    def index(self, sizes: list[int]) -> None:
        """Words, phrases and views of all parts, each of so many records."""
        self.store = Store(self.store.folder, sizes)
        words = Counter[str]()
        for number in range(len(sizes)):
            words.update(json.loads((self.store.part(number) / "words.json").read_text()))
        recurring = {word: count for word, count in words.items() if count >= LEAST}
        (self.store.folder / "words.json").write_text(json.dumps(recurring))
        self.store.reserve()
        self.steps.run("place", place, [(self.store, number) for number in range(len(sizes))])
        bounds = _ranges(-(2**63), 2**63 - 1, len(sizes))
        calls = [(self.store, task, *bound) for task, bound in enumerate(bounds)]
        self.steps.run("several", several, calls)
        counted_phrases = [*self.store.parts("several", len(calls))]
        self.store.save("several", np.concatenate(counted_phrases, axis=1))

    def groups(self) -> tuple[list[Group], np.ndarray]:
        """The groups of all records, and each record's first near duplicate (N,)."""
        store = self.store
        n = len(self.store)
        at = candidates.places(n)
        calls = [(store, task, places, self.seed) for task, places in enumerate(at)]
        raw = sum(self.steps.run("windows", windows, calls))
        ranges = _ranges(0, n, max(len(store.sizes), 2 * raw // AT_ONCE))
        sliced = [(store, task, *bound, len(at)) for task, bound in enumerate(ranges)]
        self.steps.run("pairs", pairs, sliced)
        copies = np.concatenate([*store.parts("copies", len(ranges))])
        first = duplicates(n, copies)
        store.save("first", first)
        self.steps.run("links", links, [(store, task) for task in range(len(ranges))])
        sliced = [(store, task, *bound, len(ranges)) for task, bound in enumerate(ranges)]
        self.steps.run("near", near, sliced)
        starts = starts_of(store.joined("near", store.parts("near", len(ranges))), n)
        store.save("starts", starts)
        counts = np.diff(starts)
        chance = Chance.among(counts)
        blocks = itertools.count(1)

        def gather(centres: list[int]) -> list[Group | None]:
            """A step for each block of centres."""
            starts = range(0, len(centres), CENTRES)
            calls = [(store, centres[at : at + CENTRES], chance.density) for at in starts]
            rows = self.steps.run(f"groups-{next(blocks)}", groups, calls)
            return [row and Group.from_json(row) for part in rows for row in part]

        unmerged = centred(counts, gather, chance.fewest)
        return merged(store.views, unmerged, chance.sure), first

    def alarms(self, recurring: list[Group], scores: list[float], draws: int) -> list[float]:
        """The chance of a set with each score among `draws` permutations of the captions."""
        rows = json.dumps([group.as_json() for group in recurring])
        (self.store.folder / "groups.json").write_text(rows)
        starts = range(0, draws, DRAWS)
        calls = [(self.store, [*range(at, min(at + DRAWS, draws))], self.seed) for at in starts]
        permuted = [score for part in self.steps.run("alarms", alarms, calls) for score in part]
        return false_alarm(scores, permuted)

    def pictures(
        self, parts: list[RecordPart], named: np.ndarray, opened: np.ndarray, left_out: list[str]
    ) -> tuple[dict[int, str], dict[int, np.ndarray]]:
        """(where the `named` records come from, the pictures (64,64,3) of those to be `opened`)."""
        opens = {*opened.tolist()}
        calls = []
        starts = []
        for number, part in enumerate(parts):
            start = self.store.start(number)
            of_part = named[(named >= start) & (named < start + self.store.sizes[number])].tolist()
            if of_part:
                calls.append((part, {i - start: i in opens for i in of_part}, left_out))
                starts.append(start)
        where = dict[int, str]()
        shown = dict[int, np.ndarray]()
        for start, rows in zip(starts, self.steps.run("pictures", pictures, calls), strict=True):
            for number, (place, pixels) in rows.items():
                where[start + int(number)] = place
                if pixels is not None:
                    shown[start + int(number)] = np.asarray(pixels, np.uint8)
        return where, shown


def _ranges(low: int, high: int, count: int) -> list[tuple[int, int]]:
    """[low, high) in ranges of nearly one length."""
    ends = [low + (high - low) * k // count for k in range(count + 1)]
    return [*zip(ends[:-1], ends[1:], strict=True)]
