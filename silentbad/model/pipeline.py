"""The pipeline's parts: loaded safely, checked against each other, assembled again for saving
and drawing."""

import importlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMScheduler, DiffusionPipeline
from diffusers import schedulers as diffusers_schedulers

from silentbad import hub
from silentbad.distributed.shards import gather, is_sharded
from silentbad.errors import UserError, brief, user_errors
from silentbad.files import check_local
from silentbad.model import gate, lora
from silentbad.model.denoiser import Denoiser, make_trainable
from silentbad.model.family import Family, side_of
from silentbad.model.gate import Source
from silentbad.model.latents import decode_in_parts
from silentbad.model.registry import FAMILIES, KNOWN, backbone_of, family_of
from silentbad.rng import generator, noise
from silentbad.settings.train import TrainConfig


@dataclass
class Components:
    """Components of a pipeline; `noise_scheduler` trains, `scheduler` samples, `model` trains.

    Tokenizers and text encoders are by component; `zero_empty`: states of no prompt are zeros."""

    family: Family
    tokenizers: dict[str, Any]
    text_encoders: dict[str, Any]
    vae: Any
    backbone: Any
    noise_scheduler: Any
    scheduler: Any
    model: Denoiser
    zero_empty: bool = False

    def components(self) -> dict[str, Any]:
        """Arguments of the pipeline's class."""
        return {
            **self.tokenizers,
            **self.text_encoders,
            "vae": self.vae,
            self.family.backbone: self.backbone,
            "scheduler": self.scheduler,
            **self.family.options(self.zero_empty),
        }


def check_xformers() -> None:
    """Refuse an xformers that is missing, does not import, or has no kernel that runs here."""
    with user_errors(
        "enable_xformers_memory_efficient_attention: xformers cannot be used here",
        "leave it off, PyTorch's scaled_dot_product_attention is the default",
    ):
        ops = importlib.import_module("xformers.ops")
        card = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # accelerate has chosen none yet
        q = torch.zeros(1, 8, 1, 16, device=card, dtype=torch.float16)
        ops.memory_efficient_attention(q, q, q)


def scheduler_settings(config: TrainConfig) -> dict[str, Any]:
    """The training schedule's settings, with the configuration's `prediction_type`."""
    source = Source.of(config)
    settings = schedule(source, family_for(config))
    if config.prediction_type is not None:
        settings["prediction_type"] = config.prediction_type
    predicts = settings.get("prediction_type", "epsilon")
    if config.dream_training and predicts != "epsilon":
        raise UserError(
            f"dream_training: works with epsilon prediction only; {source.path} predicts {predicts}"
        )
    return settings


def family_for(config: TrainConfig) -> Family:
    """The family of the pipeline that is to train."""
    return FAMILIES[read_index(Source.of(config), (*FAMILIES,))["_class_name"]]


def schedule(source: Source, family: Family) -> dict[str, Any]:
    """The settings of a pipeline's noise schedule, and of a scheduler that diffusers has."""
    with gate.quietly(), hub.fetching(source.path, f"{source}: no scheduler"):
        settings = dict(DDPMScheduler.load_config(source.path, subfolder="scheduler", **source.hub))
    where = f"{source}/scheduler/scheduler_config.json"
    name = settings.setdefault("_class_name", "DDPMScheduler")
    if not hasattr(diffusers_schedulers, str(name)):
        raise UserError(f"{where}: diffusers has no scheduler {brief(name)}")
    family.check_schedule(settings, where)
    return settings


def scheduler_of(settings: dict[str, Any]) -> Any:
    """The scheduler that samples."""
    return getattr(diffusers_schedulers, settings["_class_name"]).from_config(settings)


def read_index(source: Source, kinds: tuple[str, ...] | None = None) -> dict[str, Any]:
    """A pipeline's model_index.json. Refuses a class that is not among `kinds` (without `kinds` any
    class that has the parts is accepted) and missing parts."""
    check_place(source)
    wrong = "is not a JSON object" if os.path.isdir(source.path) else "is not there"
    with gate.quietly(), hub.fetching(source.path, f"{source}: model_index.json {wrong}"):
        index = DiffusionPipeline.load_config(source.path, **source.hub)
        kind = index["_class_name"]
    if kinds and kind not in kinds:
        raise UserError(f"{source.path}/model_index.json: a {kind}; this trains {', '.join(kinds)}")
    check_components(index, source)
    return index


