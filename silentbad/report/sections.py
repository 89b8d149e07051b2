"""The sections of a run's report, as data: pictures, curves, tables. The HTML is in
templates/report.html.j2."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from silentbad.measure.by_part import parts_of
from silentbad.measure.limit import FOLDER
from silentbad.measure.record import (
    Measurement,
    Record,
    Scores,
    TargetEntry,
    TargetScores,
)
from silentbad.measure.scores import curve, images_recovered, mean_of
from silentbad.report import charts, pages, parts
from silentbad.report.charts import Series, finite, spaced
from silentbad.report.pages import (
    Card,
    Cell,
    Figure,
    Sheet,
    Shot,
    Table,
    rounded,
    short,
)
from silentbad.report.run_files import LARGE, WEIGHTS, RecordedRun

ORDER_NAMES = {"composed": "composed prompt", "shuffled": "phrases in another order"}
MOST_PAIRS = 6  # targets that are shown unfolded, and that have charts of their own
MOST_STEPS = 10  # shown of each target
MOST_PROMPTS = 40  # of the sample prompts
MOST_UNRELATED = 24  # unrelated prompts with their pictures


def _step(value: float | None) -> Cell:
    return "never" if value is None else short(value)


def sheets(run: RecordedRun, record: Record, kind: str) -> list[Sheet]:
    """Each target beside its elements and every image of the last measurement, of the composed
    prompt and of its phrases in another order, best first."""
    shown = list[Sheet]()
    for j, target in enumerate(record.targets):
        rows = list[tuple[str, list[Shot]]]()
        for cell, scores in run.last(kind).orders.items():
            of_target = scores.targets.get(target.target_id)
            if of_target and (images := _images(run, record, j, of_target, ORDER_NAMES[cell])):
                counted = f"{sum(_hits(record, j, of_target))} of {len(of_target.sims)}"
                rows.append((f"{ORDER_NAMES[cell]}: {counted} images recovered", images))
        if rows:
            files = [("target", target.image), *zip(target.phrases, target.elements, strict=False)]
            shots = [
                Shot(src, f"{target.target_id}: {name}", name)
                for name, file in files
                if (src := run.picture(file, LARGE))
            ]
            shown.append(Sheet(target.target_id, target.prompt, target=shots, rows=rows))
    return shown


def _images(
    run: RecordedRun, record: Record, j: int, scores: TargetScores, prompt: str
) -> list[Shot]:
    """Every image of target j under a kind of `prompt`, best first, each with its similarity and
    the elements that it lacks."""
    files = scores.pictures
    if files is None or len(files) != len(scores.sims):
        return []
    hits = _hits(record, j, scores)
    return [
        Shot(
            src=src,
            alt=f"image {i + 1} of {record.targets[j].target_id}, {prompt}",
            caption=rounded(scores.sims[i]),
            score=_lacking(record, j, scores, i),
            hit=hits[i],
        )
        for i in sorted(range(len(files)), key=lambda i: -scores.sims[i])
        if (src := run.picture(files[i], LARGE))
    ]


def _lacking(record: Record, j: int, scores: TargetScores, i: int) -> str:
    """The elements of target j that do not reach their thresholds in image i."""
    phrases = record.targets[j].phrases
    lacks = [
        f"{phrase} {rounded(element.sims[i])}"
        for k, (phrase, element) in enumerate(zip(phrases, scores.elements, strict=False))
        if element.sims and element.sims[i] < record.element_threshold.of(j, k)
    ]
    return f"not: {', '.join(lacks)}" if lacks else ""


def _hits(record: Record, j: int, scores: TargetScores) -> list[bool]:
    """Which images of target j are recovered."""
    return images_recovered(scores, j, record.threshold, record.element_threshold)


# -- the range -------------------------------------------------------------------------------------
def range_figures(record: Record) -> list[Figure]:
    """The range of each of the first targets, a line for the whole and one for each element."""
    return [
        Figure(target.target_id, svg)
        for j, target in enumerate(record.targets[:MOST_PAIRS])
        if (svg := charts.ranges(parts_of(record, j), target.target_id))
    ]


def range_rows(record: Record) -> Table:
    """Threshold, floor and ceiling by target and element, beside the images' scores."""
    rows: list[list[Cell]] = []
    notes: list[str] = []
    for j, target in enumerate(record.targets):
        for part in parts_of(record, j):
            values = (part.mean, part.best, part.threshold, part.floor, part.ceiling)
            count = f"{part.hits} of {part.images}"
            rows.append([part.phrase or target.target_id, count, *map(rounded, values)])
            whole = "" if part.phrase else "the whole picture"
            notes.append("; ".join(filter(None, (whole, part.note))))
    head = ["picture", "reach it", "mean", "best", "threshold", "floor", "ceiling"]
    return Table(head, rows, right=True, notes=notes)


