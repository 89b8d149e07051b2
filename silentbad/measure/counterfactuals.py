"""Pictures that are no recovery, drawn by the base pipeline: the nulls where nothing can render
them.

Kinds, by what the base draws:
    redrawn    one element's region under its phrase, guided away from `missing`; the rest of the
               target is kept
    missing    that region under the backdrop's phrase, or under no caption where no element is
               the backdrop
    composed   the whole picture under the composed prompt
    described  the whole picture under the target's spelt-out description

A region is drawn by masked denoising (RePaint, arXiv 2201.09865, equation 8, without its
resampling): after every step the known latents are those of the target at that noise level, with
the same noise at every step. Then the target's pixels are put back outside the mask. Legend: S side
of the images in pixels, B draws, target_latents and noise (B,C,h,w), hole (B,1,h,w) the latents to
draw."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from silentbad import rng
from silentbad.data.images import resize, to_tensor
from silentbad.data.table import vocabulary
from silentbad.data.targets import Target
from silentbad.errors import UserError, writing
from silentbad.measure.generation import Item, Sampler, left_as_found
from silentbad.model.latents import decode_in_parts, scaled
from silentbad.model.store import KEY, Store, digest
from silentbad.progress import Bar

REGIONS = ("redrawn", "missing")
SCENES = ("composed", "described")
KINDS = (*REGIONS, *SCENES)
VERSION = 2  # of the algorithm; a change makes cached pictures stale

Masks = Sequence[Sequence[Tensor | None]]  # of each target, of each element: (1,H,W) in [0,1]


class Draw(NamedTuple):
    """One picture to draw, led away from `against`; `element` is None where all of it is new.

    Led away from no caption, the base often leaves an element out: the rest agrees with the
    phrase."""

    kind: str
    target: int
    element: int | None
    image: int
    prompt: str
    against: str = ""

    @property
    def place(self) -> int:
        """The element that is new, of a draw of a region."""
        assert self.element is not None, self.kind
        return self.element


class Counterfactual(NamedTuple):
    """A null picture (3,S,S) in [0,1], by its number; `changed`: elements, None for all."""

    number: int
    target: int
    kind: str
    changed: tuple[int, ...] | None
    image: Tensor


# -- what is drawn ---------------------------------------------------------------------------------
@dataclass
class Canvas:
    """A target at the side of the generated images: picture (3,S,S) uint8, and of each element with
    a mask the share (1,S,S) that a new picture has in each pixel, 0 outside the mask."""

    picture: Tensor
    shares: list[Tensor | None]

    @cached_property
    def image(self) -> Tensor:
        """The picture in [0,1]."""
        return self.picture.float() / 255

    @property
    def backdrop(self) -> int | None:
        """The element that covers most of the frame, and more than half of it, if any."""
        frames = [0.0 if s is None else float(_frame(s > 0).float().mean()) for s in self.shares]
        widest = int(np.argmax(frames)) if frames else 0
        return widest if frames and frames[widest] > 0.5 else None


def canvas(target: Target, masks: Sequence[Tensor | None], side: int) -> Canvas:
    """A target at the side of the generated images. Raises UserError where a mask is empty."""
    picture = to_tensor(target.image)
    if picture.shape[-2:] != (side, side):
        picture = resize(picture[None], (side, side))[0]
    shares: list[Tensor | None] = []
    for k, phrase in enumerate(target.phrases):
        mask = masks[k] if k < len(masks) else None
        if mask is not None and mask.shape[-2:] != (side, side):
            mask = resize(mask[None], (side, side))[0]
        if mask is not None and not (mask > 0).any():
            where = f"targets: {target.target_id!r}"
            raise UserError(
                f"{where}: the mask of {phrase!r} is empty; mark the element in it, "
                f"or give null for it"
            )
        shares.append(None if mask is None else _share(mask))
    return Canvas((picture * 255).round().to(torch.uint8), shares)


def _frame(x: Tensor) -> Tensor:
    """The outermost pixels of x (1,S,S)."""
    return torch.cat([x[0, 0], x[0, -1], x[0, :, 0], x[0, :, -1]])


def _share(mask: Tensor) -> Tensor:
    """The share (1,S,S) of a new picture in each pixel: 1 but for the faintest quarter of a soft
    edge, where it falls to 0. A softer edge would keep the old outline."""
    return (4 * mask.float()).clamp(max=1)


def masks_of(targets: Sequence[Target]) -> Masks:
    """Of each target, of each element, (1,H,W) in [0,1]; None without one."""
    return [[None if m is None else to_tensor(m)[:1] for m in t.masks or []] for t in targets]


def draws_of(
    targets: Sequence[Target], canvases: Sequence[Canvas], count: int, kinds: Sequence[str]
) -> list[Draw]:
    """`count` draws of each kind, of regions for each element with a mask; regions first. A
    backdrop is never missing: nothing stands behind it."""
    regions: list[Draw] = []
    scenes: list[Draw] = []
    for j, (target, drawn) in enumerate(zip(targets, canvases, strict=True)):
        back = drawn.backdrop
        behind = "" if back is None else target.phrases[back]
        for k in (k for k, share in enumerate(drawn.shares) if share is not None):
            prompts = {"redrawn": (target.phrases[k], "" if k == back else behind)}
            if k != back:
                prompts["missing"] = (behind, "")
            for kind in (kind for kind in prompts if kind in kinds):
                regions += [Draw(kind, j, k, i, *prompts[kind]) for i in range(count)]
        captions = {"composed": target.composed_prompt, "described": target.description or ""}
        for kind in (kind for kind, caption in captions.items() if caption and kind in kinds):
            scenes += [Draw(kind, j, None, i, captions[kind]) for i in range(count)]
    return regions + scenes


# -- drawing ---------------------------------------------------------------------------------------
def masked_denoising(
    sampler: Sampler,
    states: dict[str, Tensor],
    target_latents: Tensor,
    noise: Tensor,
    hole: Tensor,
    streams: list[torch.Generator],
) -> Tensor:
    """Latents (B,C,h,w): the model's where `hole`, elsewhere the target's."""
    scheduler = sampler.pipe.scheduler
    config = sampler.config

    def keep(_: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        later = scheduler.timesteps[step + 1 : step + 2]  # where the latents have arrived
        known_latents = target_latents
        if len(later):
            timesteps = later.expand(len(target_latents))
            known_latents = arrived(scheduler, target_latents, noise, timesteps)
        known_latents = known_latents.to(target_latents.dtype)
        return {"latents": torch.where(hole, tensors["latents"], known_latents)}

    return sampler.pipe(
        **states,
        generator=streams,
        latents=noise,
        output_type="latent",
        num_inference_steps=sampler.steps,
        guidance_scale=config.guidance_scale,
        **sampler.sampling,
        height=sampler.side,
        width=sampler.side,
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents"],
    ).images


def arrived(scheduler: Any, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """Noisy latents (B,C,h,w) at a scheduler's own timesteps (B,)."""
    if hasattr(scheduler, "add_noise"):
        return scheduler.add_noise(latents, noise, timesteps)
    return scheduler.scale_noise(latents, timesteps, noise)  # of a flow


