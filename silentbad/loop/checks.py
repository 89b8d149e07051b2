"""Refusals that look at more than one part of the configuration, or at the records too; no weights have loaded."""

import inspect
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from silentbad import owned
from silentbad.data import buckets
from silentbad.data.elements import DataInfo
from silentbad.data.published import is_published
from silentbad.data.records import PUBLISHED_FLAGS, Records
from silentbad.distributed.start import check_precision
from silentbad.errors import UserError, warn
from silentbad.loop.optimizers import ADAM, check_optimizer, optimizer_class
from silentbad.memory import roles
from silentbad.model.averaging import keeps_average
from silentbad.model.family import Family
from silentbad.model.pipeline import check_xformers
from silentbad.saving import checkpoint
from silentbad.saving.folder import RunFolder
from silentbad.settings import FLAGS
from silentbad.settings.memory import REHEARSED
from silentbad.settings.train import TrainConfig
from silentbad.settings.types import off_default

LAYOUT = "train_data_dir of the published layout"
NEEDS = {  # options that act on nothing without another: option -> what it needs, one of these
    "bucket_step": ("buckets",),
    "token_warmup_min": ("token_warmup_step",),
    **dict.fromkeys(("dataset_config_name", "image_column", "caption_column"), ("dataset_name",)),
    **dict.fromkeys((flag for flag in PUBLISHED_FLAGS if flag != "seed"), (LAYOUT,)),
    **dict.fromkeys(("ema_decay", "offload_ema", "foreach_ema"), ("use_ema",)),
    "dream_detail_preservation": ("dream_training",),
    "run_suffix": ("stamp_output_dir",),
    "save_best": ("validation.targets",),
    "best_by": ("save_best",),
    "validation_epochs": ("validation_prompts",),
    **dict.fromkeys(("hub_token", "hub_model_id"), ("push_to_hub",)),
}
AUXILIARY = ("retention", "distillation", "attention_binding")  # slots of memory that add a loss
OF_RULES = ("apply", "bound", "warmup", "refresh", "max_log_step", "momentum", "averaging")  # of gradient_control
DRAWING = (
    "steps",
    "early_steps",
    "num_inference_steps",
    "guidance_scale",
    "guidance_rescale",
    "resolution",
    "max_batch",
)


def check_idle(config: TrainConfig, sources: dict[str, str]) -> None:
    """Refuse options that act on nothing. A file may set up a validation that the run leaves out, and hold options of a
    part that a later one leaves out, which is said; flags may not."""
    flags = [name for name in off_default(config.validation) if sources.get(f"validation.{name}") == FLAGS]
    needs = {key: NEEDS[key] for key in off_default(config) if key in NEEDS} | {
        f"validation.{name}": ("validation.targets", *(("sample_prompts",) if name in DRAWING else ()))
        for name in flags
    }
    data = Path(config.train_data_dir or "")
    on = {
        **vars(config),
        "validation.targets": config.validation.targets,
        LAYOUT: is_published(data) or not data.is_dir(),  # one that is not there is refused later
    }
    for key, wanted in needs.items():
        if not any(on[name] for name in wanted):
            needed = " or ".join(wanted)
            raise UserError(f"{key} ({sources.get(key, 'default')}): needs {needed}, without which it has no effect")
    for key, acts, needed in idle_in_flags(config):
        wrong = f"{key} ({sources.get(key)}): needs {needed}, without which it has no effect"
        if sources.get(key) == FLAGS and not acts:
            raise UserError(wrong)
        if key in sources and not acts and attrgetter(key)(config) != attrgetter(key)(type(config)()):
            warn(wrong)


