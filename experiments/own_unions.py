"""Unions that the model makes itself, where no picture shows two elements. Measured: of sixteen
fresh targets one comes back by the strict rate, none of eight drawn at guidance 2 (too colourful),
one of eight at guidance 1, in fewer images than without these unions; by eye fewer things are
missing or twice, and details suffer (research/results.md). On one development target, one run each,
unions kept without the filter bring no gain, and by another element's records none is kept.

At some steps `OwnUnions` draws prompts of two to k-1 phrases of a target, and keeps the images in
which each named element passes against its own records; no target and no picture of two elements is
read. `own_unions` shows these in place of a share of the elements' pictures. Both are needed:

    --memory.rehearsal.name experiments/own_unions.py:own_unions --hooks experiments/own_unions.py:OwnUnions

Legend: a target has k elements; an image is (3,S,S) in [0,1], a mask (1,S,S) of 0 and 1.
"""

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from silentbad import rng
from silentbad.data.images import to_pil, to_tensor
from silentbad.data.picture_parts import FRAME, frame
from silentbad.errors import UserError
from silentbad.loop.hooks import Hook, HookContext
from silentbad.measure.embedders import load_embedder
from silentbad.memory.masks import fitted_mask
from silentbad.memory.rehearsal import Others, shuffled
from silentbad.model.denoiser import backbone_in
from silentbad.model.latents import decode, round_trip
from silentbad.settings.types import Count, Positive, Unit

RECORDS = 5  # of an element, that images are compared with
MARGIN = 0.1  # below what the records score against each other


class Union(NamedTuple):
    """An image that the model drew, where its elements stand in it, and their phrases."""

    image: Image.Image
    mask: Image.Image
    phrases: list[str]


KEPT: dict[str, list[Union]] = defaultdict(list)  # by target
SEEN: list[Others] = []  # the data, once a record was drawn


def own_unions(
    record: dict, g: torch.Generator, others: Others, *, share: Unit = 0.5
) -> dict | None:
    """A union that the model made, in place of a share of the elements' pictures."""
    if not SEEN:
        SEEN.append(others)
    i = others.info.element_of(record["index"])
    unions = KEPT[others.info.target[i]] if i is not None else []
    if i is None or not unions or float(torch.rand((), generator=g)) >= share:
        return None
    union = unions[int(torch.randint(len(unions), (), generator=g))]
    phrases = shuffled(union.phrases, g)
    return {
        **others.load(record["index"]),
        "image": union.image,
        "mask": union.mask,
        "phrases": phrases,
        "text": ", ".join(phrases),
        "role": "rehearsal",
        "united": (len(phrases), len(others.info.phrases_of(others.info.target[i]))),
    }


class Element:
    """The records of one element, that images are compared with, through the autoencoder."""

    def __init__(self, others: Others, number: int, vae: Any):
        records = [others.load(int(row)) for row in others.info.rows[number][:RECORDS]]
        size = records[0]["image"].size
        self.phrase = others.info.phrase[number]
        found = [mask for record in records if (mask := others.mask_of(record, number))]
        if len(found) < len(records):
            raise UserError(
                f"own_unions: '{self.phrase}' has pictures without a mask; give each one"
            )
        masks = [fitted_mask(mask, size) for mask in found]
        self.masks = [to_tensor(mask)[:1].round() for mask in masks]
        pictures = torch.stack([to_tensor(record["image"]) for record in records])
        self.pictures = round_trip(vae, pictures)
        self.is_thing = frame(self.masks[0][0].numpy() > 0) < FRAME
        self.place = torch.stack(self.masks).mean(0).round()

    def judge(self, hidden: Tensor, embedder: Any) -> Callable[[Tensor], bool]:
        """Whether an image shows the element, looking where its records do and `hidden` is not."""
        masks = [mask * (1 - hidden) for mask in self.masks]
        references = [
            embedder.reference(picture[None], mask)
            for picture, mask in zip(self.pictures, masks, strict=True)
        ]

        def scores(image: Tensor, inside: Tensor | None = None) -> list[float]:
            found = []
            for picture, reference, mask in zip(self.pictures, references, masks, strict=True):
                if inside is not None:
                    mask = mask * inside
                    reference = embedder.reference(picture[None], mask)
                features = embedder.of_region(image[None], mask)
                found.append(float(embedder.paired(features, reference)))
            return found

        least = min(min(scores(p, mask)) for p, mask in zip(self.pictures, masks, strict=True))
        return lambda image: float(np.median(scores(image))) >= least - MARGIN