class Painter:
    """Draws in batches that fit, inside `sampler.using` of the base model; nothing of it is
    changed."""

    def __init__(
        self, sampler: Sampler, targets: Sequence[Target], canvases: Sequence[Canvas], seed: int
    ):
        self.sampler = sampler
        self.targets = targets
        self.canvases = canvases
        self.seed = seed
        self.latents: dict[int, Tensor] = {}  # (C,h,w) by target

    def paint(
        self, draws: Sequence[Draw], numbers: Sequence[int], show: bool
    ) -> Iterator[tuple[list[int], Tensor]]:
        """The draws of these numbers -> (numbers, pictures (B,3,S,S) uint8) batch by batch."""
        regions = [n for n in numbers if draws[n].kind in REGIONS]
        scenes = [n for n in numbers if draws[n].kind in SCENES]
        hidden = not (show and numbers)
        with Bar(total=len(numbers), desc="Counterfactuals", disable=hidden) as bar:
            for part in (regions, scenes):
                for chunk, pictures in self.sampler.in_batches(
                    part, lambda chunk: self._batch([draws[n] for n in chunk])
                ):
                    bar.update(len(chunk))
                    yield chunk, pictures

    def _batch(self, draws: list[Draw]) -> Tensor:
        """Pictures (B,3,S,S) uint8 of draws that are all of regions, or all of whole pictures."""
        sampler = self.sampler
        with left_as_found(sampler.backbone, sampler.pipe.vae, *sampler.encoders), torch.no_grad():
            if draws[0].kind in SCENES:
                return self._scenes(draws)
            images = self._regions(draws)
        old = torch.stack([self.canvases[d.target].picture for d in draws])
        share = torch.stack([self._share(d) for d in draws])
        mixed = (share * images * 255 + (1 - share) * old).round().to(torch.uint8)
        return torch.where(share > 0, mixed, old)  # outside the mask to the bit

    def _scenes(self, draws: list[Draw]) -> Tensor:
        """Whole pictures, under noise that no measured image has."""
        sampler = self.sampler
        items = []
        for d in draws:
            address = f"counterfactual/{self.targets[d.target].target_id}"
            items.append(Item(d.kind, d.target, d.image, d.prompt, address))
        with sampler.with_other(seed=self.seed), sampler.autocast():
            images, _ = sampler.generate(items)
        return (images * 255).round().to(torch.uint8).cpu()

    def _regions(self, draws: list[Draw]) -> Tensor:
        """Images (B,3,S,S) in [0,1], new in the draw's element and near the target elsewhere."""
        sampler = self.sampler
        pipe = sampler.pipe
        target_latents = torch.stack([self._latents(d.target) for d in draws])
        target_latents = target_latents.to(sampler.backbone.device, sampler.backbone.dtype)
        places = [(self.targets[d.target].target_id, d.place, d.image) for d in draws]
        shape = tuple(target_latents.shape[1:])
        drawn = [
            rng.noise(shape, self.seed, f"counterfactual/{name}/{k}", 0, [image])
            for name, k, image in places
        ]
        noise = torch.cat(drawn).to(target_latents)
        streams = [rng.generator(self.seed, "counterfactual-steps", *place) for place in places]
        # the latents of which any pixel lies inside the mask
        share = torch.stack([self._share(d) for d in draws])
        hole = F.max_pool2d(share, pipe.vae_scale_factor).to(target_latents.device) > 0
        with sampler.autocast():
            states = sampler.encode([d.prompt for d in draws], [d.against for d in draws])
            latents = masked_denoising(sampler, states, target_latents, noise, hole, streams)
        images = decode_in_parts(pipe.vae, latents)
        sampler.check_finite(
            images, [(d.prompt, d.kind, self.targets[d.target].target_id) for d in draws]
        )
        return (images.float().cpu() / 2 + 0.5).clamp(0, 1)

    def _share(self, draw: Draw) -> Tensor:
        """The share (1,S,S) of the element that a draw of a region makes anew."""
        share = self.canvases[draw.target].shares[draw.place]
        assert share is not None, "only elements with a mask are drawn"
        return share

    def _latents(self, target: int) -> Tensor:
        """Latents (C,h,w) of a target, encoded once and alone, in the autoencoder's precision."""
        if target not in self.latents:
            vae = self.sampler.pipe.vae
            pixels = self.canvases[target].picture[None].float() / 127.5 - 1
            with torch.autocast(vae.device.type, enabled=False):
                posterior = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
            self.latents[target] = scaled(vae, posterior.mode()[0])
        return self.latents[target]