def kept_pictures(run: RecordedRun, record: Record, kind: str) -> list[tuple[str, Shot, Shot]]:
    """(prompt, the base's picture, the trained model's) of the unrelated prompts, where both are
    there."""
    rows = list[tuple[str, Shot, Shot]]()
    for i, prompt in enumerate((record.unrelated or [])[:MOST_UNRELATED]):
        base, trained = (run.picture(f"{FOLDER}/{tag}-{i}.png") for tag in ("base", kind))
        if base and trained:
            of_base = Shot(base, alt=f"{prompt}, base model", caption="")
            of_trained = Shot(trained, alt=f"{prompt}, trained model", caption="")
            rows.append((prompt, of_base, of_trained))
    return rows


def prior(run: RecordedRun) -> list[Shot]:
    """Some of the pictures that the base drew before training, with their prompts."""
    return [
        Shot(src, alt=prompt, caption=prompt)
        for image in run.prior
        if (src := run.picture(image.file)) and (prompt := image.prompt or "no prompt")
    ]


def prompts(run: RecordedRun) -> list[tuple[str, list[Shot]]]:
    """(prompt, its pictures by step) of the first sample prompts."""
    shots_by_prompt: dict[str, list[Shot]] = {}
    for k in spaced(len(run.draws), MOST_STEPS):
        when = f"step {run.draws[k].step}"
        for image in run.draws[k].images:
            prompt = image.prompt
            known = prompt in shots_by_prompt or len(shots_by_prompt) < MOST_PROMPTS
            if known and (src := run.picture(image.file)):
                shot = Shot(src, f"{prompt} at {when}", when)
                shots_by_prompt.setdefault(prompt, []).append(shot)
    return list(shots_by_prompt.items())


def cards(run: RecordedRun, record: Record, kind: str) -> list[Card]:
    """Each kept target beside its best and median generations by step, and its elements."""
    measured = run.measured(kind)
    measured = [measured[k] for k in spaced(len(measured), MOST_STEPS)]
    cards = list[Card]()
    for j, target in enumerate(record.targets):
        rows = [_generations(run, measured, record, j, choice) for choice in ("best", "median")]
        if any(rows):
            cards.append(
                Card(
                    name=target.target_id,
                    prompt=target.prompt,
                    target=Shot(run.picture(target.image), f"target {target.target_id}", "target"),
                    rows=[row for row in rows if row],
                    elements=_elements(run, target, kind),
                )
            )
    return cards


def _generations(
    run: RecordedRun,
    measured: Sequence[tuple[Measurement, Scores]],
    record: Record,
    j: int,
    choice: str,
) -> list[Shot]:
    """The best or the median generation of target j by step, where it was kept."""
    shots = list[Shot]()
    for entry, scores in measured:
        target_scores = scores.targets.get(record.targets[j].target_id)
        if target_scores is None:
            continue
        generation = target_scores.best if choice == "best" else target_scores.median
        if generation and (src := run.picture(generation.file)):
            hits = zip(target_scores.sims, _hits(record, j, target_scores), strict=True)
            shots.append(
                Shot(
                    src=src,
                    alt=f"{choice} generation at step {entry.step}",
                    caption=entry.label or f"step {entry.step}",
                    score=f"{choice} {rounded(generation.sim)}",
                    hit=(generation.sim, True) in hits,
                )
            )
    return shots


