"""Refusals that look at more than one part of the configuration, or at the records too; no weights have loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch

from silentbad import owned
from silentbad.data import buckets
from silentbad.data.elements import DataInfo
from silentbad.data.records import Records
from silentbad.data.table import TextLists
from silentbad.errors import UserError
from silentbad.memory import roles
from silentbad.memory.rehearsal import REHEARSED
from silentbad.model.pipeline import check_xformers
from silentbad.run.folder import RunFolder
from silentbad.run.optimizers import check_optimizer


def joined(config: Any) -> Any:
    """The configuration with the flat loss flags in the parts of `memory` they name; refuse parts that contradict each
    other."""
    loss = config.memory.loss
    if config.snr_gamma is not None:
        if loss.name not in ("none", "min_snr"):
            raise UserError(f"snr_gamma: means memory.loss.name=min_snr, which is set to {loss.name}; set one of them")
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


def check_places(config: Any) -> None:
    """Refuse an output folder among the inputs: a run would write into them, or delete them."""
    targets = config.validation.targets
    if targets is not None and not Path(targets).exists():
        targets = targets.rpartition("@")[0] or targets  # folder@100-109
    keys = ("train_data_dir", "clean_data_dir", "dataset_name", "pretrained_model_name_or_path", "sample_prompts")
    read = {key: getattr(config, key) for key in keys} | {
        "validation.targets": targets,
        "validation.embedder_path": config.validation.embedder_path,
        "validation.clip_path": config.validation.clip_path,
    }
    owned.refuse_overlap(config.output_dir, read, (*RunFolder.WRITTEN, *RunFolder.REPLACED))


def check_records(config: Any, info: DataInfo, phrases: TextLists) -> None:
    """Refuse a part that would have nothing to act on among the records; phrases[r] are what record r names."""
    memory = config.memory
    if memory.retention.unconditional and "clean" not in info.roles:
        raise UserError("memory.retention.unconditional: the data holds no clean record to show without caption")
    made = ["rehearsal"] if memory.rehearsal.name in REHEARSED else []
    roles.refuse_absent(memory, {*info.roles, *made})
    if memory.rehearsal.name == "leak_free":
        captioned = ("rehearsal", "clean") if roles.dropout(memory).get("clean", 0) < 1 else ("rehearsal",)
        if not any(role in captioned and len(phrases[r]) > 1 for r, role in enumerate(info.roles)):
            raise UserError(
                "memory.rehearsal.name=leak_free: joins phrases of clean and rehearsal records; none with a caption "
                "has two"
            )
    rehearsed = memory.rehearsal.name in REHEARSED
    if config.gradient_control.learns and not (rehearsed or "rehearsal" in info.roles):
        raise UserError(
            f"gradient_control.name={config.gradient_control.name}: learns from rehearsals, of which there are none; "
            "set memory.rehearsal.name to leak_free or pairwise, or give records of role rehearsal"
        )


def check_buckets(config: Any) -> None:
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


def bucket_step(config: Any, side: int, factor: int) -> int:
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


def check_captions(config: Any, records: Records) -> None:
    """Refuse a token warm-up that would cut no caption."""
    commas = pc.match_substring(records.column("text"), ",")
    if config.token_warmup_step and config.memory.rehearsal.name == "none" and not pc.any(commas).as_py():
        raise UserError(
            "token_warmup_step: shows the first parts of a caption, between commas; no caption of the data has a comma"
        )


# ---------------------------------------------------------------- before any weights load
def check_machine(config: Any) -> None:
    """Refuse what this machine or the pipeline's own settings cannot do."""
    check_optimizer(config)
    if config.mixed_precision == "fp16" and not torch.cuda.is_available():
        raise UserError("mixed_precision: fp16 needs a CUDA device; use bf16 or no")
    if config.enable_xformers_memory_efficient_attention:
        check_xformers()
