"""Several runs side by side, with their paired differences. The HTML is in
templates/compare.html.j2."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silentbad.measure.statistics import bootstrap_interval
from silentbad.report import evidence, pages
from silentbad.report.charts import finite, number
from silentbad.report.pages import Cell, Table, interval_text, short, supported
from silentbad.report.recorded_run import WEIGHTS, RecordedRun


def paired(
    a: RecordedRun, b: RecordedRun, key: str, kind: str
) -> tuple[float | None, float | None, float | None, int]:
    """Mean over shared targets of b minus a in a summary column, its 95 % interval, number of
    targets.

    Of "sustained_step", the step from which recovery lasts; a target without one counts with the
    run's last step."""

    def column(run: RecordedRun) -> dict[str, Any]:
        if key != "sustained_step":
            return {row.target: getattr(row, key) for row in run.targets(kind)}
        if not run.strict:
            return {}
        end = run.history[-1].step
        return {
            row.target: end if row.sustained_step is None else row.sustained_step
            for row in run.targets(kind)
        }

    if a.strict != b.strict and key != "mean":  # rates of different endpoints
        return None, None, None, 0
    first, second = column(a), column(b)
    gaps = [
        second[t] - first[t]
        for t in first
        if t in second and finite(first[t]) and finite(second[t])
    ]
    if not gaps:
        return None, None, None, 0
    low, high = bootstrap_interval(gaps)
    return (
        sum(gaps) / len(gaps),
        low if finite(low) else None,
        high if finite(high) else None,
        len(gaps),
    )


def compare(folders: Sequence[str | Path]) -> tuple[str, list[list[Cell]]]:
    """Runs side by side, the first as reference: HTML, and its table of paired differences."""
    runs = [RecordedRun(folder) for folder in folders]
    names = [
        run.name if [r.name for r in runs].count(run.name) == 1 else str(run.folder) for run in runs
    ]
    measured = [
        (f"{name}, {WEIGHTS[kind]}", run, kind)
        for name, run in zip(names, runs, strict=True)
        for kind in run.kinds()
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
    costs = [
        run.series(label, kind, lambda s: s.drift.get("clean_eps_mse"))
        for label, run, kind in measured
    ]
    head = [
        "run",
        "strict rate",
        "95 %",
        "whole alone",
        "elements",
        "sustained from",
        "targets with one",
    ]
    head += ["less placebo", "AURC", "restricted", "mean", "best", "clean eps-MSE"]
    data = {
        "count": len(runs),
        "unlike": _unlike(runs),
        "scores": Table(head, scores, right=True),
        "gaps": Table(
            ["difference", "score", "mean", "95 %", "targets"],
            [_gap_row(row) for row in gaps],
            right=True,
        ),
        "figures": [
            *pages.lines(rates, "Recovery rate (CIR)", y_range=(0, 1)),
            *pages.lines(means, "Mean similarity"),
            *pages.lines(costs, "Held-out clean error"),
        ],
        "notes": [
            note for name, run in zip(names, runs, strict=True) for note in _notes(name, run)
        ],
    }
    return pages.render("compare.html.j2", data), gaps


def _last_scores(run: RecordedRun, kind: str) -> list[Cell]:
    """A run's row of the comparison, after its name."""
    last, total, rows = run.last(kind), run.total(kind), run.targets(kind)
    curve = [_cell(total.aurc), _cell(total.restricted)] if total else [None, None]
    clean, placebo = last.drift.get("clean_eps_mse"), run.record.placebo if run.record else None
    if run.strict:
        rates: list[Cell] = [
            supported(last.cir, last.interval),
            interval_text(last.interval),
            _cell(last.whole),
        ]
        count = sum(row.sustained_step is not None for row in rows)
        lasting: list[Cell] = [
            _cell(total.sustained_step) if total else None,
            f"{count} of {len(rows)}",
        ]
    else:
        rates, lasting = [None, None, _cell(last.cir)], [None, None]
    less = supported(placebo.difference, placebo.interval) if placebo else None
    values = (last.mean, last.max)
    return [*rates, _cell(last.element_rate), *lasting, less, *curve, *map(_cell, values), clean]


def _cell(value: float | None) -> Cell:
    return None if value is None else short(value)


def _gap_row(row: list[Cell]) -> list[Cell]:
    """A difference in the digits that its interval supports."""
    name, score, mean, low, high, targets = row
    ends = [end if finite(end) else None for end in (low, high)]
    return [name, score, supported(mean, ends), interval_text(ends), targets]


def _notes(name: str, run: RecordedRun) -> list[str]:
    """What must be known of a run before its numbers are read."""
    if run.record is None:
        return [f"{name}: no validation"]
    notes = [] if run.strict else [f"{name}: {evidence.SCHEMA_1}"]
    return notes + [
        f"{name}: trained without {', '.join(withheld)}"
        for withheld in [run.withheld()]
        if withheld
    ]


def _unlike(runs: Sequence[RecordedRun]) -> str:
    """That the rates cannot be compared, where embedders, thresholds or endpoints of the runs
    differ."""
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
