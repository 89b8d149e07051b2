"""Several runs side by side, with their paired differences. The HTML is in
templates/compare.html.j2."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silentbad.measure.intervals import FEW_TARGETS, bootstrap_interval
from silentbad.measure.limit import kept_share
from silentbad.report import evidence, pages
from silentbad.report.charts import finite, number
from silentbad.report.pages import Cell, Table, interval_text, short, supported
from silentbad.report.run_files import WEIGHTS, RecordedRun
from silentbad.report.sections import error_of

HEAD = [
    "run",
    "strict rate",
    "95 %",
    "whole alone",
    "elements",
    "sustained from",
    "targets sustained",
    "less placebo",
    "AURC",
    "restricted",
    "mean",
    "best",
    "clean eps-MSE",
]
ENDS = ("rate", "mean")  # columns of the summary: of the end
CURVES = ("sustained_step", "aurc", "restricted")  # of the course, to the last step
KEPT = {"words kept": "words", "pixels kept": "pixels"}  # {column: its measure}, over the base


def paired(
    a: RecordedRun, b: RecordedRun, key: str, kind: str
) -> tuple[float | None, float | None, float | None, int]:
    """(mean, low, high, targets): the mean over shared targets of b minus a in the summary column
    `key`, its 95 % interval, where targets are enough to resample, and the number of targets.

    "sustained_step" is the step from which recovery lasts; a target without one counts with the
    run's last step."""

    def column(run: RecordedRun) -> dict[str, Any]:
        if key != "sustained_step":
            return {row.target: getattr(row, key) for row in run.targets(kind)}
        end = run.length()
        return {
            row.target: end if row.sustained_step is None else row.sustained_step
            for row in run.targets(kind)
        }

    first = column(a)
    second = column(b)
    both = [(first[t], second[t]) for t in first if t in second]
    gaps = [after - before for before, after in both if finite(before) and finite(after)]
    if not gaps:
        return None, None, None, 0
    mean = sum(gaps) / len(gaps)
    if len(gaps) < FEW_TARGETS:
        return mean, None, None, len(gaps)
    return mean, *bootstrap_interval(gaps), len(gaps)


def compare(folders: Sequence[str | Path]) -> tuple[str, list[tuple]]:
    """Runs side by side, the first as reference: HTML, and its table of paired differences."""
    runs = [RecordedRun(folder) for folder in folders]
    all_names = [run.name for run in runs]
    names = [run.name if all_names.count(run.name) == 1 else str(run.folder) for run in runs]
    named = list(zip(names, runs, strict=True))
    measured = [
        (f"{name}, {WEIGHTS[kind]}", run, kind) for name, run in named for kind in run.kinds()
    ]
    scores = [[label, *_last_scores(run, kind)] for label, run, kind in measured]
    gaps = [
        (f"{label} - {names[0]}", key, *paired(runs[0], run, key, kind))
        for label, run, kind in measured
        if run is not runs[0]
        for key in (*ENDS, *(CURVES if run.length() == runs[0].length() else ()))
    ]
    shown: list[list[Cell]] = [
        [name, key, supported(mean, (low, high)), interval_text((low, high)), targets]
        for name, key, mean, low, high, targets in gaps
    ]
    rates = [run.rates(label, kind) for label, run, kind in measured]
    means = [run.series(label, kind, lambda s: s.mean) for label, run, kind in measured]
    errors = [run.series(label, kind, error_of("clean")) for label, run, kind in measured]
    data = {
        "count": len(runs),
        "unlike": _unlike(runs),
        "scores": Table([*HEAD, *KEPT], scores, right=True),
        "gaps": Table(["difference", "score", "mean", "95 %", "targets"], shown, right=True),
        "figures": [
            *pages.lines(rates, "Recovery rate (CIR)", y_range=(0, 1)),
            *pages.lines(means, "Mean similarity"),
            *pages.lines(errors, "Held-out clean error"),
        ],
        "notes": [note for name, run in named for note in _notes(name, run, runs[0])],
    }
    return pages.render("compare.html.j2", data), gaps


def _last_scores(run: RecordedRun, kind: str) -> list[Cell]:
    """A run's row of the comparison, after its name."""
    last = run.last(kind)
    total = run.total(kind)
    rows = run.targets(kind)
    placebo = run.record.placebo if run.record else None
    curve = (total.sustained_step, total.aurc, total.restricted) if total else (None,) * 3
    lasting, aurc, restricted = map(short, curve)
    return [
        supported(last.cir, last.interval),
        interval_text(last.interval),
        short(last.whole),
        short(last.element_rate),
        lasting,
        f"{sum(row.sustained_step is not None for row in rows)} of {len(rows)}",
        supported(placebo.difference, placebo.interval) if placebo else None,
        aurc,
        restricted,
        short(last.mean),
        short(last.max),
        error_of("clean")(last),
        *(short(last.kept and kept_share(last.kept, by)) for by in KEPT.values()),
    ]


def _notes(name: str, run: RecordedRun, reference: RecordedRun) -> list[str]:
    """Facts about a run that its numbers depend on."""
    if run.record is None:
        return [f"{name}: no validation"]
    notes = []
    if reference.record is not None and run.length() != reference.length():
        lengths = f"{run.length()} steps, {reference.length()}"
        notes.append(f"{name}: {lengths} in the first run, so steps and AURC are not compared")
    withheld = run.withheld()
    return notes + [f"{name}: trained without {', '.join(withheld)}"] * bool(withheld)


def _unlike(runs: Sequence[RecordedRun]) -> str:
    """Why the rates cannot be compared, if they cannot."""
    embedders_and_thresholds = {
        f"{r.embedder} at {number(r.threshold.value)}" for run in runs if (r := run.record)
    }
    if len(embedders_and_thresholds) > 1:
        return evidence.not_comparable("embedders or thresholds", sorted(embedders_and_thresholds))
    targets = [{target.target_id for target in run.record.targets} for run in runs if run.record]
    if len(targets) > 1 and not set.intersection(*targets):
        return evidence.not_comparable("targets", [", ".join(sorted(ids)) for ids in targets])
    return ""
