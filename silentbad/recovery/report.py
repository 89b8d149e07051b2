"""report.html of a run folder, and a comparison of several runs: one file each, no network, no script.

Reads what a folder holds and says what is not there: validation.json, metrics.jsonl, multipliers.json,
phrase_memory.json, timesteps.json, config.yaml, run.json and the pictures of samples/ (docs/metrics.md). Functions here
return data; the HTML is in templates/.
"""

import base64
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from silentbad.data.images import open_image
from silentbad.errors import ArgumentParser, UserError, reading, say, writing
from silentbad.files import check_writable, named
from silentbad.recovery import evidence, pages
from silentbad.recovery.charts import Series, finite, number, spaced
from silentbad.recovery.pages import Card, Cell, Figure, Pair, Shot, Table, rounded
from silentbad.recovery.prompts import NAME as PROMPTS
from silentbad.recovery.prompts import Draw, read_draws
from silentbad.recovery.record import (
    ALL,
    NAME,
    STRICT,
    CellScores,
    Measurement,
    Record,
    Scores,
    SummaryRow,
    TargetEntry,
    TargetScores,
    decode,
    read_json,
)
from silentbad.recovery.scores import images_recovered, kinds, minus_placebo, placebo_run
from silentbad.recovery.statistics import bootstrap_interval
from silentbad.settings import read_file

WEIGHTS = {"raw": "raw weights", "ema": "averaged weights"}
CELLS = {
    "composed": "composed prompt",
    "described": "spelt-out caption",
    "shuffled": "phrases in another order",
    "others": "phrases of another target",
    "unrelated": "unrelated caption",
}
NUMBERED = {"phrase": "phrase {} alone", "without": "all but phrase {}", "paraphrase": "paraphrase {}"}
RATE = "strict rate (CIR): images with the whole and every element"
MOST_PAIRS = 6  # targets beside their best generation, at the top
MOST_STEPS = 10  # shown of each target
MOST_PROMPTS = 40  # of the sample prompts
MOST_BYTES = 32_000_000  # of a picture's file
SIDE = 208  # pixels of a picture in the page, which shows it at half of that
T = TypeVar("T")


# -- reading -----------------------------------------------------------------------------------------------
@dataclass
class Multipliers:
    """An entry of multipliers.json."""

    step: float
    multipliers: dict[str, float | None]


@dataclass
class Strengths:
    """An entry of phrase_memory.json: rho of each phrase."""

    step: float
    rho: list[float | None]


@dataclass
class NamedStrengths:
    """The same by name."""

    step: float
    rho: dict[str, float | None]


@dataclass
class PhraseMemory:
    """phrase_memory.json."""

    phrases: list[str] = field(default_factory=list)
    history: list[Strengths] = field(default_factory=list)

    def named(self) -> list[NamedStrengths]:
        """The history by name; a phrase without one gets a number."""
        names = dict(enumerate(self.phrases))
        return [
            NamedStrengths(e.step, {names.get(i, f"element {i + 1}"): v for i, v in enumerate(e.rho)})
            for e in self.history
        ]


@dataclass
class Timesteps:
    """timesteps.json: how often each range of timesteps was trained on."""

    edges: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)