def idle_in_flags(config: TrainConfig) -> list[tuple[str, bool, str]]:
    """(key, whether it acts, what it needs) of options that a file may hold idle, as for a part that another flag
    leaves out, and flags may not."""
    memory, control, kind = config.memory, config.gradient_control, optimizer_class(config)
    takes, of_hub = inspect.signature(kind).parameters, not Path(config.pretrained_model_name_or_path or "").is_dir()
    apart = control.conflict or control.transform != "none"
    return [
        *((flag, name in takes, f"an optimizer with {name}") for flag, name in ADAM.items()),
        ("memory.phrase_memory.share", memory.phrase_memory.enabled, "memory.phrase_memory.enabled"),
        ("memory.phrase_memory.images", memory.phrase_memory.enabled, "memory.phrase_memory.enabled"),
        ("memory.loss.huber_delta", memory.loss.error != "mse", "memory.loss.error"),
        (
            "memory.loss_balance.name",
            any(getattr(memory, slot).name != "none" for slot in AUXILIARY),
            " or ".join(f"memory.{slot}.name" for slot in AUXILIARY),
        ),
        ("memory.timesteps.importance", memory.timesteps.name != "uniform", "memory.timesteps.name"),
        ("validation.weights", config.use_ema or keeps_average(kind), "use_ema"),
        *((f"gradient_control.{key}", control.name != "uniform", "gradient_control.name") for key in OF_RULES),
        ("gradient_control.sample", apart or control.name != "uniform", "gradient_control.name or .conflict"),
        ("gradient_control.sources", apart, "gradient_control.conflict or .transform"),
        (
            "validation.drift_images",
            config.validation.controls != "never" or not config.validation.drift_images,
            "validation.controls",
        ),
        ("validation.unrelated", config.validation.controls != "never", "validation.controls"),
        ("tracker_project_name", config.report_to != "none", "report_to"),
        ("revision", of_hub, "a pipeline of the Hub"),
        ("non_ema_revision", of_hub, "a pipeline of the Hub"),
    ]


def joined(config: TrainConfig) -> Any:
    """The configuration with the flat loss flags in the parts of `memory` they name; refuse parts that contradict each
    other."""
    loss = config.memory.loss
    if config.snr_gamma is not None:
        if loss.name not in ("none", "min_snr"):
            raise UserError(f"snr_gamma: means memory.loss.name=min_snr, which is set to {loss.name}; set one of them")
        if loss.options.get("gamma", config.snr_gamma) != config.snr_gamma:
            raise UserError("snr_gamma: is another name of memory.loss.options.gamma, which differs; set one of them")
        loss = replace(loss, name="min_snr", options={**loss.options, "gamma": config.snr_gamma})
    if config.dream_training:
        loss = replace(loss, dream=config.dream_detail_preservation)
    if config.memory.region.name == "estimated" and config.random_flip:
        raise UserError(
            "memory.region.name=estimated: finds each element at its native place, which random_flip moves; "
            "leave one of them out"
        )
    between = config.gradient_control.between
    if between.layerwise and config.compile_model:
        raise UserError(
            f"compile_model: gradient_control.between.name={between.name} cuts batches by source into many shapes, all "
            "to be compiled; leave one of them out"
        )
    for key, part, name in (
        ("attention_binding", config.memory.attention_binding, "mass"),
        ("loss_balance", config.memory.loss_balance, "gradient_norm"),
    ):
        what = f"memory.{key}.name={name} is defined over a whole micro-batch"
        if part.name == name and between.layerwise:
            raise UserError(
                f"gradient_control.between.name={between.name}: {what}, which it cuts; leave one of them out"
            )
        if part.name == name and config.max_batch_size is not None:
            raise UserError(
                f"max_batch_size: {what}; lower train_batch_size and raise gradient_accumulation_steps instead"
            )
    return replace(config, memory=replace(config.memory, loss=loss))


def check_best(config: TrainConfig) -> None:
    """Refuse to keep as best what was not measured, and say where the pipeline is not."""
    if config.validation.targets is None or config.validation.weights != "raw":
        return
    if not (config.use_ema or keeps_average(optimizer_class(config))):
        return
    if config.save_best:
        raise UserError(
            "save_best: keeps the averaged weights, which validation.weights=raw does not measure; set "
            "validation.weights to ema or both"
        )
    warn("validation.weights=raw measures the raw weights; the pipeline that is saved holds their average")


def check_first_images(config: TrainConfig) -> None:
    """Refuse a first look at more images than there are."""
    few, images = config.validation.first_images, config.validation.images_per_target
    if config.validation.targets is not None and few > images:
        raise UserError(f"validation.first_images: is {few}, of {images} images_per_target; give fewer, or 0 for all")


def check_places(config: TrainConfig) -> None:
    """Refuse an output folder among the inputs: a run would write into them, or delete them."""
    targets = config.validation.targets
    if targets is not None and not Path(targets).exists():
        targets = targets.rpartition("@")[0] or targets  # folder@100-109
    keys = ("train_data_dir", "clean_data_dir", "dataset_name", "pretrained_model_name_or_path", "sample_prompts")
    read = {key: getattr(config, key) for key in keys} | {
        "validation.targets": targets,
        "validation.embedder_path": config.validation.embedder_path,
        "validation.clip_path": config.validation.clip_path,
        "validation.placebo": config.validation.placebo,
    }
    owned.refuse_overlap(config.output_dir, read, (*RunFolder.WRITTEN, *RunFolder.REPLACED))


