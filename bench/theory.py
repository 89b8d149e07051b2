"""A machine without training that predicts what comes back: `python -m bench.theory [--smoke]`.

    python -m bench.theory                      the frozen targets in every variant, then the comparison
    python -m bench.theory --smoke              one development target, a few samples, in minutes
    python -m bench.theory --compare            the tables alone, of the rows that are stored

At each place the denoiser sees a patch of the latent, and knows of each phrase near that place whether the prompt names
it. The optimal denoiser of this kind is a weighted mean of the records' latents (2412.20292, 2509.16447). Nothing is
trained. It is sampled with the composed prompt by the pipeline's own scheduler and steps, without guidance; the run's
copy detector judges its images by the target's own nulls. Rows go to bench/results/theory.jsonl, one a target and
variant; a row that is stored is not made again. The protocol is research/protocol.md.

Legend: z (R,C,8,8) latents of records, x (B,C,8,8) noisy ones, P places, K elements, S the phrases of a prompt.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from bench.instrument import BASE, Detector, Target, autoencoder, by_kind, rows_of
from bench.kept import RESULTS as KEPT
from bench.kept import STEPS
from bench.published import per_phrase
from bench.published_table import CLEAN
from bench.recovery import ROOT, facts
from bench.recovery_table import append, stored
from bench.theory_table import FRESH, compared, table
from silentbad.data.elements import DataInfo
from silentbad.data.images import to_tensor
from silentbad.measure.redraws import fingerprint
from silentbad.memory.masks import region_weight
from silentbad.memory.rehearsal import Others, pairwise
from silentbad.memory.timesteps import snr_mixture
from silentbad.rng import generator
from worlds.data_sets import draw_null, phrase_of
from worlds.microworld.grammar import Scene, sample_backdrop, sample_scene
from worlds.microworld.make import TARGETS
from worlds.microworld.render import backdrop_mask, render

RESULTS = Path(__file__).parent / "results" / "theory.jsonl"
SIDE = 8  # cells of a latent's side, each of 8 x 8 pixels
SAMPLES = 32
NULLS = 100  # of each kind, as the data sets of bench/kept.py have them


@dataclass(frozen=True)
class Variant:
    """What is shown, and how it counts. Shares are of all exposures that the loss sees."""

    unions: int = 80  # different ones; 0: leak-free
    elements: int | None = None  # of a union; all but one by default
    backdrop: bool | None = None  # in every union, or in none
    union_share: float = 0.25  # of the elements' exposures
    clean: int = 360
    clean_share: float = 0.25  # `recommended` trains on a third: as many exposures as elements, at half the weight
    outside: float = 0.05  # weight of the region outside the element; 1: none
    unique: bool = False  # the target's phrases hold a word that no other record has
    own_places: bool = False  # L1: a record does not count at the places of its smaller siblings
    other_rooms: bool = False  # L0: a third of the things' records before another backdrop of the target's kind
    window: bool = False  # elements are drawn in the noise window of `recommended`, clean pictures at all levels
    strictness: float = 12.0  # nats that a phrase costs which a record lacks, or has and the prompt lacks


VARIANTS = {
    "recommended": Variant(),
    "leak_free": Variant(unions=0),
    "no_region": Variant(outside=1.0),
    "window": Variant(window=True),
    "leak_free_unique": Variant(unions=0, unique=True),
    "L0": Variant(unions=0, other_rooms=True),
    "L1": Variant(unions=0, own_places=True),
    "unions_with_backdrop": Variant(backdrop=True),
    "unions_without": Variant(backdrop=False),
    "pairs_with_backdrop": Variant(backdrop=True, elements=2),
}


# ---------------------------------------------------------------- records
def encode(pictures: Sequence[Image.Image]) -> Tensor:
    """Pictures -> scaled latents (N,C,8,8)."""
    vae = autoencoder()
    pixels = torch.stack([to_tensor(picture) for picture in pictures]) * 2 - 1
    return torch.cat([vae.encode(part).latent_dist.mode() for part in pixels.split(32)]) * vae.config.scaling_factor


def decode(z: Tensor) -> Tensor:
    """Scaled latents (N,C,8,8) -> pictures (N,3,64,64) in [0,1]."""
    vae = autoencoder()
    pixels = torch.cat([vae.decode(part).sample for part in (z / vae.config.scaling_factor).split(32)])
    return (pixels / 2 + 0.5).clamp(0, 1)


def foreign(scene: Scene, masks: Sequence[Image.Image], phrases: Sequence[str]) -> Image.Image:
    """A map (L) of how little the phrase at each place resembles the target's phrases; things cover what is behind
    them."""
    parts = [(scene.backdrop.phrase if scene.backdrop.named else "", Image.new("L", masks[0].size, 255))]
    parts += [(thing.phrase, mask) for thing, mask in zip(scene.things, masks, strict=True)]
    shown = Image.new("L", masks[0].size)
    for text, mask in parts:
        known = max(likeness(text, phrase) for phrase in phrases) if text else 1.0
        shown.paste(round(255 * (1 - known)), mask=mask)
    return shown


def phrases_of(name: str) -> list[str]:
    """The phrases of a target's elements, the backdrop's last."""
    scene = TARGETS.target_scene(name)
    return [phrase_of(scene, k) for k in range(len(scene.things) + 1)]


@cache
def element_records(name: str, other_rooms: bool) -> tuple[list[dict], Tensor]:
    """The element records of a run on this target, as its data set has them, and their latents. With `other_rooms` a
    third of the things are before another backdrop of the target's kind, which the caption names."""
    scene = TARGETS.target_scene(name)
    records: list[dict] = []
    for element in range(len(scene.things) + 1):
        for number in range(per_phrase(name, CLEAN, 0.1)):
            shown = TARGETS.element_scene(scene, element, TARGETS.rng("element", name, element, number, 0))
            if other_rooms and element < len(scene.things) and number % 3 == 0:
                another = sample_backdrop(TARGETS.rng("theory", name, element, number), scene.backdrop.kind)
                shown = replace(shown, backdrop=another)
            picture, masks = render(shown)
            mask = backdrop_mask(masks) if element == len(scene.things) else masks[-1]
            record: dict = {"image": picture, "mask": mask, "foreign": foreign(shown, masks, phrases_of(name))}
            record |= {"phrases": shown.phrases, "role": "element", "target_id": name, "element": element}
            records.append(
                {**record, "element_id": f"{name}/{element}", "resized": picture.size, "index": len(records)}
            )
    return records, encode([record["image"] for record in records])


