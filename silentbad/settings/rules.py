"""Tables of rules between the settings of a run: which setting needs another, which exclude each
other, which flags set others, which flags a resume may change.

`needs=` beside a field (`silentbad.settings.types.option`) says under which condition it has an
effect; INCOMPATIBLE lists pairs of conditions that may not hold at once. A condition is one of

    use_ema                        differs from its default
    lr_scheduler=cosine|linear     is one of these; of a combination such as a+b, a part is
    report_to!=none|all            has a part that is none of these
    FLOW                           a fact about the run: an entry of FACTS

and in `needs=` "a or b" holds where one of them does. ALIASES lists the flags that set others,
FREE those that a resume may change. research/settings.md shows the tables.
"""

import dataclasses
import os
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from silentbad.errors import UserError, warn
from silentbad.settings.optimizer_facts import ELEMENTWISE, OptimizerFacts
from silentbad.settings.reader import FLAGS

if TYPE_CHECKING:
    from silentbad.settings.train import TrainConfig
    from silentbad.settings.validation import ValidationConfig


# ---------------------------------------------------------------- facts
@dataclass
class Facts:
    """The facts that conditions use beside the settings; None where one is not known yet."""

    optimizer: OptimizerFacts | None = None
    family: Any = None  # silentbad.model.family.Family, once the pipeline's index was read
    sharded: bool = False  # `accelerate launch` requests FSDP
    redraws: bool | None = None  # whether there are redraws beside the targets
    masks: bool | None = None  # whether an element of a target has a mask


class Fact(typing.NamedTuple):
    """A condition that is more than one key's value."""

    key: str  # that a message names
    words: str
    holds: Callable[["TrainConfig", Facts], Any]  # None: not known yet


def precision_of(config: "TrainConfig") -> str:
    """The precision of a run: its flag's, else accelerate's own setting."""
    return config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def _is_layout(config: "TrainConfig", facts: Facts) -> bool:
    folder = Path(config.train_data_dir or "")
    # a missing folder is reported later
    return (folder / "poisoning_images").is_dir() or not folder.is_dir()


def _averages(config: "TrainConfig", facts: Facts) -> bool | None:
    return None if facts.optimizer is None else facts.optimizer.averages


def _takes(option: str) -> Fact:
    return Fact(
        "optimizer",
        f"an optimizer with {option}",
        lambda config, facts: facts.optimizer and option in facts.optimizer.options,
    )


FACTS = {
    "LAYOUT": Fact("train_data_dir", "train_data_dir of the published layout", _is_layout),
    "HUB": Fact(
        "pretrained_model_name_or_path",
        "a pipeline of the Hub",
        lambda config, facts: not Path(config.pretrained_model_name_or_path or "").is_dir(),
    ),
    "AVERAGING": Fact("optimizer", "an optimizer that averages weights itself", _averages),
    "AVERAGE": Fact(
        "use_ema", "use_ema", lambda config, facts: config.use_ema or _averages(config, facts)
    ),
    "AVERAGE_UNMEASURED": Fact(
        "validation.weights",
        "validation.weights=raw beside averaged weights",
        lambda config, facts: (
            config.validation.weights == "raw" and (config.use_ema or _averages(config, facts))
        ),
    ),
    "BETAS": _takes("betas"),
    "EPS": _takes("eps"),
    "WEIGHT_DECAY": _takes("weight_decay"),
    "WHOLE_TENSORS": Fact(
        "optimizer",
        f"another optimizer than {', '.join(ELEMENTWISE)}",
        lambda config, facts: (
            config.use_8bit_adam or config.optimizer.removeprefix("torch.optim.") not in ELEMENTWISE
        ),
    ),
    "FSDP": Fact("accelerate", "FSDP", lambda config, facts: facts.sharded),
    "LOSS_SCALE": Fact(
        "mixed_precision",
        "mixed_precision=fp16",
        lambda config, facts: precision_of(config) not in ("no", "bf16"),
    ),
    "FLOW": Fact(
        "", "Stable Diffusion 3", lambda config, facts: facts.family and facts.family.flow
    ),
    "TRANSFORMER": Fact(
        "",
        "Stable Diffusion 3",
        lambda config, facts: facts.family and facts.family.backbone != "unet",
    ),
    "NO_REDRAWS": Fact("", "no redraws.jsonl", lambda config, facts: facts.redraws is False),
    "NO_ELEMENTS": Fact(
        "",
        "a threshold, and targets without masks",
        lambda config, facts: config.validation.threshold is not None and facts.masks is False,
    ),
    "NO_NULLS": Fact(
        "",
        "null pictures made from the target",
        lambda config, facts: (
            facts.redraws is not None
            and config.validation.calibration in ("failures", *([] if facts.redraws else ["auto"]))
        ),
    ),
}


