"""The pipeline's parts: loaded safely, checked against each other, assembled again for saving and drawing."""

import importlib
import os
from dataclasses import dataclass, replace
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
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from silentbad.distributed.shards import cut_up, whole
from silentbad.errors import UserError, brief, first_line, reading
from silentbad.model import gate, lora
from silentbad.model.denoiser import Denoiser, make_trainable
from silentbad.model.encoder import decode
from silentbad.model.gate import Source
from silentbad.rng import generator, noise

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
    source = Source.of(config)
    read_index(source, PIPELINES)
    settings = schedule(source)
    if config.prediction_type is not None:
        settings["prediction_type"] = config.prediction_type
    prediction_type = settings.get("prediction_type", "epsilon")
    if config.dream_training and prediction_type != "epsilon":
        raise UserError(f"dream_training: works with epsilon prediction only; {source.path} predicts {prediction_type}")
    return settings


def schedule(source: Source) -> dict[str, Any]:
    """The settings of a pipeline's noise schedule, each of them sane, and of a scheduler that diffusers has."""
    with gate.quietly(), reading(f"{source}: no scheduler"):
        settings = dict(DDPMScheduler.load_config(source.path, subfolder="scheduler", **source.hub))
    where = f"{source}/scheduler/scheduler_config.json"
    name = settings.get("_class_name", "DDPMScheduler")
    if not isinstance(getattr(diffusers_schedulers, str(name), None), type) or not str(name).endswith("Scheduler"):
        raise UserError(f"{where}: diffusers has no scheduler {brief(name)}")
    gate.check_schedule(settings, where)
    return settings


def read_index(source: Source, kinds: tuple[str, ...] | None = None) -> dict[str, Any]:
    """A pipeline's model_index.json, of one of these classes (of any that has the parts, where none are given) and
    with its parts in place."""
    path, local = source.path, Path(source.path)
    if not path.strip() or "\0" in path:
        raise UserError(f"{source}: no folder {brief(path)}")
    is_folder = os.path.isdir(local)
    if is_folder and not (local / "model_index.json").is_file():
        raise UserError(f"{source}: no model_index.json; not a diffusers pipeline")
    looks_local = local.is_absolute() or path.startswith((".", "~")) or os.path.isfile(local) or path.count("/") != 1
    if not is_folder and looks_local:
        raise UserError(f"{source.flag}: no folder {path}")
    try:
        with gate.quietly():
            index = DiffusionPipeline.load_config(path, **source.hub)
            kind = index.get("_class_name")
    except Exception as error:  # from_pretrained's own and, for another JSON value, that it has no `get`
        wrong = "model_index.json is not a JSON object" if is_folder else f"no model_index.json ({first_line(error)})"
        raise UserError(f"{source}: {wrong}") from None
    if kinds and kind not in kinds:
        raise UserError(f"{path}/model_index.json: a {kind}; this trains {', '.join(kinds)}")
    second = ("text_encoder_2", "tokenizer_2") if has(index, "text_encoder_2") else ()
    for part in ("unet", "vae", "text_encoder", "tokenizer", "scheduler", *second):
        if not has(index, part):
            raise UserError(f"'{path}' is a {kind} without {part}; give a Stable Diffusion 1, 2 or XL pipeline")
        if is_folder and not (local / part).is_dir():
            raise UserError(f"{source}: no {part}/")
    for part, wanted in (("unet", "UNet2DConditionModel"), ("vae", "AutoencoderKL")):
        if index[part][1] != wanted:
            raise UserError(
                f"{path}/model_index.json: {part} is {brief(index[part][1])}, not {wanted}; give a Stable Diffusion "
                "1, 2 or XL pipeline"
            )
    return index


def has(index: dict[str, Any], part: str) -> bool:
    """Whether a model_index.json names a class for this part: [library, class], both null where there is none."""
    entry = index.get(part)
    return isinstance(entry, (list, tuple)) and len(entry) == 2 and all(isinstance(name, str) for name in entry)


# ---------------------------------------------------------------- loading
def load_tokenizer(config: Any) -> Any:
    """The first, or only, tokenizer; SDXL's second cuts captions into the same tokens."""
    return tokenizer_of("tokenizer", Source.of(config))