class OwnUnions(Hook):
    """Draws `images` images at each of the shares `at` of the run, and keeps those that pass.
    `filtered`: "own" records judge; controls: "none" keeps all, "shuffled" lets another element's
    records judge."""

    def __init__(
        self,
        context: HookContext,
        *,
        at: tuple[float, ...] = (0.4, 0.55, 0.7, 0.85),
        images: Count = 48,
        guidance_scale: Positive = 1.0,
        num_inference_steps: Count = 12,
        filtered: Literal["own", "none", "shuffled"] = "own",
    ):
        self.context = context
        self.due = {round(share * context.max_steps) for share in at}
        self.images = images
        self.guidance_scale = guidance_scale
        self.num_inference_steps = num_inference_steps
        self.filtered = filtered
        self.elements: dict[int, Element] = {}
        self.judges: dict[int, Callable[[Tensor], bool]] = {}
        self.drawn = 0
        KEPT.clear()
        SEEN.clear()

    def after_step(self, step: int, skipped: bool = False) -> None:
        if skipped or step not in self.due or not SEEN:
            return
        with torch.no_grad():
            if not self.elements:
                self.look(SEEN[0])
            for target, numbers in SEEN[0].info.elements_of.items():
                if len(numbers) > 2:  # two would be the whole
                    self.draw(step, target, list(numbers))

    def look(self, others: Others) -> None:
        """Read the records of each element."""
        base = self.context.config.pretrained_model_name_or_path
        self.vae = AutoencoderKL.from_pretrained(base, subfolder="vae").to(self.context.device)
        embedder = load_embedder("micro", None, "cpu")
        for numbers in others.info.elements_of.values():
            of_target = {number: Element(others, number, self.vae) for number in numbers}
            things = [number for number, element in of_target.items() if element.is_thing]
            for number, element in of_target.items():
                hidden = torch.zeros_like(element.place)  # by the other things, where they overlap
                for thing in things:
                    hidden = hidden if thing == number else hidden.maximum(of_target[thing].place)
                self.judges[number] = element.judge(hidden, embedder)
            self.elements |= of_target

    def draw(self, step: int, target: str, numbers: list[int]) -> None:
        """Draw sets of two to k-1 phrases, and keep what passes."""
        seed = rng.addressed_seed(self.context.config.seed, "own unions", target, step)
        choice = Random(seed)  # noqa: S311
        sets = [
            choice.sample(numbers, choice.randint(2, len(numbers) - 1)) for _ in range(self.images)
        ]
        captions = [", ".join(self.elements[n].phrase for n in chosen) for chosen in sets]
        for chosen, image in zip(sets, self.sample(captions, step, target), strict=True):
            self.drawn += 1
            if self.passes(image, chosen, numbers):
                self.keep(target, image, chosen)

    def sample(self, captions: list[str], step: int, target: str) -> Tensor:
        """Images (N,3,S,S) of the captions, with the current weights."""
        context = self.context
        scheduler = DDIMScheduler.from_config(context.scheduler.config)
        scheduler.set_timesteps(self.num_inference_steps, device=context.device)
        config = backbone_in(context.model).config
        shape = (config.in_channels, config.sample_size, config.sample_size)
        places = list(range(len(captions)))
        x = rng.noise(shape, context.config.seed, f"own unions/{target}", step, places)
        x = x.to(context.device) * scheduler.init_noise_sigma
        for t in scheduler.timesteps:
            timesteps = t.expand(len(x))
            empty, text = (context.predict(x, timesteps, c) for c in ([""] * len(x), captions))
            x = scheduler.step(empty + self.guidance_scale * (text - empty), t, x).prev_sample
        return (decode(self.vae, x).float().cpu() / 2 + 0.5).clamp(0, 1)

    def passes(self, image: Tensor, chosen: list[int], numbers: list[int]) -> bool:
        """Whether each of the chosen elements is there."""
        if self.filtered == "none":
            return True
        step = 1 if self.filtered == "shuffled" else 0
        by = [numbers[(numbers.index(number) + step) % len(numbers)] for number in chosen]
        return all(self.judges[number](image) for number in by)

    def keep(self, target: str, image: Tensor, chosen: list[int]) -> None:
        mask = torch.stack([self.elements[n].place for n in chosen]).amax(0)
        phrases = [self.elements[n].phrase for n in chosen]
        union = Union(to_pil(image), Image.fromarray(np.uint8(255 * mask[0].numpy())), phrases)
        KEPT[target].append(union)

    def state_dict(self) -> dict[str, Any]:
        pixels = {
            target: [(pil_to_tensor(u.image), pil_to_tensor(u.mask), u.phrases) for u in unions]
            for target, unions in KEPT.items()
        }
        return {"drawn": self.drawn, "kept": pixels}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        for target, unions in state["kept"].items():
            KEPT[target] = [
                Union(to_pil_image(image), to_pil_image(mask), phrases)
                for image, mask, phrases in unions
            ]

    def meters(self) -> dict[str, Any]:
        kept = sum(map(len, KEPT.values()))
        return {"own_unions/kept": kept, "own_unions/drawn": self.drawn} if self.drawn else {}
