"""The pipeline's parts: loaded safely, frozen or trained, encoded with a cache, assembled again for saving.

Legend: x0 (B,C,h,w) latents, eps noise, t (B,), c (B,L,D) text states.
"""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers import schedulers as diffusers_schedulers
from diffusers.training_utils import EMAModel
from transformers import CLIPTextModel, CLIPTokenizer
from transformers.utils import logging as transformers_logging

from .errors import UserError
from .rng import generator, noise

PIPELINES = ("StableDiffusionPipeline",)


@dataclass
class Parts:
    """Components of a Stable Diffusion pipeline; `noise_scheduler` trains, `scheduler` samples."""

    tokenizer: Any
    text_encoder: torch.nn.Module
    vae: torch.nn.Module
    unet: torch.nn.Module
    noise_scheduler: Any
    scheduler: Any

    def components(self) -> dict[str, Any]:
        names = ("tokenizer", "text_encoder", "vae", "unet", "scheduler")
        return {name: getattr(self, name) for name in names}


# ---------------------------------------------------------------- before any weights load


def check_machine(config: Any) -> None:
    """Refuse what this machine or the pipeline's own settings cannot do."""
    if config.use_8bit_adam:
        try:
            importlib.import_module("bitsandbytes")
        except Exception as error:
            raise UserError(f"use_8bit_adam: bitsandbytes does not import ({error}); pip install it") from None
    if config.mixed_precision == "fp16" and not torch.cuda.is_available():
        raise UserError("mixed_precision: fp16 needs a CUDA device; use bf16 or no")
    if config.enable_xformers_memory_efficient_attention:
        check_xformers()


def check_xformers() -> None:
    """Refuse an xformers that is missing, does not import, or has no kernel that runs here."""
    key = "enable_xformers_memory_efficient_attention"
    instead = "leave it off, PyTorch's scaled_dot_product_attention is the default"
    if not torch.cuda.is_available():
        raise UserError(f"{key}: xformers needs a CUDA device; {instead}")
    try:
        ops = importlib.import_module("xformers.ops")
        q = torch.zeros(1, 8, 1, 16, device="cuda", dtype=torch.float16)
        ops.memory_efficient_attention(q, q, q)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{key}: xformers cannot be used here ({reason}); {instead}") from None


def scheduler_settings(config: Any) -> dict[str, Any]:
    """The training schedule's settings, `prediction_type` overridden where the configuration does."""
    path = config.pretrained_model_name_or_path
    local = Path(path)
    if local.is_dir():
        _check_folder(local)
    elif local.is_absolute() or path.startswith((".", "~")) or local.is_file() or path.count("/") != 1:
        raise UserError(f"pretrained_model_name_or_path: no folder {path}")
    try:
        settings = dict(DDPMScheduler.load_config(path, subfolder="scheduler", **_hub(config)))
    except Exception as error:
        raise UserError(f"pretrained_model_name_or_path {path}: no scheduler ({_first(error)})") from None
    if config.prediction_type is not None:
        settings["prediction_type"] = config.prediction_type
    prediction_type = settings.get("prediction_type", "epsilon")
    if config.dream_training and prediction_type != "epsilon":
        raise UserError(f"dream_training: works with epsilon prediction only; {path} predicts {prediction_type}")
    return settings


def _check_folder(path: Path) -> None:
    index = path / "model_index.json"
    if not index.is_file():
        raise UserError(f"pretrained_model_name_or_path {path}: no model_index.json; not a diffusers pipeline")
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))
        kind = listed.get("_class_name")
    except (ValueError, AttributeError):
        raise UserError(f"{index}: not a JSON object") from None
    if kind not in PIPELINES:
        raise UserError(f"{index}: a {kind}; this trains {', '.join(PIPELINES)}")
    for part in ("unet", "vae", "text_encoder", "tokenizer", "scheduler"):
        if not (path / part).is_dir():
            raise UserError(f"pretrained_model_name_or_path {path}: no {part}/")


def _hub(config: Any) -> dict[str, Any]:
    local = Path(config.pretrained_model_name_or_path).is_dir()
    return {} if local else {"revision": config.revision, "cache_dir": config.cache_dir}


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---------------------------------------------------------------- loading


def load_tokenizer(config: Any) -> Any:
    return _load("tokenizer", CLIPTokenizer, config)


