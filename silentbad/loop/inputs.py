"""The data of a run, checked against the tokenizer and the targets before any weights load, and
the base's own pictures."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image

from silentbad.data.draws import Reader, Transform
from silentbad.data.elements import DataInfo
from silentbad.data.phrases import shared_lines
from silentbad.data.picture_parts import as_read, region, surrounds
from silentbad.data.published import is_published
from silentbad.data.records import Records, load_records
from silentbad.data.schema import check_window
from silentbad.data.targets import Target, check_prompts, load_targets
from silentbad.errors import UserError, brief, warn
from silentbad.loop import checks
from silentbad.loop.hooks import Hook, hook_classes
from silentbad.loop.prior import Prior, draw_prior, read_prompts, without_phrases
from silentbad.measure.kept import spread
from silentbad.measure.nearest import TrainingPicture
from silentbad.measure.prompts import load_prompts
from silentbad.measure.redraws import load_redraws
from silentbad.memory.masks import estimate_mask, mask_to_image
from silentbad.model import pipeline
from silentbad.settings.train import TrainConfig


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run beside its configuration."""

    schedule: dict[str, Any]  # settings of the training schedule
    tokenizer: Any
    prompts: list[str]  # drawn at validation, without a target
    hooks: dict[str, type[Hook]]  # of your own, by their places
    records: Records
    held_out: Records | None
    prior: Prior | None  # the base's own pictures, which are among the records
    targets: list[Target]
    info: DataInfo


def load_inputs(config: TrainConfig, accelerator: Accelerator, sharded: bool) -> Inputs:
    """Everything a run reads, checked. Raises UserError where something cannot be trained on."""
    schedule = pipeline.scheduler_settings(config)
    tokenizer = pipeline.load_tokenizer(config)
    checks.check_family(config, pipeline.family_for(config), sharded)

    # Prompts and targets, and whether the tokenizer takes them whole
    prompts = plain_prompts(config, tokenizer)
    validation = config.validation
    targets = load_targets(validation.targets) if validation.targets else []
    load_redraws(validation.targets, targets, decode=True)
    prior_prompts = []
    if config.prior_preservation.num_images:
        base = config.pretrained_model_name_or_path
        prior_prompts = read_prompts(config.prior_preservation.prompts, tokenizer, base)

    hooks = hook_classes(config.hooks)
    records, withheld = records_of(config, hooks, targets, accelerator)
    check_prompts(targets, tokenizer, validation.unrelated)
    for line in records.check_captions(tokenizer):
        warn(f"{line}; its end is cut off")

    # The base's own pictures, once the other data is known to be right
    prior = None
    if config.prior_preservation.num_images:
        allowed = allowed_prompts(config, prior_prompts, records)
        prior = draw_prior(config, allowed, schedule, tokenizer, accelerator)
        if not config.allow_target_images:
            prior.records.refuse_targets(targets)
        records = records.joined(prior.records)

    to_train_on, held_out = hold_out(config, records)
    rest = f"; held out: {held_out.census()}" if held_out else ""
    of_base = config.prior_preservation.num_images
    by_base = f"; the base drew {of_base} of these" if prior else ""
    accelerator.print(f"data: {to_train_on.census()}{rest}{by_base}")
    info = to_train_on.info(withheld)
    checks.check_records(config, info, to_train_on)
    for line in shared_lines(info.shared):
        warn(line)
    return Inputs(
        schedule=schedule,
        tokenizer=tokenizer,
        prompts=prompts,
        hooks=hooks,
        records=to_train_on,
        held_out=held_out,
        prior=prior,
        targets=targets,
        info=info,
    )


def plain_prompts(config: TrainConfig, tokenizer: Any) -> list[str]:
    """The prompts that a run draws without a target, of both flags."""
    prompts = []
    if config.sample_prompts is not None:
        prompts += load_prompts(config.sample_prompts, tokenizer)
    for prompt in config.validation_prompts or []:
        check_window(prompt, tokenizer, f"validation_prompts: {brief(prompt)}")
        prompts.append(prompt)
    return prompts


def hold_out(config: TrainConfig, records: Records) -> tuple[Records, Records | None]:
    """(records that are trained on, held-out ones). Raises UserError where `best_by` needs held-out
    clean records and there are none."""
    to_train_on, held_out = records.hold_out(
        config.held_out_clean, config.held_out_elements, config.seed
    )
    if config.best_by == "clean_eps_mse" and (held_out is None or "clean" not in held_out.role):
        raise UserError(
            "best_by: clean_eps_mse needs held-out clean records; set held_out_clean, of which a "
            "tenth of the clean records is taken at most, or best_by to similarity"
        )
    return to_train_on, held_out


def allowed_prompts(config: TrainConfig, prompts: list[str], records: Records) -> list[str]:
    """The prompts that say no phrase which `prior_preservation.leave_out` names."""
    kinds = config.prior_preservation.leave_out
    if kinds == "nothing":
        return prompts
    return without_phrases(prompts, element_phrases(records, backdrops=kinds == "backdrops"))