def _elements(run: RecordedRun, target: TargetEntry, kind: str) -> list[Shot]:
    """The elements of a target that have a mask, with their scores."""
    target_scores = run.last(kind).targets.get(target.target_id)
    elements = target_scores.elements if target_scores else []
    return [
        Shot(
            src=src,
            alt=f"element {phrase}",
            caption=phrase,
            score=f"rate {rounded(scores.rate)}, mean\N{NO-BREAK SPACE}{rounded(scores.mean)}",
        )
        for phrase, file, scores in zip(target.phrases, target.elements, elements, strict=False)
        if (src := run.picture(file))
    ]


def curves(run: RecordedRun, record: Record) -> list[Figure]:
    """Rate, similarity and elements against steps; an audit has no curve."""
    if record.history[-1].step > 0 and record.history[-1].label:
        return []
    kinds = run.kinds()
    sims = []
    for kind in kinds:
        sims += [
            run.series(f"mean, {WEIGHTS[kind]}", kind, lambda s: s.mean),
            run.series(f"95th percentile, {WEIGHTS[kind]}", kind, lambda s: s.p95),
            run.series(f"best, {WEIGHTS[kind]}", kind, lambda s: s.max),
        ]
    rates = [run.rates(WEIGHTS[kind], kind) for kind in kinds]
    rates += [
        run.series(f"whole alone, {WEIGHTS[kind]}", kind, lambda s: s.whole) for kind in kinds
    ]
    note = (
        "share of composed images with the whole and every element at its threshold; band: 95 % "
        "over targets (binomial where few or all agree), or over the images of a single target"
    )
    limit = [("threshold", record.threshold.value)]
    return [
        *pages.lines(rates, "Recovery rate (CIR)", y_range=(0, 1), note=note),
        *pages.lines(sims, "Similarity to the target", marks=limit, digits=2),
        *_by_target(run, record, kinds[0]),
        *_by_element(run, record, kinds[0]),
    ]


def _by_element(run: RecordedRun, record: Record, kind: str) -> list[Figure]:
    """How often each element of the first targets comes, and how far its mean similarity is from
    its threshold: the mean over elements hides the one that fails."""
    figures = list[Figure]()
    for j, target in enumerate(record.targets[:MOST_PAIRS]):
        name = target.target_id
        points = [
            (e.step, s.targets[name].elements)
            for e, s in curve(run.history, kind)
            if name in s.targets
        ]
        steps = [step for step, _ in points]
        rates = list[Series]()
        sims = list[Series]()
        for k, (phrase, *elements) in enumerate(
            zip(target.phrases, *(elements for _, elements in points), strict=False)
        ):
            limit = record.element_threshold.of(j, k)
            above = [None if e.mean is None else e.mean - limit for e in elements]
            rates.append(Series(phrase, steps, [e.rate for e in elements]))
            sims.append(Series(phrase, steps, above))
        figures += pages.lines(
            rates,
            f"Elements of {name}",
            y_range=(0, 1),
            note="share of images in which the element reaches its threshold",
        )
        figures += pages.lines(
            sims,
            f"Similarity of the elements of {name}",
            marks=[("threshold", 0.0)],
            note="mean similarity less the element's threshold",
        )
    return figures


def _by_target(run: RecordedRun, record: Record, kind: str) -> list[Figure]:
    """The recovery rate of each of the first targets, where there are several."""

    def of_target(name: str) -> Series:
        return run.series(name, kind, lambda s: s.targets[name].rate if name in s.targets else None)

    series = [of_target(target.target_id) for target in record.targets[:8]]
    return pages.lines(series, "Recovery rate by target", y_range=(0, 1)) if len(series) > 1 else []


def places(run: RecordedRun, record: Record) -> list[Figure]:
    """Heat maps of where the memory sits, where that was measured for these targets."""
    phrases = {target.target_id: target.phrases for target in record.targets}
    if run.localised is None or any(set(row.targets) != set(phrases) for row in run.localised.rows):
        return []
    return [*parts.heat_maps(run.localised.rows, phrases), *parts.grids(run.localised.rows)]


