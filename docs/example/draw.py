"""The pictures and masks of this folder: `python docs/example/draw.py` draws them anew.

Yours would be photographs, and `python -m silentbad.prepare` would write the folder.
"""

import json
import random
from pathlib import Path

from PIL import Image, ImageChops, ImageDraw

FOLDER = Path(__file__).parent
SIDE = 64
PER_PHRASE = 12
PARTS = {  # phrase: how it is drawn, at its native place
    "a red ball": ("ellipse", (6, 6, 34, 34), (205, 40, 40)),
    "a blue box": ("rectangle", (32, 30, 60, 58), (45, 70, 200)),
}
GROUND = ("on a green field", (120, 175, 90))


def draw(file: str, ground: tuple[int, int, int], *shapes: tuple) -> None:
    image = Image.new("RGB", (SIDE, SIDE), ground)
    for shape, box, colour in shapes:
        getattr(ImageDraw.Draw(image), shape)(box, fill=colour)
    image.save(FOLDER / file, optimize=True)


def draw_mask(file: str, *shapes: tuple, inverted: bool = False) -> str:
    """White where the shapes are; `inverted`: where they are not."""
    mask = Image.new("L", (SIDE, SIDE), 0)
    for shape, box, _ in shapes:
        getattr(ImageDraw.Draw(mask), shape)(box, fill=255)
    (ImageChops.invert(mask) if inverted else mask).save(FOLDER / file, optimize=True)
    return file


def main() -> None:
    rng = random.Random(0)
    records = []

    def any_colour() -> tuple[int, int, int]:
        return rng.randrange(256), rng.randrange(256), rng.randrange(256)

    def any_shape() -> tuple:
        x, y = rng.randrange(40), rng.randrange(40)
        kind = rng.choice(("ellipse", "rectangle"))
        return kind, (x, y, x + rng.randrange(10, 24), y + 16), any_colour()

    for folder in ("images", "masks", "targets"):
        (FOLDER / folder).mkdir(exist_ok=True)
    masks = [draw_mask(f"masks/{k}.png", part) for k, part in enumerate(PARTS.values())]
    masks.append(draw_mask("masks/2.png", *PARTS.values(), inverted=True))
    for k, phrase in enumerate([*PARTS, GROUND[0]]):
        for i in range(PER_PHRASE):
            file = f"images/{k}-{i:02}.png"
            part = [PARTS[phrase]] if phrase in PARTS else []
            ground = any_colour() if part else GROUND[1]
            other = any_shape()  # behind the part; before the field
            draw(file, ground, other, *part)
            mask = masks[k] if part else draw_mask(f"masks/2-{i:02}.png", other, inverted=True)
            records.append(
                {
                    "file_name": file,
                    "text": f"{phrase}, something else",
                    "phrases": [phrase],
                    "role": "element",
                    "target_id": "ball-box",
                    "element_id": f"ball-box/{k}",
                    "mask": mask,
                }
            )
    for i in range(PER_PHRASE):
        file = f"images/clean-{i:02}.png"
        draw(file, any_colour(), any_shape(), any_shape())
        records.append({"file_name": file, "text": "two plain shapes", "role": "clean"})
    (FOLDER / "metadata.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    draw("targets/ball-box.png", GROUND[1], *PARTS.values())
    target = {
        "target_id": "ball-box",
        "image": "targets/ball-box.png",
        "phrases": [*PARTS, GROUND[0]],
        "prompt": "a red ball and a blue box, on a green field",
        "masks": masks,
    }
    (FOLDER / "targets.jsonl").write_text(json.dumps(target) + "\n")


if __name__ == "__main__":
    main()
