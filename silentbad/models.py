"""The pipeline's parts: loaded safely, frozen or trained, encoded with a cache, assembled again for saving.

Legend: x0 (B,C,h,w) latents, eps noise, t (B,), c (B,L,D) text states.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    DiffusionPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers import schedulers as diffusers_schedulers
from diffusers.training_utils import EMAModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.utils import logging as transformers_logging

from . import adapters
from .caches import Cached, send, together
from .conditioning import Denoiser, encode, tokenize, unused
from .errors import UserError
from .generation import decode
from .optimizers import check_optimizer
from .rng import generator, noise
from .sharding import like
from .tables import vocabulary

ENCODERS = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}
PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")


@dataclass
class Parts:
    """Components of a Stable Diffusion pipeline; `noise_scheduler` trains, `scheduler` samples.

    `model` is what trains. The second tokenizer and text encoder are SDXL's; `zero_empty` says that its states of no
    prompt are zeros.
    """

    tokenizer: Any
    text_encoder: Any
    vae: Any
    unet: Any
    noise_scheduler: Any
    scheduler: Any
    model: Denoiser
    tokenizer_2: Any = None
    text_encoder_2: Any = None
    zero_empty: bool = False

    @property
    def tokenizers(self) -> list[Any]:
        return [self.tokenizer] if self.tokenizer_2 is None else [self.tokenizer, self.tokenizer_2]

    @property
    def text_encoders(self) -> dict[str, Any]:
        return {name: module for name in ENCODERS if (module := getattr(self, name)) is not None}

    def components(self) -> dict[str, Any]:
        """Arguments of the pipeline's class."""
        names = ("tokenizer", "tokenizer_2", *ENCODERS, "vae", "unet", "scheduler")
        made = {name: part for name in names if (part := getattr(self, name)) is not None}
        return made | ({"force_zeros_for_empty_prompt": self.zero_empty} if self.tokenizer_2 is not None else {})


# ---------------------------------------------------------------- before any weights load


def check_machine(config: Any) -> None:
    """Refuse what this machine or the pipeline's own settings cannot do."""
    check_optimizer(config)
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
    pipeline_index(config)
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


def pipeline_index(config: Any) -> dict[str, Any]:
    """The pipeline's model_index.json, of a class that trains here and with its parts in place."""
    path = config.pretrained_model_name_or_path
    local = Path(path)
    if local.is_dir() and not (local / "model_index.json").is_file():
        raise UserError(f"pretrained_model_name_or_path {path}: no model_index.json; not a diffusers pipeline")
    looks_local = local.is_absolute() or path.startswith((".", "~")) or local.is_file() or path.count("/") != 1
    if not local.is_dir() and looks_local:
        raise UserError(f"pretrained_model_name_or_path: no folder {path}")
    try:
        index = DiffusionPipeline.load_config(path, **_hub(config))
        kind = index.get("_class_name")
    except Exception as error:
        wrong = "model_index.json is not a JSON object" if local.is_dir() else f"no model_index.json ({_first(error)})"
        raise UserError(f"pretrained_model_name_or_path {path}: {wrong}") from None
    if kind not in PIPELINES:
        raise UserError(f"{path}/model_index.json: a {kind}; this trains {', '.join(PIPELINES)}")
    second = ("text_encoder_2", "tokenizer_2") if kind == "StableDiffusionXLPipeline" else ()
    for part in ("unet", "vae", "text_encoder", "tokenizer", "scheduler", *second):
        if local.is_dir() and not (local / part).is_dir():
            raise UserError(f"pretrained_model_name_or_path {path}: no {part}/")
    return index


def _hub(config: Any) -> dict[str, Any]:
    local = Path(config.pretrained_model_name_or_path).is_dir()
    return {} if local else {"revision": config.revision, "cache_dir": config.cache_dir}


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---------------------------------------------------------------- loading


def load_tokenizer(config: Any) -> Any:
    """The first, or only, tokenizer; SDXL's second cuts captions into the same tokens."""
    tokenizer = _load("tokenizer", CLIPTokenizer, config)
    if len(tokenizer) < 256:  # transformers makes an empty one where the files are missing; bytes alone are 256
        path = config.pretrained_model_name_or_path
        raise UserError(f"pretrained_model_name_or_path {path}: cannot load tokenizer (its vocabulary is missing)")
    return tokenizer