def load_parts(config: Any, settings: dict[str, Any], tokenizer: Any, precision: str = "no") -> Parts:
    """Text encoder and VAE frozen in the run's precision, UNet ready to train in fp32; safetensors only."""
    transformers_logging.disable_progress_bar()
    weights = {"use_safetensors": True, "variant": config.variant}
    frozen = {**weights, "torch_dtype": {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)}
    text_encoder = _load("text_encoder", CLIPTextModel, config, **frozen).requires_grad_(False).eval()
    vae = _load("vae", AutoencoderKL, config, **frozen).requires_grad_(False).eval()
    unet_hub = {"revision": config.non_ema_revision} if config.non_ema_revision else {}
    unet = _load("unet", UNet2DConditionModel, config, **weights, **unet_hub)
    sampler = getattr(diffusers_schedulers, str(settings.get("_class_name")), None) or DDPMScheduler
    parts = Parts(
        tokenizer, text_encoder, vae, unet,
        DDPMScheduler.from_config(settings), sampler.from_config(settings),
    )  # fmt: skip
    _check_fit(parts, config)
    unet.train()
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    if config.enable_xformers_memory_efficient_attention:
        unet.enable_xformers_memory_efficient_attention()
    return parts


def _load(part: str, cls: Any, config: Any, **extra: Any) -> Any:
    path = config.pretrained_model_name_or_path
    try:
        return cls.from_pretrained(path, subfolder=part, **{**_hub(config), **extra})
    except Exception as error:
        raise UserError(f"pretrained_model_name_or_path {path}: cannot load {part} ({_first(error)})") from None


def _check_fit(parts: Parts, config: Any) -> None:
    path, unet = config.pretrained_model_name_or_path, parts.unet.config
    if unet.in_channels != parts.vae.config.latent_channels:
        raise UserError(f"{path}: unet takes {unet.in_channels} channels, vae gives {parts.vae.config.latent_channels}")
    width = parts.text_encoder.config.hidden_size
    if unet.cross_attention_dim != width:
        raise UserError(f"{path}: unet attends to width {unet.cross_attention_dim}, text_encoder gives {width}")
    factor = vae_factor(parts.vae) * 2 ** (len(unet.block_out_channels) - 1)
    side = resolution(parts, config)
    if side % factor:
        raise UserError(f"resolution: {side} is not a multiple of {factor}, which {path} needs")


def vae_factor(vae: Any) -> int:
    """Pixels a latent."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def resolution(parts: Parts, config: Any) -> int:
    """Side of the training images: the flag, or the pipeline's own."""
    if config.resolution is not None:
        return config.resolution
    size = parts.unet.config.sample_size
    return (size if isinstance(size, int) else size[0]) * vae_factor(parts.vae)


def make_ema(unet: torch.nn.Module, config: Any, device: torch.device) -> EMAModel | None:
    """diffusers' average of the trained weights, on the CPU when offloaded."""
    if not config.use_ema:
        return None
    parameters = [p for p in unet.parameters() if p.requires_grad]
    ema = EMAModel(parameters, decay=config.ema_decay, foreach=config.foreach_ema)
    if config.offload_ema:
        ema.pin_memory() if torch.cuda.is_available() else ema.to("cpu")
    else:
        ema.to(device)
    return ema


def make_optimizer(groups: list[dict[str, Any]], config: Any, scale: float) -> torch.optim.Optimizer:
    """AdamW over the controller's groups at `scale` times the learning rate, 8 bit where asked."""
    kind: Any = torch.optim.AdamW
    if config.use_8bit_adam:
        kind = importlib.import_module("bitsandbytes").optim.AdamW8bit
    betas = (config.adam_beta1, config.adam_beta2)
    decay = config.adam_weight_decay
    return kind(groups, lr=config.learning_rate * scale, betas=betas, weight_decay=decay, eps=config.adam_epsilon)