def tokenizer_of(part: str, source: Source) -> Any:
    """A tokenizer with a vocabulary and a window."""
    tokenizer = gate.load_part(part, CLIPTokenizer, source)
    if len(tokenizer) < 256:  # transformers makes an empty one where the files are missing; bytes alone are 256
        raise UserError(f"{source}: cannot load {part} (its vocabulary is missing)")
    gate.check_tokenizer(tokenizer, None, f"{source}/{part}")
    return tokenizer


def load_parts(config: Any, settings: dict[str, Any], tokenizer: Any, precision: str = "no") -> Parts:
    """What trains in fp32, the rest frozen in the run's precision; safetensors only.

    The UNet trains, whole or through LoRA, which leaves its own weights frozen; so do the text encoders where asked.
    """
    source = Source.of(config)
    index = read_index(source, PIPELINES)
    xl = index["_class_name"] == "StableDiffusionXLPipeline"
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    own = torch.float32 if config.lora.rank is None else half  # of weights that train themselves, or carry adapters
    vae = gate.load_part("vae", AutoencoderKL, source, torch_dtype=half)
    if xl and vae.config.force_upcast:
        vae.float()  # SDXL's autoencoder overflows in fp16
    text_dtype = own if config.train_text_encoder else half
    encoders = {
        name: gate.load_part(name, ENCODERS[name], source, torch_dtype=text_dtype) for name in [*ENCODERS][: 1 + xl]
    }
    unet_hub = {"revision": config.non_ema_revision} if config.non_ema_revision else {}
    unet = gate.load_part("unet", UNet2DConditionModel, source, **unet_hub, torch_dtype=own)
    sampler = getattr(diffusers_schedulers, str(settings.get("_class_name")), None) or DDPMScheduler
    parts = Parts(
        tokenizer=tokenizer,
        **encoders,
        vae=vae,
        unet=unet,
        noise_scheduler=DDPMScheduler.from_config(settings),
        scheduler=sampler.from_config(settings),
        model=make_trainable(config, unet, encoders),
        tokenizer_2=tokenizer_of("tokenizer_2", source) if xl else None,
        zero_empty=bool(xl and index.get("force_zeros_for_empty_prompt", True)),
    )
    vae.requires_grad_(False).eval()
    check_fit(source.path, unet, vae, parts.text_encoders, parts.tokenizers)
    _check_side(parts, config)
    if config.enable_xformers_memory_efficient_attention:
        unet.enable_xformers_memory_efficient_attention()
    return parts


def check_fit(path: str, unet: Any, vae: Any, encoders: dict[str, Any], tokenizers: list[Any]) -> None:
    """Refuse parts of a pipeline whose shapes or settings do not fit each other."""
    gate.check_settings(unet.config, gate.UNET, f"{path}/unet/config.json")
    gate.check_settings(vae.config, gate.VAE, f"{path}/vae/config.json")
    channels = vae.config.latent_channels
    for what, found in (("takes", unet.config.in_channels), ("predicts", unet.config.out_channels)):
        if found != channels:
            raise UserError(f"{path}: unet {what} {found} channels, vae gives {channels}")
    width = sum(encoder.config.hidden_size for encoder in encoders.values())
    if unet.config.cross_attention_dim != width:
        raise UserError(f"{path}: unet attends to width {unet.config.cross_attention_dim}, text_encoder gives {width}")
    for (name, encoder), tokenizer in zip(encoders.items(), tokenizers, strict=False):
        if tokenizer is None:
            continue
        known = encoder.config.vocab_size
        if len(tokenizer) > known:
            raise UserError(f"{path}: tokenizer has {len(tokenizer)} tokens, {name} knows {known}")
        place = f"{path}/{name.replace('text_encoder', 'tokenizer')}"
        gate.check_tokenizer(tokenizer, encoder.config.max_position_embeddings, place)
    gate.check_runs(path, unet, vae, width)


def _check_side(parts: Parts, config: Any) -> None:
    factor, side = side_factor(parts.unet, parts.vae), resolution(parts, config)
    if side % factor:
        path = config.pretrained_model_name_or_path
        raise UserError(f"resolution: {side} is not a multiple of {factor}, which {path} needs")


