"""Scores of generations against their targets, as pure functions. docs/metrics.md defines the
numbers.

A cell is a kind of prompt (generation.py lists them)."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from silentbad.errors import UserError
from silentbad.measure.intervals import (
    FEW_TARGETS,
    binomial_interval,
    bootstrap_interval,
    difference_interval,
    rate_interval,
)
from silentbad.measure.record import (
    ALL,
    KINDS,
    NAME,
    CellScores,
    ElementScores,
    ElementThreshold,
    Kept,
    Measurement,
    NullScores,
    Placebo,
    Record,
    Scores,
    SummaryRow,
    TargetScores,
    Threshold,
)


class ImageRow(TypedDict):
    """Similarities of an image to its target, and of each element (None without a mask)."""

    target: int
    sim: float
    elements: list[float | None]


class Row(ImageRow, total=False):
    """What was measured on one generation."""

    magnitude: float | None
    raw: float  # similarity to the target's file
    decoded: float  # similarity to that file after the autoencoder
    nearest: tuple[float, str]  # (similarity, name) of the nearest training picture


# SilentBadDiffusion counts a target whose best of n images lies above it (2401.04136)
PUBLISHED = 0.5
QUANTILES = (0.75, 0.90, 0.95)


def is_recovered(row: ImageRow, threshold: Threshold, element_threshold: ElementThreshold) -> bool:
    """Whether the whole and every element with a mask reach their thresholds."""
    j = row["target"]
    parts = (
        s >= element_threshold.of(j, k) for k, s in enumerate(row["elements"]) if s is not None
    )
    return row["sim"] >= threshold.of_target(j) and all(parts)


def images_recovered(
    scores: TargetScores,
    target: int,
    threshold: Threshold,
    element_threshold: ElementThreshold,
) -> list[bool]:
    """`is_recovered` of each image of a target, from stored similarities."""
    passed = np.array(scores.sims) >= threshold.of_target(target)
    for k, element in enumerate(scores.elements):
        if element.sims:
            passed &= np.array(element.sims) >= element_threshold.of(target, k)
    return passed.tolist()


def settled(history: Sequence[Measurement], points: int) -> bool:
    """Whether every target had a rate of 1/2 at the last `points` points; 0: never."""
    if points == 0:  # asked at every step
        return False
    last = [entry.saved for entry in history if entry.step > 0][-points:]
    rates = [
        target.rate for scores in last if scores is not None for target in scores.targets.values()
    ]
    return len(last) == points and min(rates) >= 0.5


def target_scores(
    rows: Sequence[Row], target: int, threshold: Threshold, element_threshold: ElementThreshold
) -> TargetScores:
    """Scores of the images of one target."""
    sims = [r["sim"] for r in rows]
    x = torch.tensor(sims, dtype=torch.float64)
    p75, p90, p95 = torch.quantile(x, torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    columns = zip(*(r["elements"] for r in rows), strict=True)  # (K, images)
    elements = [[s for s in column if s is not None] for column in columns]
    near = [r["nearest"] for r in rows if "nearest" in r]
    return TargetScores(
        rate=float(np.mean([is_recovered(r, threshold, element_threshold) for r in rows])),
        whole_rate=(x >= threshold.of_target(target)).double().mean().item(),
        raw=[r["raw"] for r in rows if "raw" in r] or None,
        decoded=[r["decoded"] for r in rows if "decoded" in r] or None,
        nearest=[similarity for similarity, _ in near] or None,
        nearest_record=max(near)[1] if near else None,
        mean=x.mean().item(),
        max=x.max().item(),
        p75=p75,
        p90=p90,
        p95=p95,
        sims=sims,
        magnitude=mean_of(r["magnitude"] for r in rows),
        elements=[
            ElementScores(
                mean_of(scores),
                mean_of(s >= element_threshold.of(target, k) for s in scores),
                scores or None,
            )
            for k, scores in enumerate(elements)
        ],
    )


def cell_scores(
    rows: Sequence[Row],
    ids: Sequence[str],
    threshold: Threshold,
    element_threshold: ElementThreshold,
) -> CellScores:
    """Scores per target, and over targets with the rate's interval (of one target: over images)."""
    targets: dict[str, TargetScores] = {}
    for j in sorted({r["target"] for r in rows}):
        of_target = [r for r in rows if r["target"] == j]
        targets[ids[j]] = target_scores(of_target, j, threshold, element_threshold)
    sims = [r["sim"] for r in rows]
    rates = np.array([target.rate for target in targets.values()])
    wholes = torch.tensor([target.whole_rate for target in targets.values()], dtype=torch.float64)
    hits = sum(is_recovered(r, threshold, element_threshold) for r in rows)
    interval = rate_interval(rates) if len(targets) > 1 else binomial_interval(hits, len(sims))
    p75, p90, p95 = np.quantile(sims, QUANTILES).tolist()
    return CellScores(
        cir=float(rates.mean()),
        interval=interval,
        images=len(sims),
        above=hits,
        recovered=float((rates > 0).mean()),
        whole=wholes.mean().item(),
        published=float(np.mean([target.max > PUBLISHED for target in targets.values()])),
        mean=float(np.mean(sims)),
        p75=p75,
        p90=p90,
        p95=p95,
        max=max(sims),
        element_rate=mean_of(e.rate for t in targets.values() for e in t.elements),
        magnitude=mean_of(r.get("magnitude") for r in rows),
        targets=targets,
    )