class Run:
    """What a run folder holds. A damaged validation.json is refused; another part that is missing or damaged is left
    empty, with a note where it is damaged."""

    def __init__(self, folder: str | Path):
        self.folder, self.notes = Path(folder), list[str]()
        if not self.folder.is_dir():
            raise UserError(f"report: no folder '{folder}'; give the output_dir of a run")
        self.name = self.folder.resolve().name
        file = self.folder / NAME
        if file.exists() and not file.is_file():
            raise UserError(f"report: {file} is no file")
        self.record = Record.load(file) if self._holds(NAME) else None
        self.metrics = self._metrics()
        self.draws = self._draws()
        if not (self.record or self.metrics or self.draws):
            raise UserError(f"report: '{folder}' holds neither validation.json nor metrics.jsonl; is it a run folder?")
        self.multipliers = self._part("multipliers.json", lambda x: decode(list[Multipliers], x)) or []
        self.phrases = self._part("phrase_memory.json", _strengths) or []
        self.timesteps = self._part("timesteps.json", lambda x: decode(Timesteps, x)) or Timesteps()
        self.facts = self._part("run.json", lambda x: decode(dict[str, Any], x)) or {}
        self.config = self._text("config.yaml")
        self.history = self.record.history if self.record else []
        self._pictures: dict[Path, str] = {}

    def _inside(self, name: str) -> Path | None:
        """Where a file of the folder is; None where there is none, or its name or a link leads out."""
        try:
            file = (self.folder / name).resolve()
            return file if file.is_relative_to(self.folder.resolve()) and file.is_file() else None
        except (OSError, ValueError, RuntimeError):  # too long a name, NUL, a loop of links
            return None

    def _holds(self, name: str) -> bool:
        """Whether the folder holds this file; a note where a link leads out."""
        if self._inside(name) is not None:
            return True
        if (self.folder / name).is_file():
            self.notes.append(f"{name} is a link that leads out of the folder; left out")
        return False

    def _draws(self) -> list[Draw]:
        try:
            return read_draws(self.folder) if self._holds(PROMPTS) else []
        except UserError as error:
            self.notes.append(f"{PROMPTS} could not be read: {error}")
            return []

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace") if self._holds(name) else ""
        except OSError as error:
            self.notes.append(f"{name} could not be read: {error.strerror}")
            return ""

    def _part(self, name: str, read: Callable[[Any], T]) -> T | None:
        """A JSON file in its form, None where there is none; NaN and infinity count as not measured."""
        if not self._holds(name):
            return None
        try:
            value = read_json(self.folder / name, parse_constant=lambda _: None)
        except UserError as error:
            self.notes.append(f"{name} could not be read: {error}")
            return None
        try:
            return read(value)
        except UserError as error:
            self.notes.append(f"{name} has another form than docs/metrics.md states: {error}")
            return None

    def _metrics(self) -> list[dict[str, Any]]:
        rows, broken = [], 0
        for line in self._text("metrics.jsonl").splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and finite(row.get("step")):
                rows.append({**row, "step": int(row["step"])})
            else:
                broken += bool(line.strip())
        if broken:
            self.notes.append(f"metrics.jsonl: {broken} unreadable lines left out")
        return rows

    def picture(self, name: str | None) -> str:
        """A picture of the folder as a data URI; empty where there is none that can be read."""
        file = None if name is None else self._inside(name)
        if name is None or file is None:
            return ""
        if file not in self._pictures:
            try:
                self._pictures[file] = _data_uri(file, name)
            except UserError as error:
                self._pictures[file] = ""
                self.notes.append(str(error))
        return self._pictures[file]

    @property
    def strict(self) -> bool:
        """Whether an image counts by the whole and every element."""
        return self.record is not None and self.record.endpoint == STRICT

    def withheld(self) -> list[str]:
        """Elements that config.yaml left out of training."""
        try:
            names = read_file(str(self.folder / "config.yaml"))[0].get("withhold") if self.config else None
        except UserError:
            return []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def kinds(self) -> list[str]:
        """Which weights were measured."""
        return kinds(self.history)

    def measured(self, kind: str) -> list[tuple[Measurement, Scores]]:
        """The measurements of these weights."""
        return [(entry, scores) for entry in self.history if (scores := entry.scores(kind))]

    def curve(self, kind: str) -> list[tuple[int, Scores]]:
        """(step, scores) of one kind of weights; the base model's point opens both."""
        points = [(e.step, e.scores(kind) or (e.raw if e.step == 0 else None)) for e in self.history]
        return [(step, scores) for step, scores in points if scores]

    def series(self, name: str, kind: str, of: Callable[[Scores], float | None]) -> Series:
        """One score against steps."""
        points = self.curve(kind)
        return Series(name, [step for step, _ in points], [of(scores) for _, scores in points])

    def rates(self, name: str, kind: str) -> Series:
        """The recovery rate with its interval."""
        low, high = zip(*(scores.interval for _, scores in self.curve(kind)), strict=True)
        return self.series(name, kind, lambda s: s.cir)._replace(low=low, high=high)

    def last(self, kind: str) -> Scores:
        """The latest scores of these weights."""
        return self.measured(kind)[-1][1]

    def total(self, kind: str) -> SummaryRow | None:
        """The summary row over all targets."""
        rows = self.record.summary if self.record else []
        return next((row for row in rows if row.target == ALL and row.weights == kind), None)

    def targets(self, kind: str) -> list[SummaryRow]:
        """The summary rows of each target."""
        rows = self.record.summary if self.record else []
        return [row for row in rows if row.target != ALL and row.weights == kind]


def _strengths(value: Any) -> list[NamedStrengths]:
    return decode(list[NamedStrengths], value) if isinstance(value, list) else decode(PhraseMemory, value).named()