@cache
def unions(name: str, count: int, backdrop: bool | None, elements: int | None) -> tuple[list[dict], Tensor]:
    """Pictures of several elements, pasted as training pastes them, and their latents; their `foreign` maps are pasted
    alike."""
    records, z = element_records(name, other_rooms=False)
    columns = [[record[key] for record in records] for key in ("role", "target_id", "element_id", "phrases")]

    def others(layer: str) -> Others:
        load = lambda index, picture=True: {**records[index], "image": records[index][layer].convert("RGB")}  # noqa: E731
        return Others(DataInfo(*columns), load, {})

    last = phrases_of(name)[-1]
    joined: list[dict] = []
    for i in range(4 * count):
        record = records[i % len(records)]
        layers = [
            pairwise(record, generator(0, "theory union", i), others(layer), share=1.0, elements=elements)
            for layer in ("image", "foreign")
        ]
        if layers[0] and layers[1] and backdrop in (None, last in layers[0]["phrases"]):
            joined.append({**layers[0], "foreign": layers[1]["image"].convert("L")})
    joined = joined[:count]
    return joined, encode([union["image"] for union in joined]) if joined else z[:0]


@cache
def clean_scenes(count: int) -> tuple[list[tuple[Scene, list[Image.Image]]], Tensor]:
    """Clean scenes with the masks of their things, and their latents."""
    scenes = [sample_scene(TARGETS.rng("clean", 0, i)) for i in range(count)]
    drawn = [render(scene) for scene in scenes]
    return [(s, masks) for s, (_, masks) in zip(scenes, drawn, strict=True)], encode([p for p, _ in drawn])


