"""The facts that a checkpoint and the run that resumes it must share: settings, targets, records,
base, embedder.

A recovery curve means nothing if its target or learning rate changed halfway. So each checkpoint
holds the facts of its run, and a run whose facts differ is refused.
`FREE` in the settings' rules are the flags that may change."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from silentbad.data.images import content_hash
from silentbad.data.records import Records
from silentbad.data.table import blocks
from silentbad.data.targets import Target
from silentbad.errors import UserError, brief
from silentbad.files import read_json, sha256
from silentbad.measure.embedders import MICRO
from silentbad.measure.redraws import load_redraws
from silentbad.settings import user_code
from silentbad.settings.reader import flat
from silentbad.settings.rules import FREE
from silentbad.settings.train import TrainConfig, own_code
from silentbad.settings.types import NEVER_SAVED

FILE = "facts.json"  # of a checkpoint
READ = (".json", ".txt", ".model", ".safetensors", ".pt")  # of a folder of weights

# Compared by the content that they name, not by the name: a folder may move.
BY_CONTENT = (
    "pretrained_model_name_or_path",
    "train_data_dir",
    "dataset_name",
    "clean_data_dir",
    "prior_preservation.prompts",
    "validation.targets",
)
BUNDLED = "bundled embedder"
WORDS = "description and paraphrases"
HELD_OUT = "held-out records"
TABLES = "prior tables"
NULLS = "null pictures"
CODE = "the file of "  # of the user's own code
# facts whose difference is reported as "changed" alone
DIGESTS = ("base", "records", BUNDLED, HELD_OUT, TABLES, NULLS)
# Compared as one product together with the number of processes: the effective batch.
BATCH = ("train_batch_size", "gradient_accumulation_steps")


def facts(
    config: TrainConfig,
    records: Records,
    held_out: Records | None,
    targets: list[Target],
    embedder: str | None,
    effective_batch: int,
) -> dict[str, Any]:
    """The facts of a run."""
    left_out = {*BY_CONTENT, *BATCH, *NEVER_SAVED}.union(*FREE.values())
    if config.buckets:  # the order is of micro-batches of this size, each of one shape
        left_out.remove("train_batch_size")
    settings = {
        key: value for key, value in flat(_shortened(asdict(config))).items() if key not in left_out
    }
    files = ("validation.embedder_path", "validation.clip_path", "validation.prompts")
    weights = {key: settings.get(key) for key in files}
    weights["base"] = config.pretrained_model_name_or_path
    code = user_code.record(own_code(config))
    of_run = settings | {
        **{f"{CODE}{user_code.short(place)}": entry["sha256"] for place, entry in code.items()},
        "effective batch": effective_batch,
        **{key: None if name is None else weights_digest(name) for key, name in weights.items()},
        "records": records_digest(records),
        HELD_OUT: None if held_out is None else records_digest(held_out),
        TABLES: [weights_digest(table) for table in _tables(config.gradient_control.options)],
        NULLS: nulls_digest(config.validation.targets, targets),
        "number of records": len(records),
        "embedder": embedder,
    }
    for target in targets:
        masks = [None if mask is None else content_hash(mask) for mask in target.masks]
        scored = [content_hash(target.image), masks, target.phrases, target.composed_prompt]
        words = [target.description, target.paraphrases]  # which only controls and nulls use
        of_run[f"target {target.target_id!r}"] = _digest(scored)
        of_run[f"target {target.target_id!r}, {WORDS}"] = _digest(words)
    may_be_bundled = config.validation.embedder in ("auto", "copy", "micro")
    if embedder is not None and may_be_bundled and not config.validation.embedder_path:
        of_run[BUNDLED] = weights_digest(str(MICRO))
    return json.loads(json.dumps(of_run, default=str))


def _shortened(value: Any) -> Any:
    """Settings with the places of own code in short: a file may move."""
    if isinstance(value, dict):
        return {_shortened(key): _shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return user_code.short(value) if isinstance(value, str) else value


def _tables(options: Any) -> list[str]:
    """The tables that the options of scale rules name, nested rules included."""
    if not isinstance(options, dict):
        return []
    inner = [table for value in options.values() for table in _tables(value)]
    return [options["table"], *inner] if isinstance(options.get("table"), str) else inner


# ---------------------------------------------------------------- digests
def weights_digest(name: str) -> str:
    """A digest over a local file or folder of weights; for weights on the Hub, their name."""
    root = Path(name)
    if not root.exists():
        return name
    files = [root]
    if not root.is_file():
        files = sorted(p for p in root.rglob("*") if p.suffix in READ and p.is_file())
    # of a pipeline only the files that are read: no other format, no safety checker
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
    columns = ("content", "mask_content", "text", "role", "target_id", "element_id", "phrases")
    for name in columns:
        for block in blocks(records.column(name)):
            digest.update(json.dumps(block).encode())
    return digest.hexdigest()[:16]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def nulls_digest(targets_file: str | None, targets: list[Target]) -> str | None:
    """A digest over the null pictures beside the targets; None where there are none."""
    digest = hashlib.sha256()
    redraws = load_redraws(targets_file, targets)
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
    """A line for each fact that differs; a setting that the checkpoint lacks had its default."""
    defaults = json.loads(json.dumps(flat(asdict(TrainConfig())), default=str))
    # an older checkpoint compares the effective batch alone, also with buckets
    now = {name: value for name, value in now.items() if name in then or name not in BATCH}
    then = {name: value for name, value in defaults.items() if name in now} | _shortened(then)
    lines = []
    for name in dict.fromkeys([*now, *then]):
        in_both = name in then and name in now
        if in_both and then[name] == now[name]:
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
