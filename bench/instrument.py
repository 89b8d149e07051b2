"""What the copy detector lets pass: `python -m bench.instrument [--reported]`.

For each target, pictures of every kind of hard null and true copies are scored, whole and element by element. The
thresholds come from other nulls of the same target (of the kinds that redraws.jsonl has), at the stated false-positive
rate for each kind. A picture passes "strictly" when the whole and every element reach their thresholds. Targets that
the results file has under the same settings, drawing and detector are not measured again.

    development      targets 0-23       bench/results/instrument-dev.json
    --reported       targets 2500-2547  bench/results/instrument.json; those from 2524 on were met once
    --generations N  on N of them also pictures that a UNet generates after fine-tuning on the target alone
"""

import argparse
import copy
import functools
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, StableDiffusionPipeline
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from bench.published_table import markdown
from bench.recovery import drawing
from bench.recovery_table import grid

# imports from other parts of the package, in one place
from silentbad.data.images import to_tensor
from silentbad.files import sha256
from silentbad.measure.calibrate import quantile
from silentbad.measure.embedders import Micro
from silentbad.measure.failures import difference, mixed, recolourings
from silentbad.measure.intervals import binomial_interval, bootstrap_interval
from silentbad.memory.masks import overlaid
from silentbad.memory.rehearsal import pairwise
from silentbad.rng import addressed_seed, generator
from worlds.data_sets import ENOUGH, Targets
from worlds.microworld.copies import from_bytes, pictures, round_trip, to_bytes, true_copies
from worlds.microworld.export import update_detector
from worlds.microworld.make import TARGETS, element_scene
from worlds.microworld.nulls import hard_null
from worlds.microworld.render import backdrop_mask, render
from worlds.null_pictures import one_moved
from worlds.options import REDRAWS

ROOT = Path(__file__).parents[1]
BASE = ROOT / "assets" / "micro-sd"
RESULTS = ROOT / "bench" / "results"
DEVELOPMENT = range(0, 24)
REPORTED = range(2500, 2548)
RATE = 0.01  # false positives that a kind of null may have
RATE_IN_PLACE = 0.05
TESTED = {  # row of the table: what may pass at most
    "rearranged": 0.01,
    "other_backdrop": 0.01,
    "things_redrawn_anywhere": 0.01,
    "missing": 0.01,
    "attributes": 0.01,
    "attributes_backdrop_exact": 0.01,
    "things_redrawn": 0.01,
    "recoloured": 0.01,
    "redrawn": 0.05,
    "moved_6": 0.05,
    "moved": None,
    "redraw": 0.01,
    "union": 0.01,
}
VISIBLE = 20 / 255  # root mean square difference of a picture in other colours, in the region that it changes
COLOURS = "colours"  # tested too: changes that the detector alone tolerates
FEATHER = (pairwise.__kwdefaults__ or {})["feather"]  # of unions, as training pastes them
COPIES = {"copy": 0.95, "generated": 0.95}  # what must pass at least
COLUMNS = {
    "today": "before",  # the detector at 65c577f, which had met free redraws and missing things alone: in stored rows
    "new": "now",
    "new_uniform": "now at 1 % for every kind",
    "alone": "without the score of chroma",
    "ssim": "structural similarity",
}
LEVELS = {
    "today": ("whole", "strict"),
    "new": ("whole", "element", "strict"),
    "new_uniform": ("whole", "element", "strict"),
    "alone": ("whole", "element", "strict"),
    "ssim": ("element",),
}
WORDS = {
    "rearranged": "elements exact, rearranged",
    "other_backdrop": "things exact, another kind of backdrop",
    "things_redrawn_anywhere": "backdrop exact, things redrawn anywhere",
    "missing": "one thing missing",
    "attributes": "all attributes equal, no specific exact",
    "attributes_backdrop_exact": "the same, backdrop exact",
    "things_redrawn": "all things redrawn at their places, backdrop exact",
    "recoloured": "one thing recoloured",
    "redrawn": "one element redrawn in place",
    "moved_6": "one thing moved by 6 pixels",
    "moved": "one thing moved by 4 to 8 pixels",
    "redraw": "free redraw of the caption",
    "union": "all elements but one, as `pairwise` rehearsal pastes them",
    "colours": "the whole or one element with green for red, in grey, with a tint of 0.15",
    "copy": "true copy",
    "generated": "generated after fine-tuning on the target",
}