def shares_of_cells(masks: Sequence[Image.Image]) -> Tensor:
    """Masks (L) -> the share of each cell that each covers (N,64)."""
    stack = torch.stack([to_tensor(mask)[:1] for mask in masks])
    return F.avg_pool2d(stack, stack.shape[-1] // SIDE).flatten(1)


def near(shares: Tensor) -> Tensor:
    """Shares of cells (N,64) -> shares of the patch of 3 x 3 cells around each place (N,64)."""
    return F.avg_pool2d(shares.view(-1, 1, SIDE, SIDE), 3, 1, 1, count_include_pad=False).flatten(1)


class Data:
    """A target's records: latents, log weights (R,P), what each lacks of the prompt (R,K) and has beside it (R,P)."""

    def __init__(self, name: str, variant: Variant):
        self.name = name
        self.phrases = phrases_of(name)
        elements, z_elements = element_records(name, variant.other_rooms)
        pasted, z_unions = unions(name, variant.unions, variant.backdrop, variant.elements)
        drawn, z_clean = clean_scenes(variant.clean)
        clean = [
            {"phrases": s.phrases, "role": "clean", "mask": None, "foreign": foreign(s, masks, self.phrases)}
            for s, masks in drawn
        ]
        self.records = [*elements, *pasted, *clean]
        self.z = torch.cat([z_elements, z_unions, z_clean])
        picture, masks = render(TARGETS.target_scene(name))
        self.target = encode([picture])
        self.cells = shares_of_cells([*masks, backdrop_mask(masks)])

        of_unions = (1 - variant.clean_share) * variant.union_share * bool(pasted)
        shares = (1 - variant.clean_share - of_unions, of_unions, variant.clean_share)
        of_roles = zip(shares, (elements, pasted, clean), strict=True)
        exposures = [share / len(of_role) for share, of_role in of_roles for _ in of_role]
        masks = [record["mask"] or Image.new("L", (64, 64), 255) for record in self.records]
        covered = torch.stack([to_tensor(mask)[:1] for mask in masks])
        weights = region_weight(covered, (SIDE, SIDE), variant.outside).flatten(1)
        if variant.own_places:
            weights = weights * self.counted()
        self.log_weight = (weights * torch.tensor(exposures)[:, None]).clamp(min=1e-12).log()
        self.lacks = self.lacking(variant.unique)
        self.foreign = near(shares_of_cells([record["foreign"] for record in self.records]))  # (R,P)
        self.clean = torch.tensor([float(record["role"] == "clean") for record in self.records])
        self.shows = (self.lacks.T == 0) & (self.clean == 0)  # (K,R): the element itself is there

    def counted(self) -> Tensor:
        """L1: nought where a smaller element of the target stands (R,P)."""
        area = self.cells.sum(1)
        covered = torch.stack([self.cells[area < mine].sum(0) for mine in area])  # by smaller elements (K,P)
        counted = torch.ones(len(self.records), SIDE**2)
        for row, record in enumerate(self.records):
            if record["role"] == "element":
                counted[row] = (covered[record["element"]] < 0.5).float()
        return counted

    def lacking(self, unique: bool) -> Tensor:
        """1 where a record's caption lacks an element's phrase, less where it has some of its words (R,K)."""
        rows = []
        for record in self.records:
            known = [] if unique and record["role"] == "clean" else record["phrases"]
            rows.append([1 - max((likeness(phrase, other) for other in known), default=0.0) for phrase in self.phrases])
        return torch.tensor(rows)


def likeness(phrase: str, other: str) -> float:
    """Words in common over words in either; words that any caption may hold do not count."""
    first, second = (set(text.split()) - set(TARGETS.little) for text in (phrase, other))
    return len(first & second) / max(len(first | second), 1)


# ---------------------------------------------------------------- the machine
def patches(z: Tensor, radius: int) -> Tensor:
    """z (N,C,8,8) -> patches around each place (P,N,C*(2r+1)^2), nought outside the frame."""
    return F.unfold(z, 2 * radius + 1, padding=radius).permute(2, 0, 1).contiguous()


class Machine:
    """The optimal local denoiser of a target's records."""

    def __init__(self, data: Data, variant: Variant):
        self.data = data
        self.variant = variant
        self.scheduler = DDIMScheduler.from_pretrained(BASE / "scheduler")
        self.seen = patches(data.z, 1)  # (P,R,D)
        self.squares = self.seen.square().sum(-1)[:, None]
        self.centres = patches(data.z, 0)  # (P,R,C)

    def log_prior(self) -> Tensor:
        """Log weight of each record at each place before anything is seen (P,1,R): its exposures and region weight,
        less `strictness` for phrases it lacks of the prompt, or has beside it, by their share of the patch."""
        disagree = self.data.lacks @ near(self.data.cells) + self.data.foreign
        return (self.data.log_weight - self.variant.strictness * disagree).T[:, None]

    def posterior(self, x: Tensor, level: float, log_prior: Tensor) -> Tensor:
        """Weights of the records at each place (P,B,R), given x = a z + s eps with a^2 = level, s^2 = 1 - level."""
        a = level**0.5
        if self.variant.window:  # the elements' density over that of clean pictures at this level, taken off the latter
            log_prior = log_prior - self.element_share(level) * self.data.clean
        likelihood = a * torch.bmm(patches(x, 1), self.seen.mT) - a * a * self.squares / 2
        return (likelihood / (1 - level) + log_prior).softmax(-1)

    def element_share(self, level: float) -> float:
        """Log density of elements over that of clean pictures at a noise level."""
        levels = self.scheduler.alphas_cumprod.double().numpy()
        density = snr_mixture(levels / (1 - levels), 0.0, centre=3.0, width=1.0, high=0.1)
        return float(np.log(density[np.abs(levels - level).argmin()] * len(levels)))

    def sample(self, count: int, seed: int = 0) -> Tensor:
        """Latents (count,C,8,8) of the composed prompt, by the pipeline's scheduler and steps."""
        self.scheduler.set_timesteps(STEPS)
        log_prior = self.log_prior()
        x = torch.randn(count, *self.data.z.shape[1:], generator=generator(seed, "theory noise", self.data.name))
        for t in self.scheduler.timesteps:
            level = float(self.scheduler.alphas_cumprod[t])
            mean = torch.bmm(self.posterior(x, level, log_prior), self.centres)  # of the latent at each place (P,B,C)
            clean = mean.permute(1, 2, 0).reshape(x.shape)
            noise = (x - level**0.5 * clean) / (1 - level) ** 0.5
            velocity = level**0.5 * noise - (1 - level) ** 0.5 * clean
            x = self.scheduler.step(velocity, t, x).prev_sample
        return x

    def odds(self, level: float) -> Tensor:
        """At the target itself, log odds at each place (P,) of the records that show the element which stands there."""
        weights = self.posterior(level**0.5 * self.data.target, level, self.log_prior())[:, 0]
        right = self.data.shows[self.data.cells.argmax(0)].float()
        won, lost = ((weights * part).sum(1).clamp(min=1e-9).log() for part in (right, 1 - right))
        return won - lost


def pairs(data: Data, odds: Tensor) -> dict[str, float]:
    """Of each ordered pair "i,j" of neighbours, the lowest log odds of a place of i beside j; nought is a draw."""
    owner = data.cells.argmax(0)
    near = F.max_pool2d((data.cells > 0.5).float().view(-1, 1, SIDE, SIDE), 3, 1, 1).flatten(1) > 0
    lowest: dict[str, float] = {}
    for place, element in enumerate(owner.tolist()):
        for other in near[:, place].nonzero()[:, 0].tolist():
            if other != element:
                pair = f"{element},{other}"
                lowest[pair] = min(lowest.get(pair, float("inf")), float(odds[place]))
    return lowest


# ---------------------------------------------------------------- what is predicted
class Judge:
    """The run's copy detector, with the thresholds that the target's own nulls set."""

    def __init__(self, name: str):
        self.target = Target(name)
        self.detector = Detector()
        own = fingerprint(render(self.target.scene)[0])
        rows = {}
        for kind in TARGETS.nulls:
            earlier: set[bytes] = set()
            drawn = [draw_null(TARGETS, kind, name, self.target.scene, i, earlier, own) for i in range(NULLS)]
            pictures = torch.stack([to_tensor(picture) for _, picture in drawn])
            rows[kind] = rows_of(self.detector, self.target, pictures, [null.changed for null, _ in drawn])
        whole, elements = by_kind(rows)
        self.thresholds = torch.tensor([whole, *elements])

    def scores(self, pictures: Tensor) -> Tensor:
        """Pictures (N,3,64,64) in [0,1] -> similarities (1+K,N), of the whole first."""
        return self.detector.scores(self.target.image, pictures, self.target.masks)


judge_of = cache(Judge)


@torch.no_grad()
def predict(name: str, variant: str, count: int) -> dict:
    """The row of a target in a variant."""
    judge = judge_of(name)
    data = Data(name, VARIANTS[variant])
    machine = Machine(data, VARIANTS[variant])
    z = machine.sample(count)
    scores = judge.scores(decode(z))
    passes = scores >= judge.thresholds[:, None]
    error = (z - data.target).square().mean((0, 1)).flatten()
    odds = machine.odds(0.5)
    return {
        "target": name,
        "variant": variant,
        "samples": count,
        "rate": float(passes.all(0).float().mean()),
        "whole_rate": float(passes[0].float().mean()),
        "elements": passes[1:].float().mean(1).tolist(),
        "element_means": scores[1:].mean(1).tolist(),
        "thresholds": judge.thresholds.tolist(),
        "copies": judge.scores(decode(data.target))[1:, 0].tolist(),
        "area": data.cells.mean(1).tolist(),
        "error": [float((error * cells).sum() / cells.sum()) for cells in data.cells],
        "odds": [float((odds * cells).sum() / cells.sum()) for cells in data.cells],
        "pairs": pairs(data, odds),
    }


# ---------------------------------------------------------------- command
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=";".join(FRESH), help="separated by ';'")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of the composed prompt")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--compare", action="store_true", help="the tables alone")
    parser.add_argument("--smoke", action="store_true", help="one development target, in minutes")
    args = parser.parse_args(argv)
    if args.smoke:
        smoke = {"targets": "103", "variants": "recommended,leak_free", "samples": 4}
        vars(args).update(smoke, results=ROOT / "runs" / "theory-smoke.jsonl")
        args.results.parent.mkdir(exist_ok=True)
    if unknown := [name for name in args.variants.split(",") if name not in VARIANTS]:
        parser.exit(2, f"error: --variants: unknown variant '{unknown[0]}'; there are: {', '.join(VARIANTS)}\n")
    names = args.targets.split(";")
    here = facts()  # before the first row: the code has been read by now
    done = {(row["target"], row["variant"]) for row in stored(args.results)}
    asked = [(name, variant) for name in names for variant in args.variants.split(",")]
    for name, variant in tqdm([run for run in asked if run not in done and not args.compare], desc="predictions"):
        append(args.results, [{**predict(name, variant, args.samples), **here}])
    rows, kept = stored(args.results), stored(KEPT)
    print(f"the network has rows of {len({r['target'] for r in kept} & {*names})} of {len(names)} targets\n")
    print(table(rows, names), compared(rows, kept, names), sep="\n\n")


if __name__ == "__main__":
    main()