def _data_uri(file: Path, name: str) -> str:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise UserError(f"{name}: over the limit of {MOST_BYTES} bytes; left out")
        image = open_image(file.read_bytes(), name)
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    small = max(image.size) <= SIDE // 2
    image.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True) if small else image.save(stream, "JPEG", quality=86)
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(stream.getvalue()).decode()}"


# -- parts of the page -------------------------------------------------------------------------------------
@dataclass
class Tile:
    """A headline number; its 95 % interval, or the mean beside it."""

    name: str
    value: Cell
    interval: tuple[float, float] | None = None
    beside: float | None = None


def tiles(run: Run, kind: str) -> list[Tile]:
    """The headline numbers of these weights at the last measurement."""
    last, total, rows = run.last(kind), run.total(kind), run.targets(kind)
    low, high = bootstrap_interval([row.aurc for row in rows if row.aurc is not None])
    spread = (low, high) if high > low else None
    lasting = [row for row in rows if row.sustained_step is not None]
    found, placebo = last.detection, run.record.placebo if run.record else None

    def step(key: str) -> Cell:
        value: float | None = getattr(total, key)
        return "never" if value is None else value

    ends = (found.auc_low, found.auc_high) if found else (None, None)
    auc = None if ends[0] is None or ends[1] is None else (ends[0], ends[1])
    headline = "headline: strict rate less that of placebo data"
    first = "first step with a recovered image, mean over the targets that have one"
    lasts = f"step from which the rate stays at 50 % (sustained), mean over the {len(lasting)} of {len(rows)} targets"
    curve = (
        [
            Tile(first, step("first_step")),
            Tile(f"{lasts} that have one", step("sustained_step") if run.strict else None),
            Tile("area under the recovery curve (AURC)", total.aurc, spread),
        ]
        if total
        else []
    )
    made = [Tile(headline, placebo.difference, placebo.interval)] if placebo else []
    made += [
        Tile(RATE if run.strict else "rate of the whole alone (CIR)", last.cir, last.interval),
        Tile("whole alone", last.whole),
        Tile("elements recovered in the composed images", last.element_rate),
        Tile("published criterion: targets whose best image passes a fixed number", last.published),
        Tile("targets with a recovered image", last.recovered),
        *curve,
        Tile("best similarity", last.max, beside=last.mean),
        Tile("diversity of a target's images (0: all alike)", last.diversity),
        Tile("composed prompts told from clean ones (AUC)", found.auc if found else None, auc),
    ]
    return [tile for tile in made if tile.value is not None]


def pairs(run: Run, record: Record, kind: str) -> list[Pair]:
    """Each of the first targets beside its best generation at the last measurement."""
    last, made = run.last(kind), list[Pair]()
    for j, target in enumerate(record.targets[:MOST_PAIRS]):
        own = last.targets.get(target.target_id)
        if own is None or own.best is None or not (src := run.picture(own.best.file)):
            continue
        hits = images_recovered(own, j, record.threshold, record.element_threshold, record.endpoint)
        best = Shot(src, "best generation", "best generation", hit=_hit(own, own.best.sim, hits))
        shot = Shot(run.picture(target.image), f"target {target.target_id}", target.target_id)
        made.append(Pair(shot, best, f"{sum(hits)} of {len(hits)} images recovered"))
    return made


def prompts(run: Run) -> list[tuple[str, str, list[Shot]]]:
    """(prompt, what else it was drawn with, its pictures by step) of the first sample prompts."""
    draws = [run.draws[k] for k in spaced(len(run.draws), MOST_STEPS)]
    found: dict[tuple[str, int, str], list[Shot]] = {}
    for draw in draws:
        for image in draw.images:
            key = image.prompt, image.seed, image.negative
            if (key in found or len(found) < MOST_PROMPTS) and (src := run.picture(image.file)):
                when = f"step {draw.step}"
                found.setdefault(key, []).append(Shot(src, f"{image.prompt} at {when}", when))
    return [
        (prompt, f"seed {seed}" + (f", away from: {negative}" if negative else ""), shots)
        for (prompt, seed, negative), shots in found.items()
    ]


def _hit(own: TargetScores, sim: float, hits: Sequence[bool]) -> bool:
    """Whether the image of this similarity is recovered."""
    return any(hit for s, hit in zip(own.sims, hits, strict=False) if s == sim)