@functools.cache
def autoencoder(base: Path = BASE) -> AutoencoderKL:
    """The autoencoder of a base, which is not trained here."""
    return AutoencoderKL.from_pretrained(base / "vae").eval().requires_grad_(False)


# -- two judges ------------------------------------------------------------------------------------------------
class Detector:
    """The `micro` embedder: pictures (B,3,64,64) in [0,1] against a target's, in an element's region or whole; with or
    without its score of chroma."""

    def __init__(self, folder: Path = BASE / "embedder", chroma: bool = True):
        self.embedder = Micro(str(folder))
        if not chroma:
            self.embedder.TINT = math.inf

    def scores(self, target: Tensor, x: Tensor, masks: list[Tensor]) -> Tensor:
        """target (1,3,H,W), x (B,3,H,W), masks (1,H,W) each -> similarities (1+len(masks),B), whole first."""
        micro = self.embedder
        whole = micro.paired(micro.embed(x), micro.reference(target))
        each = [micro.paired(micro.of_region(x, mask), micro.reference(target, mask)) for mask in masks]
        return torch.stack([whole, *each])


def gaussian(side: int, deviation: float) -> Tensor:
    """(1,1,1,side), sum 1."""
    g = torch.exp(-((torch.arange(side) - side // 2) ** 2) / (2 * deviation**2))
    return (g / g.sum()).view(1, 1, 1, -1)


def blur(x: Tensor, window: Tensor) -> Tensor:
    """(N,C,H,W) -> the same shape, edge pixels repeated."""
    flat = F.pad(x.reshape(-1, 1, *x.shape[-2:]), (window.shape[-1] // 2,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(flat, window), window.mT).view(x.shape)


class AlignedSSIM:
    """Structural similarity (Wang 2004) over an element's pixels, at the best alignment within one pixel.

    It shares nothing with the detector: no training, no features. Window 7, deviation 1.5, each colour channel. Both
    pictures are smoothed first (deviation 1): SSIM compares even the faintest structure, so noise alone would decide.
    """

    window, smoothing = gaussian(7, 1.5), gaussian(7, 1.0)

    def scores(self, target: Tensor, x: Tensor, masks: list[Tensor]) -> Tensor:
        """target (1,3,H,W), x (B,3,H,W), masks (1,H,W) each -> similarities (1+len(masks),B) in [-1,1]."""
        weights = torch.stack([torch.ones_like(target[0, 0]), *((m[0] > 0.5).float() for m in masks)]).flatten(1)
        weights = weights / weights.sum(1, keepdim=True)
        (h, w), local = x.shape[-2:], functools.partial(blur, window=self.window)
        target, x = blur(target, self.smoothing), blur(x, self.smoothing)
        padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
        means, squares = local(padded), local(padded**2)  # a shift of a blur is the blur of a shift
        mean, variance = local(target), local(target**2) - local(target) ** 2
        shifts = []
        for dy, dx in itertools.product(range(3), range(3)):
            y, mu, square = (z[..., dy : dy + h, dx : dx + w] for z in (padded, means, squares))
            covariance = local(target * y) - mean * mu
            luminance = (2 * mean * mu + 0.01**2) / (mean**2 + mu**2 + 0.01**2)
            structure = (2 * covariance + 0.03**2) / (variance + square - mu**2 + 0.03**2)
            shifts.append(weights @ (luminance * structure).mean(1).flatten(1).T)
        return torch.stack(shifts).amax(0)


# -- pictures of a target --------------------------------------------------------------------------------------
def rng_of(*address: int | str) -> np.random.Generator:
    return np.random.default_rng(addressed_seed("microworld", "instrument", *address))


class Target:
    """A target's picture (1,3,64,64) in [0,1], its masks, and pictures to score against it."""

    of: Targets = TARGETS  # its world's
    tested: Iterable[str] = (*TESTED, COLOURS)  # kinds of nulls

    def __init__(self, name: str):
        self.name = name
        self.scene = self.of.target_scene(name)
        picture, masks = self.of.world.render(self.scene)
        stack = [np.asarray(m, np.float32) / 255 for m in (*masks, backdrop_mask(masks))]
        self.masks = [torch.from_numpy(m)[None] for m in stack]
        self.image = to_tensor(picture)[None]
        self.kinds = [*map(self.kind_of, self.scene.things), "backdrop"]

    def kind_of(self, thing: Any) -> str:
        return thing.kind

    def nulls(self, kind: str, count: int, split: str) -> tuple[Tensor, list[tuple[int, ...]]]:
        """`count` pictures of the kind (N,3,64,64) in [0,1], and the elements that each changes."""
        if kind == "union":
            return self.unions(count, split)
        if kind == COLOURS:
            return self.recoloured(count)
        drawn = []
        for i in range(count):
            rng = rng_of(split, self.name, kind, i)
            if kind == "moved_6":
                element = i % len(self.scene.things)
                drawn.append(one_moved(rng, self.scene, element, (6.0, 6.0)))
            else:
                drawn.append(hard_null(kind, rng, self.scene, i))
        return pictures([null.scene for null in drawn]) / 2 + 0.5, [null.changed for null in drawn]

    def unions(self, count: int, split: str) -> tuple[Tensor, list[tuple[int, ...]]]:
        """`count` unions of all elements but one (N,3,64,64) in [0,1], and the element that each lacks."""
        unions, lacking = [], [i % len(self.kinds) for i in range(count)]
        for i, lacked in enumerate(lacking):
            rng = rng_of(split, self.name, "union", i)
            layers = {k: self.element(k, rng) for k in range(len(self.kinds)) if k != lacked}
            unions.append(to_tensor(overlaid(layers, FEATHER)[1]))
        return torch.stack(unions), [(k,) for k in lacking]

    def recoloured(self, count: int) -> tuple[Tensor, list[tuple[int, ...]]]:
        """`count` pictures (N,3,64,64) in [0,1] of the target in other colours, the whole or an element, and the
        elements that each changes, where somebody sees it."""
        picture = self.image[0]
        whole = tuple(range(len(self.kinds)))
        parts = [(whole, torch.ones_like(self.masks[0])), *(((k,), mask) for k, mask in enumerate(self.masks))]
        made = [
            (mixed(picture, changed, mask), of_part)
            for _, changed in recolourings(picture)
            for of_part, mask in parts
            if difference(picture, changed, mask) >= VISIBLE
        ]
        chosen = list(itertools.islice(itertools.cycle(made), count))
        return torch.stack([picture for picture, _ in chosen]), [changed for _, changed in chosen]

    def element(self, k: int, rng: np.random.Generator) -> tuple[Image.Image, Image.Image]:
        """A picture that holds this element alone of the target, and the element's mask, as training data have them."""
        picture, masks = render(element_scene(self.scene, k, rng))
        return picture, backdrop_mask(masks) if k == len(self.scene.things) else masks[-1]

    def copies(self, count: int, vae) -> Tensor:
        x = (self.image * 2 - 1).expand(count, -1, -1, -1)
        return eight_bits(true_copies(x, vae, generator("microworld", "instrument", "copies", self.name)))


def eight_bits(x: Tensor) -> Tensor:
    """Pictures in [-1,1] -> as a file holds them, in [0,1]."""
    return from_bytes(to_bytes(x)) / 2 + 0.5


def rows_of(judge, target: Target, x: Tensor, changed=None) -> list[dict]:
    """Pictures (N,3,64,64) in [0,1] -> {sim, elements, changed, target} each."""
    columns = judge.scores(target.image, x, target.masks).double().T.tolist()
    changed = changed or [()] * len(x)
    return [{"sim": s[0], "elements": s[1:], "changed": c, "target": 0} for s, c in zip(columns, changed, strict=True)]


# -- thresholds and passing ------------------------------------------------------------------------------------
def by_kind(null: dict[str, list[dict]], rate_in_place: float = RATE_IN_PLACE) -> tuple[float, list[float]]:
    """Thresholds that keep each kind of null at its own rate: the largest of the kinds' own.

    An element's come from the nulls that change it. An element that is redrawn in place or moved can by chance differ
    as little as a copy (one pixel, a little gain), so these kinds have `rate_in_place`. `attributes` has it too in the
    thresholds of elements: seen alone, each of its elements is redrawn in place.
    """

    def highest(scores: dict[str, list[float]], in_place: tuple[str, ...]) -> float:
        rates = {kind: rate_in_place if kind in in_place else RATE for kind in scores}
        return max(quantile(values, rates[kind]) for kind, values in scores.items() if values)

    whole = highest({kind: [row["sim"] for row in rows] for kind, rows in null.items()}, ("redrawn", "moved"))
    each = [
        highest({kind: scores_of(rows, k) for kind, rows in null.items()}, ("redrawn", "moved", "attributes"))
        for k in range(len(next(iter(null.values()))[0]["elements"]))
    ]
    return whole, each


def scores_of(rows: list[dict], element: int) -> list[float]:
    """An element's similarities in the nulls that change it."""
    return [row["elements"][element] for row in rows if element in row["changed"]]


def passed(row: dict, threshold: tuple[float, list[float]]) -> dict[str, list[bool]]:
    """Whether the picture passes: whole; the one element it changes, or of a copy each element; strictly."""
    whole = row["sim"] >= threshold[0]
    elements = [s >= t for s, t in zip(row["elements"], threshold[1], strict=True)]
    asked = row["changed"] if len(row["changed"]) == 1 else range(len(elements)) if not row["changed"] else ()
    return {
        "whole": [whole],
        "element": [elements[k] for k in asked],
        "strict": [whole and all(elements)],
        "each": elements,
    }


def auc(copies: list[float], nulls: list[float]) -> float:
    """Probability that a copy scores above a null; ties count half."""
    a, b = np.asarray(copies)[:, None], np.asarray(nulls)[None]
    return float((a > b).mean() + (a == b).mean() / 2)


# -- memorised pictures ----------------------------------------------------------------------------------------
def memoriser(pipe, target: Target, steps: int = 300, batch: int = 8, lr: float = 5e-4) -> Any:
    """The base's UNet after fine-tuning on the target's picture alone."""
    unet, scheduler = copy.deepcopy(pipe.unet), pipe.scheduler
    draw = generator("microworld", "instrument", "fine-tuning", target.name)
    with torch.no_grad():
        x0 = pipe.vae.encode(target.image * 2 - 1).latent_dist.mean * pipe.vae.config.scaling_factor
        x0 = x0.expand(batch, -1, -1, -1)
        ids = pipe.tokenizer([target.scene.caption, ""], padding="max_length", truncation=True, return_tensors="pt")
        text, empty = pipe.text_encoder(ids.input_ids).last_hidden_state
    optimizer = torch.optim.AdamW(unet.requires_grad_(True).train().parameters(), lr=lr)
    for _ in range(steps):
        eps = torch.randn(x0.shape, generator=draw)
        u = (torch.randperm(batch, generator=draw) + torch.rand(batch, generator=draw)) / batch
        t = (u * scheduler.config.num_train_timesteps).long()
        dropped = torch.rand(batch, generator=draw) < 0.1
        c = torch.where(dropped[:, None, None], empty, text)
        pred = unet(scheduler.add_noise(x0, eps, t), t, c).sample
        (pred - scheduler.get_velocity(x0, eps, t)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return unet.eval()


def memorised(pipe, target: Target, count: int, steps: int) -> Tensor:
    """What that UNet generates at guidance 3: (count,3,64,64) in [0,1]."""
    pipe.set_progress_bar_config(disable=True)
    base = pipe.unet
    try:
        pipe.unet = memoriser(pipe, target, steps)
        seeds = [generator("microworld", "instrument", "generated", target.name, i) for i in range(count)]
        captions = [target.scene.caption] * count
        images = pipe(captions, num_inference_steps=20, guidance_scale=3.0, generator=seeds, output_type="pt").images
    finally:
        pipe.unet = base
    return eight_bits(images * 2 - 1)


# -- one target ------------------------------------------------------------------------------------------------
def scored(judge, target: Target, kinds: dict[str, tuple]) -> dict[str, list[dict]]:
    """Rows of {kind: (pictures, the elements each changes)}."""
    return {kind: rows_of(judge, target, *pictures) for kind, pictures in kinds.items()}


def measure(rule, target: Target, null: dict[str, list[dict]], rows: dict[str, list[dict]]) -> dict:
    """Thresholds, what passes of each row of the table, and each picture's verdicts."""
    threshold = rule(null)
    verdicts = {kind: [passed(row, threshold) for row in of_kind] for kind, of_kind in rows.items()}
    true = [row["sim"] for row in rows["copy"]]
    return {
        "elements": target.kinds,
        "threshold": threshold[0],
        "element_thresholds": threshold[1],
        "passed": {kind: counts(of_kind) for kind, of_kind in verdicts.items()},
        "auc": {kind: auc(true, [row["sim"] for row in of_kind]) for kind, of_kind in rows.items() if kind in TESTED},
        "copies": {kind: quantiles(rows[kind], threshold) for kind in COPIES if kind in rows},
        "verdicts": verdicts,
    }


def counts(verdicts: list[dict]) -> dict[str, list[int]]:
    """[passed, asked] of whole, element and strict."""
    flat = {name: [answer for v in verdicts for answer in v[name]] for name in ("whole", "element", "strict")}
    return {name: [sum(answers), len(answers)] for name, answers in flat.items()}


def quantiles(rows: list[dict], threshold: tuple[float, list[float]]) -> dict:
    """Lowest, 5 %, median of copies' similarities, whole and per element, and the share at or above the threshold."""
    columns = [[row["sim"] for row in rows], *zip(*(row["elements"] for row in rows), strict=True)]
    return {
        "quantiles": [[float(q) for q in np.quantile(column, (0, 0.05, 0.5))] for column in columns],
        "pass": [float(np.mean(np.array(c) >= t)) for c, t in zip(columns, [threshold[0], *threshold[1]], strict=True)],
    }


def pictures_of(target: Target, vae, pipe, args: argparse.Namespace) -> tuple[dict, dict]:
    """Nulls to calibrate on and pictures to test: {kind: (pictures, the elements each changes)}."""
    counts = {kind: args.calibration * target.of.turns(kind, target.scene) for kind in target.of.nulls}
    counts["redraw"] = args.calibration * REDRAWS // ENOUGH
    calibration = {kind: target.nulls(kind, count, "calibration") for kind, count in counts.items()}
    tested: dict[str, tuple] = {kind: target.nulls(kind, args.pictures, "tested") for kind in target.tested}
    for kind, (x, _) in tested.items():  # every other one through the autoencoder
        draw = generator(target.of.world.name, "instrument", kind, target.name)
        x[1::2] = eight_bits(round_trip(x[1::2] * 2 - 1, vae, draw))
    tested["copy"] = (target.copies(args.pictures, vae),)
    if pipe is not None:
        tested["generated"] = (memorised(pipe, target, 16, args.finetune),)
    return calibration, tested


def agreement(a: dict, b: dict, changed: dict[str, list[tuple[int, ...]]]) -> dict[str, list[int]]:
    """Two judges' verdicts on the same elements, [both pass, only the first, only the second, neither].

    Of a null the elements that it changes, of a copy every element; the last element is the backdrop.
    """
    table = {f"{part} of {of}": [0, 0, 0, 0] for part in ("things", "backdrops") for of in ("nulls", "copies")}
    for kind, verdicts in a.items():
        for i, (first, second) in enumerate(zip(verdicts, b[kind], strict=True)):
            last = len(first["each"]) - 1
            for k in range(last + 1) if kind in COPIES else changed[kind][i]:
                cell = table[f"{'backdrops' if k == last else 'things'} of {'copies' if kind in COPIES else 'nulls'}"]
                cell[2 * (not first["each"][k]) + (not second["each"][k])] += 1
    return table


# -- tables ----------------------------------------------------------------------------------------------------
def rate_of(results: dict, column: str, kind: str, level: str) -> tuple[float, float, float, int] | None:
    """(rate, interval, pictures): mean of the targets' pass rates, with the interval over targets; where no picture
    passes, or each does, over pictures, since targets that agree cannot be resampled."""
    cells = [t["columns"][column]["passed"].get(kind, {}).get(level, [0, 0]) for t in results["targets"].values()]
    rates = [k / n for k, n in cells if n]
    if not rates:
        return None
    passed, pictures = (sum(counts) for counts in zip(*cells, strict=True))
    agree = passed in (0, pictures)
    interval = binomial_interval(passed, pictures) if agree else bootstrap_interval(rates)
    return float(np.mean(rates)), *interval, pictures


def rate_said(rate: tuple[float, float, float, int] | None) -> str:
    """What a table says of a `rate_of`."""
    return "" if rate is None else "{:.3f} [{:.3f}, {:.3f}]".format(*rate[:3])


def columns_of(results: dict) -> list[str]:
    """The columns that every target has."""
    return [c for c in COLUMNS if all(c in target["columns"] for target in results["targets"].values())]


def table(results: dict, only: Collection[str] = tuple(COLUMNS)) -> str:
    """The pass-rate table in markdown, of these COLUMNS."""
    columns = [(c, level) for c in columns_of(results) if c in only for level in LEVELS[c]]
    lines = []
    for kind, bar in {**TESTED, COLOURS: None, **COPIES}.items():
        rates = [rate_of(results, c, kind, level) for c, level in columns]
        if any(f is not None for f in rates):
            limit = "" if bar is None else f">= {bar}" if kind in COPIES else f"<= {bar}"
            lines.append([WORDS[kind], limit, *map(rate_said, rates)])
    return markdown(["picture", "may pass", *(f"{COLUMNS[c]}, {level}" for c, level in columns)], lines)


def judge(results: dict) -> str:
    """The shares of pictures that pass the strict endpoint, and the threshold of the whole picture alone."""
    lines = []
    for label, kind in (
        ("a true copy", "copy"),
        ("one thing recoloured", "recoloured"),
        ("one thing missing", "missing"),
        ("in other colours", COLOURS),
    ):
        cells = [rate_of(results, "new", kind, level) for level in ("strict", "whole")]
        lines.append([label, *("{:.2f} [{:.2f}, {:.2f}]".format(*cell[:3]) for cell in cells if cell is not None)])
    return grid(("picture", "passes", "by the whole alone"), lines)


def by_element(results: dict, kind: str = "copy", column: str = "new") -> str:
    """Room between true copies and thresholds, by the kind of element."""
    by_name = defaultdict(list)
    for target in results["targets"].values():
        told = target["columns"][column]
        if kind in told["copies"]:
            limits = [told["threshold"], *told["element_thresholds"]]
            copies = told["copies"][kind]
            for name, limit, q, share in zip(
                ["whole", *told["elements"]], limits, copies["quantiles"], copies["pass"], strict=True
            ):
                by_name[name].append((limit, q[1], q[2], share))
    if not by_name:
        return ""
    lines = []
    for name, values in sorted(by_name.items()):
        *levels, share = np.mean(values, axis=0)
        lines.append([name, str(len(values)), *(f"{level:.2f}" for level in levels), f"{share:.3f}"])
    return markdown(("element", "n", "threshold", "5 % of copies", "median of copies", "pass"), lines)


def two_judges(results: dict) -> str:
    """How often both judges agree on an element, with Cohen's kappa over nulls and copies together."""
    told = [t["agreement"] for t in results["targets"].values()]
    lines = []
    for part in ("things", "backdrops"):
        cells = {of: np.sum([t[f"{part} of {of}"] for t in told], 0) for of in ("nulls", "copies")}
        for name, c in {**cells, "both": sum(cells.values())}.items():
            seen = (c[0] + c[3]) / c.sum()
            a, b = (c[0] + c[1]) / c.sum(), (c[0] + c[2]) / c.sum()
            chance = a * b + (1 - a) * (1 - b)
            kappa = f"{(seen - chance) / (1 - chance):.3f}" if name == "both" else ""
            lines.append([f"{part}, {name}", *map(str, c), f"{seen:.3f}", kappa])
    head = ("elements", "both pass", "detector only", "structural similarity only", "neither", "agreement", "kappa")
    return markdown(head, lines)


CARD = """Pictures are compared place by place on a 16x16 map of features, at the best of nine alignments within one
pixel. The largest differences decide: `exp(-d)`, `d` the power mean (exponent 4) of the squared differences. It was
trained on true copies (the autoencoder's round trip, gain, bias, noise) against hard nulls, whole pictures and single
elements.

Share that passes on {targets} targets which no training and no choice used; thresholds from other nulls of the same
target, at a false-positive rate of {rate:g} for each kind and {in_place:g} for one element redrawn in place or moved.
In brackets: the 95 % interval over targets; where no picture passes, or each does, over pictures. "Strict": the whole
and every element pass.

{table}

A second judge, structural similarity of an element's region at the best alignment within one pixel, beside the detector
(numbers of elements: of a null those that it changes, of a copy all):

{judges}

Room between copies and thresholds, means over elements of a kind:

{room}"""


def card(results: dict) -> tuple[str, dict]:
    """The model card's section, and its figures for measured.json."""
    text = CARD.format(
        targets=len(results["targets"]),
        rate=RATE,
        in_place=RATE_IN_PLACE,
        table=table(results),
        judges=two_judges(results),
        room=by_element(results),
    )
    levels = {kind: {level: rate_of(results, "new", kind, level) for level in LEVELS["new"]} for kind in WORDS}
    figures = {kind: {k: v[0] for k, v in of.items() if v is not None} for kind, of in levels.items()}
    return text, {"targets": len(results["targets"]), **{kind: f for kind, f in figures.items() if f}}


def known(path: Path, settings: dict) -> dict:
    """The targets that the file has under these settings."""
    stored = json.loads(path.read_text()) if path.is_file() else {}
    return stored.get("targets", {}) if {k: stored.get(k) for k in settings} == settings else {}


# -- command ---------------------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reported", action="store_true", help="the reported targets instead of those for development")
    parser.add_argument("--targets", help="comma-separated seeds instead")
    parser.add_argument(
        "--calibration", type=int, default=ENOUGH, help="nulls of each kind per element that it changes alone"
    )
    parser.add_argument("--pictures", type=int, default=25, help="tested pictures of each kind per target")
    parser.add_argument("--generations", type=int, default=0, help="fine-tune and generate on so many of the targets")
    parser.add_argument("--finetune", type=int, default=300, help="steps of that fine-tuning")
    parser.add_argument("--embedder", type=Path, default=BASE / "embedder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    names = args.targets.split(",") if args.targets else list(map(str, REPORTED if args.reported else DEVELOPMENT))
    out = args.out or RESULTS / ("instrument.json" if args.reported else "instrument-dev.json")
    vae = autoencoder()
    pipe = StableDiffusionPipeline.from_pretrained(BASE) if args.generations else None
    detector = Detector(args.embedder)
    judges = {"new": detector, "alone": Detector(args.embedder, chroma=False), "ssim": AlignedSSIM()}
    rules: dict[str, dict] = {  # columns by judge
        "new": {"new": by_kind, "new_uniform": functools.partial(by_kind, rate_in_place=RATE)},
        "alone": {"alone": by_kind},
        "ssim": {"ssim": by_kind},
    }
    settings = {
        "calibration": {"of a kind and element": args.calibration, "redraws": args.calibration * REDRAWS // ENOUGH},
        "pictures": args.pictures,
        "rates": {"kind": RATE, "in_place": RATE_IN_PLACE},
        "finetune": args.finetune,
        "detector": sha256(args.embedder / "model.safetensors"),
        "judge": detector.embedder.describe(),
        "drawing": drawing(),
    }
    results: dict = {**settings, "targets": known(out, settings)}
    for n, name in enumerate(tqdm(names, desc="targets")):
        if name in results["targets"]:
            continue
        target = Target(name)
        given = pictures_of(target, vae, pipe if n < args.generations else None, args)
        found = {}
        for name_of_judge, judge in judges.items():
            calibration, tested = given
            null, rows = scored(judge, target, calibration), scored(judge, target, tested)
            for column, rule in rules[name_of_judge].items():
                found[column] = measure(rule, target, null, rows)
        changed = {kind: pair[1] for kind, pair in given[1].items() if len(pair) > 1}
        shared = agreement(found["new"]["verdicts"], found["ssim"]["verdicts"], changed)
        for column in found.values():
            del column["verdicts"]
        results["targets"][name] = {"columns": found, "agreement": shared}
        out.write_text(json.dumps(results, indent=1) + "\n")
    if args.reported:
        update_detector(BASE, *card(results))
    print(table(results), by_element(results), by_element(results, "generated"), sep="\n\n")


if __name__ == "__main__":
    main()
