"""Refusals that look at more than one part of the configuration, or at the records too; no
weights have loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from silentbad.data import buckets
from silentbad.data.elements import DataInfo
from silentbad.data.records import Records
from silentbad.distributed.start import check_precision
from silentbad.errors import UserError
from silentbad.loop.optimizers import facts_of, optimizer_class
from silentbad.memory import roles
from silentbad.model.family import Family
from silentbad.model.pipeline import check_xformers
from silentbad.saving import checkpoint
from silentbad.settings.memory import REHEARSED
from silentbad.settings.optimizers import check_optimizer, read_optimizer
from silentbad.settings.rules import Facts, check_rules
from silentbad.settings.train import TrainConfig


def check_records(config: TrainConfig, info: DataInfo, records: Records) -> None:
    """Refuse a part that would have nothing to act on among the records."""
    memory, phrases = config.memory, records.phrases
    if memory.region.name == "mask" and not records.masked:
        raise UserError(
            "memory.region.name=mask: no record has a mask; give masks in the metadata, or set "
            "memory.region.name to "
            "estimated, which finds them from at least 4 pictures a phrase"
        )
    if memory.retention.unconditional and "clean" not in info.roles:
        raise UserError(
            "memory.retention.unconditional: the data holds no clean record to show without caption"
        )
    made = ["rehearsal"] if memory.rehearsal.name in REHEARSED else []
    unseen = {"clean"} if memory.sampler.clean_ratio == 0 else set()
    roles.refuse_absent(memory, {*info.roles, *made} - unseen)
    if memory.retention.name == "self_distillation" and unseen:
        raise UserError(
            "memory.retention.name=self_distillation: acts on clean records, of which "
            "memory.sampler.clean_ratio 0 "
            "shows none; leave one of them out"
        )
    between = config.gradient_control.between
    idle = {*between.levels} - {*info.roles, *made} - {*type(between)().levels}
    if between.name != "none" and idle:
        raise UserError(
            f"gradient_control.between.levels: there is no {min(idle)} record to act "
            f"on; leave it out"
        )
    if memory.rehearsal.name == "leak_free":
        captioned = (
            ("rehearsal", "clean") if roles.dropout(memory).get("clean", 0) < 1 else ("rehearsal",)
        )
        if not any(role in captioned and len(phrases[r]) > 1 for r, role in enumerate(info.roles)):
            raise UserError(
                "memory.rehearsal.name=leak_free: joins phrases of clean and rehearsal records; "
                "none with a caption "
                "has two"
            )
    rehearsed = memory.rehearsal.name in REHEARSED
    if config.gradient_control.uses_hypergradient and not (rehearsed or "rehearsal" in info.roles):
        raise UserError(
            f"gradient_control.name={config.gradient_control.name}: learns from rehearsals, of "
            f"which there are none; "
            "set memory.rehearsal.name to leak_free or pairwise, or give records of role rehearsal"
        )


REPEATS = 64  # times that a record may stand in one micro-batch


def dry_run_config(config: Any, scratch: str) -> Any:
    """The configuration of a dry run: its folder is `scratch`, its caches are the run's, and it
    resumes what the run would."""
    asked = config.resume_from_checkpoint
    found = checkpoint.resolve(asked, Path(config.output_dir) / "checkpoints") if asked else None
    return replace(
        config, output_dir=scratch, resume_from_checkpoint=None if found is None else str(found)
    )


def evaluations_after_end(config: TrainConfig, total: int) -> str | None:
    """One line on points of the recovery curve that lie after the last step, if there are any."""
    late = [step for step in config.validation.early_steps if step > total]
    if config.validation.targets is None or not late:
        return None
    return (
        f"validation.early_steps: {late[0]} lies after the last step, {total}, and is not measured"
    )


def check_batch(config: TrainConfig, records: int) -> None:
    """Refuse a micro-batch far above the number of records."""
    size, most = config.train_batch_size, REPEATS * records
    if size > most:
        raise UserError(
            f"train_batch_size: {size} samples of {records} records; each may stand {REPEATS} "
            f"times in a micro-batch, "
            f"so at most {most}"
        )


def bucket_step(config: TrainConfig, side: int, factor: int) -> int:
    """What the sides of the buckets are multiples of; 0 where images are squares. The pipeline
    takes multiples of `factor`."""
    if not config.buckets:
        return 0
    step = config.bucket_step or buckets.default_step(side, factor)
    if step % factor or side % step:
        raise UserError(
            f"bucket_step: {step} must be a multiple of {factor}, which the pipeline needs, and "
            f"divide the "
            f"resolution {side}"
        )
    return step


def check_captions(config: TrainConfig, records: Records) -> None:
    """Refuse a token warm-up that would cut no caption."""
    commas = pc.match_substring(records.column("text"), ",")
    if (
        config.token_warmup_step
        and config.memory.rehearsal.name == "none"
        and not pc.any(commas).as_py()
    ):
        raise UserError(
            "token_warmup_step: shows the first parts of a caption, between commas; no caption "
            "of the data has a comma"
        )


# ---------------------------------------------------------------- of a family of models
def check_family(config: TrainConfig, family: Family, sharded: bool = False) -> None:
    """Refuse what has no meaning on a family's path, or is not there for its layers; `sharded`
    as in `build`."""
    check_rules(config, {}, Facts(family=family, sharded=sharded), about=("FLOW", "TRANSFORMER"))


# ---------------------------------------------------------------- before any weights load
def check_machine(config: TrainConfig, sources: dict[str, str]) -> None:
    """Refuse an optimizer that does not import, and what this machine cannot do."""
    optimizer = facts_of(optimizer_class(config))
    if read_optimizer(config) is None:  # else it was checked by its source
        check_optimizer(config, optimizer)
        about = ("AVERAGING", "AVERAGE", "AVERAGE_UNMEASURED", "BETAS", "EPS", "WEIGHT_DECAY")
        check_rules(config, sources, Facts(optimizer=optimizer), about)
    check_precision(config.mixed_precision or "no", "mixed_precision")
    if config.enable_xformers_memory_efficient_attention:
        check_xformers()
