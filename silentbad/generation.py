"""Prompts of a validation, and the images a Stable Diffusion pipeline makes of them.

A cell is a kind of prompt: composed, shuffled, phrase-k, others, unrelated. `config` is a ValidationConfig, of which
the sampler reads max_batch, resolution, num_inference_steps, guidance_scale and guidance_rescale.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from torch import Tensor

from silentbad.errors import UserError
from silentbad.rng import addressed_seed, generator, noise
from silentbad.similarity import pretrained


# -- prompts -----------------------------------------------------------------------------------------------
class Item(NamedTuple):
    """One image to generate. Items of equal `address` and `image` share their noise, whatever the prompt."""

    cell: str
    target: int
    image: int
    prompt: str
    address: str


def reordered(target, seed: int, image: int) -> str:
    """The phrases in another order, addressed by (seed, target, image); the list stays as it is."""
    draw = generator(seed, "order", target.target_id, image)
    order = torch.randperm(len(target.phrases), generator=draw).tolist()
    if order == sorted(order):
        order = order[1:] + order[:1]
    return ", ".join(target.phrases[i] for i in order)


def stranger(targets: list, j: int, seed: int):
    """Another target whose phrases differ most from those of j, whatever the list's order; None if alone."""
    others = [t for i, t in enumerate(targets) if i != j]
    mine = set(targets[j].phrases)
    return min(others, default=None, key=lambda t: (
        len(mine & set(t.phrases)), addressed_seed(seed, "others", targets[j].target_id, t.target_id)))


def plan(targets: list, images: int, seed: int, full: bool = False, unrelated: str = "") -> list[Item]:
    """The images of one validation: the composed prompt alone, or with every control under the same noise."""
    items = []
    for j, target in enumerate(targets):
        cells: dict[str, Callable[..., str]] = {"composed": lambda i, target=target: target.composed_prompt}
        if full:
            if len(target.phrases) > 1:
                cells["shuffled"] = lambda i, target=target: reordered(target, seed, i)
                for k, phrase in enumerate(target.phrases):
                    cells[f"phrase-{k}"] = lambda i, phrase=phrase: phrase
            if other := stranger(targets, j, seed):
                cells["others"] = lambda i, other=other: other.composed_prompt
            cells["unrelated"] = lambda i: unrelated
        for cell, prompt in cells.items():
            items += [Item(cell, j, i, prompt(i), target.target_id) for i in range(images)]
    return items


# -- generation --------------------------------------------------------------------------------------------
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


