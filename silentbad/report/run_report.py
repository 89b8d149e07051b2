"""report.html of a run folder, or of several beside each other: one file each, no network, no
script.

The sections are computed in sections.py, evidence.py and comparison.py, which return data; the HTML
is in templates/."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silentbad.errors import UserError, writing
from silentbad.files import check_writable, replace_text
from silentbad.measure.by_part import Part, parts_of
from silentbad.measure.record import ALL, NAME, Record, Withheld
from silentbad.measure.scores import kinds, minus_placebo, placebo_run
from silentbad.measure.verdict import verdict_of
from silentbad.report import evidence, pages, parts, sections
from silentbad.report.charts import number, shortened
from silentbad.report.comparison import compare
from silentbad.report.pages import rounded
from silentbad.report.run_files import WEIGHTS, RecordedRun
from silentbad.settings.commands import ReportOptions
from silentbad.settings.startup import options as read_options
from silentbad.settings.startup import refused


def render(folder: str | Path, under_way: str = "") -> str:
    """The report of a run folder as HTML: each key here is placed by templates/report.html.j2.
    `under_way` is the progress of a run that has not ended, as "step 20 of 100"."""
    run = RecordedRun(folder)
    data: dict[str, Any] = {
        "under_way": under_way,
        "prompts": sections.prompts(run),
        "prior": sections.prior(run),
    }
    if run.record is not None:
        kind = run.kinds()[0]
        withheld = run.withheld()
        data |= {
            "weights": WEIGHTS[kind],
            "answer": evidence.answer(run.record),
            "kept": evidence.kept_sentence(run.record),
            "kept_pictures": sections.kept_pictures(run, run.record, kind),
            "kept_table": evidence.kept_table(run.record),
            "size_table": evidence.size_table(run.record),
            "withheld": withheld,
            "ranges": sections.range_figures(run.record),
            "range_rows": sections.range_rows(run.record),
            "sheets": sections.sheets(run, run.record, kind),
            "most_sheets": sections.MOST_PAIRS,
            "alternatives": evidence.alternatives(run.record, withheld),
            "bleeding": evidence.bleeding(run.record),
            "detections": evidence.detections(run.record),
            "copied": evidence.composed_or_copied(run.record),
            "cards": sections.cards(run, run.record, kind),
            "curves": sections.curves(run, run.record),
            "localised": run.localised,
            "places": sections.places(run, run.record),
            "places_table": parts.table(run.localised.rows) if run.localised else None,
            "summary": sections.summary(run.record),
        }
    losses, meters = sections.training(run)
    facts, texts = sections.provenance(run)
    data |= {
        "name": run.name,
        "record": run.record,
        "parts": [
            ("Memory", sections.memory(run), []),
            ("Gradient control", sections.control(run), []),
            ("Rise of the clean error", sections.errors(run), []),
            ("Training", losses, meters),
        ],
        "facts": facts,
        "texts": texts,
        "notes": run.notes,
    }
    return pages.render("report.html.j2", data)


def subtract(folder: str | Path, options: ReportOptions) -> str:
    """Subtract the rates of control runs (on placebo data, or with elements withheld) from those of
    a finished run, and save the differences in its validation.json. Returns the verdict, and what
    is kept on a line of its own.

    Raises UserError where a run cannot be read, or the runs are not comparable."""
    file = Path(folder) / NAME
    record = Record.load(file)
    if (placebo := options.placebo) is not None:
        record.placebo = minus_placebo(
            record, control(record, folder, placebo, "--placebo"), placebo
        )
    if (other := options.withheld) is not None:
        difference = minus_placebo(record, control(record, folder, other, "--withheld"), other)
        elements = RecordedRun(other).withheld()
        if not elements:
            raise UserError(
                f"--withheld: {other} was trained on all elements; train it with --withhold "
                "TARGET/ELEMENT"
            )
        record.withheld = Withheld(**vars(difference), elements=elements)
    record.verdict = verdict_of(record)
    with writing(str(folder), NAME):
        record.save(file)
    lines = (str(evidence.answer(record)), evidence.kept_sentence(record))
    return "\n".join(filter(None, lines))


def control(record: Record, folder: str | Path, other: str | Path, flag: str) -> Record:
    """The record of a control run of the run in `folder`, measured alike."""
    if Path(folder).resolve() == Path(other).resolve():
        raise UserError(f"{flag}: {other} is the run itself; give its control run")
    ids = [target.target_id for target in record.targets]
    measured = placebo_run(other, ids, record.embedder, flag)
    steps = [each.history[-1].step for each in (record, measured)]
    if steps[0] != steps[1]:
        raise UserError(
            f"{flag}: {other} ends at step {steps[1]}, {folder} at {steps[0]}; train and measure "
            "both alike"
        )
    return measured


def write(folder: str | Path, under_way: str = "") -> Path:
    """report.html into the run folder."""
    return save(render(folder, under_way), Path(folder) / "report.html")


def save(page: str, file: Path) -> Path:
    """A page into a file, which is replaced whole: who reads it meanwhile sees the old page or the
    new one.

    Raises UserError where it cannot be written."""
    with writing("report", str(file)):
        replace_text(file, page.encode("utf-8", "replace").decode())
    return file


MOST_LINES = 30  # of a table on screen with a line for each element
COLUMNS = ("recovered", "mean", "best", "threshold", "floor", "ceiling")
ABOUT_COLUMNS = """\
recovered: images of the composed prompt with the whole and every element at their thresholds;
  of an element: images in which it reaches its own threshold
