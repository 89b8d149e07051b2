"""The pictures of docs/theory.md, into docs/images: `python -m bench.theory_figures [--targets "2760;2761"]`.

theory-samples.png   the machine's samples beside the network's, a line a target
theory-winners.png   from which pictures each place takes, along the sampling of one image
theory-tests.png     what the machine draws under other data, a line a variant
"""

import argparse
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageColor, ImageDraw, ImageFont
from torch import Tensor

from bench.judged import images_of
from bench.kept import RESULTS as KEPT
from bench.kept import pictures_of
from bench.recovery import ROOT
from bench.theory import SIDE, VARIANTS, Data, Machine, decode
from bench.theory_table import FRESH
from silentbad.data.images import to_pil
from silentbad.report.charts import COLOURS

IMAGES = ROOT / "docs" / "images"
CELL = 96  # pixels of a picture in a sheet
HEAD = 20
STEPS = (0, 2, 4, 7, 11)  # of sampling, in `winners`
TESTS = ("recommended", "leak_free", "L1", "L0")
GREY = "#c8c8c8"


def pictures(z: Tensor) -> list[Image.Image]:
    """Latents (N,C,8,8) -> pictures."""
    return [to_pil(picture) for picture in decode(z)]


def sheet(
    lines: Sequence[Sequence[Image.Image]], heads: Sequence[tuple[int, str]], names: Sequence[str]
) -> Image.Image:
    """Pictures in lines that have `names`; heads (column, text)."""
    left = 8 * max(map(len, names)) + 12
    page = Image.new("RGB", (left + CELL * max(map(len, lines)), HEAD + CELL * len(lines)), "white")
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(13)
    for column, text in heads:
        draw.text((left + CELL * column + 3, 2), text, fill="black", font=font)
    for row, (name, line) in enumerate(zip(names, lines, strict=True)):
        draw.text((4, HEAD + CELL * row + CELL // 2 - 8), name, fill="black", font=font)
        for column, picture in enumerate(line):
            place = (left + CELL * column, HEAD + CELL * row)
            page.paste(picture.convert("RGB").resize((CELL - 2, CELL - 2), Image.Resampling.NEAREST), place)
    return page


def of_network(arm: str, target: str, count: int) -> list[Image.Image]:
    """The first images of a trained network, as bench/kept.py stored them."""
    with zipfile.ZipFile(pictures_of(KEPT)) as archive:
        return images_of(archive, f"{arm}-{target}.png")[:count]


def samples(arm: str, targets: Sequence[str]) -> Image.Image:
    """Of each target: itself, the machine with and without unions, the network."""
    lines = []
    for target in targets:
        with_unions, without = (Data(target, VARIANTS[name]) for name in ("recommended", "leak_free"))
        line = pictures(with_unions.target)
        line += pictures(Machine(with_unions, VARIANTS["recommended"]).sample(4))
        line += pictures(Machine(without, VARIANTS["leak_free"]).sample(2))
        lines.append(line + of_network(arm, target, 4))
    heads = [(0, "target"), (1, "machine"), (5, "machine, no unions"), (7, "trained network")]
    return sheet(lines, heads, targets)


class Traced(Machine):
    """A machine that keeps the weights of its first sample's places, and what it draws from them."""

    def sample(self, count: int, seed: int = 0) -> Tensor:
        self.weights: list[Tensor] = []
        return super().sample(count, seed)

    def posterior(self, x: Tensor, level: float, log_prior: Tensor) -> Tensor:
        weights = super().posterior(x, level, log_prior)
        self.weights.append(weights[:, 0])
        return weights


def kind_of(record: dict, phrases: Sequence[str]) -> int:
    """Of a union the element that it lacks; then one number for records of one element, and one for clean pictures."""
    if record["role"] == "rehearsal":
        return next(k for k, phrase in enumerate(phrases) if phrase not in record["phrases"])
    return len(phrases) + (record["role"] == "clean")


def winners(target: str) -> Image.Image:
    """Along the sampling of one image: what the machine takes it for, and the pictures that hold each place."""
    data = Data(target, VARIANTS["recommended"])
    machine = Traced(data, VARIANTS["recommended"])
    machine.sample(1)
    kinds = [kind_of(record, data.phrases) for record in data.records]
    belongs = torch.nn.functional.one_hot(torch.tensor(kinds), len(data.phrases) + 2).float()  # (R,kinds)
    colours = [*COLOURS[: len(data.phrases)], "#f0e442", GREY]
    drawn, maps = [], []
    for step in STEPS:
        weights = machine.weights[step]
        mean = torch.bmm(weights[:, None], machine.centres)[:, 0]  # (P,C)
        drawn += pictures(mean.T.reshape(1, -1, SIDE, SIDE))
        best = (weights @ belongs).argmax(1).reshape(SIDE, SIDE).tolist()
        cells = [[ImageColor.getrgb(colours[k]) for k in line] for line in best]
        maps.append(Image.fromarray(np.array(cells, np.uint8)))
    heads = [(k, f"step {step + 1}") for k, step in enumerate(STEPS)]
    page = sheet([drawn, maps], heads, ["posterior mean", "taken from"])
    names = [*(f"all but '{phrase}'" for phrase in data.phrases), "one element alone", "a clean picture"]
    return with_legend(page, list(zip(names, colours, strict=True)))


def with_legend(page: Image.Image, entries: Sequence[tuple[str, str]]) -> Image.Image:
    """A page with coloured names below it."""
    longer = Image.new("RGB", (page.width, page.height + 22 * ((len(entries) + 2) // 3)), "white")
    longer.paste(page)
    draw = ImageDraw.Draw(longer)
    for k, (name, colour) in enumerate(entries):
        x, y = 8 + page.width // 3 * (k % 3), page.height + 4 + 22 * (k // 3)
        draw.rectangle((x, y, x + 13, y + 13), fill=colour)
        draw.text((x + 19, y - 1), name, fill="black", font=ImageFont.load_default(13))
    return longer


def tests(target: str) -> Image.Image:
    """Samples of a target under each variant's data."""
    lines = []
    for name in TESTS:
        data = Data(target, VARIANTS[name])
        lines.append(pictures(data.target) + pictures(Machine(data, VARIANTS[name]).sample(6)))
    return sheet(lines, [(0, "target"), (1, "machine")], TESTS)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=";".join(FRESH[:6]), help="separated by ';'")
    parser.add_argument("--arm", default="recommended", help="whose images stand beside the machine's")
    parser.add_argument("--one", default="103", help="the target of the two other pictures")
    parser.add_argument("--out", type=Path, default=IMAGES)
    args = parser.parse_args(argv)
    samples(args.arm, args.targets.split(";")).save(args.out / "theory-samples.png")
    winners(args.one).save(args.out / "theory-winners.png")
    tests(args.one).save(args.out / "theory-tests.png")


if __name__ == "__main__":
    main()