@contextmanager
def averaged(ema, model: torch.nn.Module):
    """The averaged weights inside, the raw ones bit for bit afterwards, whatever happened."""
    parameters = list(model.parameters())
    if len(ema.shadow_params) != len(parameters):
        parameters = [p for p in parameters if p.requires_grad]
    ema.store(parameters)
    try:
        ema.copy_to(parameters)
        yield
    finally:
        ema.restore(parameters)


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Latents (B,C,h,w) -> images (B,3,H,W) in [-1,1], in the autoencoder's own precision: SDXL's overflows in fp16."""
    with torch.autocast(latents.device.type, enabled=False):
        return vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]


class Sampler:
    """One pipeline over given modules: prompts encoded once, noise by address, a batch that halves on OOM."""

    NAMES = ("prompt_embeds", "negative_prompt_embeds",
             "pooled_prompt_embeds", "negative_pooled_prompt_embeds")  # fmt: skip

    def __init__(self, components: dict, config, seed: int, prediction_type=None):
        scheduler = components["scheduler"]
        override = {"prediction_type": prediction_type} if prediction_type else {}
        scheduler = type(scheduler).from_config(scheduler.config, **override)
        parts = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "unet")
        parts = {name: components[name] for name in parts if components.get(name) is not None}
        if "text_encoder_2" in parts:
            zeros = components.get("force_zeros_for_empty_prompt", True)
            self.pipe = StableDiffusionXLPipeline(scheduler=scheduler, **parts, add_watermarker=False,
                                                  force_zeros_for_empty_prompt=zeros)
        else:
            self.pipe = StableDiffusionPipeline(scheduler=scheduler, **parts, safety_checker=None,
                                                feature_extractor=None, requires_safety_checker=False)
        self.pipe.set_progress_bar_config(disable=True)
        self.encoders = [parts[name] for name in ("text_encoder", "text_encoder_2") if name in parts]
        self.config, self.seed, self.batch, self.cache = config, seed, config.max_batch, {}
        self.autocast: Callable = nullcontext
        self.steps = config.num_inference_steps
        size = self.pipe.unet.config.sample_size
        size = size if isinstance(size, int) else size[0]
        self.side = config.resolution or size * self.pipe.vae_scale_factor

    @contextmanager
    def using(self, unet: torch.nn.Module, device: torch.device, autocast: Callable = nullcontext):
        """Generate with this UNet; autoencoder and text encoders that rest on another device join it for the time."""
        before, homes = self.pipe.unet, [(m, m.device) for m in (self.pipe.vae, *self.encoders)]
        self.pipe.unet, self.autocast = unet, autocast
        for module, _ in homes:
            module.to(device)
        try:
            with left_as_found(unet, self.pipe.vae, *self.encoders), torch.no_grad():
                yield self
        finally:
            self.pipe.unet = before  # a copy made to measure is not kept
            for module, home in homes:
                module.to(home)

    def encode(self, prompts: list[str]) -> dict[str, Tensor]:
        """Prompts -> stacked text states by the pipeline's argument names; every prompt is encoded once."""
        if any(p.requires_grad for encoder in self.encoders for p in encoder.parameters()):
            self.cache.clear()  # the text encoders train, or hold their average: states are stale
        missing = [p for p in dict.fromkeys(prompts) if p not in self.cache]
        for start in range(0, len(missing), self.batch):
            part = missing[start : start + self.batch]
            states = self.pipe.encode_prompt(prompt=part, device=self.encoders[0].device,
                                             num_images_per_prompt=1, do_classifier_free_guidance=True)
            for i, prompt in enumerate(part):
                self.cache[prompt] = [state[i].cpu() for state in states]
        device, dtype = self.pipe.unet.device, self.pipe.unet.dtype
        columns = zip(*(self.cache[p] for p in prompts), strict=True)
        stacked = [torch.stack(column).to(device, dtype) for column in columns]
        return dict(zip(self.NAMES, stacked, strict=False))

    def generate(self, items: list[Item]) -> tuple[Tensor, Tensor]:
        """Items -> images (B,3,H,W) in [0,1] and text-conditional magnitudes (B,), nan without guidance."""
        pipe, config = self.pipe, self.config
        side = self.side // pipe.vae_scale_factor
        shape = (pipe.unet.config.in_channels, side, side)
        latents = torch.cat([noise(shape, self.seed, f"validation/{i.address}", 0, [i.image]) for i in items])
        streams = [generator(self.seed, "validation-steps", i.address, i.image) for i in items]
        gaps = []

        def watch(module, arguments, output):  # |eps(x,c) - eps(x,0)| at each step, arXiv 2407.21720
            if len(output[0]) == 2 * len(items):
                empty, text = output[0].float().chunk(2)
                gaps.append((text - empty).flatten(1).norm(dim=1))

        hook = pipe.unet.register_forward_hook(watch)
        try:
            latents = pipe(
                **self.encode([i.prompt for i in items]), generator=streams,
                latents=latents.to(pipe.unet.device, pipe.unet.dtype), output_type="latent",
                num_inference_steps=self.steps,
                guidance_scale=config.guidance_scale, guidance_rescale=config.guidance_rescale,
                height=self.side, width=self.side,
            ).images  # fmt: skip
        finally:
            hook.remove()
        images = torch.cat([decode(pipe.vae, part) for part in latents.split(8)])  # decoding is the peak of memory
        nothing = torch.full((len(items),), float("nan"))
        images = (images.float() / 2 + 0.5).nan_to_num().clamp(0, 1)  # a diverged model gives black
        return images, torch.stack(gaps).mean(0).cpu() if gaps else nothing

    def eps_errors(self, records: list[dict], mine: list[int]) -> list[float]:
        """Clean records {pixel_values (3,H,W) in [-1,1], text} -> ||eps_hat - eps||^2 / dim of those in
        `mine`, at fixed noise and at timesteps that lie evenly over the schedule."""
        pipe, errors = self.pipe, []
        for part in np.array_split(mine, -(-len(mine) // self.batch)) if mine else []:
            part = part.tolist()
            pixels = torch.stack([records[i]["pixel_values"] for i in part])
            x0 = pipe.vae.encode(pixels.to(pipe.vae.device, pipe.vae.dtype)).latent_dist.mode()
            x0 = x0.to(pipe.unet.dtype) * pipe.vae.config.scaling_factor
            eps = noise(tuple(x0.shape[1:]), self.seed, "validation/clean", 0, part).to(x0)
            bars = pipe.scheduler.alphas_cumprod
            t = torch.tensor([int((i + 0.5) / len(records) * len(bars)) for i in part])
            a = bars[t].to(x0)[:, None, None, None]
            x_t = a.sqrt() * x0 + (1 - a).sqrt() * eps
            states = self.encode([records[i]["text"] for i in part])
            extra = {}
            if "pooled_prompt_embeds" in states:
                H, W = pixels.shape[2:]
                sizes = torch.tensor([[H, W, 0, 0, H, W]] * len(part)).to(x0)
                extra = dict(text_embeds=states["pooled_prompt_embeds"], time_ids=sizes)
            with self.autocast():
                out = pipe.unet(x_t, t.to(x0.device), states["prompt_embeds"], added_cond_kwargs=extra).sample
            kind = pipe.scheduler.config.prediction_type
            if kind == "v_prediction":
                out = a.sqrt() * out + (1 - a).sqrt() * x_t
            elif kind == "sample":
                out = (x_t - a.sqrt() * out) / (1 - a).sqrt()
            errors += (out.float() - eps.float()).square().flatten(1).mean(1).tolist()
        return errors

    def map(self, items: list[Item], work: Callable[[list[Item], Tensor, Tensor], list]) -> Iterator:
        """`work(chunk, images, magnitudes)` over all items, in batches that fit; a halved batch is kept."""
        start = 0
        while start < len(items):
            chunk = items[start : start + self.batch]
            try:
                with self.autocast():
                    made = self.generate(chunk)
                rows = work(chunk, *made)  # similarities in full precision
            except RuntimeError as error:
                if len(chunk) == 1 or not should_reduce_batch_size(error):
                    raise
                self.batch = len(chunk) // 2
                continue
            yield from rows
            start += len(chunk)


def load_pipeline(name: str, dtype: str, device, lora: str | None = None):
    """A Stable Diffusion 1, 2 or XL pipeline, with adapters where asked, from safetensors only."""
    pipe = pretrained("pipeline", DiffusionPipeline, name, "a diffusers folder or Hub id", use_safetensors=True)
    if not {"unet", "vae", "text_encoder", "tokenizer"} <= set(pipe.components):
        raise UserError(f"'{name}' is a {type(pipe).__name__}; give a Stable Diffusion 1, 2 or XL pipeline")
    if lora is not None:
        try:
            pipe.load_lora_weights(lora, use_safetensors=True)
        except Exception as error:
            raise UserError(f"--lora {lora}: no adapters of '{name}' ({str(error).splitlines()[0]})") from None
    return pipe.to(device, getattr(torch, dtype))
