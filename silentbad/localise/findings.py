"""The results for a run's parts: the part whose return to the base removes the picture at the least
clean loss, a page of heat maps, and the same as JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from silentbad.errors import writing
from silentbad.files import replace_text
from silentbad.localise.substitution import Subject
from silentbad.report import pages, parts, run_report
from silentbad.report.evidence import kept_sentence
from silentbad.report.pages import Table
from silentbad.report.parts import PUT_BACK, Row

TEMPLATES = Path(__file__).parent / "templates"


def cheapest(rows: list[Row]) -> Row:
    """Of the parts put back, the one that leaves the fewest images; of equal ones, that with the
    least clean loss."""
    others = [row for row in rows if row.state == PUT_BACK]
    return min(others, key=lambda row: (row.recovered.count, row.clean or 0.0, row.share))


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
        clean = f"; the clean loss is then {best.clean:.4f}, as trained {trained.clean:.4f}"
        clean += f", of the base {rows[1].clean:.4f}"
    return (
        f"Put {best.part} back ({best.share:.1%} of what changed): none of {images} images is "
        f"recovered (at most {best.recovered.interval[1]:.0%} with 95 % confidence), "
        f"{trained.recovered.count} are as trained{clean}."
    )


def page(name: str, subject: Subject, rows: list[Row]) -> str:
    """The rows as heat maps and a table."""
    values = {
        "name": name,
        "sentence": defence(rows),
        "heats": parts.heat_maps(
            rows, {target.target_id: target.phrases for target in subject.targets}
        ),
        "grids": parts.grids(rows),
        "table": table(rows),
        "images": rows[0].recovered.images,
        "clean": len(rows[0].errors),
        "kept": kept_sentence(subject.record),
    }
    return pages.render("localise.html.j2", values, TEMPLATES)


def table(rows: list[Row]) -> Table:
    """Every row with its intervals."""
    head = ["weights", "share of change", "strict rate", "elements", "clean loss", "above the base"]
    lines: list[list[Any]] = []
    for row in rows:
        rise = "–"
        if row.rise is not None and row.rise_interval is not None:
            low, high = row.rise_interval
            rise = f"{row.rise:+.4f} ({low:+.4f} to {high:+.4f})"
        mean = row.element_mean()
        elements = "–" if mean is None else f"{mean:.2f}"
        clean = "–" if row.clean is None else f"{row.clean:.4f}"
        name = f"{row.part} {row.state}".strip()
        lines.append([name, f"{row.share:.1%}", str(row.recovered), elements, clean, rise])
    return Table(head, lines, right=True)


def written(run: Path, subject: Subject, rows: list[Row], file: Path) -> None:
    """The page, and the same as JSON beside it."""
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
    with writing(str(file.parent), file.with_suffix(".json").name):
        replace_text(file.with_suffix(".json"), json.dumps(about | {"rows": plain}, indent=1))
    run_report.save(page(run.resolve().name, subject, rows), file)
