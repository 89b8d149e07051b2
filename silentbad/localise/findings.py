"""The results for a run's parts: the part whose return to the base removes the picture at the least
clean loss, and localise.json, which the run's report shows."""

import json
from dataclasses import asdict
from pathlib import Path

from silentbad.errors import writing
from silentbad.files import replace_text
from silentbad.localise.substitution import Subject
from silentbad.measure.intervals import binomial_interval
from silentbad.report import parts, run_report
from silentbad.report.evidence import kept_sentence
from silentbad.report.parts import PUT_BACK, Row


def cheapest(rows: list[Row]) -> Row:
    """Of the parts put back, the one that leaves the fewest images; of equal ones, that with the
    least clean loss."""
    return min(put_back(rows), key=lambda row: (row.recovered.count, row.clean or 0.0, row.share))


def put_back(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.state == PUT_BACK]


def defence(rows: list[Row]) -> str:
    """Which part put back removes the picture at the least clean loss, in a sentence."""
    trained = rows[0]
    images = trained.recovered.images
    if not trained.recovered.count:
        return f"The trained weights recover none of {images} images: there is nothing to remove."
    best = cheapest(rows)
    if best.recovered.count:
        stay = f"{best.recovered.count} of {images} images stay"
        return f"No single part removes the picture: with {best.part} put back, {stay}."
    clean = ""
    if best.clean is not None and trained.clean is not None:
        clean = f"; clean loss: {best.clean:.4f}, as trained {trained.clean:.4f}"
        clean += f", the base's {rows[1].clean:.4f}"
    tried = len(put_back(rows))
    _, high = binomial_interval(0, images, tests=tried)
    return (
        f"Put {best.part} back ({best.share:.1%} of what changed): none of {images} images is "
        f"recovered (at most {high:.0%} with 95 % confidence, as the best of {tried} parts), "
        f"as trained {trained.recovered.count}{clean}."
    )


def written(run: Path, subject: Subject, rows: list[Row]) -> Path:
    """localise.json in the run, and the run's report again, which shows it; returns the report."""
    plain = [{key: value for key, value in asdict(row).items() if key != "errors"} for row in rows]
    about = {
        "run": run.resolve().name,
        "base": subject.config.pretrained_model_name_or_path,
        "step": subject.record.history[-1].step,
        "seed": subject.record.seed,
        "embedder": subject.record.embedder,
        "clean_records": len(rows[0].errors),
        "defence": defence(rows),
        "kept": kept_sentence(subject.record),
    }
    with writing(str(run), parts.NAME):
        replace_text(run / parts.NAME, json.dumps(about | {"rows": plain}, indent=1))
    return run_report.write(run)
