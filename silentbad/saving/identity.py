"""What a checkpoint and the run that takes it up must have in common: settings, targets, records,
base, embedder.

A curve of which one half was measured against another target, or trained at another rate, says
nothing; so the facts of a run stand in each checkpoint, and a run whose facts differ is refused.
`FREE` are the flags that may change."""

import hashlib
import json
import math
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from silentbad.data.images import content_hash
from silentbad.data.records import Records
from silentbad.data.table import blocks
from silentbad.data.targets import Target
from silentbad.errors import UserError, brief
from silentbad.files import read_json
from silentbad.measure.embedders import MICRO
from silentbad.measure.thresholds import load_redraws
from silentbad.saving.checkpoint import sha256
from silentbad.settings import user_code
from silentbad.settings.train import NEVER_SAVED, TrainConfig, own_code

FILE = "facts.json"  # of a checkpoint
READ = (".json", ".txt", ".model", ".safetensors", ".pt")  # of a folder of weights

FREE = {
    "length": ("max_train_steps", "num_train_epochs"),
    "where it writes": (
        "output_dir",
        "stamp_output_dir",
        "run_suffix",
        "overwrite_output_dir",
        "cache_dir",
    ),
    "checkpoints and pipelines": (
        *("checkpointing_steps", "checkpoints_total_limit", "resume_from_checkpoint"),
        *("save_ckpt_epoch_interval", "save_best", "lora.merged"),
    ),
    "logs and pictures": (
        *("log_every", "report_to", "tracker_project_name", "logging_dir"),
        *("validation_prompts", "validation_epochs", "sample_prompts", "validation.sample_targets"),
    ),
    "when recovery is measured": (
        *("validation.steps", "validation.early_steps", "validation.controls"),
        *("validation.first_images", "validation.settled_after"),
    ),
    "the Hub": ("push_to_hub", "hub_token", "hub_model_id"),
    "speed and memory": (
        *(
            "cache_mb",
            "disk_cache_gb",
            "dataloader_num_workers",
            "max_batch_size",
            "validation.max_batch",
        ),
        *("allow_tf32", "channels_last", "compile_model", "gradient_checkpointing"),
        *("enable_xformers_memory_efficient_attention", "offload_ema", "foreach_ema"),
    ),
    "what only stops or shows": (
        "max_nonfinite_steps",
        "dry_run",
        "print_groups",
        "allow_target_images",
    ),
}
# Compared by what they lead to, not by their names: a folder may move.
BY_CONTENT = (
    "pretrained_model_name_or_path",
    "train_data_dir",
    "dataset_name",
    "clean_data_dir",
    "validation.targets",
)
BUNDLED, WORDS = "bundled embedder", "description and paraphrases"
HELD_OUT, TABLES, GUARDING = "held-out records", "prior tables", "pictures of guard.scan"
NULLS = "null pictures"
CODE = "the file of "  # of the user's own code
# that say no more than "changed"
DIGESTS = ("base", "records", BUNDLED, HELD_OUT, TABLES, GUARDING, NULLS)
# Compared as their product, with the number of processes.
BATCH = ("train_batch_size", "gradient_accumulation_steps")


def facts(
    config: TrainConfig,
    records: Records,
    held_out: Records | None,
    targets: list[Target],
    embedder: str | None,
    effective_batch: int,
    guarding: list[Path],
) -> dict[str, Any]:
    """The facts of a run, as plain values: {name: value}; `guarding` are the pictures that its
    guards read."""
    left_out = {name for names in FREE.values() for name in names} | {
        *BY_CONTENT,
        *BATCH,
        *NEVER_SAVED,
    }
    settings = {key: value for key, value in _flat(asdict(config)).items() if key not in left_out}
    weights = {
        key: settings.get(key)
        for key in ("validation.embedder_path", "validation.clip_path", "guard.scan")
    }
    weights["base"] = config.pretrained_model_name_or_path
    code = user_code.record(own_code(config))
    settings |= {
        "gradient_control.name": user_code.short(config.gradient_control.name),
        "hooks": [user_code.short(place) for place in config.hooks],
    }
    of_run = settings | {
        **{f"{CODE}{user_code.short(place)}": entry["sha256"] for place, entry in code.items()},
        "effective batch": effective_batch,
        **{key: None if name is None else weights_digest(name) for key, name in weights.items()},
        "records": records_digest(records),
        HELD_OUT: None if held_out is None else records_digest(held_out),
        TABLES: [weights_digest(table) for table in _tables(config.gradient_control.options)],
        GUARDING: [weights_digest(str(picture)) for picture in guarding],
        NULLS: nulls_digest(config.validation.targets, targets),
        "number of records": len(records),
        "embedder": embedder,
        **{f"target {target.target_id!r}": target_digest(target) for target in targets},
        **{f"target {target.target_id!r}, {WORDS}": words_digest(target) for target in targets},
    }
    bundled = (
        config.validation.embedder in ("auto", "copy", "micro")
        and not config.validation.embedder_path
    )
    if embedder is not None and bundled:
        of_run[BUNDLED] = weights_digest(str(MICRO))
    return json.loads(json.dumps(of_run, default=str))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested parts as dotted keys; options stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        part = isinstance(value, dict) and key not in ("options", "weights", "optimizer_options")
        flat |= _flat(value, f"{prefix}{key}.") if part else {prefix + key: value}
    return flat


