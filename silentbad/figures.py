"""One picture of a run: each target's elements, the target, and the median generation of its composed prompt by step.

`python -m silentbad.figures RUN --out picture.png`
"""

import argparse
import json
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from silentbad.errors import UserError

TILE, GAP, LABEL = 112, 8, 22


def strip(run: Path, kind: str = "median", columns: int = 6) -> Image.Image:
    """Rows of targets; `kind` is "median" or "best", over the images of a step. At most `columns` steps are shown.

    Raises UserError where the folder holds no validation.
    """
    path = run / "validation.json"
    if not path.is_file():
        raise UserError(f"figures: '{run}' holds no validation.json; is it a run folder?")
    report = json.loads(path.read_text(encoding="utf-8"))
    history = _spread(report["history"], columns)
    tag = "ema" if "ema" in history[-1] else "raw"
    widest = max(len(target["elements"]) for target in report["targets"])
    titles = ["elements"] + [""] * (widest - 1) + ["target"] + [f"step {entry['step']}" for entry in history]
    size = (len(titles) * (TILE + GAP) + 2 * GAP, len(report["targets"]) * (TILE + GAP) + LABEL)
    sheet = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=13)
    for x, title in enumerate(titles):
        draw.text((_left(x, widest), 3), title, fill=(40, 40, 40), font=font)
    for y, target in enumerate(report["targets"]):
        files = list(target["elements"]) + [None] * (widest - len(target["elements"])) + [target["image"]]
        for entry in history:
            scores = (entry.get(tag) or entry["raw"])["targets"][target["target_id"]]
            files.append(scores[kind]["file"] if kind in scores else None)
        for x, file in enumerate(files):
            if file is not None and (run / file).is_file():
                tile = Image.open(run / file).convert("RGB").resize((TILE, TILE), Image.Resampling.NEAREST)
                sheet.paste(tile, (_left(x, widest), LABEL + y * (TILE + GAP)))
    return sheet


def _left(column: int, elements: int) -> int:
    """Left edge of a column; a wider gap on both sides of the target."""
    return column * (TILE + GAP) + GAP * (column >= elements) + GAP * (column > elements)


def _spread(entries: list[dict], n: int) -> list[dict]:
    """At most n of the entries, first and last included."""
    if len(entries) <= n:
        return entries
    return [entries[round(i * (len(entries) - 1) / (n - 1))] for i in range(n)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=("median", "best"), default="median")
    args = parser.parse_args(argv)
    try:
        picture = strip(args.run, args.kind)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    picture.save(args.out, optimize=True)
    print(args.out)


if __name__ == "__main__":
    main()