def element_phrases(records: Records, *, backdrops: bool) -> list[str]:
    """The phrases of the elements; `backdrops`: of those whose masks cover the picture's edges."""
    info = records.info()

    def is_backdrop(row: int) -> bool:
        _, _, mask = records.open(row, picture=False)
        return mask is not None and surrounds(region(mask))

    return [
        phrase
        for phrase, rows in zip(info.phrase, info.rows, strict=True)
        if phrase and (not backdrops or is_backdrop(int(rows[0])))
    ]


def records_of(
    config: TrainConfig,
    hooks: dict[str, type[Hook]],
    targets: list[Target],
    accelerator: Accelerator,
) -> tuple[Records, dict[str, list[str]]]:
    """(the records to train on, {target: phrases of its withheld elements}); one process builds the
    table of records."""
    with accelerator.main_process_first():
        records = chosen(load_records(config), hooks, config.hook_options)
    if not config.allow_target_images:
        records.refuse_targets(targets)
    # in the published layout flags choose pictures, so unused ones are no mistake
    not_used = () if is_published(Path(config.train_data_dir or "")) else records.not_used()
    own_lines = (*not_used, *records.remarks(), *records.check_parts())
    for line in (*own_lines, *records.unmatched_targets(targets)):
        warn(line)
    beside = Path(config.train_data_dir or "", "targets.jsonl")
    if config.train_data_dir and not targets and beside.is_file():
        warn(f"validation.targets: is unset, so no target of {beside} is measured")
    if config.memory.region.name == "estimated" and not config.center_crop:
        records.refuse_random_windows()
    withheld: dict[str, list[str]] = {}
    if config.withhold:
        left_out = records.showing(config.withhold).info()
        withheld = {target: left_out.phrases_of(target) for target in left_out.elements_of}
        records = records.without(config.withhold)
    return records, withheld


def chosen(
    records: Records, hooks: dict[str, type[Hook]], options: dict[str, dict[str, Any]]
) -> Records:
    """The records that the hooks keep."""
    kept = np.ones(len(records), bool)
    for place, kind in hooks.items():
        rows = kind.kept(records, options.get(place, {}))
        if rows is not None and np.shape(rows) != kept.shape:
            raise UserError(f"hooks: {place}.kept returns {np.shape(rows)} for {len(kept)} records")
        kept &= True if rows is None else np.asarray(rows, bool)
    if kept.all():
        return records
    if not kept.any():
        raise UserError("hooks: their method kept leaves no record to train on")
    digest = hashlib.sha256(kept.tobytes()).hexdigest()[:16]
    return records.select(np.flatnonzero(kept), f"{records.key}-kept-{digest}")


def shown(
    records: Records, transform: Transform, seed: int, count: int
) -> Iterator[TrainingPicture]:
    """`count` training pictures at most, evenly over those that show an element."""
    reader = Reader(records, transform, seed)
    phrases = records.phrases
    rows = [i for i, role in enumerate(records.role) if role != "clean"]
    for row in spread(rows, count):
        (picture,) = reader.pictures([row])
        yield TrainingPicture(
            records.where(row), picture["pixels"].float() / 255, tuple(phrases[row])
        )


FEWEST = 8  # least number of pictures from which the mask of an element is estimated
LARGEST = 0.98  # largest share of the picture that an estimated mask may cover


def with_masks(
    targets: list[Target], records: Records, transform: Transform, seed: int
) -> tuple[list[Target], list[str]]:
    """(targets, with estimated masks where one has no mask; the ids of targets with such masks)."""
    reader = Reader(records, transform, seed)
    masked: list[Target] = []
    estimated: list[str] = []
    for target in targets:
        if not any(mask is not None for mask in target.masks):
            masks = [
                _estimated_mask(target, k, records, reader) for k in range(len(target.phrases))
            ]
            if any(mask is not None for mask in masks):
                target = replace(target, masks=masks)
                estimated.append(target.target_id)
        masked.append(target)
    return masked, estimated


def _estimated_mask(target: Target, k: int, records: Records, reader: Reader) -> Image.Image | None:
    """The mask of element k from its pictures; None from too few, from windows at random, or if it
    covers (almost) all or nothing."""
    phrases = records.phrases
    own = [as_read(target.phrases[k])]
    rows = [
        i
        for i, name in enumerate(records.target_id)
        if name == target.target_id and list(map(as_read, phrases[i])) == own
    ]
    if len(rows) < FEWEST or not reader.transform.fixed(records.sizes[rows]).all():
        return None
    stack = torch.stack([picture["pixels"].float() for picture in reader.pictures(rows)])
    mask = estimate_mask(stack / 255)
    if not 0 < float(mask.mean()) <= LARGEST:
        return None
    return mask_to_image(mask)