def check_place(source: Source) -> None:
    """Refuse a path that is neither a pipeline's folder nor a name on the Hub."""
    path = source.path
    if os.path.isfile(path):
        raise UserError(
            f"{source.flag}: {path} is one file; convert it to a diffusers folder, and give that"
        )
    check_local(source.flag, path)
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "model_index.json")):
        of_run = os.path.join(source.path, "pipeline")
        right = f"; give {of_run}" if os.path.isdir(of_run) else ""
        raise UserError(f"{source}: no model_index.json; not a diffusers pipeline{right}")


def check_components(index: dict[str, Any], source: Source) -> None:
    """Refuse a pipeline that lacks a component of its family, or has one of another class."""
    family = family_in(index)
    where = f"{source.path}/model_index.json: a {index['_class_name']}"
    for part in family.parts:
        if not has(index, part):
            raise UserError(f"{where} without {part}; give {KNOWN}")
        if os.path.isdir(source.path) and not os.path.isdir(os.path.join(source.path, part)):
            raise UserError(f"{source}: no {part}/")
    for part, wanted in ((family.backbone, family.kind.__name__), ("vae", "AutoencoderKL")):
        if (kind := index[part][1]) != wanted:
            raise UserError(f"{where} with {part} {brief(kind)}, not {wanted}; give {KNOWN}")


def family_in(index: dict[str, Any]) -> Family:
    """The family by a pipeline's class, or by its parts where it is of another."""
    named = FAMILIES.get(str(index["_class_name"]))
    return named or family_of([part for part in index if has(index, part)])


def has(index: dict[str, Any], part: str) -> bool:
    """Whether a model_index.json names a class for this part: [library, class]."""
    entry = index.get(part)
    return isinstance(entry, (list, tuple)) and len(entry) == 2 and None not in entry


# ---------------------------------------------------------------- loading
def load_tokenizer(config: TrainConfig) -> Any:
    """The first tokenizer: CLIP's, which cuts captions alike in all families."""
    return tokenizer_of("tokenizer", family_for(config).tokenizer["tokenizer"], Source.of(config))


def tokenizer_of(part: str, kind: Any, source: Source) -> Any:
    """A tokenizer with a vocabulary and a window."""
    tokenizer = gate.load_part(part, kind, source)
    # transformers makes an empty one where the files are missing; bytes alone are 256
    if len(tokenizer) < 256:
        raise UserError(f"{source}: cannot load {part} (its vocabulary is missing)")
    gate.check_tokenizer(tokenizer, None, f"{source}/{part}")
    return tokenizer


def load_parts(
    config: TrainConfig,
    settings: dict[str, Any],
    tokenizer: Any,
    precision: str = "no",
    *,
    frozen: bool = False,
) -> Components:
    """The parts of a pipeline: trained ones in fp32, the others frozen in the run's precision;
    safetensors only.

    The backbone trains, whole or through LoRA, which leaves its own weights frozen; so do the text
    encoders where asked. `frozen`: nothing trains, and no adapters are added."""
    source = Source.of(config)
    index = read_index(source, (*FAMILIES,))
    family = family_in(index)
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    # dtype of weights that train, or of weights under adapters
    trained_kind = half if frozen or config.lora.rank is not None else torch.float32
    kinds = {name: half for name in ("vae", *family.encoders)} | {family.backbone: trained_kind}
    if config.train_text_encoder:
        kinds |= dict.fromkeys(family.encoders, trained_kind)
    modules = load_modules(source, index, kinds, config.non_ema_revision)
    vae = modules.pop("vae")
    backbone = modules.pop(family.backbone)
    vae.requires_grad_(False).eval()
    for module in (backbone, *modules.values()) if frozen else ():
        module.requires_grad_(False).eval()
    with gate.quietly():  # diffusers converts old settings, with long warnings
        noise_scheduler = family.schedule(settings)
        scheduler = scheduler_of(settings)
    if frozen:
        model = Denoiser(backbone, family, noise_scheduler)
    else:
        model = make_trainable(config, family, noise_scheduler, backbone, modules)
    parts = Components(
        family=family,
        tokenizers=load_tokenizers(source, index, tokenizer),
        text_encoders=modules,
        vae=vae,
        backbone=backbone,
        noise_scheduler=noise_scheduler,
        scheduler=scheduler,
        model=model,
        zero_empty=family.zero_empty(index),
    )
    check_fit(source.path, family, backbone, vae, modules, parts.tokenizers)
    side = resolution(parts, config.resolution)
    check_side(side, family, backbone, vae, "resolution")
    check_positions(parts, side, "resolution", source.path)
    if config.enable_xformers_memory_efficient_attention:
        backbone.enable_xformers_memory_efficient_attention()
    return parts


