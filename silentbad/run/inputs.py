"""The data of a run, checked against the tokenizer and the targets before any weights load."""

from collections.abc import Callable
from typing import Any

from silentbad.data.draws import Reader, Transform
from silentbad.data.records import Records, load_records
from silentbad.data.targets import Target, check_prompts, load_targets
from silentbad.recovery.nulls import load_redraws
from silentbad.shield.guard import guarded


def prepare(config: Any, tokenizer: Any, first: Any, say: Callable) -> tuple[Records, Records | None, list[Target]]:
    """(records to train on, clean ones held out, targets), all checked; `first` lets one process build the table."""
    targets = load_targets(config.validation.targets) if config.validation.targets else []
    load_redraws(config.validation.targets, targets, decode=True)
    with first():
        records = guarded(load_records(config), config.guard)
    if not config.allow_target_images:
        records.refuse_targets(targets)
    for line in records.strangers(targets):
        say(f"warning: {line}")
    if config.memory.region.name == "estimated" and not config.center_crop:
        records.refuse_random_windows()
    if config.withhold:
        records = records.without(config.withhold)
    check_prompts(targets, tokenizer)
    for line in records.check_captions(tokenizer):
        say(f"warning: {line}; its end is cut off")
    return *records.hold_out(config.held_out_clean, config.seed), targets


def clean_records(records: Records, transform: Transform, seed: int) -> list[dict[str, Any]]:
    """Held-out records as the drift measurement takes them: pixel_values (3,R,R) in [-1,1] and text."""
    pictures = Reader(records, transform, seed).pictures(list(range(len(records))))
    return [{"pixel_values": p["pixels"].float() / 127.5 - 1, "text": p["text"]} for p in pictures]