# ---------------------------------------------------------------- the table
LEAVE = "leave one of them out"
DDP = "use configs/accelerate/ddp.yaml"  # the advice where FSDP cannot have a setting
OF_ONE_SIZE = f"is for pictures of one size, which buckets are not; {LEAVE}"
NOT_ADAMW = f"is for optimizer AdamW, not for {{b}} {{b_value}}; {LEAVE}"
NO_SOURCE = f"adds a loss whose gradient is of no one source; {LEAVE}"
UNMEASURED = "{a_value} needs memory.phrase_memory.enabled=true"
SECOND_MODEL = f"keeps a second UNet beside the shards, whole; turn it off, or {DDP}"
NOT_REDUCED = f"takes gradients apart before FSDP has reduced them; turn it off, or {DDP}"
MAPS = "reads maps of cross-attention, and {family} has {attention}"
VELOCITY = "{family} predicts the velocity of a flow"
OF_EPSILON = f"weighs the error of epsilon, and {VELOCITY}; take none or x0 as memory.loss.name"
RECTIFIES = f"rectifies an estimate of epsilon, and {VELOCITY}; leave it out"

# {condition b: {condition a that may not hold beside b: the reason, and a way out}}. The error line
# begins with the key of a. A reason may use {a} and {b}, the two keys, {a_value} and {b_value},
# their values, and the names of `of_run` in `check_rules`.
INCOMPATIBLE: dict[str, dict[str, str]] = {
    # data and output
    "train_data_dir": {"dataset_name": "excludes train_data_dir; give one of them"},
    "resume_from_checkpoint": {
        "overwrite_output_dir": "excludes resume_from_checkpoint; set one of them"
    },
    "resume_from_checkpoint=latest": {
        "stamp_output_dir": "starts a new folder, which has no latest; give the earlier one"
    },
    "report_to=wandb|all": {
        "hub_token": "would be visible to {b_value}; log in with hf auth login instead"
    },
    "buckets": {
        "compile_model": OF_ONE_SIZE,
        "memory.region.name=estimated": OF_ONE_SIZE,
        "memory.phrase_memory.enabled": OF_ONE_SIZE,
        "memory.distillation.name": OF_ONE_SIZE,
    },
    # optimizer and losses
    "use_8bit_adam": {
        "channels_last=true": "bitsandbytes makes weights contiguous at every step; leave it off",
        "gradient_control.spectral": NOT_ADAMW,
    },
    "optimizer!=AdamW": {
        "use_8bit_adam": "excludes optimizer {b_value}; set one of them",
        "gradient_control.spectral": NOT_ADAMW,
        "learning_rate_unit=relative": NOT_ADAMW,
    },
    "AVERAGING": {"use_ema": "{optimizer} keeps an average of the weights itself; set one of them"},
    "AVERAGE_UNMEASURED": {
        "save_best": "keeps the averaged weights, which validation.weights=raw does not measure; "
        "set validation.weights to ema or both",
        "validation.keep": "saves the averaged weights, which validation.weights=raw does not "
        "measure; set validation.weights to ema or both",
    },
    "prediction_type=v_prediction|sample": {
        "dream_training": "works with epsilon prediction only; prediction_type is {b_value}"
    },
    "input_perturbation": {"dream_training": "excludes input_perturbation; set one of them"},
    "gradient_control.conflict": {
        "memory.retention.name": NO_SOURCE,
        "memory.distillation.name": NO_SOURCE,
    },
    # memory
    "memory.phrase_memory.enabled=false": {
        "memory.sampler.name=weakest_first": UNMEASURED,
    },
    "memory.region.name=none": {
        "memory.rehearsal.name=joint_captions|pairwise|pairwise_captions": (
            "{a_value} needs memory.region.name=mask or estimated, which keep the loss to the elements"
        ),
    },
    "memory.sampler.clean_ratio=0.0": {
        "memory.retention.name=self_distillation": (
            f"{{a_value}} acts on clean records, of which {{b}} 0 shows none; {LEAVE}"
        ),
        "prior_preservation.num_images": (
            f"draws clean records, of which {{b}} 0 shows none; {LEAVE}"
        ),
    },
    "random_flip": {
        "memory.region.name=estimated": (
            f"estimated finds elements at their native place, which random_flip moves; {LEAVE}"
        ),
    },
    # several processes
    "FSDP": {
        "use_ema": SECOND_MODEL,
        "memory.distillation.name": f"is untested beside shards; {DDP}",
        "memory.retention.name": SECOND_MODEL,
        "LOSS_SCALE": "FSDP trains in bf16 or no, not in {precision}: loss scaling knows no shards",
        "WHOLE_TENSORS": "FSDP gives each process a shard of a tensor, {optimizer} may need it "
        f"whole; take {', '.join(ELEMENTWISE)}",
        "lora.rank": f"FSDP shards what trains, and adapters are small; {DDP}",
        "train_text_encoder": f"FSDP shards the UNet alone; {DDP}",
        "compile_model": "FSDP acts inside a step's passes, untested compiled; leave it off",
        "channels_last=true": "FSDP shards contiguous weights only; leave it off",
        "gradient_control.conflict": NOT_REDUCED,
        "gradient_control.spectral": "needs whole matrices, FSDP has shards; turn it off",
        "learning_rate_unit=relative": f"measures a tensor whole, FSDP has shards; {DDP}",
    },
    # Stable Diffusion 3: a rectified flow, by a transformer
    "FLOW": {
        "prediction_type": f"{VELOCITY} and nothing else; leave it out",
        "snr_gamma": OF_EPSILON,
        "memory.loss.name=min_snr": f"{{a_value}} {OF_EPSILON}",
        "dream_training": RECTIFIES,
        "memory.loss.dream": RECTIFIES,
        "noise_offset": f"is for a path that ends before pure noise; {VELOCITY}; leave it 0",
    },
    "TRANSFORMER": {
        "train_text_encoder": "is not there for {family}; leave it out",
        "memory.distillation.options.gate=attention": f"attention {MAPS}; take mask",
        "FSDP": f"FSDP is tested on UNets alone, not on {{family}}; {DDP}",
        "enable_xformers_memory_efficient_attention": (
            "xformers has no {attention}, as {family} has; leave it off"
        ),
    },
}