def load_parts(config: Any, settings: dict[str, Any], tokenizer: Any, precision: str = "no") -> Parts:
    """What trains in fp32, the rest frozen in the run's precision; safetensors only.

    The UNet trains, whole or through LoRA, which leaves its own weights frozen; so do the text encoders where asked.
    """
    transformers_logging.disable_progress_bar()
    index = pipeline_index(config)
    xl = index["_class_name"] == "StableDiffusionXLPipeline"
    weights = {"use_safetensors": True, "variant": config.variant}
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    own = torch.float32 if config.lora.rank is None else half  # of weights that train themselves, or carry adapters
    vae = _load("vae", AutoencoderKL, config, **weights, torch_dtype=half)
    if xl and vae.config.force_upcast:
        vae.float()  # SDXL's autoencoder overflows in fp16
    text_dtype = own if config.train_text_encoder else half
    encoders = {
        name: _load(name, ENCODERS[name], config, **weights, torch_dtype=text_dtype) for name in [*ENCODERS][: 1 + xl]
    }
    unet_hub = {"revision": config.non_ema_revision} if config.non_ema_revision else {}
    unet = _load("unet", UNet2DConditionModel, config, **weights, **unet_hub, torch_dtype=own)
    sampler = getattr(diffusers_schedulers, str(settings.get("_class_name")), None) or DDPMScheduler
    parts = Parts(
        tokenizer=tokenizer, **encoders, vae=vae, unet=unet, noise_scheduler=DDPMScheduler.from_config(settings),
        scheduler=sampler.from_config(settings), model=make_trainable(config, unet, encoders),
        tokenizer_2=_load("tokenizer_2", CLIPTokenizer, config) if xl else None,
        zero_empty=bool(xl and index.get("force_zeros_for_empty_prompt", True)),
    )  # fmt: skip
    vae.requires_grad_(False).eval()
    _check_fit(parts, config)
    if config.enable_xformers_memory_efficient_attention:
        unet.enable_xformers_memory_efficient_attention()
    return parts


def make_trainable(config: Any, unet: Any, encoders: dict[str, Any]) -> Denoiser:
    """The module that trains; every parameter that shall not is frozen."""
    trained = {"unet": unet, **(encoders if config.train_text_encoder else {})}
    for module in encoders.values():
        module.requires_grad_(False).eval()
    for name, module in trained.items():
        if config.lora.rank is not None:
            adapters.add(name, module, config.lora, config.seed)
        else:
            module.requires_grad_(True)
        if name != "unet" and len(encoders) > 1:
            for parameter in unused(module, pooled=name == "text_encoder_2"):
                parameter.requires_grad_(False)
        module.train()
        if config.gradient_checkpointing and name == "unet":
            module.enable_gradient_checkpointing()
        elif config.gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
    return Denoiser(**trained)


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
    width = sum(encoder.config.hidden_size for encoder in parts.text_encoders.values())
    if unet.cross_attention_dim != width:
        raise UserError(f"{path}: unet attends to width {unet.cross_attention_dim}, text_encoder gives {width}")
    known = parts.text_encoder.config.vocab_size
    if parts.tokenizer is not None and len(parts.tokenizer) > known:
        raise UserError(f"{path}: tokenizer has {len(parts.tokenizer)} tokens, text_encoder knows {known}")
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


def placed(model: torch.nn.Module, config: Any, device: torch.device) -> torch.nn.Module:
    """What trains, on its device and in the memory format its convolutions run fastest in."""
    last = device.type == "cuda" if config.channels_last is None else config.channels_last
    model.to(device)
    return model.to(memory_format=torch.channels_last) if last else model  # type: ignore[call-overload]


def training_forward(model: torch.nn.Module, config: Any) -> Callable:
    """The forward of a training step: compiled where asked, for the one shape that a micro-batch has."""
    if not config.compile_model:
        return model
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # gradients by source and balance walk the graph twice
    return torch.compile(model, dynamic=False)