def cards(run: Run, record: Record, kind: str) -> list[Card]:
    """Each kept target beside its best and median generations by step, and its elements."""
    measured = run.measured(kind)
    measured = [measured[k] for k in spaced(len(measured), MOST_STEPS)]
    made = []
    for target in record.targets:
        rows = [_generations(run, measured, record, target, choice) for choice in ("best", "median")]
        if any(rows):
            shot = Shot(run.picture(target.image), f"target {target.target_id}", "target")
            made.append(
                Card(target.target_id, target.prompt, shot, [r for r in rows if r], _elements(run, target, kind))
            )
    return made


def _generations(
    run: Run, measured: Sequence[tuple[Measurement, Scores]], record: Record, target: TargetEntry, choice: str
) -> list[Shot]:
    """The best or the median generation of a target by step, where it was kept."""
    shots, j = list[Shot](), record.targets.index(target)
    for entry, scores in measured:
        own = scores.targets.get(target.target_id)
        kept = own and (own.best if choice == "best" else own.median)
        if own and kept and (src := run.picture(kept.file)):
            alt = f"{choice} generation at step {entry.step}"
            when = entry.label or f"step {entry.step}"
            hits = images_recovered(own, j, record.threshold, record.element_threshold, record.endpoint)
            shots.append(Shot(src, alt, when, f"{choice} {rounded(kept.sim)}", hit=_hit(own, kept.sim, hits)))
    return shots


def _elements(run: Run, target: TargetEntry, kind: str) -> list[Shot]:
    """The elements of a target that have a mask, with their scores."""
    own, shots = run.last(kind).targets.get(target.target_id), []
    for k, (phrase, file) in enumerate(zip(target.phrases, target.elements, strict=False)):
        if src := run.picture(file):
            scores = own.elements[k] if own and k < len(own.elements) else None
            rate, mean = (scores.rate, scores.mean) if scores else (None, None)
            shots.append(
                Shot(src, f"element {phrase}", phrase, f"rate {rounded(rate)}, mean\N{NO-BREAK SPACE}{rounded(mean)}")
            )
    return shots


def curves(run: Run, record: Record) -> list[Figure]:
    """Rate, similarity and elements against steps."""
    sims = []
    for kind in run.kinds():
        sims += [
            run.series(f"mean, {WEIGHTS[kind]}", kind, lambda s: s.mean),
            run.series(f"95th percentile, {WEIGHTS[kind]}", kind, lambda s: s.p95),
            run.series(f"best, {WEIGHTS[kind]}", kind, lambda s: s.max),
        ]
    parts = [run.series(WEIGHTS[kind], kind, lambda s: s.element_rate) for kind in run.kinds()]
    note = (
        f"share of composed images with {'the whole and every element' if run.strict else 'the whole'} at its "
        "threshold; band: 95 % over targets (binomial where all agree), or over the images of a single target"
    )
    rates = [run.rates(WEIGHTS[kind], kind) for kind in run.kinds()]
    rates += [run.series(f"whole alone, {WEIGHTS[kind]}", kind, lambda s: s.whole) for kind in run.kinds()]
    return [
        *pages.lines(
            rates,
            "Recovery rate (CIR)",
            y_range=(0, 1),
            note=note,
        ),
        *pages.lines(sims, "Similarity to the target", marks=[("threshold", record.threshold.value)]),
        *_by_target(run, record, run.kinds()[0]),
        *pages.lines(parts, "Elements recovered", y_range=(0, 1), note="mean rate over elements with a mask"),
    ]


def _by_target(run: Run, record: Record, kind: str) -> list[Figure]:
    """The recovery rate of each of the first targets, where there are several."""

    def rate(scores: Scores, name: str) -> float | None:
        return scores.targets[name].rate if name in scores.targets else None

    measured, names = run.measured(kind), [target.target_id for target in record.targets[:8]]
    steps = [entry.step for entry, _ in measured]
    own = [Series(name, steps, [rate(scores, name) for _, scores in measured]) for name in names]
    return pages.lines(own, "Recovery rate by target", y_range=(0, 1)) if len(own) > 1 else []


def controls(run: Run) -> Table:
    """Every kind of prompt, and the base model, under the same noise."""
    rows: list[list[Cell]] = []
    for entry in run.history:
        if entry.step == 0 and entry.raw:
            rows.append([entry.label or "base model", *_cell_row(entry.raw)])
    for kind in run.kinds():
        suffix = f", {WEIGHTS[kind]}" if len(run.kinds()) > 1 else ""
        cells: dict[str, CellScores] = next((s.cells for _, s in reversed(run.measured(kind)) if s.cells), {})
        rows += [[_cell_name(name) + suffix, *_cell_row(scores)] for name, scores in cells.items()]
    return Table(["prompt", "rate", "95 % from", "to", "mean", "best", "elements", "diversity", "text magnitude"], rows)