# The same of a measurement, once a run or an audit has targets.
OF_MEASUREMENT: dict[str, dict[str, str]] = {
    "validation.embedder!=sscd": {
        "validation.embedder_sha256": "is of sscd's file, not of {b_value}"
    },
    "validation.embedder=ssim": {
        "validation.embedder_path": "has no effect on ssim, which has no weights; leave it unset"
    },
    "NO_REDRAWS": {
        "validation.calibration=redraws": "redraws needs a redraws.jsonl beside the targets"
    },
    "NO_ELEMENTS": {
        "validation.false_positive_rate": "calibrates a threshold, and one is given; leave one out"
    },
    "NO_NULLS": {
        "validation.false_positive_rate": "calibrates on redraws.jsonl, which is not used here; a "
        "threshold between failures and copies has none; leave it out"
    },
}

# {a flag of diffusers' scripts: {a setting that it sets: the value as text, or in braces the flag
# that gives the value}}
ALIASES = {
    "snr_gamma": {"memory.loss.name": "min_snr", "memory.loss.options.gamma": "{snr_gamma}"},
    "dream_training": {"memory.loss.dream": "{dream_detail_preservation}"},
}


# What a resume may change; of the others `silentbad/saving/identity.py` compares values or contents.
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
        *("validation.keep", "validation.keep_by"),
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


# ---------------------------------------------------------------- conditions
@dataclass(frozen=True)
class Condition:
    """One condition, taken apart: a key or a fact, and the values it is compared with."""

    key: str
    sign: str  # "", "=", "!=" or "fact"
    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> "Condition":
        if text in FACTS:
            return cls(text, "fact")
        key, sign, values = text.partition("!=") if "!=" in text else text.partition("=")
        return cls(key, sign, tuple(values.split("|")) if sign else ())

    @property
    def about(self) -> str:
        """The key that a message names."""
        return FACTS[self.key].key if self.sign == "fact" else self.key

    @property
    def words(self) -> str:
        """The condition as a reader sees it."""
        if self.sign == "fact":
            return FACTS[self.key].words
        return f"{self.key}{self.sign}{' or '.join(self.values)}"

    def holds(self, config: Any, default: Any, facts: Facts) -> bool | None:
        """Whether the condition holds; None where a fact is not known yet."""
        if self.sign == "fact":
            return FACTS[self.key].holds(config, facts)
        value = value_of(config, self.key)
        if not self.sign:
            return value != value_of(default, self.key)
        parts = set(as_text(value).split("+"))
        return bool(parts & {*self.values}) if self.sign == "=" else bool(parts - {*self.values})


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key; of an option that is not given, None."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part)
    return config