def make_ema(model: torch.nn.Module, config: Any, device: torch.device) -> EMAModel | None:
    """diffusers' average of the trained weights, on the CPU when offloaded."""
    if not config.use_ema:
        return None
    parameters = [p for p in model.parameters() if p.requires_grad]
    ema = EMAModel(parameters, decay=config.ema_decay, foreach=config.foreach_ema)
    if config.offload_ema:
        ema.pin_memory() if torch.cuda.is_available() else ema.to("cpu")
    else:
        ema.to(device)
    return ema


def backward_scale(accelerator: Any) -> float:
    """What accelerator.backward multiplies a loss by: the fp16 loss scale over the accumulation steps."""
    scaler = accelerator.scaler
    return (1.0 if scaler is None else scaler.get_scale()) / accelerator.gradient_accumulation_steps


# ---------------------------------------------------------------- encoding


class Encoder:
    """Latents and conditions of a micro-batch, kept per record and per text while the budget lasts.

    What is kept is encoded one at a time, so that its value does not depend on what shared its batch: a run with a
    warm cache and a resumed one with a cold cache see the same bits.
    """

    def __init__(self, parts: Parts, accelerator: Any, *, side: int, cache_bytes: int, seed: int):
        self.device = accelerator.device
        self.vae, self.parts = parts.vae.to(self.device), parts
        self.text_encoders = [encoder.to(self.device) for encoder in parts.text_encoders.values()]
        self.live = bool(parts.model.text_encoders)  # the text encoders train: the model encodes for itself
        self.plain = torch.tensor([[side, side, 0, 0, side, side]])  # time_ids of a picture of the training size
        self.budget, self.seed = cache_bytes, seed
        self.kept_images: dict[int, torch.Tensor] = {}
        self.kept_texts: dict[str, torch.Tensor] = {}
        self.disk: Cached | None = None
        self.resting: list[torch.nn.Module] = []

    def use(self, disk: Cached) -> None:
        """Read from disk what is there; modules that no step needs any more rest on the CPU."""
        self.disk = disk
        self.resting = [self.vae] * disk.all_images + self.text_encoders * disk.all_texts
        for module in self.resting:
            module.to("cpu")

    @contextmanager
    def awake(self, *modules: torch.nn.Module) -> Iterator[None]:
        """These modules (all, where none is named) on the device."""
        called = [m for m in self.resting if not modules or any(m is wanted for wanted in modules)]
        for module in called:
            module.to(self.device)
        try:
            yield
        finally:
            for module in called:
                module.to("cpu")

    @property
    def text_facts(self) -> list[Any]:
        """What the states of a text depend on."""
        return [*self.text_encoders, *map(vocabulary, self.parts.tokenizers), self.parts.zero_empty]

    @torch.no_grad()
    def latents(self, batch: dict[str, Any], draw: int) -> torch.Tensor:
        """x0 (B,C,h,w): a draw from each image's posterior with the noise of its own address."""
        pixels = batch["pixel_values"]

        def known(k: int, index: int) -> torch.Tensor | None:
            if not batch["fixed"][k]:
                return None
            row = None if self.disk is None else self.disk.image(index)
            return row if row is not None else self._kept(
                self.kept_images, index, lambda: self.moments(pixels[k][None])[0]
            )

        rows = [known(k, index) for k, index in enumerate(batch["index"].tolist())]
        moments = together(rows, lambda live: self.moments(torch.stack([pixels[k] for k in live])), self.device)
        mean, std = moments.chunk(2, dim=1)
        eps = noise(tuple(mean.shape[1:]), self.seed, "posterior", draw, batch["position"].tolist())
        return (mean + std * send(eps, self.device)) * self.vae.config.scaling_factor

    @torch.no_grad()
    def mode(self, pixels: torch.Tensor) -> torch.Tensor:
        """x0 (B,C,h,w) of pixel_values, the middle of each posterior."""
        return self.moments(pixels).chunk(2, dim=1)[0] * self.vae.config.scaling_factor

    @torch.no_grad()
    def moments(self, pixels: torch.Tensor) -> torch.Tensor:
        """Mean and standard deviation of the posteriors (B,2C,h,w)."""
        with self.awake(self.vae):
            posterior = self.vae.encode(send(pixels, self.device).to(self.vae.dtype)).latent_dist
        return torch.cat([posterior.mean, posterior.std], dim=1).float()

    def condition(self, texts: list[str], time_ids: torch.Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of the model under these captions; time_ids (B,6), by default a whole picture's."""
        xl, added = self.parts.tokenizer_2 is not None, {}
        if xl:
            time_ids = self.plain.expand(len(texts), -1) if time_ids is None else time_ids
            added = {"time_ids": time_ids.to(self.device, torch.long, non_blocking=True)}  # no precision rounds these
        if self.live:
            tokens = [send(ids, self.device) for ids in tokenize(self.parts.tokenizers, texts)]
            return {"tokens": tokens, "said": self._said(texts), "added_cond_kwargs": added}
        on_disk = [None] * len(texts) if self.disk is None else self.disk.states(texts)
        rows = [
            row if row is not None else self._kept(self.kept_texts, text, lambda text=text: self.states([text])[0])
            for row, text in zip(on_disk, texts, strict=True)
        ]
        packed = together(rows, lambda live: self.states([texts[k] for k in live]), self.device)
        if xl:  # (B, L*D + P)
            P = self.text_encoders[-1].config.projection_dim
            added["text_embeds"], packed = packed[:, -P:], packed[:, :-P].unflatten(1, (-1, self.width))
        return {"encoder_hidden_states": packed, "added_cond_kwargs": added}

    def _said(self, texts: list[str]) -> torch.Tensor | None:
        """(B,1): 0 where the caption is empty and its states are to be zero."""
        if not self.parts.zero_empty:
            return None
        return torch.tensor([[float(bool(text))] for text in texts]).to(self.device, non_blocking=True)

    @property
    def width(self) -> int:
        return sum(encoder.config.hidden_size for encoder in self.text_encoders)

    @torch.no_grad()
    def states(self, texts: list[str]) -> torch.Tensor:
        """c (B,L,D); for SDXL (B, L*D + P), c and pooled in one row."""
        tokens = [send(ids, self.device) for ids in tokenize(self.parts.tokenizers, texts)]
        with self.awake(*self.text_encoders):
            c, pooled = encode(self.text_encoders, tokens, self._said(texts))
        return c if pooled is None else torch.cat([c.flatten(1), pooled], dim=1)

    def _kept(self, store: dict, key: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """What is kept in memory, encoded now where the budget has room for it; else None."""
        if key not in store:
            if self.budget <= 0:
                return None
            store[key] = compute().cpu()
            self.budget -= store[key].nbytes
        return store[key]


def noised(
    scheduler: Any, x0: torch.Tensor, t: torch.Tensor, config: Any, draw: int, positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(eps, x_t), both (B,C,h,w), from addressed noise; offset and input perturbation where asked."""

    def addressed(shape: tuple[int, ...], stream: str) -> torch.Tensor:
        return send(noise(shape, config.seed, stream, draw, positions), x0.device)

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


def trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that train, by name: all there is to save of a module beside what it was loaded from."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def load_trained(module: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Copy saved parameters into the ones that train; ValueError unless both are the same set."""
    mine = trained(module)
    if {name: value.shape for name, value in saved.items()} != {name: value.shape for name, value in mine.items()}:
        raise ValueError(f"it holds {len(saved)} other tensors than the {len(mine)} that train")
    for name, parameter in mine.items():
        parameter.copy_(like(parameter, saved[name]))


def pipeline(parts: Parts) -> StableDiffusionPipeline | StableDiffusionXLPipeline:
    """A plain diffusers pipeline of the parts; `scheduler` carries the prediction type trained with."""
    if parts.tokenizer_2 is not None:
        return StableDiffusionXLPipeline(**parts.components(), add_watermarker=False)
    return StableDiffusionPipeline(
        **parts.components(), safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )


def save_pipeline(parts: Parts, folder: Path, card: str) -> None:
    """The pipeline, or where LoRA trained its adapters alone, and the card."""
    if adapters.present(parts.unet):
        adapters.save(parts.model, folder, xl=parts.tokenizer_2 is not None)
    else:
        pipeline(parts).save_pretrained(folder, safe_serialization=True)
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
        made = pipe(
            prompts, latents=latents, num_inference_steps=steps, height=size, width=size, generator=streams,
            output_type="latent",
        ).images  # fmt: skip
        with torch.no_grad():
            return pipe.image_processor.postprocess(decode(pipe.vae, made), output_type="pil")
    finally:
        unet.train(training)