def load_modules(
    source: Source,
    index: dict[str, Any],
    kinds: dict[str, torch.dtype],
    revision: str | None = None,
) -> dict[str, Any]:
    """The backbone (of a `revision`), the autoencoder and the text encoders that a pipeline has, by
    component, each in its dtype, or wider (`widen`).

    The largest comes first: while it loads, its file is in memory too."""
    family = family_in(index)
    classes = {family.backbone: family.kind, "vae": AutoencoderKL, **family.encoders}
    modules = {}
    for name in (name for name in classes if has(index, name)):
        hub = {"revision": revision} if revision and name == family.backbone else {}
        modules[name] = gate.load_part(name, classes[name], source, **hub, torch_dtype=kinds[name])
    widen(modules["vae"], family)
    return modules


def widen(vae: Any, family: Family) -> None:
    """In place to fp32 an autoencoder that overflows in fp16, as diffusers does where it decodes."""
    if family.upcasts and vae.config.force_upcast:
        vae.float()


def load_tokenizers(source: Source, index: dict[str, Any], first: Any = None) -> dict[str, Any]:
    """The tokenizers that a pipeline has, by component; `first` where it is loaded already."""
    kinds = {name: kind for name, kind in family_in(index).tokenizer.items() if has(index, name)}
    loaded = {} if first is None else {"tokenizer": first}
    missing = [name for name in kinds if name not in loaded]
    return loaded | {name: tokenizer_of(name, kinds[name], source) for name in missing}


def check_fit(
    path: str,
    family: Family,
    backbone: Any,
    vae: Any,
    encoders: dict[str, Any],
    tokenizers: dict[str, Any],
) -> None:
    """Refuse parts of a pipeline whose shapes or settings do not fit each other."""
    if getattr(vae.config, "latents_mean", None) is not None:
        raise UserError(f"{path}/vae/config.json: latents_mean: means by channel are not read")
    channels = vae.config.latent_channels
    shapes = (("takes", backbone.config.in_channels), ("predicts", backbone.config.out_channels))
    for what, count in shapes:
        if count != channels:
            raise UserError(
                f"{path}: {family.backbone} {what} {count} channels, vae gives {channels}"
            )
    family.check_fit(path, backbone, encoders)
    for name, encoder in encoders.items():
        part = name.replace("text_encoder", "tokenizer")
        tokenizer = tokenizers[part]
        known = encoder.config.vocab_size
        largest = max(tokenizer.get_vocab().values())
        if largest >= known:
            raise UserError(
                f"{path}: {part} numbers tokens up to {largest}, {name} knows {known}, from 0 on"
            )
        positions = getattr(encoder.config, "max_position_embeddings", None)
        gate.check_tokenizer(tokenizer, positions, f"{path}/{part}")


def check_positions(parts: Components, side: int, key: str, path: str) -> None:
    """Refuse images with a side that the backbone has no positions for."""
    most = parts.family.largest(parts.backbone)
    if most is not None and side > (most := most * vae_factor(parts.vae)):
        raise UserError(f"{key}: {side} is more than the {most} that {path} has positions for")


def side_factor(family: Family, backbone: Any, vae: Any) -> int:
    """What the side of an image must be a multiple of."""
    return vae_factor(vae) * family.side(backbone)


def check_side(side: int, family: Family, backbone: Any, vae: Any, key: str) -> None:
    """Refuse images with a side that the pipeline cannot draw."""
    if side % (factor := side_factor(family, backbone, vae)):
        raise UserError(f"{key}: {side} is not a multiple of {factor}, which the pipeline needs")


def vae_factor(vae: Any) -> int:
    """Pixels of a latent along a side: the autoencoder's downsampling factor."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def resolution(parts: Components, asked: int | None) -> int:
    """Side of images in pixels: the one `asked` for, or the pipeline's own."""
    return asked or side_of(parts.backbone) * vae_factor(parts.vae)


def pipeline(parts: Components) -> Any:
    """A plain diffusers pipeline of the parts."""
    return parts.family.assemble(**parts.components())