def side_factor(unet: Any, vae: Any) -> int:
    """What the side of an image must be a multiple of."""
    return vae_factor(vae) * 2 ** (len(unet.config.block_out_channels) - 1)


def vae_factor(vae: Any) -> int:
    """Pixels a latent."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def resolution(parts: Parts, config: Any) -> int:
    """Side of the training images: the flag, or the pipeline's own."""
    if config.resolution is not None:
        return config.resolution
    size = parts.unet.config.sample_size
    return (size if isinstance(size, int) else size[0]) * vae_factor(parts.vae)


def pipeline(parts: Parts) -> StableDiffusionPipeline | StableDiffusionXLPipeline:
    """A plain diffusers pipeline of the parts; `scheduler` carries the prediction type trained with."""
    if parts.tokenizer_2 is not None:
        return StableDiffusionXLPipeline(**parts.components(), add_watermarker=False)
    return StableDiffusionPipeline(
        **parts.components(), safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )


def save_pipeline(parts: Parts, folder: Path, card: str) -> None:
    """The pipeline, or where LoRA trained its adapters alone, and the card."""
    if lora.present(parts.unet):
        lora.save(parts.model, folder, xl=parts.tokenizer_2 is not None)
    else:
        pipeline(parts).save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").write_text(card, encoding="utf-8")


def with_merged(parts: Parts) -> Parts:
    """The parts with what their adapters add in the weights, ready to be assembled."""
    names = ("unet", *parts.text_encoders)
    return replace(parts, **{name: lora.merged(getattr(parts, name)) for name in names})


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
            prompts,
            latents=latents,
            num_inference_steps=steps,
            height=size,
            width=size,
            generator=streams,
            output_type="latent",
        ).images
        with torch.no_grad():
            return pipe.image_processor.postprocess(decode(pipe.vae, made), output_type="pil")
    finally:
        unet.train(training)


def whole_parts(parts: Any) -> Any:
    """The pipeline's parts with a plain copy of the UNet on each process; themselves where nothing is sharded."""
    if not any(map(cut_up, parts.model.parameters())):
        return parts
    with torch.device("meta"):
        unet = type(parts.unet).from_config(parts.unet.config)
    unet.load_state_dict({name: whole(p).detach() for name, p in parts.unet.state_dict().items()}, assign=True)
    return replace(parts, unet=unet, model=Denoiser(unet))


def load_pipeline(
    name: str, dtype: str, device: Any, lora_path: str | None = None, flag: str = "--pipeline"
) -> StableDiffusionPipeline | StableDiffusionXLPipeline:
    """A Stable Diffusion 1, 2 or XL pipeline, with adapters where asked, from safetensors only; every tensor loaded and
    finite, in the precision asked for. `flag` names it in messages."""
    source = Source(name, flag)
    index = read_index(source)
    settings = schedule(source)
    kinds = {part: kind for part, kind in ENCODERS.items() if has(index, part)}
    tokenizers = {part: tokenizer_of(part, source) for part in ("tokenizer", "tokenizer_2")[: len(kinds)]}
    precision = getattr(torch, dtype)
    parts = {part: gate.load_part(part, kind, source, torch_dtype=precision) for part, kind in kinds.items()}
    vae = gate.load_part("vae", AutoencoderKL, source, torch_dtype=precision)
    unet = gate.load_part("unet", UNet2DConditionModel, source, torch_dtype=precision)
    check_fit(name, unet, vae, parts, [*tokenizers.values()])
    with gate.quietly(), reading(f"{source}: cannot load scheduler"):
        scheduler = getattr(diffusers_schedulers, settings.get("_class_name", "DDPMScheduler")).from_config(settings)
    parts |= {"unet": unet, "vae": vae, "scheduler": scheduler, **tokenizers}
    if len(kinds) == 2:
        zeros = bool(index.get("force_zeros_for_empty_prompt", True))
        pipe = StableDiffusionXLPipeline(**parts, add_watermarker=False, force_zeros_for_empty_prompt=zeros)
    else:
        pipe = StableDiffusionPipeline(
            **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    if lora_path is not None:
        lora.load(pipe, lora_path, name)
    return pipe.to(device)
