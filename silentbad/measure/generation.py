"""Prompts of a validation, and the images a Stable Diffusion pipeline makes of them.

A cell is a kind of prompt: composed, described, shuffled, phrase-k, without-k, paraphrase-k,
others, unrelated. `config` is a ValidationConfig."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from silentbad import rng
from silentbad.data.targets import Target
from silentbad.device import Made, T, in_batches
from silentbad.errors import UserError, brief, user_errors
from silentbad.model.diffusion import levels, model_time, to_epsilon
from silentbad.model.family import side_of
from silentbad.model.forwards import as_convolutions, text_projected_once
from silentbad.model.gate import quietly
from silentbad.model.latents import AT_ONCE, decode_in_parts, round_trips, scaled
from silentbad.model.pipeline import check_side
from silentbad.model.registry import family_of
from silentbad.progress import Bar
from silentbad.settings.validation import ValidationConfig


# -- prompts ---------------------------------------------------------------------------------------
class Item(NamedTuple):
    """One image to generate. Items of equal `address` and `image` share their noise."""

    cell: str
    target: int
    image: int
    prompt: str
    address: str


def reordered(target: Target, seed: int, image: int) -> str:
    """The phrases in another order, addressed by (seed, target, image). The target is unchanged."""
    draw = rng.generator(seed, "order", target.target_id, image)
    order = torch.randperm(len(target.phrases), generator=draw).tolist()
    if order == sorted(order):
        order = order[1:] + order[:1]
    return ", ".join(target.phrases[i] for i in order)


def most_different_target(targets: Sequence[Target], j: int, seed: int) -> Target | None:
    """Another target whose phrases differ most from those of j; None if alone."""
    target = targets[j]

    def likeness(other: Target) -> tuple[int, int]:
        common = {*target.phrases} & {*other.phrases}
        return len(common), rng.addressed_seed(seed, "others", target.target_id, other.target_id)

    return min((other for other in targets if other is not target), key=likeness, default=None)


def plan(
    targets: Sequence[Target],
    images: int,
    seed: int,
    full: bool = False,
    unrelated: str = "",
    described: bool = False,
) -> list[Item]:
    """The images of one validation: the composed prompt, where asked also the spelt-out description
    and every control, all under the same noise."""
    items = []
    for j, target in enumerate(targets):
        cells = {"composed": target.composed_prompt}
        if (full or described) and target.description:
            cells["described"] = target.description
        if full:
            cells |= controls(targets, j, seed, unrelated)
        for cell, prompt in cells.items():
            for i in range(images):
                text = reordered(target, seed, i) if cell == "shuffled" else prompt
                items.append(
                    Item(cell=cell, target=j, image=i, prompt=text, address=target.target_id)
                )
    return items


def controls(targets: Sequence[Target], j: int, seed: int, unrelated: str) -> dict[str, str]:
    """The control prompts of target j, by cell: its phrases in another order (empty here, since
    each image has its own order), each phrase alone, all but one, paraphrases, the phrases of
    another target, an unrelated caption."""
    target = targets[j]
    cells = dict[str, str]()
    phrases = target.phrases
    if len(phrases) > 1:
        cells["shuffled"] = ""
        cells |= {f"phrase-{k}": phrase for k, phrase in enumerate(phrases)}
    if len(phrases) > 2:
        for k in range(len(phrases)):
            cells[f"without-{k}"] = ", ".join(phrases[:k] + phrases[k + 1 :])
    cells |= {f"paraphrase-{k}": text for k, text in enumerate(target.paraphrases)}
    if other := most_different_target(targets, j, seed):
        cells["others"] = other.composed_prompt
    cells["unrelated"] = unrelated
    return cells


# -- generation ------------------------------------------------------------------------------------
@contextmanager
def left_as_found(*modules: torch.nn.Module):
    """Modules in eval mode inside; afterwards their modes and every random stream are as before."""
    modes = [(m, m.training) for module in modules for m in module.modules()]
    streams = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            for module in modules:
                module.eval()
            yield
    finally:
        for m, mode in modes:
            m.training = mode
        random.setstate(streams[0])
        np.random.set_state(streams[1])


class Sampler:
    """Draws images with one pipeline. It encodes a prompt once, draws noise by address, and halves
    the batch where memory runs out.

    An image with NaN raises UserError, which names the training step (`using`), or in an audit the
    pipeline (`refuses`). `prefix` comes before the name of a setting in messages: "validation.", or
    "--" for an audit's flags."""

    NAMES = (
        "prompt_embeds",
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
    )

    decodes = True  # targets are compared as its autoencoder leaves them

    def __init__(
        self,
        components: dict,
        config: ValidationConfig,
        seed: int,
        *,
        prediction_type=None,
        refuses: str | None = None,
    ):
        self.prefix = "validation." if refuses is None else "--"
        scheduler = components["scheduler"]
        override = {"prediction_type": prediction_type} if prediction_type else {}
        with quietly():
            scheduler = type(scheduler).from_config(scheduler.config, **override)
        self.family = family = family_of(
            [name for name, part in components.items() if part is not None]
        )
        names = ("vae", family.backbone, *family.encoders, *family.tokenizer)
        parts = {name: components[name] for name in names if components.get(name) is not None}
        options = family.options(components.get("force_zeros_for_empty_prompt", True))
        self.pipe = family.assemble(scheduler=scheduler, **parts, **options)
        self.pipe.set_progress_bar_config(disable=True)
        self.encoders = [parts[name] for name in family.encoders if name in parts]
        self.sampling = family.sampling(config, self.prefix)
        self.schedule = family.schedule_of(scheduler)
        self.config = config
        self.seed = seed
        self.batch = config.max_batch
        self.cache: dict[str, Any] = {}  # text states by prompt
        self.autocast: Callable = nullcontext
        self.between_batches: Callable[[], None] = lambda: None  # may end a measurement by raising
        self.precision: str | None = None  # of the forward passes; `using` sets it
        self.steps = config.num_inference_steps
        self.refuses = refuses
        self.at: int | None = None  # step of the training that is measured
        self.side = config.resolution or side_of(self.backbone) * self.pipe.vae_scale_factor
        self._check()

    @property
    def backbone(self) -> Any:
        """The denoising network."""
        return getattr(self.pipe, self.family.backbone)

    @property
    def tokenizer(self) -> Any:
        """The pipeline's first tokenizer."""
        return self.pipe.tokenizer

    def plan(self, targets: list, full: bool, described: bool) -> list[Item]:
        """The images of one validation (`plan`) as they are configured."""
        count = self.config.images_per_target
        return plan(targets, count, self.seed, full, self.config.unrelated, described)

    def _check(self) -> None:
        """Refuse a resolution or a number of sampling steps that the pipeline does not support."""
        key = f"{self.prefix}resolution"
        check_side(self.side, self.family, self.backbone, self.pipe.vae, key)
        most = self.pipe.scheduler.config.num_train_timesteps
        key = f"{self.prefix}num_inference_steps"
        scheduler = copy.deepcopy(self.pipe.scheduler)
        with user_errors(f"{key}: the scheduler cannot take {self.steps} steps"):
            scheduler.set_timesteps(self.steps)
        last = int(scheduler.timesteps.max())
        if self.steps > most or (last >= most and not self.family.flow):
            raise UserError(
                f"{key}: {self.steps} steps begin at timestep {last} of {most}; take fewer, or a "
                f"scheduler with a lower steps_offset"
            )

    @contextmanager
    def using(
        self,
        backbone: torch.nn.Module,
        device: torch.device,
        autocast: Callable = nullcontext,
        step: int | None = None,
    ):
        """Inside, generate with this backbone, at this step of training. The autoencoder and the
        text encoders are moved to `device` for that time."""
        self.at = step
        before = self.backbone
        homes = [(m, m.device) for m in (self.pipe.vae, *self.encoders)]
        setattr(self.pipe, self.family.backbone, backbone)
        self.autocast = autocast
        with autocast():
            cast = torch.is_autocast_enabled(device.type)
            kind = torch.get_autocast_dtype(device.type) if cast else backbone.dtype
        self.precision = str(kind).removeprefix("torch.")
        for module, _ in homes:
            module.to(device)
        try:
            with (
                left_as_found(backbone, self.pipe.vae, *self.encoders),
                as_convolutions(backbone),
                torch.no_grad(),
            ):
                yield self
        finally:
            setattr(self.pipe, self.family.backbone, before)  # a copy made to measure is not kept
            for module, home in homes:
                module.to(home)

    def limit(self, batch: int) -> None:
        """At most so many images at once from now on."""
        self.batch = batch

    def in_batches(
        self, items: list[T], work: Callable[[list[T]], Made]
    ) -> Iterator[tuple[list[T], Made]]:
        """(chunk, `work(chunk)`) in batches that fit; a signal can end it between two batches."""
        for chunk_and_result in in_batches(items, self.batch, work, self.limit):
            yield chunk_and_result
            self.between_batches()

    def encode(self, prompts: list[str]) -> dict[str, Tensor]:
        """Prompts -> stacked text states by the pipeline's argument names, from a cache."""
        if any(p.requires_grad for encoder in self.encoders for p in encoder.parameters()):
            self.cache.clear()  # the text encoders train, or hold their average: states are stale
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.cache]
        for start in range(0, len(missing), self.batch):
            part = missing[start : start + self.batch]
            states = self.pipe.encode_prompt(
                **self.family.prompt(part),
                device=self.encoders[0].device,
                num_images_per_prompt=1,
                do_classifier_free_guidance=True,
            )
            for i, prompt in enumerate(part):
                self.cache[prompt] = [state[i].cpu() for state in states]
        backbone = self.backbone
        columns = zip(*(self.cache[prompt] for prompt in prompts), strict=True)
        stacked = [torch.stack(column).to(backbone.device, backbone.dtype) for column in columns]
        return dict(zip(self.NAMES, stacked, strict=False))

    def generate(self, items: list[Item]) -> tuple[Tensor, Tensor]:
        """Items -> images (B,3,H,W) in [0,1] and text-conditional magnitudes (B,), nan without
        guidance.

        Raises UserError where an image is not finite, as of a diverged model."""
        latents = self.start_noise(items)
        streams = [rng.generator(self.seed, "validation-steps", i.address, i.image) for i in items]
        gaps = []

        # |eps(x,c) - eps(x,0)| at each step, arXiv 2407.21720
        def watch(module, arguments, output):
            if len(output[0]) == 2 * len(items):
                empty, text = output[0].float().chunk(2)
                gaps.append((text - empty).flatten(1).norm(dim=1))

        hook = self.backbone.register_forward_hook(watch)
        try:
            with text_projected_once(self.backbone):
                latents = self.pipe(
                    **self.encode([i.prompt for i in items]),
                    generator=streams,
                    latents=latents,
                    output_type="latent",
                    num_inference_steps=self.steps,
                    guidance_scale=self.config.guidance_scale,
                    **self.sampling,
                    height=self.side,
                    width=self.side,
                ).images
        finally:
            hook.remove()
        images = decode_in_parts(self.pipe.vae, latents)
        magnitudes = (
            torch.stack(gaps).mean(0).cpu() if gaps else torch.full((len(items),), float("nan"))
        )
        magnitudes = magnitudes.masked_fill(magnitudes.isinf(), float("nan"))
        self.check_finite(images, [(i.prompt, i.cell, i.address) for i in items])
        return (images.float() / 2 + 0.5).clamp(0, 1), magnitudes

    def start_noise(self, items: list[Item]) -> Tensor:
        """The latents (B,C,h,w) that each item's sampling starts from."""
        side = self.side // self.pipe.vae_scale_factor
        shape = (self.backbone.config.in_channels, side, side)
        drawn = [
            rng.noise(shape, self.seed, f"validation/{i.address}", 0, [i.image]) for i in items
        ]
        return torch.cat(drawn).to(self.backbone.device, self.backbone.dtype)

    def round_trip(self, images: Tensor, bar: Bar | None = None) -> Tensor:
        """Images (B,3,S,S) in [0,1] after the autoencoder, on their own device."""
        parts = []
        for part, decoded in round_trips(self.pipe.vae, images, self.batch):
            self.between_batches()
            parts.append(decoded)
            if bar is not None:
                bar.update(len(part))
        return torch.cat(parts)

    def check_finite(self, images: Tensor, drawn: Sequence[tuple[str, str, str]]) -> None:
        """Refuse images (B,...) that are not finite; drawn: (prompt, kind, target) of each."""
        if lost := (~images.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist():
            prompt, kind, target = drawn[lost[0]]
            first = f"the first of {brief(prompt)} ({kind}, {target})"
            raise self.not_finite(f"{len(lost)} of {len(images)} images are not finite, {first}")

    def not_finite(self, what: str) -> UserError:
        """The error that says what is not finite, where, and what to try."""
        if self.refuses is not None:
            wide = self.precision in (None, "float32")
            advice = "but too large to compute with" if wide else "try --dtype float32"
            return UserError(f"{self.refuses}: {what}; its weights are finite, {advice}")
        tries = ["lower learning_rate"] if self.at else []
        if self.precision not in (None, "float32"):
            tries.append(f"leave {self.precision} (mixed_precision no)")
        place = "validation" if self.at is None else f"validation at step {self.at}"
        return UserError(
            f"{place}: {what}; {' or '.join(tries) or 'take another base model or scheduler'}"
        )

    def eps_errors(self, records: list[dict], numbers: list[int], address: str) -> list[float]:
        """Records {pixel_values (3,R,R) in [-1,1], text} -> ||eps_hat - eps||^2 / dim of those in
        `numbers`.

        Noise is addressed by `address`; timesteps lie evenly over the schedule."""
        vae = self.pipe.vae

        def of(part: list[int]) -> list[float]:
            pixels = torch.stack([records[i]["pixel_values"] for i in part]).to(
                vae.device, vae.dtype
            )
            # in parts, since memory peaks here
            latents = torch.cat(
                [vae.encode(some).latent_dist.mode() for some in pixels.split(AT_ONCE)]
            )
            latents = scaled(vae, latents.to(self.backbone.dtype))
            noise = rng.noise(tuple(latents.shape[1:]), self.seed, address, 0, part).to(latents)
            T = self.schedule.config.num_train_timesteps
            timesteps = torch.tensor([int((i + 0.5) / len(records) * T) for i in part])
            alpha, sigma = levels(self.schedule, timesteps, latents)
            noisy_latents = alpha * latents + sigma * noise
            states = self.encode([records[i]["text"] for i in part])
            noise_pred = self.predict_eps(noisy_latents, timesteps, states, pixels.shape[2:])
            return (noise_pred.float() - noise.float()).square().flatten(1).mean(1).tolist()

        errors: list[float] = []
        for part in np.array_split(numbers, -(-len(numbers) // self.batch)) if numbers else []:
            for _, errors_of_batch in self.in_batches(part.tolist(), of):
                errors += errors_of_batch
        return errors

    def predict_eps(
        self,
        noisy_latents: Tensor,
        timesteps: Tensor,
        states: dict[str, Tensor],
        size: Sequence[int],
    ) -> Tensor:
        """The predicted noise (B,C,h,w) under text states of `encode`. `size` is the picture's
        (height, width), which SDXL is conditioned on."""
        extra = {}
        if "pooled_prompt_embeds" in states:
            height, width = size
            sizes = [[height, width, 0, 0, height, width]] * len(noisy_latents)
            extra = {
                "text_embeds": states["pooled_prompt_embeds"],
                "time_ids": torch.tensor(sizes).to(noisy_latents),
            }
        timesteps = timesteps.to(noisy_latents.device)
        model_timesteps = model_time(self.schedule, timesteps)
        with self.autocast():
            model_pred = self.family.predict(
                self.backbone, noisy_latents, model_timesteps, states["prompt_embeds"], extra
            )
        return to_epsilon(self.schedule, model_pred, noisy_latents, timesteps)

    def map(
        self,
        items: list[Item],
        work: Callable[[list[Item], Tensor, Tensor], list],
        show: bool = False,
    ) -> Iterator:
        """`work(chunk, images, magnitudes)` over all items, in batches that fit; show: a bar."""

        def drawn(chunk: list[Item]) -> list:
            with self.autocast():
                images_and_magnitudes = self.generate(chunk)
            return work(chunk, *images_and_magnitudes)  # similarities in full precision

        with Bar(
            total=len(items), desc="Images", unit="image", leave=False, disable=not show
        ) as bar:
            for chunk, rows in self.in_batches(items, drawn):
                bar.update(len(chunk))
                yield from rows