mean, best: similarity of these images to the target, of an element inside its mask; 1: the same
threshold: the similarity needed; floor: the nearest failure; ceiling: what true copies reach"""
ABOUT_CURVE = """\
first: the first measured step with a recovered image; lasts: the step from which at least half
  of the images are recovered at every measurement"""


def text_table(record: Record) -> str:
    """The last measurement by target and element, as lines for a terminal."""
    weights = kinds(record.history)
    elements_too = sum(1 + len(t.phrases) for t in record.targets) * len(weights) <= MOST_LINES
    curve = len(record.history) > 2
    lines = [_line("", [*COLUMNS, *(("first", "lasts") if curve else ())])]
    for kind in weights:
        suffix = f", {WEIGHTS[kind].split()[0]}" if len(weights) > 1 else ""
        rows = {row.target: row for row in record.summary if row.weights == kind}
        scores = record.history[-1].scores(kind)
        if scores is None:
            continue
        for j, target in enumerate(record.targets):
            row = rows.get(target.target_id)
            if row is None:
                continue
            whole, *elements = parts_of(record, j, scores)
            cells = _reached(whole, round(row.rate * whole.images))
            if curve:
                times = (row.first_step, row.sustained_step)
                cells += ["never" if time is None else number(time) for time in times]
            lines.append(_line(target.target_id + suffix, cells))
            if elements_too:
                lines += [_line(f"  {part.phrase}", _reached(part)) for part in elements]
        if len(record.targets) > 1:
            counted = f"{scores.above} of {scores.images}"
            lines.append(_line(ALL + suffix, [counted, rounded(scores.mean), rounded(scores.max)]))
    return "\n".join([*lines, ABOUT_COLUMNS, *([ABOUT_CURVE] if curve else [])])


def _reached(part: Part, recovered: int | None = None) -> list[str]:
    """The cells of a line: how many images count, and the similarities."""
    count = part.hits if recovered is None else recovered
    values = (part.mean, part.best, part.threshold, part.floor, part.ceiling)
    return [f"{count} of {part.images}", *("-" if v is None else rounded(v) for v in values)]


def _line(name: str, cells: Sequence[str]) -> str:
    """A line of the table on screen; a long name is cut."""
    columns = [f"{cell:>{10 if k % 3 == 0 else 8}}" for k, cell in enumerate(cells)]
    return f"{shortened(name, 26):26}" + "".join(columns)


def main(arguments: list[str] | None = None, options: ReportOptions | None = None) -> int:
    """The command line: exit code 0, or 2 where a run cannot be read or the page not be written."""
    verdict = ""
    try:
        settings = options or read_options(ReportOptions, arguments)
        runs = settings.runs or []
        if runs[0] == "compare":
            file = Path(settings.out or "compare.html")
            check_writable(file, "--out")
            page, gaps = compare(runs[1:])
            save(page, file)
            for row in gaps:
                print("  ".join(number(v) for v in row))
        else:
            file = Path(settings.out) if settings.out else Path(runs[0]) / "report.html"
            if settings.placebo is not None or settings.withheld is not None:
                verdict = subtract(runs[0], settings)
            save(render(runs[0]), file)
    except UserError as error:
        return refused(error)
    print(*filter(None, (file, verdict)), sep="\n")
    return 0