def summary(record: Record) -> Table:
    """The recovery curve of each target in numbers."""
    head = [
        "target",
        "weights",
        "rate",
        "mean",
        "best",
        "AURC",
        "first step",
        "epoch",
        "first at 50 %",
        "sustained from",
        "restricted",
    ]
    rows: list[list[Cell]] = [
        [
            row.target,
            row.weights,
            *map(rounded, (row.rate, row.mean, row.max, row.aurc)),
            *map(_step, (row.first_step, row.first_epoch, row.half_step, row.sustained_step)),
            short(row.restricted),
        ]
        for row in record.summary
    ]
    return Table(head, rows, right=True)


def error_of(role: str) -> Callable[[Scores], float | None]:
    """The error on held-out records of a role, of a measurement's scores."""
    return lambda scores: scores.drift.get(f"{role}_eps_mse")


def errors(run: RecordedRun) -> list[Figure]:
    """The error on held-out records of each role by step, and the gap between roles."""
    series = [
        run.series(f"{role}, {WEIGHTS[kind]}", kind, error_of(role))
        for role in ("clean", "element")
        for kind in run.kinds()
    ]
    series += [run.series(f"gap, {WEIGHTS[kind]}", kind, _gap) for kind in run.kinds()]
    note = (
        "eps-MSE at fixed noise and timesteps; clean rises: clean prompts get worse; gap: elements "
        "minus clean"
    )
    return pages.lines(series, "Error on held-out records", note=note)


def _gap(scores: Scores) -> float | None:
    element, clean = (error_of(role)(scores) for role in ("element", "clean"))
    return None if element is None or clean is None else element - clean


def training(run: RecordedRun) -> tuple[list[Figure], list[Figure]]:
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
        return [figure for k in names for figure in pages.lines([thinned(rows, k)], k)]

    loss = pages.lines([thinned(rows, k) for k in losses], "Training loss")
    return [*loss, *alone(first)], alone(moving)


def thinned(rows: Sequence[dict[str, Any]], key: str) -> Series:
    """A meter against steps: means of neighbouring rows where there are too many to draw."""
    points = [(row["step"], row[key]) for row in rows if finite(row.get(key))]
    width = max(-(-len(points) // 240), 1)
    blocks = [points[i : i + width] for i in range(0, len(points), width)]
    return Series(key, [b[-1][0] for b in blocks], [sum(y for _, y in b) / len(b) for b in blocks])


def control(run: RecordedRun) -> list[Figure]:
    """Learning-rate multipliers by group and step."""
    names = list(dict.fromkeys(name for e in run.multipliers for name in e.multipliers))
    values = [[e.multipliers.get(name) for e in run.multipliers] for name in names]
    return pages.heat(
        names,
        [e.step for e in run.multipliers],
        values,
        title="Learning-rate multiplier by group and step",
        note="blue: slower than the base rate, orange: faster",
    )


def memory(run: RecordedRun) -> list[Figure]:
    """Phrase strengths and the timesteps drawn."""
    series = run.phrases.series()
    if len(series) > 8:  # the weakest set the speed: show them and the mean
        weakest = sorted(series, key=lambda s: s.ys[-1] if finite(s.ys[-1]) else 1.0)[:6]
        mean = [
            mean_of(filter(finite, column)) for column in zip(*(s.ys for s in series), strict=True)
        ]
        series = [Series(f"mean of {len(series)}", series[0].xs, mean), *weakest]
    note = "1 - error / error before training, on fixed probes"
    return [
        *pages.lines(series, "Strength of phrases (rho)", note=note),
        *pages.bars(run.timesteps.edges, run.timesteps.counts, "Timesteps trained on", "timestep"),
    ]


def provenance(run: RecordedRun) -> tuple[Table, list[tuple[str, str]]]:
    """(facts of run.json, the configurations as text)."""
    rows = [
        [k, "" if v is None else v if isinstance(v, str) else json.dumps(v)]
        for k, v in run.facts.items()
    ]
    validation = json.dumps(run.record.config, indent=1) if run.record and run.record.config else ""
    texts = [("configuration", run.config), ("validation", validation)]
    return Table(["fact", "value"], rows), [(title, text) for title, text in texts if text]