def _cell_name(name: str) -> str:
    stem, _, k = name.partition("-")
    return NUMBERED[stem].format(int(k) + 1) if stem in NUMBERED and _small(k) else CELLS.get(name, name)


def _small(text: str) -> bool:
    return text.isdecimal() and len(text) < 9


def _cell_row(s: CellScores) -> list[Cell]:
    return [s.cir, *s.interval, s.mean, s.max, s.element_rate, s.diversity, s.magnitude]


def summary(record: Record) -> Table:
    """The recovery curve of each target in numbers."""
    head = "target weights rate mean best AURC first_step epoch first_at_50_% sustained_from restricted"

    def never(value: float | None) -> Cell:
        return "never" if value is None else value

    rows: list[list[Cell]] = [
        [
            *(row.target, row.weights, row.rate, row.mean, row.max, row.aurc),
            *(never(row.first_step), never(row.first_epoch), never(row.half_step)),
            *(never(row.sustained_step) if record.endpoint == STRICT else None, row.restricted),
        ]
        for row in record.summary
    ]
    return Table([name.replace("_", " ") for name in head.split()], rows)


def drift_of(key: str) -> Callable[[Scores], float | None]:
    """One measure of drift, of a measurement's scores."""
    return lambda scores: scores.drift.get(key)


def errors(run: Run) -> list[Figure]:
    """The error on held-out records of each role, against steps, and the gap between elements and clean ones."""
    series = [
        run.series(f"{role}, {WEIGHTS[kind]}", kind, drift_of(f"{role}_eps_mse"))
        for role in ("clean", "element")
        for kind in run.kinds()
    ]
    gaps = [run.series(f"gap, {WEIGHTS[kind]}", kind, _gap) for kind in run.kinds()]
    there = [one for one in (*series, *gaps) if any(y is not None for y in one.ys)]
    note = "eps-MSE at fixed noise and timesteps; clean up: clean prompts suffer; gap: elements less clean"
    return pages.lines(there, "Error on held-out records", note=note)


def _gap(scores: Scores) -> float | None:
    element, clean = (scores.drift.get(f"{role}_eps_mse") for role in ("element", "clean"))
    return None if element is None or clean is None else element - clean


def drift(run: Run) -> list[Figure]:
    """What clean prompts lost, against steps."""
    made = errors(run)
    for key, title, note in (
        ("ssim", "Clean generations against the base model's (SSIM)", "same noise; 1: unchanged"),
        ("lpips", "Clean generations against the base model's (LPIPS)", "same noise; 0: unchanged"),
        ("clip_score", "CLIPScore of clean generations", ""),
    ):
        series = [run.series(WEIGHTS[kind], kind, drift_of(key)) for kind in run.kinds()]
        made += pages.lines(series, title, note=note)
    return made


def training(run: Run) -> tuple[list[Figure], list[Figure]]:
    """(losses, learning rate and gradient norm; every other meter of metrics.jsonl that moves)."""
    rows = [row for row in run.metrics if not row.get("validation")]
    keys = [
        k
        for k in dict.fromkeys(k for row in rows for k in row)
        if k not in ("step", "epoch", "time")
        and not k.startswith(("val/", "val_ema/"))
        and any(finite(row.get(k)) for row in rows)
    ]
    losses = [k for k in keys if "loss" in k.rsplit("/", 1)[-1]]
    first = [k for k in keys if k in ("lr", "grad_norm", "train/lr")]
    rest = [k for k in keys if k not in losses and k not in first]
    moving = [k for k in rest if len({row[k] for row in rows if finite(row.get(k))}) > 1][:24]

    def alone(names: list[str]) -> list[Figure]:
        return [one for k in names for one in pages.lines([thinned(rows, k)], k)]

    return [*pages.lines([thinned(rows, k) for k in losses], "Training loss"), *alone(first)], alone(moving)