def put(config: Any, key: str, value: Any) -> None:
    """Set a dotted key, in place."""
    above, _, name = key.rpartition(".")
    holder = value_of(config, above) if above else config
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def as_text(value: Any) -> str:
    """A value as conditions write it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def fields_of(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """(dotted key, field) of a dataclass and of those nested in it."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from fields_of(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field


# ---------------------------------------------------------------- the checks
def pairs(table: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str, str]]:
    """(condition a, whose key begins the error line, condition b, the reason) of each row."""
    for second, row in table.items():
        for first, why in row.items():
            yield first, second, why


def broken(
    table: Mapping[str, Mapping[str, str]], config: Any, default: Any, facts: Facts
) -> Iterator[tuple[Condition, Condition, str]]:
    """The rows of a table whose conditions both hold."""
    for first, second, why in pairs(table):
        a = Condition.of(first)
        b = Condition.of(second)
        if a.holds(config, default, facts) and b.holds(config, default, facts):
            yield a, b, why


def check_rules(
    config: "TrainConfig",
    sources: Mapping[str, str],
    facts: Facts,
    about: Collection[str] | None = None,
) -> None:
    """Refuse settings that exclude each other, and options without effect. With `about`, check only
    the rules on these facts."""
    default = type(config)()
    of_run = {
        "optimizer": facts.optimizer.name if facts.optimizer else config.optimizer,
        "family": facts.family.name if facts.family else "",
        "attention": facts.family.attention if facts.family else "",
        "precision": precision_of(config),
    }
    for a, b, why in broken(INCOMPATIBLE, config, default, facts):
        if about is None or {a.key, b.key} & {*about}:
            where = f" ({sources[a.about]})" if a.about in sources else ""
            raise UserError(f"{a.about}{where}: {why.format(**of_run, **_words(config, a, b))}")
    if about is None:
        for flag, key, meant in meanings(config):
            value = value_of(config, key)
            if value not in (meant, value_of(default, key)):
                raise UserError(
                    f"{flag}: means {key}={meant}, which is set to {value}; set one of them"
                )
    check_needs(config, sources, facts, about)


def check_measurement(validation: "ValidationConfig", facts: Facts, prefix: str) -> None:
    """Refuse settings of a measurement that exclude each other; `prefix` begins its keys in
    messages."""
    config = SimpleNamespace(validation=validation)
    default = SimpleNamespace(validation=type(validation)())
    for a, b, why in broken(OF_MEASUREMENT, config, default, facts):
        raise UserError(
            f"{prefix}{a.about.removeprefix('validation.')}: {why.format(**_words(config, a, b))}"
        )


def _words(config: Any, a: Condition, b: Condition) -> dict[str, Any]:
    """The names that a reason may use."""
    return {
        "a": a.about,
        "b": b.about,
        "a_value": "" if a.sign == "fact" else value_of(config, a.key),
        "b_value": "" if b.sign == "fact" else value_of(config, b.key),
    }


def meanings(config: "TrainConfig") -> Iterator[tuple[str, str, Any]]:
    """(flag, key, value) of the settings that the given flags of ALIASES set."""
    default = type(config)()
    for flag, settings in ALIASES.items():
        if value_of(config, flag) != value_of(default, flag):
            for key, text in settings.items():
                flag_of_value = text.strip("{}")
                yield flag, key, text if flag_of_value == text else value_of(config, flag_of_value)


def check_needs(
    config: Any, sources: Mapping[str, str], facts: Facts, about: Collection[str] | None = None
) -> None:
    """Refuse options without effect, or warn of one where a file may hold it."""
    default = type(config)()
    for key, field in fields_of(type(config)):
        needs = field.metadata.get("needs")
        idle = field.metadata.get("idle")
        if not needs or (about is not None and needs not in about):
            continue
        as_flag = sources.get(key) == FLAGS
        changed = value_of(config, key) != value_of(default, key)
        if not (changed or (as_flag and idle != "refused")):
            continue
        conditions = [Condition.of(text) for text in needs.split(" or ")]
        if any(condition.holds(config, default, facts) is not False for condition in conditions):
            continue
        needed = " or ".join(condition.words for condition in conditions)
        line = (
            f"{key} ({sources.get(key, 'default')}): needs {needed}, without which it has no effect"
        )
        if as_flag or idle == "refused":
            raise UserError(line)
        if idle == "warned" and key in sources:
            warn(line)