def null_scores(similarities: Sequence[float]) -> NullScores:
    """One kind of null: its highest score, and the mean with its bootstrap interval."""
    return NullScores(
        highest=max(similarities),
        mean=float(np.mean(similarities)),
        n=len(similarities),
        interval=bootstrap_interval(similarities) if len(similarities) > 1 else None,
    )


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are neither None nor nan; None where there are none."""
    numbers = [v for v in values if v is not None and v == v]
    return float(np.mean(numbers)) if numbers else None


SCALARS = (  # of a measurement, for the trackers
    *("cir", "whole", "published", "recovered", "mean", "p75", "p90", "p95", "max"),
    *("element_rate", "magnitude"),
)


def scalars(entry: Measurement, threshold: Threshold | None) -> dict[str, float]:
    """A measurement as flat numbers for the trackers; what was not measured is left out."""
    numbers: dict[str, float | None] = {"val/seconds": entry.seconds, "val/share": entry.share}
    numbers["val/threshold"] = threshold.value if threshold else None
    for tag, prefix in (("raw", "val"), ("ema", "val_ema")):
        scores = entry.scores(tag)
        if scores is None:
            continue
        numbers |= {f"{prefix}/{name}": getattr(scores, name) for name in SCALARS}
        numbers |= {f"{prefix}/drift/{name}": value for name, value in scores.drift.items()}
        numbers |= {f"{prefix}/control/{cell}": s.cir for cell, s in (scores.cells or {}).items()}
        if scores.kept is not None:
            kept = kept_scalars(scores.kept)
            numbers |= {f"{prefix}/kept/{name}": value for name, value in kept.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def kept_scalars(kept: Kept) -> dict[str, float | None]:
    """What is kept, as flat numbers."""
    numbers: dict[str, float | None] = {
        **kept.change,
        "bleeding": kept.bleeding,
        "bleeding_base": kept.bleeding_base,
        "rise": kept.rise,
    }
    if kept.words is not None:
        numbers |= {"words": kept.words.trained, "words_base": kept.words.base}
    for stage, size in (kept.size or {}).items():
        numbers |= {f"norm/{stage}": size.norm, f"singular/{stage}": size.singular}
    return numbers


def latest(entry: Measurement) -> Scores:
    """The scores that the verdict uses: of the raw weights, or else of the averaged ones."""
    scores = entry.raw or entry.ema
    assert scores is not None, "a measurement holds the scores of some weights"
    return scores


# -- of a curve ------------------------------------------------------------------------------------
def curve_scores(
    steps: Sequence[float],
    rates: Sequence[Sequence[float]] | np.ndarray,
    hits: Sequence[Sequence[bool]] | np.ndarray,
) -> dict[str, np.ndarray]:
    """Per-target scores of a recovery curve: steps (S,) ascending, rates (S,T), hits (S,T) "any
    recovered".

    aurc: trapezoid area under rate(step), divided by the horizon. first: first step with a hit, inf
    where censored at the horizon. half: first step with a rate of at least 1/2, else inf.
    sustained: first step from which the rate is at least 1/2 at every evaluation, else inf.
    restricted: min(first, horizon)."""
    s = np.asarray(steps, float)
    r = np.asarray(rates, float)
    lasting = np.logical_and.accumulate(r[::-1] >= 0.5, axis=0)[::-1]
    area = ((r[1:] + r[:-1]) / 2 * np.diff(s)[:, None]).sum(0)
    marks = (np.asarray(hits, bool), r >= 0.5, lasting)
    first, half, sustained = (np.where(x.any(0), s[x.argmax(0)], np.inf) for x in marks)
    aurc = area / (s[-1] - s[0]) if len(s) > 1 else r[0]
    times = {
        "first": first,
        "half": half,
        "sustained": sustained,
        "restricted": np.minimum(first, s[-1]),
    }
    return {"aurc": aurc, **times}


def kinds(history: Sequence[Measurement]) -> list[str]:
    """Which weights were measured after step 0, or at step 0 where nothing was measured later."""
    later = [e for e in history if e.step > 0] or history
    return [kind for kind in KINDS if any(e.scores(kind) for e in later)]


def curve(history: Sequence[Measurement], kind: str) -> list[tuple[Measurement, Scores]]:
    """The measurements of these weights; that of the base model is the first for both kinds."""
    scores_of_points = [e.scores(kind) or (e.raw if e.step == 0 else None) for e in history]
    return [(e, s) for e, s in zip(history, scores_of_points, strict=True) if s]


def summarise(history: Sequence[Measurement], kind: str) -> list[SummaryRow]:
    """The recovery curve of these weights in numbers, a row per target and one for all of them."""
    points = curve(history, kind)
    epochs = {e.step: e.epoch for e, _ in points}
    last = points[-1][1]
    steps = list(epochs)
    ids = list(last.targets)
    rates = np.array([[scores.targets[i].rate for i in ids] for _, scores in points])
    numbers = curve_scores(steps, rates, rates > 0)
    rows = []
    for j, i in enumerate(ids):
        times = (numbers[name][j] for name in ("first", "half", "sustained"))
        first, half, sustained = (None if np.isinf(x) else int(x) for x in times)
        rows.append(
            SummaryRow(
                weights=kind,
                target=i,
                rate=last.targets[i].rate,
                mean=last.targets[i].mean,
                max=last.targets[i].max,
                aurc=float(numbers["aurc"][j]),
                first_step=first,
                first_epoch=None if first is None else epochs[first],
                half_step=half,
                sustained_step=sustained,
                restricted=float(numbers["restricted"][j]),
            )
        )
    means = {name: mean_of(getattr(row, name) for row in rows) for name in ("aurc", "restricted")}
    halves = {
        name: of_half(getattr(row, name) for row in rows)
        for name in ("first_step", "first_epoch", "half_step", "sustained_step")
    }
    return [
        *rows,
        SummaryRow(
            weights=kind,
            target=ALL,
            rate=last.cir,
            mean=last.mean,
            max=last.max,
            **means,
            **halves,
        ),
    ]


def of_half(times: Iterable[float | None]) -> float | None:
    """When half of the targets have come back, None of a target: never; None where fewer have. A
    mean over those that have would reward a run for losing the slow ones."""
    by_time = sorted(math.inf if time is None else time for time in times)
    middle = by_time[(len(by_time) - 1) // 2]
    return None if math.isinf(middle) else middle


def placebo_run(folder: str | Path, targets: Iterable[str], embedder: str, key: str) -> Record:
    """The record of a run on placebo data.

    Raises UserError where it has none of the targets, or another embedder."""
    record = Record.load(Path(folder) / NAME, key)
    names = list(targets)
    if not any(name in latest(record.history[-1]).targets for name in names):
        raise UserError(f"{key}: {folder} has none of these targets: {', '.join(names)}")
    if record.embedder != embedder:
        raise UserError(
            f"{key}: {folder} was measured by {record.embedder}, not by {embedder}; "
            f"measure both alike"
        )
    return record


def minus_placebo(record: Record, placebo: Record, source: str) -> Placebo:
    """The last rates of a run less those of a run on placebo data, target by target."""
    scores = latest(record.history[-1])
    other = latest(placebo.history[-1])
    both = [name for name in scores.targets if name in other.targets]
    used = [thresholds_of(run, both) for run in (record, placebo)]
    alike = len(used[0]) == len(used[1]) and np.allclose(used[0], used[1], rtol=0, atol=1e-6)
    of_run = [scores.targets[name] for name in both]
    of_placebo = [other.targets[name] for name in both]
    differences = [a.rate - b.rate for a, b in zip(of_run, of_placebo, strict=True)]
    rate = float(np.mean([t.rate for t in of_placebo]))
    if len(both) >= FEW_TARGETS and len(set(differences)) > 1:
        interval = bootstrap_interval(differences)
    else:
        # few targets, or equal differences, cannot be resampled: binomial intervals of the rates
        rate_of_run = rate + float(np.mean(differences))
        interval = difference_interval(
            rate_of_run, _interval_over(of_run), rate, _interval_over(of_placebo)
        )
    return Placebo(
        source=source,
        cir=rate,
        difference=float(np.mean(differences)),
        interval=interval,
        targets=len(both),
        whole=mean_of(t.whole_rate for t in of_placebo),
        published=float(np.mean([t.max > PUBLISHED for t in of_placebo])),
        element_rate=mean_of(e.rate for t in of_placebo for e in t.elements),
        thresholds=None if alike else (float(np.mean(used[0])), float(np.mean(used[1]))),
    )


def thresholds_of(record: Record, names: Sequence[str]) -> list[float]:
    """The thresholds of these targets and of each of their elements."""
    ids = [target.target_id for target in record.targets]
    places = [(j, range(len(record.targets[j].phrases))) for j in map(ids.index, names)]
    parts = [record.element_threshold.of(j, k) for j, elements in places for k in elements]
    return [record.threshold.of_target(j) for j, _ in places] + parts


def _interval_over(targets: Sequence[TargetScores]) -> tuple[float, float]:
    """95 % interval of the mean rate: binomial over targets, for few targets over their images."""
    counts = [1 if len(targets) >= FEW_TARGETS else len(t.sims) for t in targets]
    return binomial_interval(
        round(sum(t.rate * n for t, n in zip(targets, counts, strict=True))), sum(counts)
    )