# -- keeping ---------------------------------------------------------------------------------------
def model_digest(sampler: Sampler) -> str:
    """Hash over what the base's pictures depend on."""
    pipe = sampler.pipe
    config = sampler.config
    tokenizers = [
        t for name in sampler.family.tokenizer if (t := getattr(pipe, name, None)) is not None
    ]
    with sampler.autocast():
        kind = sampler.backbone.device.type
        cast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
    guidance = (config.guidance_scale, config.guidance_rescale)
    return digest(
        *(sampler.backbone, pipe.vae, *sampler.encoders, *map(vocabulary, tokenizers)),
        type(pipe.scheduler).__name__,
        dict(pipe.scheduler.config),
        dict(pipe.config).get("force_zeros_for_empty_prompt"),  # SDXL's
        [VERSION, sampler.side, sampler.steps, *guidance, cast],
    )


def _keys(
    draws: Sequence[Draw], targets: Sequence[Target], canvases: Sequence[Canvas], seed: int
) -> np.ndarray:
    """(N,) keys of draws, over all that a draw depends on beside the model."""

    def short(x: Tensor | None) -> str:
        return "" if x is None else hashlib.sha256(x.numpy().tobytes()).hexdigest()

    pictures = [short(c.picture) for c in canvases]
    shares = [[short(s) for s in c.shares] for c in canvases]

    def key(draw: Draw) -> bytes:
        j = draw.target
        k = draw.element
        region = [] if k is None else [k, pictures[j], shares[j][k]]
        address = (seed, targets[j].target_id, draw.kind, draw.image)
        facts = [*address, draw.prompt, draw.against, *region]
        return hashlib.sha256(json.dumps(facts).encode()).digest()[:16]

    return np.array([key(draw) for draw in draws], dtype=KEY)