def gradient_norm(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of all gradients, on the device."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


# ---------------------------------------------------------------- encoding


class Encoder:
    """Latents and text states of a micro-batch, kept per record and per text while the budget lasts.

    What is kept is encoded one at a time, so that its value does not depend on what shared its batch: a run with a
    warm cache and a resumed one with a cold cache see the same bits.
    """

    def __init__(self, parts: Parts, accelerator: Any, *, cache_bytes: int, seed: int):
        self.device = accelerator.device
        self.vae, self.text_encoder = parts.vae.to(self.device), parts.text_encoder.to(self.device)
        self.tokenizer, self.budget, self.seed = parts.tokenizer, cache_bytes, seed
        self.posteriors: dict[int, torch.Tensor] = {}
        self.states: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def latents(self, batch: dict[str, Any], draw: int) -> torch.Tensor:
        """x0 (B,C,h,w): a draw from each image's posterior with the noise of its own address."""
        pixels, rows = batch["pixel_values"], []
        if not self.budget:
            moments = self._moments(pixels)
        else:
            for k, (index, fixed) in enumerate(zip(batch["index"].tolist(), batch["fixed"], strict=True)):
                store = self.posteriors if fixed else {}
                rows.append(self._kept(store, index, lambda k=k: self._moments(pixels[k : k + 1])[0]))
            moments = torch.stack(rows).to(self.device)
        mean, std = moments.chunk(2, dim=1)
        eps = noise(tuple(mean.shape[1:]), self.seed, "posterior", draw, batch["position"].tolist())
        return (mean + std * eps.to(self.device)) * self.vae.config.scaling_factor

    @torch.no_grad()
    def mode(self, pixels: torch.Tensor) -> torch.Tensor:
        """x0 (B,C,h,w) of pixel_values, the middle of each posterior."""
        return self._moments(pixels).chunk(2, dim=1)[0] * self.vae.config.scaling_factor

    def _moments(self, pixels: torch.Tensor) -> torch.Tensor:
        """Mean and standard deviation of the posteriors (B,2C,h,w)."""
        posterior = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist
        return torch.cat([posterior.mean, posterior.std], dim=1).float()

    @torch.no_grad()
    def captions(self, texts: list[str]) -> torch.Tensor:
        """c (B,L,D)"""
        if not self.budget:
            return self._states(texts)
        rows = [self._kept(self.states, text, lambda text=text: self._states([text])[0]) for text in texts]
        return torch.stack(rows).to(self.device)

    def _states(self, texts: list[str]) -> torch.Tensor:
        window = self.tokenizer.model_max_length
        encoded = self.tokenizer(texts, max_length=window, padding="max_length", truncation=True, return_tensors="pt")
        return self.text_encoder(encoded.input_ids.to(self.device), return_dict=False)[0].float()

    def _kept(self, store: dict, key: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key in store:
            return store[key]
        value = compute().cpu()
        size = value.numel() * value.element_size()
        if store in (self.posteriors, self.states) and size <= self.budget:
            store[key] = value
            self.budget -= size
        return value


def noised(
    scheduler: Any, x0: torch.Tensor, t: torch.Tensor, config: Any, draw: int, positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(eps, x_t), both (B,C,h,w), from addressed noise; offset and input perturbation where asked."""

    def addressed(shape: tuple[int, ...], stream: str) -> torch.Tensor:
        return noise(shape, config.seed, stream, draw, positions).to(x0.device)

    shape = tuple(x0.shape[1:])
    eps = addressed(shape, "noise")
    if config.noise_offset:
        eps = eps + config.noise_offset * addressed((shape[0], 1, 1), "offset")
    seen = eps
    if config.input_perturbation:  # the input is noisier than the target says (2301.11706)
        seen = eps + config.input_perturbation * addressed(shape, "perturbation")
    return eps, scheduler.add_noise(x0, seen, t)


def prediction_target(scheduler: Any, x0: torch.Tensor, eps: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """What the UNet is to predict (B,C,h,w): eps, v or x0, by the schedule's prediction_type."""
    kind = scheduler.config.prediction_type
    if kind == "epsilon":
        return eps
    return scheduler.get_velocity(x0, eps, t) if kind == "v_prediction" else x0


# ---------------------------------------------------------------- saving


def pipeline(parts: Parts) -> StableDiffusionPipeline:
    """A plain diffusers pipeline of the parts; `scheduler` carries the prediction type trained with."""
    return StableDiffusionPipeline(
        vae=parts.vae, text_encoder=parts.text_encoder, tokenizer=parts.tokenizer, unet=parts.unet,
        scheduler=parts.scheduler, safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def save_pipeline(pipe: StableDiffusionPipeline, folder: Path, card: str) -> None:
    pipe.save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").write_text(card, encoding="utf-8")


def draw_images(pipe: StableDiffusionPipeline, prompts: list[str], seed: int, steps: int = 20) -> list[Any]:
    """One image a prompt, from the same noise at every call."""
    unet = pipe.unet
    side = unet.config.sample_size
    latents = noise((unet.config.in_channels, side, side), seed, "prompts", 0, list(range(len(prompts))))
    pipe.set_progress_bar_config(disable=True)
    size, training = side * vae_factor(pipe.vae), unet.training
    streams = [generator(seed, "prompts-steps", i) for i in range(len(prompts))]
    unet.eval()
    try:
        latents = latents.to(unet.device)
        return pipe(
            prompts, latents=latents, num_inference_steps=steps, height=size, width=size, generator=streams
        ).images
    finally:
        unet.train(training)