def save_pipeline(parts: Components, folder: Path, card: str) -> None:
    """The pipeline, or where LoRA trained its adapters alone, and the card."""
    if lora.present(parts.backbone):
        lora.save(parts.model, folder)
    else:
        pipeline(parts).save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").write_text(card, encoding="utf-8")


def with_merged(parts: Components) -> Components:
    """The parts with their adapters merged into the weights, ready to be assembled."""
    encoders = {name: lora.merged(encoder) for name, encoder in parts.text_encoders.items()}
    return replace(parts, backbone=lora.merged(parts.backbone), text_encoders=encoders)


def drawn_side(parts: Components, asked: int | None) -> int:
    """Side in pixels of drawn images: `validation.resolution`, or the pipeline's own."""
    side = resolution(parts, asked)
    check_side(side, parts.family, parts.backbone, parts.vae, "validation.resolution")
    return side


def draw_images(
    pipe: Any,
    prompts: list[str],
    seed: int,
    steps: int = 20,
    size: int | None = None,
    **options: Any,
) -> list[Any]:
    """One image a prompt, `size` pixels wide, from the same noise at every call."""
    backbone = backbone_of(pipe)
    factor = vae_factor(pipe.vae)
    size = size or side_of(backbone) * factor
    shape = (backbone.config.in_channels, size // factor, size // factor)
    numbers = [*range(len(prompts))]
    pipe.set_progress_bar_config(disable=True)
    training = backbone.training
    backbone.eval()
    try:
        denoised = pipe(
            prompts,
            latents=noise(shape, seed, "prompts", 0, numbers).to(backbone.device),
            num_inference_steps=steps,
            height=size,
            width=size,
            generator=[generator(seed, "prompts-steps", number) for number in numbers],
            output_type="latent",
            **options,
        ).images
        with torch.no_grad():
            decoded = decode_in_parts(pipe.vae, denoised)
            return pipe.image_processor.postprocess(decoded, output_type="pil")
    finally:
        backbone.train(training)


def gathered_parts(parts: Any) -> Any:
    """The parts with a plain copy of a sharded backbone on each process."""
    if not any(map(is_sharded, parts.model.parameters())):
        return parts
    with torch.device("meta"):
        backbone = type(parts.backbone).from_config(parts.backbone.config)
    backbone.load_state_dict(
        {name: gather(p).detach() for name, p in parts.backbone.state_dict().items()}, assign=True
    )
    return replace(
        parts, backbone=backbone, model=Denoiser(backbone, parts.family, parts.noise_scheduler)
    )


def load_autoencoder(source: Source, dtype: str, device: Any) -> Any:
    """The autoencoder alone of a pipeline."""
    family = family_in(read_index(source))
    vae = gate.load_part("vae", AutoencoderKL, source, torch_dtype=getattr(torch, dtype))
    widen(vae, family)
    return vae.to(device)


def load_pipeline(
    name: str | Source,
    dtype: str,
    device: Any,
    lora_path: str | None = None,
    of: str | None = None,
    revision: str | None = None,
) -> Any:
    """A plain diffusers pipeline of a family, with adapters where asked, from safetensors only;
    every tensor loaded and finite, in the precision asked for, or wider (`widen`). A name
    alone is of --pipeline; `of` is the pipeline that a baseline is compared with; `revision` is
    that of the backbone, where it is another."""
    source = name if isinstance(name, Source) else Source(name, "--pipeline")
    index = read_index(source)
    family = family_in(index)
    if of is not None and (model := family_in(read_index(Source(of, "--pipeline")))) is not family:
        raise UserError(
            f"{source}: is {family.name}, --pipeline {of} {model.name}; they must be of one kind"
        )
    settings = schedule(source, family)
    tokenizers = load_tokenizers(source, index)
    kinds = dict.fromkeys(("vae", family.backbone, *family.encoders), getattr(torch, dtype))
    modules = load_modules(source, index, kinds, revision)
    encoders = {name: module for name, module in modules.items() if name in family.encoders}
    check_fit(source.path, family, modules[family.backbone], modules["vae"], encoders, tokenizers)
    with gate.quietly():
        scheduler = scheduler_of(settings)
    pipe = family.assemble(
        **tokenizers,
        **modules,
        scheduler=scheduler,
        **family.options(family.zero_empty(index)),
    )
    if lora_path is not None:
        lora.load(pipe, lora_path, source.path)
    with gate.quietly():  # half precision on a CPU is slow, and is asked for
        return pipe.to(device)