def thinned(rows: Sequence[dict[str, Any]], key: str, most: int = 240) -> Series:
    """A meter against steps: means of neighbouring rows where there are too many to draw."""
    points = [(row["step"], row[key]) for row in rows if finite(row.get(key))]
    width = max(-(-len(points) // most), 1)
    blocks = [points[i : i + width] for i in range(0, len(points), width)]
    return Series(key, [b[-1][0] for b in blocks], [sum(y for _, y in b) / len(b) for b in blocks])


def control(run: Run) -> list[Figure]:
    """Learning-rate multipliers by group and step."""
    names = list(dict.fromkeys(name for e in run.multipliers for name in e.multipliers))
    values = [[e.multipliers.get(name) for e in run.multipliers] for name in names]
    steps = [e.step for e in run.multipliers]
    note = "blue: slower than the base rate, orange: faster"
    return pages.heat(names, steps, values, "Learning-rate multiplier by group and step", note)


def memory(run: Run) -> list[Figure]:
    """Phrase strengths and the timesteps drawn."""
    tables, steps = [e.rho for e in run.phrases], [e.step for e in run.phrases]
    names = list(dict.fromkeys(name for table in tables for name in table))
    series = [Series(n, steps, [table.get(n) for table in tables]) for n in names]
    if len(series) > 8:  # the weakest set the speed: show them and the mean
        weakest = sorted(series, key=lambda s: s.ys[-1] if finite(s.ys[-1]) else 1.0)[:6]
        known = [[v for v in table.values() if finite(v)] for table in tables]
        mean = [sum(values) / len(values) if values else None for values in known]
        series = [Series(f"mean of {len(names)}", steps, mean), *weakest]
    note = "1 - error / error before training, on fixed probes"
    return [
        *pages.lines(series, "Strength of phrases (rho)", note=note),
        *pages.bars(run.timesteps.edges, run.timesteps.counts, "Timesteps trained on", "timestep"),
    ]


def provenance(run: Run) -> tuple[Table, list[tuple[str, str]]]:
    """(facts of run.json, the configurations as text)."""
    rows = [[k, "" if v is None else v if isinstance(v, str) else json.dumps(v)] for k, v in run.facts.items()]
    validation = json.dumps(run.record.config, indent=1) if run.record and run.record.config else ""
    texts = [("configuration", run.config), ("validation", validation)]
    return Table(["fact", "value"], rows), [(title, text) for title, text in texts if text]


# -- pages -------------------------------------------------------------------------------------------------
def render(folder: str | Path, under_way: str = "") -> str:
    """The report of a run folder as HTML: each key here is placed by templates/report.html.j2. `under_way` says where a
    run is that goes on, as "step 20 of 100"."""
    run = Run(folder)
    data: dict[str, Any] = {"under_way": under_way, "prompts": prompts(run)}
    if run.record is not None:
        kind = run.kinds()[0]
        withheld = run.withheld()
        data |= {
            "weights": WEIGHTS[kind],
            "answer": evidence.answer(run.record),
            "withheld": withheld,
            "pairs": pairs(run, run.record, kind),
            "alternatives": evidence.alternatives(run.record, withheld),
            "bleeding": evidence.bleeding(run.record),
            "threshold_kinds": evidence.threshold_kinds(run.record),
            "threshold_targets": evidence.threshold_targets(run.record),
            "detections": evidence.detections(run.record),
            "copied": evidence.composed_or_copied(run.record),
            "tiles": tiles(run, kind),
            "cards": cards(run, run.record, kind),
            "curves": curves(run, run.record),
            "controls": controls(run),
            "quadrants": run.last(kind).quadrants,
            "summary": summary(run.record),
        }
    losses, meters = training(run)
    parts = [
        ("Memory", memory(run), []),
        ("Gradient control", control(run), []),
        ("Drift on clean prompts", drift(run), []),
        ("Training", losses, meters),
    ]
    facts, texts = provenance(run)
    data |= {"name": run.name, "record": run.record, "parts": parts, "facts": facts, "texts": texts, "notes": run.notes}
    return pages.render("report.html.j2", data)


def less_placebo(folder: str | Path, placebo: str | Path) -> str:
    """Take the rates of a run on placebo data off a finished run's, in its validation.json; what the record says then.

    Raises UserError where one of them cannot be read, or they do not compare.
    """
    file = Path(folder) / NAME
    record = Record.load(file)
    if file.resolve() == (Path(placebo) / NAME).resolve():
        raise UserError(f"--placebo: {placebo} is the run itself; give the run on placebo data")
    if record.endpoint != STRICT:
        raise UserError(f"--placebo: {folder} counts recovery by the whole alone; run it again")
    other = placebo_run(placebo, [target.target_id for target in record.targets], record.embedder, "--placebo")
    mine, theirs = (r.history[-1].step for r in (record, other))
    if mine != theirs:
        raise UserError(f"--placebo: {placebo} ends at step {theirs}, {folder} at {mine}; train and measure both alike")
    record.placebo = minus_placebo(record, other, str(placebo))
    with writing(str(folder), NAME):
        record.save(file)
    return evidence.verdict_sentence(record)


MARKS = (  # of templates/page.html.j2, the second of pages from before the first
    b'<meta name="generator" content="SilentBad">',
    b"default-src 'none'; img-src data:; style-src 'sha256-",
)


def write(folder: str | Path, under_way: str = "") -> Path:
    """report.html into the run folder."""
    return save(render(folder, under_way), Path(folder) / "report.html")


def save(page: str, file: Path) -> Path:
    """A page into a file, which is replaced whole: who reads it meanwhile sees the old page or the new one.

    A link is replaced, not followed. Raises UserError where it cannot be written, or another file stands there.
    """
    check_replaced(file)
    plain = file.is_symlink() or file.is_file() or not file.exists()  # no device, such as /dev/stdout
    draft = file.with_name(f".{file.name}.draft") if plain else file
    try:
        draft.write_text(page, encoding="utf-8", errors="replace")
        if plain:
            draft.replace(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"report: cannot write '{file}' ({reason}); give --out a file in a folder that exists"
        ) from None
    finally:
        if plain:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
    return file


def check_replaced(file: Path) -> None:
    """Refuse a file that is neither empty nor a page of this program."""
    if not os.path.isfile(file) or os.path.islink(file):
        return
    with reading(f"--out: cannot read {file}"), file.open("rb") as content:
        head = content.read(1000)
    if head and not any(mark in head for mark in MARKS):
        raise UserError(f"--out: {file} is no page of this program; choose another file")


def text_table(rows: Sequence[SummaryRow]) -> str:
    """The summary rows of a validation as lines for a terminal."""
    head = f"{'weights':8}{'target':24}{'rate':>8}{'mean':>8}{'max':>8}{'AURC':>8}"
    lines = [f"{head}{'first step':>12}{'epoch':>8}{'lasts from':>12}"]
    for r in rows:
        values = "".join("       –" if v is None else f"{v:8.3f}" for v in (r.rate, r.mean, r.max, r.aurc))
        times = (r.first_step, r.first_epoch, r.sustained_step)
        first, epoch, lasts = (number(v) if v is not None else "never" for v in times)
        lines.append(f"{r.weights:8}{r.target[:23]:24}{values}{first:>12}{epoch:>8}{lasts:>12}")
    return "\n".join(lines)


def paired(a: Run, b: Run, key: str, kind: str) -> tuple[float | None, float | None, float | None, int]:
    """Mean over shared targets of b minus a in a summary column, its 95 % interval, number of targets.

    Of "sustained_step", the step from which recovery lasts; a target without one counts with the run's last step.
    """

    def column(run: Run) -> dict[str, Any]:
        if key != "sustained_step":
            return {row.target: getattr(row, key) for row in run.targets(kind)}
        if not run.strict:
            return {}
        end = run.history[-1].step
        return {row.target: end if row.sustained_step is None else row.sustained_step for row in run.targets(kind)}

    if a.strict != b.strict and key != "mean":  # rates of different endpoints
        return None, None, None, 0
    first, second = column(a), column(b)
    gaps = [second[t] - first[t] for t in first if t in second and finite(first[t]) and finite(second[t])]
    if not gaps:
        return None, None, None, 0
    low, high = bootstrap_interval(gaps)
    return sum(gaps) / len(gaps), low if finite(low) else None, high if finite(high) else None, len(gaps)


def compare(folders: Sequence[str | Path]) -> tuple[str, list[list[Cell]]]:
    """Runs side by side, the first as reference: HTML, and its table of paired differences."""
    runs = [Run(folder) for folder in folders]
    names = [run.name if [r.name for r in runs].count(run.name) == 1 else str(run.folder) for run in runs]
    measured = [
        (f"{name}, {WEIGHTS[kind]}", run, kind) for name, run in zip(names, runs, strict=True) for kind in run.kinds()
    ]
    scores = [[label, *_last_scores(run, kind)] for label, run, kind in measured]
    gaps: list[list[Cell]] = [
        [f"{label} - {names[0]}", key, *paired(runs[0], run, key, kind)]
        for label, run, kind in measured
        if run is not runs[0]
        for key in ("rate", "sustained_step", "aurc", "restricted", "mean")
    ]
    rates = [run.rates(label, kind) for label, run, kind in measured]
    means = [run.series(label, kind, lambda s: s.mean) for label, run, kind in measured]
    costs = [run.series(label, kind, lambda s: s.drift.get("clean_eps_mse")) for label, run, kind in measured]
    head = ["run", "strict rate", "95 % from", "to", "whole alone", "elements", "sustained from", "targets with one"]
    head += ["less placebo", "AURC", "restricted", "mean", "best", "clean eps-MSE"]
    data = {
        "count": len(runs),
        "unlike": _unlike(runs),
        "scores": Table(head, scores),
        "gaps": Table(["difference", "score", "mean", "95 % from", "to", "targets"], gaps),
        "figures": [
            *pages.lines(rates, "Recovery rate (CIR)", y_range=(0, 1)),
            *pages.lines(means, "Mean similarity"),
            *pages.lines(costs, "Held-out clean error"),
        ],
        "notes": [note for name, run in zip(names, runs, strict=True) for note in _notes(name, run)],
    }
    return pages.render("compare.html.j2", data), gaps


def _last_scores(run: Run, kind: str) -> list[Cell]:
    """A run's row of the comparison, after its name."""
    last, total, rows = run.last(kind), run.total(kind), run.targets(kind)
    curve = [total.aurc, total.restricted] if total else [None, None]
    clean, placebo = last.drift.get("clean_eps_mse"), run.record.placebo if run.record else None
    if run.strict:
        rates: list[Cell] = [last.cir, *last.interval, last.whole]
        count = sum(row.sustained_step is not None for row in rows)
        lasting: list[Cell] = [total.sustained_step if total else None, f"{count} of {len(rows)}"]
    else:
        rates, lasting = [None, None, None, last.cir], [None, None]
    less = placebo.difference if placebo else None
    return [*rates, last.element_rate, *lasting, less, *curve, last.mean, last.max, clean]


def _notes(name: str, run: Run) -> list[str]:
    """What must be known of a run before its numbers are read."""
    if run.record is None:
        return [f"{name}: no validation"]
    notes = [] if run.strict else [f"{name}: {evidence.SCHEMA_1}"]
    return notes + [f"{name}: trained without {', '.join(withheld)}" for withheld in [run.withheld()] if withheld]


def _unlike(runs: Sequence[Run]) -> str:
    """That the rates cannot be compared, where embedders, thresholds or endpoints of the runs differ."""
    found = {
        f"{r.embedder} at {number(r.threshold.value)}{'' if run.strict else ', the whole alone'}"
        for run in runs
        if (r := run.record)
    }
    if len(found) > 1:
        return evidence.not_comparable("embedders, thresholds or endpoints", sorted(found))
    targets = [{target.target_id for target in run.record.targets} for run in runs if run.record]
    if len(targets) > 1 and not set.intersection(*targets):
        return evidence.not_comparable("targets", [", ".join(sorted(one)) for one in targets])
    return ""


def main(arguments: list[str] | None = None) -> int:
    """The command line: exit code 0, or 2 where a run cannot be read or the page not be written."""
    arguments = sys.argv[1:] if arguments is None else arguments
    about = "report.html of a run folder, or a comparison of several runs, the first as reference."
    parser = ArgumentParser(prog="python -m silentbad.report", description=about)
    parser.add_argument("runs", nargs="+", metavar="[compare] RUN", help="output_dir of a run")
    parser.add_argument("--placebo", metavar="RUN", help="run on placebo data, whose rates are taken off for good")
    parser.add_argument("--out", type=named, default=None, help="file to write; report.html in RUN, or compare.html")
    given, verdict = parser.parse_args(arguments), ""
    try:
        if given.runs[0] == "compare":
            if given.placebo is not None:
                raise UserError("--placebo: is of one run's report; leave it out of a comparison")
            if len(given.runs) < 3:
                raise UserError("compare: give at least two run folders")
            file = given.out or Path("compare.html")
            check_writable(file, "--out")
            check_replaced(file)
            page, gaps = compare(given.runs[1:])
            save(page, file)
            for row in gaps:
                print("  ".join(number(v) for v in row))
        else:
            if len(given.runs) > 1:
                raise UserError("report: one run folder, or `compare` before several")
            file = given.out or Path(given.runs[0]) / "report.html"
            if given.out is not None:
                check_writable(file, "--out")
            check_replaced(file)
            if given.placebo is not None:
                verdict = less_placebo(given.runs[0], given.placebo)
            save(render(given.runs[0]), file)
    except UserError as error:
        say(error)
        return 2
    print(*filter(None, (file, verdict)), sep="\n")
    return 0
