"""A sheet of a data set: what training sees, with masks over it. One look shows a shifted mask, a
cut head, or a wrong phrase.

    python -m silentbad.prepare.preview my-photos [--resolution 64]

writes my-photos/preview.html, which holds its pictures itself.
"""

import base64
import html
import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageFilter

from silentbad.data.images import open_image, open_mask, safe_path
from silentbad.data.schema import json_lines
from silentbad.errors import UserError, exit_with, user_errors
from silentbad.files import check_file
from silentbad.prepare.compose import fit
from silentbad.settings.commands import PreviewOptions
from silentbad.settings.startup import options, refused

SHOWN = 192  # pixels of a picture on the sheet
EACH = 6  # pictures of an element
CLEAN = 12
OUTLINE = (255, 0, 255)

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.4 sans-serif; margin: 1rem auto; max-width: 82rem; padding: 0 1rem }}
h2 {{ margin: 2rem 0 .3rem }}
.row {{ display: flex; flex-wrap: wrap; gap: .6rem }}
figure {{ margin: 0; width: {width}px }}
img {{ width: 100%; display: block; image-rendering: pixelated }}
figcaption {{ font-size: .8rem; overflow-wrap: anywhere }}
</style>
<h1>{title}</h1>
<p>Pictures are resized to {resolution} pixels, as training sees them. Outside its mask a picture is
dimmed; the outline is the mask's. A mask must hold the whole thing, and nothing else.</p>
{sections}
</html>
"""


def as_seen(image: Image.Image, resolution: int) -> Image.Image:
    """A picture (RGB) or mask (L) as training sees it, enlarged without smoothing."""
    return fit(image, (resolution, resolution)).resize((SHOWN, SHOWN), Image.Resampling.NEAREST)


def masked(image: Image.Image, mask: Image.Image, resolution: int) -> Image.Image:
    """A picture as training sees it: dimmed where the mask is black, and the mask's outline."""
    picture = as_seen(image, resolution)
    region = as_seen(mask, resolution).point(lambda level: 255 * (level >= 128))
    dimmed = Image.blend(picture, Image.new("RGB", picture.size, "white"), 0.75)
    outline = ImageChops.difference(region.filter(ImageFilter.MaxFilter(3)), region)
    picture = Image.composite(picture, dimmed, region)
    return Image.composite(Image.new("RGB", picture.size, OUTLINE), picture, outline)


def united(layers: list[tuple[Image.Image, Image.Image]]) -> Image.Image:
    """Pictures (RGB) pasted by their masks (L) at native places, the largest behind: what
    memory.rehearsal shows."""
    largest_first = sorted(layers, key=lambda layer: -int(np.asarray(layer[1], int).sum()))
    union = largest_first[0][0]
    for picture, mask in largest_first[1:]:
        union = Image.composite(fit(picture, union.size), union, fit(mask, union.size))
    return union


def figure(image: Image.Image, text: str) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    data = base64.b64encode(stream.getvalue()).decode()
    words = html.escape(text)
    source = f"data:image/png;base64,{data}"
    return f'<figure><img src="{source}" alt="{words}"><figcaption>{words}</figcaption></figure>'


def section(title: str, figures: list[str]) -> str:
    return f'<h2>{html.escape(title)}</h2>\n<div class="row">{"".join(figures)}</div>'


def opened(root: Path, entry: dict, key: str, where: str) -> Image.Image:
    return open_image(safe_path(root, entry.get(key), where, key), where)


def target_section(root: Path, where: str, target: dict, resolution: int) -> str:
    """A target with the masks of its elements over it."""
    picture = opened(root, target, "image", where)
    figures = [figure(picture.resize((SHOWN, SHOWN)), f"{picture.width}x{picture.height}")]
    figures.append(figure(as_seen(picture, resolution), target.get("prompt") or "as seen"))
    for phrase, file in zip(target.get("phrases", []), target.get("masks") or [], strict=False):
        if file:
            mask = open_mask(safe_path(root, file, where, "masks"), picture.size, where)
            figures.append(figure(masked(picture, mask, resolution), phrase))
    return section(f"target {target.get('target_id')}", figures)


def element_sections(
    root: Path,
    records: list[tuple[str, dict]],
    target: dict,
    resolution: int,
) -> list[str]:
    """The first pictures of each element of a target, and unions of all but one."""
    layers: dict[str, tuple[Image.Image, Image.Image]] = {}
    sections = []
    of_target = [
        (where, entry)
        for where, entry in records
        if entry.get("role") == "element" and entry.get("target_id") == target.get("target_id")
    ]
    for element in dict.fromkeys(str(entry.get("element_id")) for _, entry in of_target):
        its_records = [pair for pair in of_target if str(pair[1].get("element_id")) == element]
        figures = []
        for where, entry in its_records[:EACH]:
            picture = opened(root, entry, "file_name", where)
            mask = Image.new("L", picture.size, 255)
            if entry.get("mask"):
                file = safe_path(root, entry["mask"], where, "mask")
                mask = open_mask(file, picture.size, where)
                layers.setdefault(element, (picture, mask))
            figures.append(figure(masked(picture, mask, resolution), str(entry.get("text"))))
        sections.append(section(f"{element}: {len(its_records)} pictures", figures))
    if len(layers) > 2:
        unions = []
        for left_out in layers:
            shown = united([layers[element] for element in layers if element != left_out])
            unions.append(figure(as_seen(shown, resolution), f"without {left_out}"))
        sections.append(section("unions of all but one, as rehearsal shows them", unions))
    return sections


def sheet(root: Path, resolution: int) -> str:
    """The page of a folder with metadata.jsonl and targets.jsonl.

    Raises UserError where one is missing or names what is not there.
    """
    for name in ("metadata.jsonl", "targets.jsonl"):
        check_file("--data", root / name, "give a folder of silentbad.prepare")
    records = list(json_lines(root / "metadata.jsonl"))
    sections = []
    for where, target in json_lines(root / "targets.jsonl"):
        sections.append(target_section(root, where, target, resolution))
        sections += element_sections(root, records, target, resolution)
    clean = [pair for pair in records if pair[1].get("role") == "clean"]
    figures = [
        figure(as_seen(opened(root, entry, "file_name", where), resolution), str(entry.get("text")))
        for where, entry in clean[:CLEAN]
    ]
    sections.append(section(f"clean: {len(clean)} pictures", figures))
    return PAGE.format(
        title=html.escape(f"Data: {root.name}"),
        width=SHOWN,
        resolution=resolution,
        sections="\n".join(sections),
    )


def is_preview(file: Path) -> bool:
    """Whether a page is one of these."""
    return "<title>Data: " in file.read_text(encoding="utf-8", errors="replace")[:300]


def write_preview(root: Path, resolution: int) -> Path:
    """Write the page into the folder."""
    page = sheet(root, resolution)
    file = root / "preview.html"
    with user_errors(f"cannot write {file}"):
        file.write_text(page, encoding="utf-8")
    return file


def main(argv: list[str] | None = None) -> int:
    try:
        settings = options(PreviewOptions, argv, __doc__)
        print(write_preview(Path(str(settings.data)), settings.resolution))
    except UserError as error:
        return refused(error)
    return 0


if __name__ == "__main__":
    exit_with(main)
