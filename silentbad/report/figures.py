"""One picture of a run: each target's elements, the target, and the median generation of its
composed prompt by step.

`python -m silentbad.report.figures RUN --out picture.png`"""

from silentbad.settings.commands import FigureOptions
from silentbad.settings.startup import early, refused
from silentbad.settings.startup import options as read_options

if __name__ == "__main__":  # a mistake is said before the seconds that the imports below take
    OPTIONS = early(read_options, FigureOptions, None, __doc__)

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from silentbad.data.images import open_image, safe_path
from silentbad.errors import UserError, exit_with, user_errors, warn
from silentbad.measure.record import NAME, Record, Scores
from silentbad.report.charts import spaced

MOST = 50  # targets that are shown, and elements of a target
TILE = 112  # pixels of a picture
GAP = 8  # between two
LABEL = 22  # height of the titles


def strip(run: Path, kind: str = "median", columns: int = 6) -> Image.Image:
    """Rows of targets; `kind` is "median" or "best", over the images of a step. At most `columns`
    steps are shown.

    Raises UserError where the folder holds no validation."""
    path = run / NAME
    if not path.is_file():
        raise UserError(f"figures: '{run}' holds no {NAME}; is it a run folder?")
    record = Record.load(path)
    history = [record.history[k] for k in spaced(len(record.history), columns)]
    tag = "ema" if history[-1].ema is not None else "raw"
    rows = record.targets[:MOST]
    widest = min(max(len(target.elements) for target in rows), MOST)
    steps = [f"step {entry.step}" for entry in history]
    titles = ["elements", *[""] * (widest - 1), "target", *steps]
    size = (len(titles) * (TILE + GAP) + 2 * GAP, len(rows) * (TILE + GAP) + LABEL)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=13)
    for x, title in enumerate(titles):
        draw.text((_left(x, widest), 3), title, fill=(40, 40, 40), font=font)
    shown = False
    missing = []
    for y, target in enumerate(rows):
        elements = target.elements[:widest]
        files = [*elements, *[None] * (widest - len(elements)), target.image]
        files += [
            _kept(entry.scores(tag) or entry.raw, target.target_id, kind) for entry in history
        ]
        for x, file in enumerate(files):
            if file is not None and (run / file).is_file():
                shown = shown or file not in (target.image, *elements)
                picture = open_image(safe_path(run, file, str(path)), str(path))
                tile = picture.resize((TILE, TILE), Image.Resampling.NEAREST)
                sheet.paste(tile, (_left(x, widest), LABEL + y * (TILE + GAP)))
            elif file is not None:
                missing.append(file)
    if not shown:
        raise UserError(
            f"figures: '{run}' holds none of the images that {NAME} names; they were in samples/"
        )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        warn(f"figures: '{run}' lacks {missing[0]}{more}; left empty")
    return sheet


def _kept(scores: Scores | None, target_id: str, kind: str) -> str | None:
    """The file of a target's "median" or "best" picture, where there is one."""
    target = scores.targets.get(target_id) if scores is not None else None
    picture = getattr(target, kind) if target is not None else None
    return picture.file if picture is not None else None


def _left(column: int, elements: int) -> int:
    """Left edge of a column; a wider gap on both sides of the target."""
    return column * (TILE + GAP) + GAP * (column >= elements) + GAP * (column > elements)


def _save(picture: Image.Image, file: Path) -> None:
    """A picture into a file, which is replaced whole, or left as it was where there is no room."""
    draft = file.with_name(f".draft-{file.name[-100:]}")
    try:
        picture.save(draft, optimize=True)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def main(argv: list[str] | None = None, options: FigureOptions | None = None) -> int:
    try:
        settings = options or read_options(FigureOptions, argv, __doc__)
        out = Path(str(settings.out))
        picture = strip(Path(str(settings.run)), settings.kind)
        with user_errors(f"--out: cannot write {out}"):
            out.parent.mkdir(parents=True, exist_ok=True)
            _save(picture, out)
    except UserError as error:
        return refused(error)
    print(out)
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(options=OPTIONS))