def check_records(config: TrainConfig, info: DataInfo, records: Records) -> None:
    """Refuse a part that would have nothing to act on among the records."""
    memory, phrases = config.memory, records.phrases
    if memory.region.name == "mask" and not records.masked:
        raise UserError(
            "memory.region.name=mask: no record has a mask; give masks in the metadata, or set memory.region.name to "
            "estimated, which finds them from at least 4 pictures a phrase"
        )
    if memory.retention.unconditional and "clean" not in info.roles:
        raise UserError("memory.retention.unconditional: the data holds no clean record to show without caption")
    made = ["rehearsal"] if memory.rehearsal.name in REHEARSED else []
    unseen = {"clean"} if memory.sampler.clean_ratio == 0 else set()
    roles.refuse_absent(memory, {*info.roles, *made} - unseen)
    if memory.retention.name == "self_distillation" and unseen:
        raise UserError(
            "memory.retention.name=self_distillation: acts on clean records, of which memory.sampler.clean_ratio 0 "
            "shows none; leave one of them out"
        )
    between = config.gradient_control.between
    idle = {*between.levels} - {*info.roles, *made} - {*type(between)().levels}
    if between.name != "none" and idle:
        raise UserError(f"gradient_control.between.levels: there is no {min(idle)} record to act on; leave it out")
    if memory.rehearsal.name == "leak_free":
        captioned = ("rehearsal", "clean") if roles.dropout(memory).get("clean", 0) < 1 else ("rehearsal",)
        if not any(role in captioned and len(phrases[r]) > 1 for r, role in enumerate(info.roles)):
            raise UserError(
                "memory.rehearsal.name=leak_free: joins phrases of clean and rehearsal records; none with a caption "
                "has two"
            )
    rehearsed = memory.rehearsal.name in REHEARSED
    if config.gradient_control.uses_hypergradient and not (rehearsed or "rehearsal" in info.roles):
        raise UserError(
            f"gradient_control.name={config.gradient_control.name}: learns from rehearsals, of which there are none; "
            "set memory.rehearsal.name to leak_free or pairwise, or give records of role rehearsal"
        )


REPEATS = 64  # times that a record may stand in one micro-batch


def dry_run_config(config: Any, scratch: str) -> Any:
    """The configuration of a dry run: its folder is `scratch`, its caches are the run's, and it resumes what the run
    would."""
    asked = config.resume_from_checkpoint
    found = checkpoint.resolve(asked, Path(config.output_dir) / "checkpoints") if asked else None
    return replace(config, output_dir=scratch, resume_from_checkpoint=None if found is None else str(found))


def evaluations_after_end(config: TrainConfig, total: int) -> str | None:
    """One line on points of the recovery curve that lie after the last step, if there are any."""
    late = [step for step in config.validation.early_steps if step > total]
    if config.validation.targets is None or not late:
        return None
    return f"validation.early_steps: {late[0]} lies after the last step, {total}, and is not measured"


def check_batch(config: TrainConfig, records: int) -> None:
    """Refuse a micro-batch far above the number of records."""
    size, most = config.train_batch_size, REPEATS * records
    if size > most:
        raise UserError(
            f"train_batch_size: {size} samples of {records} records; each may stand {REPEATS} times in a micro-batch, "
            f"so at most {most}"
        )


def check_buckets(config: TrainConfig) -> None:
    """Refuse, beside buckets, what looks at pictures of one size."""
    memory = config.memory
    alone = {
        "compile_model": config.compile_model,
        "memory.region.name=estimated": memory.region.name == "estimated",
        "memory.phrase_memory.enabled": memory.phrase_memory.enabled,
        f"memory.distillation.name={memory.distillation.name}": memory.distillation.name != "none",
        f"memory.attention_binding.name={memory.attention_binding.name}": memory.attention_binding.name != "none",
    }
    for key, on in alone.items():
        if config.buckets and on:
            raise UserError(f"buckets: {key} works on pictures of one size; leave one of them out")