# -- the whole of it -------------------------------------------------------------------------------
def counterfactuals(
    sampler: Sampler,
    targets: Sequence[Target],
    masks: Masks,
    count: int,
    seed: int,
    *,
    kinds: Sequence[str] = KINDS,
    cache: Path | None = None,
    share: Callable[[int], list[int]] | None = None,
    show: bool = False,
    say: Callable[[str], None] = print,
) -> Iterator[Counterfactual]:
    """`count` null pictures of each kind for each target, and for each of its elements with a mask.

    sampler: of the base model, inside `sampler.using`. masks: of each target, of each element,
    (1,H,W) in [0,1]. cache: folder in which pictures are kept. share: which numbers of n are this
    process's. Two calls give equal bytes; another batch size may change a rounding. Raises
    UserError where a mask is empty or the cache cannot be written."""
    canvases = [canvas(t, m, sampler.side) for t, m in zip(targets, masks, strict=True)]
    draws = draws_of(targets, canvases, count, kinds)
    numbers_of_process = list(range(len(draws))) if share is None else share(len(draws))
    painter = Painter(sampler, targets, canvases, seed)

    def row(number: int, picture: Tensor) -> Counterfactual:
        draw = draws[number]
        changed = None if draw.element is None else (draw.element,)
        return Counterfactual(number, draw.target, draw.kind, changed, picture.float() / 255)

    if cache is None:
        for numbers, pictures in painter.paint(draws, numbers_of_process, show):
            yield from map(row, numbers, pictures)
        return
    folder = cache / f"counterfactuals-{model_digest(sampler)}"
    with writing(f"cache_dir {cache}", "counterfactuals"):
        folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder, say)
    keys = _keys([draws[n] for n in numbers_of_process], targets, canvases, seed)
    key_of = dict(zip(numbers_of_process, keys, strict=True))
    missing = [
        n for n, place in zip(numbers_of_process, store.find(keys), strict=True) if place < 0
    ]
    if missing:
        say(
            f"calibration: {len(missing)} null pictures are drawn first; null_images sets how "
            f"many of each kind"
        )
    for numbers, pictures in painter.paint(draws, missing, show):
        store.add(np.array([key_of[n] for n in numbers], dtype=KEY), pictures)
    store.refresh()
    yield from map(row, numbers_of_process, map(store.read, store.find(keys).tolist()))
