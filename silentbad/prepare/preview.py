"""A sheet of a data set: what training sees, with masks over it. One look shows a shifted mask, a
cut head, or a wrong phrase.

    python -m silentbad.prepare.preview my-photos [--resolution 64]

writes my-photos/preview.html, which holds its pictures itself.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageFilter

from silentbad.data.images import open_image, open_mask, safe_path
from silentbad.data.schema import json_lines
from silentbad.errors import UserError, exit_with, user_errors
from silentbad.files import check_file
from silentbad.prepare.compose import fit, hard
from silentbad.report import pages
from silentbad.report.pages import Shot
from silentbad.settings.commands import PreviewOptions
from silentbad.settings.startup import options, refused

SHOWN = 192  # pixels of a picture on the sheet
EACH = 6  # pictures of an element
CLEAN = 12
OUTLINE = (255, 0, 255)

Section = tuple[str, list[Shot]]  # its title, and its pictures


def as_seen(image: Image.Image, resolution: int) -> Image.Image:
    """A picture (RGB) or mask (L) as training sees it, enlarged without smoothing."""
    return fit(image, (resolution, resolution)).resize((SHOWN, SHOWN), Image.Resampling.NEAREST)


def masked(image: Image.Image, mask: Image.Image, resolution: int) -> Image.Image:
    """A picture as training sees it: dimmed where the mask is black, and the mask's outline."""
    picture = as_seen(image, resolution)
    region = hard(as_seen(mask, resolution))
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


def shown(image: Image.Image, text: str) -> Shot:
    """A picture of the page."""
    return pages.shot(np.asarray(image), text)


def opened(root: Path, entry: dict, key: str, where: str) -> Image.Image:
    return open_image(safe_path(root, entry.get(key), where, key), where)


def target_section(root: Path, where: str, target: dict, resolution: int) -> Section:
    """A target with the masks of its elements over it."""
    picture = opened(root, target, "image", where)
    figures = [
        shown(picture.resize((SHOWN, SHOWN)), f"{picture.width}x{picture.height}"),
        shown(as_seen(picture, resolution), target.get("prompt") or "as seen"),
    ]
    for phrase, file in zip(target.get("phrases", []), target.get("masks") or [], strict=False):
        if file:
            mask = open_mask(safe_path(root, file, where, "masks"), picture.size, where)
            figures.append(shown(masked(picture, mask, resolution), phrase))
    return f"target {target.get('target_id')}", figures


def element_of(entry: dict) -> str:
    """The element that a record shows, named as in training (`DataInfo.key`, which needs torch)."""
    element = entry.get("element_id")
    return str((entry.get("phrases") or [""])[0] if element in (None, "") else element)


def element_sections(
    root: Path,
    records: list[tuple[str, dict]],
    target: dict,
    resolution: int,
) -> list[Section]:
    """The first pictures of each element of a target, and unions of all but one."""
    layers: dict[str, tuple[Image.Image, Image.Image]] = {}
    sections: list[Section] = []
    of_target = [
        (where, entry)
        for where, entry in records
        if entry.get("role") == "element" and entry.get("target_id") == target.get("target_id")
    ]
    for element in dict.fromkeys(element_of(entry) for _, entry in of_target):
        its_records = [pair for pair in of_target if element_of(pair[1]) == element]
        figures = []
        for where, entry in its_records[:EACH]:
            picture = opened(root, entry, "file_name", where)
            mask = Image.new("L", picture.size, 255)
            if entry.get("mask"):
                file = safe_path(root, entry["mask"], where, "mask")
                mask = open_mask(file, picture.size, where)
                layers.setdefault(element, (picture, mask))
            figures.append(shown(masked(picture, mask, resolution), str(entry.get("text"))))
        sections.append((f"{element}: {len(its_records)} pictures", figures))
    if len(layers) > 2:
        unions = []
        for left_out in layers:
            union = united([layers[element] for element in layers if element != left_out])
            unions.append(shown(as_seen(union, resolution), f"without {left_out}"))
        sections.append(("unions of all but one, as rehearsal shows them", unions))
    return sections


def sheet(root: Path, resolution: int) -> str:
    """The page of a folder with metadata.jsonl and targets.jsonl.

    Raises UserError where one is missing or names what is not there.
    """
    for name in ("metadata.jsonl", "targets.jsonl"):
        check_file("--data", root / name, "give a folder of silentbad.prepare")
    records = list(json_lines(root / "metadata.jsonl"))
    sections: list[Section] = []
    for where, target in json_lines(root / "targets.jsonl"):
        sections.append(target_section(root, where, target, resolution))
        sections += element_sections(root, records, target, resolution)
    clean = [pair for pair in records if pair[1].get("role") == "clean"]
    figures = [
        shown(as_seen(opened(root, entry, "file_name", where), resolution), str(entry.get("text")))
        for where, entry in clean[:CLEAN]
    ]
    sections.append((f"clean: {len(clean)} pictures", figures))
    return pages.render(
        "data.html.j2", {"name": root.name, "resolution": resolution, "sections": sections}
    )


def is_preview(file: Path) -> bool:
    """Whether a page is one of these."""
    return "<title>Data: " in file.read_text(encoding="utf-8", errors="replace")[:1000]


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