def bucket_step(config: TrainConfig, side: int, factor: int) -> int:
    """What the sides of the buckets are multiples of; 0 where images are squares. The pipeline takes multiples of
    `factor`."""
    if not config.buckets:
        return 0
    step = config.bucket_step or buckets.default_step(side, factor)
    if step % factor or side % step:
        raise UserError(
            f"bucket_step: {step} must be a multiple of {factor}, which the pipeline needs, and divide the "
            f"resolution {side}"
        )
    return step


def check_captions(config: TrainConfig, records: Records) -> None:
    """Refuse a token warm-up that would cut no caption."""
    commas = pc.match_substring(records.column("text"), ",")
    if config.token_warmup_step and config.memory.rehearsal.name == "none" and not pc.any(commas).as_py():
        raise UserError(
            "token_warmup_step: shows the first parts of a caption, between commas; no caption of the data has a comma"
        )


# ---------------------------------------------------------------- of a family of models
OF_EPSILON = ("min_snr", "soft_min_snr", "debiased", "p2")  # losses whose papers weigh the error of a noise estimate


def check_family(config: TrainConfig, family: Family, sharded: bool = False) -> None:
    """Refuse what has no meaning on a family's path, or is not there for its layers; `sharded` as in `build`."""
    rows = unfit_flow(config, family.name) if family.flow else []
    rows += unfit_transformer(config, family, sharded) if family.backbone != "unet" else []
    for key, on, why in rows:
        if on:
            raise UserError(f"{key}: {why}")


def unfit_flow(config: TrainConfig, family: str) -> list[tuple[str, bool, str]]:
    """(key, whether it is set so, why a rectified flow cannot have it and what can)."""
    loss, velocity = config.memory.loss, f"{family} predicts the velocity of a flow"
    weight = "snr_gamma" if config.snr_gamma is not None else f"memory.loss.name={loss.name}"
    dream = "dream_training" if config.dream_training else "memory.loss.dream"
    return [
        ("prediction_type", config.prediction_type is not None, f"{velocity} and nothing else; leave it out"),
        (
            weight,
            loss.name in OF_EPSILON,
            f"weighs the error of epsilon, and {velocity}; take none, x0, cosmap or sigma_sqrt as memory.loss.name",
        ),
        (dream, loss.dream is not None, f"rectifies an estimate of epsilon, and {velocity}; leave it out"),
        (
            "noise_offset",
            config.noise_offset > 0,
            f"mends a path that ends before pure noise, and {velocity}, which ends there; leave it 0",
        ),
    ]


def unfit_transformer(config: TrainConfig, kind: Family, sharded: bool) -> list[tuple[str, bool, str]]:
    """(key, whether it is set so, why and what can) of what reads layers of a UNet, or is untested without one."""
    memory, control = config.memory, config.gradient_control
    rules = control.name.split("+")
    of_prior = control.options.get("prior", {}) if len(rules) > 1 else control.options
    copied = control.options.get("of", "prior+gsnr") if "placebo" in rules else ""
    family, maps = kind.name, f"reads maps of cross-attention, and {kind.name} has {kind.attention}"
    return [
        ("train_text_encoder", config.train_text_encoder, f"is not there for {family}; leave it out"),
        ("memory.attention_binding.name", memory.attention_binding.name != "none", f"{maps}; leave it none"),
        (
            "memory.distillation.options.gate",
            memory.distillation.options.get("gate") == "attention",
            f"attention {maps}; take mask",
        ),
        (
            "gradient_control.name",
            "prior" in rules and of_prior.get("table") is None,
            f"the rows of prior are about a UNet, and {family} has none; give option 'table', or take gsnr",
        ),
        (
            "gradient_control.name",
            "prior" in copied,
            f"placebo: option 'of' is {copied}, whose rows are about a UNet, and {family} has none; take gsnr",
        ),
        (
            "accelerate",
            sharded,
            f"FSDP is tested on UNets alone, not on {family}; use configs/accelerate/ddp.yaml",
        ),
        (
            "enable_xformers_memory_efficient_attention",
            config.enable_xformers_memory_efficient_attention,
            f"xformers has no {kind.attention}, as {family} has; leave it off",
        ),
    ]


# ---------------------------------------------------------------- before any weights load
def check_machine(config: TrainConfig) -> None:
    """Refuse what this machine or the pipeline's own settings cannot do."""
    check_optimizer(config)
    check_precision(config.mixed_precision or "no", "mixed_precision")
    if config.enable_xformers_memory_efficient_attention:
        check_xformers()