@cache
def _defaults() -> dict[str, Any]:
    """{flag: default}, as `facts` has them; those of the parts (memory.*, ...) belong to other
    modules."""
    return json.loads(json.dumps(_flat(asdict(TrainConfig())), default=str))


def _tables(options: Any) -> list[str]:
    """The tables that options of scale rules name, also of rules inside others."""
    if not isinstance(options, dict):
        return []
    inner = [table for value in options.values() for table in _tables(value)]
    return [options["table"], *inner] if isinstance(options.get("table"), str) else inner


# ---------------------------------------------------------------- digests
def weights_digest(name: str) -> str:
    """A digest over a local file or folder of weights; the name itself of what is on the Hub."""
    root = Path(name)
    if not root.exists():
        return name
    files = (
        [root]
        if root.is_file()
        else sorted(p for p in root.rglob("*") if p.suffix in READ and p.is_file())
    )
    # of a pipeline what is read: no other format of it, no safety checker
    if (root / "model_index.json").is_file():
        beside = {p for p in files if p.parent == root and p.suffix != ".json"}
        beside |= {p for p in files if p.parent == root / "safety_checker"}
        files = [p for p in files if p not in beside]
    digest = hashlib.sha256()
    for path in files:
        digest.update(
            f"{'' if path == root else path.relative_to(root).as_posix()} {sha256(path)}\n".encode()
        )
    return digest.hexdigest()[:16]


def records_digest(records: Records) -> str:
    """A digest over what records show and say, wherever their files lie."""
    digest = hashlib.sha256()
    for name in ("content", "text", "role", "target_id", "element_id", "phrases"):
        for block in blocks(records.column(name)):
            digest.update(json.dumps(block).encode())
    for block in blocks(records.column("mask")):
        for mask in filter(None, block):
            digest.update(
                Path(mask).name.encode(errors="surrogateescape") + Path(mask).read_bytes()
            )
    return digest.hexdigest()[:16]


def target_digest(target: Target) -> str:
    """A digest over a target's picture, masks, phrases and prompt."""
    masks = [None if mask is None else content_hash(mask) for mask in target.masks]
    contents = [content_hash(target.image), masks, target.phrases, target.composed_prompt]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]


def words_digest(target: Target) -> str:
    """A digest over what only the controls and the null pictures ask for."""
    return hashlib.sha256(
        json.dumps([target.description, target.paraphrases]).encode()
    ).hexdigest()[:16]


def nulls_digest(targets_file: str | None, targets: list[Target]) -> str | None:
    """A digest over the null pictures beside the targets, which set the thresholds; None where
    there are none."""
    digest, redraws = hashlib.sha256(), load_redraws(targets_file, targets)
    for target, file, kind, changed in redraws:
        digest.update(f"{targets[target].target_id!r} {kind} {changed} {sha256(file)}\n".encode())
    return digest.hexdigest()[:16] if redraws else None


# ---------------------------------------------------------------- comparing
def read(folder: Path) -> dict[str, Any]:
    """The facts in a checkpoint."""
    try:
        facts = read_json(folder / FILE)
    except (OSError, ValueError):
        facts = None
    if not isinstance(facts, dict):
        raise UserError(f"{folder}: {FILE} is not readable; resume from another checkpoint")
    return facts


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """ "name was X, is Y" for each fact that differs; of `_defaults`, what a checkpoint does not
    know was at it."""
    then = {name: value for name, value in _defaults().items() if name in now} | then
    lines = []
    for name in dict.fromkeys([*now, *then]):
        in_both = name in then and name in now
        if in_both and _same(then[name], now[name]):
            continue
        if name.endswith(WORDS) and not in_both:
            continue  # of a target that is new or missing
        if name.startswith("target ") and not in_both:
            lines.append(f"{name} is {'new' if name in now else 'missing'}")
        elif name.startswith(("target ", CODE)) or name in DIGESTS:
            lines.append(f"{name} changed")
        else:
            was, is_ = (
                brief(facts[name]) if name in facts else "not known" for facts in (then, now)
            )
            lines.append(f"{name} was {was}, is {is_}")
    return lines


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, (int, float)) and not isinstance(b, bool):
        return math.isclose(a, b, rel_tol=1e-12)
    return a == b


def refuse_mixture(folder: Path, now: dict[str, Any]) -> None:
    """Refuse a checkpoint of other facts."""
    if lines := differences(read(folder), now):
        raise UserError(
            f"{folder}: cannot be resumed with other settings or data: {'; '.join(lines)}; "
            "resume with its config.yaml, or start a new run"
        )
