"""What needs what and what excludes what among the settings of a run: two tables and one loop.

`needs=` beside a field (`silentbad.settings.types.option`) says under which condition it has an
effect; INCOMPATIBLE lists pairs of conditions that may not hold at once. A condition is one of

    use_ema                        differs from its default
    lr_scheduler=cosine|linear     is one of these; of a combination such as mask+cap, a part is
    guard.name!=none|drop          has a part that is none of these
    FLOW                           a fact about the run: an entry of FACTS

and "a or b" holds where one of them does. research/settings.md shows both tables.
"""

import dataclasses
import os
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silentbad.errors import UserError, warn
from silentbad.settings.optimizers import ELEMENTWISE, OptimizerFacts
from silentbad.settings.reader import FLAGS

if TYPE_CHECKING:
    from silentbad.settings.train import TrainConfig

INSTEAD = "use configs/accelerate/ddp.yaml"  # where a launch in shards cannot have something
OF_EPSILON = (
    "min_snr",
    "soft_min_snr",
    "debiased",
    "p2",
)  # losses whose papers weigh a noise error


# ---------------------------------------------------------------- facts
@dataclass
class Facts:
    """What a condition may ask beside the settings; None where it is not known yet."""

    optimizer: OptimizerFacts | None = None
    family: Any = None  # silentbad.model.family.Family, once the pipeline's index was read
    sharded: bool = False  # `accelerate launch` was told to use FSDP

    def words(self, config: "TrainConfig") -> dict[str, Any]:
        """What the reasons of INCOMPATIBLE may name."""
        family = self.family
        return {
            "optimizer": self.optimizer.name if self.optimizer else config.optimizer,
            "family": family.name if family else "",
            "attention": family.attention if family else "",
            "precision": precision_of(config),
        }


def precision_of(config: "TrainConfig") -> str:
    """The precision of a run: its flag's, else accelerate's own setting."""
    return config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def _is_layout(config: "TrainConfig", facts: Facts) -> bool:
    folder = Path(config.train_data_dir or "")
    return (folder / "poisoning_images").is_dir() or not folder.is_dir()  # if missing, said later


def _averages(config: "TrainConfig", facts: Facts) -> bool | None:
    return None if facts.optimizer is None else facts.optimizer.averages


def _keeps_average(config: "TrainConfig", facts: Facts) -> bool | None:
    return config.use_ema or _averages(config, facts)


def _average_unmeasured(config: "TrainConfig", facts: Facts) -> bool | None:
    return config.validation.weights == "raw" and _keeps_average(config, facts)


def _takes(option: str) -> Callable[["TrainConfig", Facts], bool | None]:
    return lambda config, facts: (
        None if facts.optimizer is None else option in facts.optimizer.options
    )


def _whole_tensors(config: "TrainConfig", facts: Facts) -> bool:
    return config.use_8bit_adam or config.optimizer.removeprefix("torch.optim.") not in ELEMENTWISE


def _rows_of_prior(config: "TrainConfig", facts: Facts) -> bool:
    """Whether gradient control takes the rows of configs/prior.yaml."""
    control = config.gradient_control
    rules = control.name.split("+")
    options = control.options.get("prior", {}) if len(rules) > 1 else control.options
    return "prior" in rules and options.get("table") is None


def _copies_prior(config: "TrainConfig", facts: Facts) -> bool:
    """Whether a placebo copies the rows of configs/prior.yaml."""
    control = config.gradient_control
    rules = control.name.split("+")
    options = control.options.get("placebo", {}) if len(rules) > 1 else control.options
    return "placebo" in rules and "prior" in options.get("of", "prior+gsnr").split("+")


def _other_gamma(config: "TrainConfig", facts: Facts) -> bool:
    return config.memory.loss.options.get("gamma", config.snr_gamma) != config.snr_gamma


Test = Callable[["TrainConfig", Facts], "bool | None"]  # None: not known yet
FACTS: dict[str, tuple[str, str, Test]] = {  # name -> (the key it is about, its words, the test)
    "LAYOUT": ("train_data_dir", "train_data_dir of the published layout", _is_layout),
    "HUB": (
        "pretrained_model_name_or_path",
        "a pipeline of the Hub",
        lambda config, facts: not Path(config.pretrained_model_name_or_path or "").is_dir(),
    ),
    "AVERAGING": ("optimizer", "an optimizer that averages weights itself", _averages),
    "AVERAGE": ("use_ema", "use_ema", _keeps_average),
    "AVERAGE_UNMEASURED": (
        "validation.weights",
        "validation.weights=raw beside averaged weights",
        _average_unmeasured,
    ),
    "BETAS": ("optimizer", "an optimizer with betas", _takes("betas")),
    "EPS": ("optimizer", "an optimizer with eps", _takes("eps")),
    "WEIGHT_DECAY": ("optimizer", "an optimizer with weight_decay", _takes("weight_decay")),
    "WHOLE_TENSORS": (
        "optimizer",
        f"another optimizer than {', '.join(ELEMENTWISE)}",
        _whole_tensors,
    ),
    "OTHER_GAMMA": ("memory.loss.options", "another memory.loss.options.gamma", _other_gamma),
    "LEARNING_RULE": (
        "gradient_control.name",
        "gradient_control.name=hypergradient, or its placebo",
        lambda config, facts: config.gradient_control.uses_hypergradient,
    ),
    "PRIOR_ROWS": (
        "gradient_control.name",
        "gradient_control.name=prior without a table",
        _rows_of_prior,
    ),
    "PRIOR_COPIED": ("gradient_control.name", "a placebo of prior", _copies_prior),
    "FSDP": ("accelerate", "FSDP", lambda config, facts: facts.sharded),
    "LOSS_SCALE": (
        "mixed_precision",
        "mixed_precision=fp16",
        lambda config, facts: precision_of(config) not in ("no", "bf16"),
    ),
    "FLOW": ("", "Stable Diffusion 3", lambda config, facts: facts.family and facts.family.flow),
    "TRANSFORMER": (
        "",
        "Stable Diffusion 3",
        lambda config, facts: facts.family and facts.family.backbone != "unet",
    ),
}


# ---------------------------------------------------------------- the table
LAYERWISE = "gradient_control.between.name!=none|uniform"  # each backward is then of one source
OF_ONE_SIZE = "{b} works on pictures of one size; leave one of them out"
WHOLE_BATCH = "is defined over a whole micro-batch"
ON_THEIR_WAY = (
    "takes the sources' gradients apart, which between.name={b_value} scales on their way; leave "
    "one of them out"
)
KEPT_APART = "composes what guard.name={b_value} keeps apart; leave one of them out"
NOT_ADAMW = "is for optimizer AdamW, not for {b} {b_value}; leave one of them out"
SECOND_MODEL = f"keeps a second UNet beside the shards, whole; turn it off, or {INSTEAD}"
NOT_REDUCED = f"takes gradients apart before FSDP has reduced them; turn it off, or {INSTEAD}"
MAPS = "reads maps of cross-attention, and {family} has {attention}"
VELOCITY = "{family} predicts the velocity of a flow"
OTHER_LOSSES = "take none, x0, cosmap or sigma_sqrt as memory.loss.name"

# (a condition, one that may not hold beside it, why and what can); the line begins with the first.
# {a}, {b} are the keys, {a_value}, {b_value} their values, the others in `Facts.words`.
INCOMPATIBLE: list[tuple[str, str, str]] = [
    # data and output
    ("dataset_name", "train_data_dir", "excludes train_data_dir; give one of them"),
    (
        "stamp_output_dir",
        "resume_from_checkpoint=latest",
        "starts a new folder, which has no latest; give the earlier one as output_dir",
    ),
    (
        "overwrite_output_dir",
        "resume_from_checkpoint",
        "excludes resume_from_checkpoint; set one of them",
    ),
    (
        "hub_token",
        "report_to=wandb|all",
        "would be visible to {b_value}; log in with hf auth login instead",
    ),
    ("buckets", "compile_model", OF_ONE_SIZE),
    ("buckets", "memory.region.name=estimated", OF_ONE_SIZE),
    ("buckets", "memory.phrase_memory.enabled", OF_ONE_SIZE),
    ("buckets", "memory.distillation.name", OF_ONE_SIZE),
    ("buckets", "memory.attention_binding.name", OF_ONE_SIZE),
    # optimizer
    ("use_8bit_adam", "optimizer!=AdamW", "excludes optimizer {b_value}; set one of them"),
    ("use_ema", "AVERAGING", "{optimizer} keeps an average of the weights itself; set one of them"),
    (
        "save_best",
        "AVERAGE_UNMEASURED",
        "keeps the averaged weights, which validation.weights=raw does not measure; set "
        "validation.weights to ema or both",
    ),
    (
        "gradient_control.spectral",
        "gradient_control.shrink",
        "does not go with shrink: each is an update of its own",
    ),
    ("gradient_control.shrink", "use_8bit_adam", NOT_ADAMW),
    ("gradient_control.spectral", "use_8bit_adam", NOT_ADAMW),
    ("gradient_control.shrink", "optimizer!=AdamW", NOT_ADAMW),
    ("gradient_control.spectral", "optimizer!=AdamW", NOT_ADAMW),
    (
        "gradient_control.shrink",
        "adam_beta1=0.0",
        "adam_beta1 0 averages nothing to tell noise by; 0.9 does",
    ),
    # losses
    (
        "dream_training",
        "prediction_type=v_prediction|sample",
        "works with epsilon prediction only; prediction_type is {b_value}",
    ),
    ("dream_training", "input_perturbation", "excludes input_perturbation; set one of them"),
    (
        "snr_gamma",
        "memory.loss.name!=none|min_snr",
        "means memory.loss.name=min_snr, which is set to {b_value}; set one of them",
    ),
    (
        "snr_gamma",
        "OTHER_GAMMA",
        "is another name of memory.loss.options.gamma, which differs; set one of them",
    ),
    # sources of a batch
    ("gradient_control.conflict", LAYERWISE, ON_THEIR_WAY),
    ("gradient_control.transform", LAYERWISE, ON_THEIR_WAY),
    ("LEARNING_RULE", LAYERWISE, ON_THEIR_WAY),
    (
        "compile_model",
        LAYERWISE,
        "{b}={b_value} cuts batches by source into many shapes, all to be compiled; leave one "
        "of them out",
    ),
    *(
        (
            LAYERWISE,
            whole_batch,
            f"{{b}}={{b_value}} {WHOLE_BATCH}, which it cuts; leave one of them out",
        )
        for whole_batch in (
            "memory.attention_binding.name=mass",
            "memory.loss_balance.name=gradient_norm",
        )
    ),
    *(
        (
            "max_batch_size",
            whole_batch,
            f"{{b}}={{b_value}} {WHOLE_BATCH}; lower train_batch_size and raise "
            f"gradient_accumulation_steps instead",
        )
        for whole_batch in (
            "memory.attention_binding.name=mass",
            "memory.loss_balance.name=gradient_norm",
        )
    ),
    # memory
    (
        "memory.sampler.name=weakest_first|leitner",
        "memory.phrase_memory.enabled=false",
        "{a_value} needs memory.phrase_memory.enabled=true",
    ),
    (
        "memory.distillation.name=and",
        "memory.phrase_memory.enabled=false",
        "{a_value} needs memory.phrase_memory.enabled=true",
    ),
    (
        "memory.rehearsal.name=joint_captions|pairwise|pairwise_captions",
        "memory.region.name=none",
        "{a_value} needs memory.region.name=mask: its loss is where elements stand",
    ),
    (
        "memory.region.name=estimated",
        "random_flip",
        "estimated finds each element at its native place, which random_flip moves; leave one "
        "of them out",
    ),
    # guards
    (
        "guard.name",
        "guard.scan=null",
        "{a_value} needs guard.scan, the scan.json of a scan; make it with `python -m "
        "silentbad.scan`",
    ),
    (
        "guard.name=drop",
        "guard.name=mask|cap",
        "{a_value}: drop leaves no suspect record to mask or cap; leave one of them out",
    ),
    ("memory.rehearsal.name", "guard.name!=none|drop", KEPT_APART),
    ("memory.distillation.name", "guard.name!=none|drop", KEPT_APART),
    ("memory.attention_binding.name", "guard.name!=none|drop", KEPT_APART),
    (
        "memory.region.name=estimated",
        "guard.name=mask",
        "estimated stresses what recurs, which guard mask leaves out; take one of them",
    ),
    (
        "guard.name=project",
        "mixed_precision=fp16",
        "the gradient of project has no loss scale; use mixed_precision bf16 or no",
    ),
    # several processes
    ("use_ema", "FSDP", SECOND_MODEL),
    ("memory.distillation.name", "FSDP", SECOND_MODEL),
    ("memory.retention.name", "FSDP", SECOND_MODEL),
    (
        "memory.attention_binding.name",
        "FSDP",
        f"reads layers inside what FSDP gathers, untested; leave it none, or {INSTEAD}",
    ),
    (
        "LOSS_SCALE",
        "FSDP",
        "FSDP trains in bf16 or no here, not in {precision}, whose loss scale does not know shards",
    ),
    (
        "WHOLE_TENSORS",
        "FSDP",
        f"FSDP gives each process a shard of a tensor, {{optimizer}} may need it whole; take "
        f"{', '.join(ELEMENTWISE)}",
    ),
    ("lora.rank", "FSDP", f"FSDP shards what trains, and adapters are small; {INSTEAD}"),
    ("train_text_encoder", "FSDP", f"FSDP shards the UNet alone; {INSTEAD}"),
    (
        "compile_model",
        "FSDP",
        "FSDP acts inside a step's passes, untested compiled; leave it off",
    ),
    ("channels_last=true", "FSDP", "FSDP shards contiguous weights only; leave it off"),
    ("gradient_control.conflict", "FSDP", NOT_REDUCED),
    ("gradient_control.transform", "FSDP", NOT_REDUCED),
    ("LEARNING_RULE", "FSDP", NOT_REDUCED),
    (LAYERWISE, "FSDP", NOT_REDUCED),
    ("memory.loss_balance.name", "FSDP", NOT_REDUCED),
    (
        "gradient_control.spectral",
        "FSDP",
        "takes a matrix whole, FSDP in shards; turn it off",
    ),
    (
        "guard.name=project",
        "FSDP",
        "project works on whole gradients, FSDP shards them; leave it out",
    ),
    # a rectified flow
    ("prediction_type", "FLOW", f"{VELOCITY} and nothing else; leave it out"),
    ("snr_gamma", "FLOW", f"weighs the error of epsilon, and {VELOCITY}; {OTHER_LOSSES}"),
    (
        f"memory.loss.name={'|'.join(OF_EPSILON)}",
        "FLOW",
        f"{{a_value}} weighs the error of epsilon, and {VELOCITY}; {OTHER_LOSSES}",
    ),
    ("dream_training", "FLOW", f"rectifies an estimate of epsilon, and {VELOCITY}; leave it out"),
    (
        "memory.loss.dream",
        "FLOW",
        f"rectifies an estimate of epsilon, and {VELOCITY}; leave it out",
    ),
    (
        "noise_offset",
        "FLOW",
        f"mends a path that ends before pure noise, and {VELOCITY}, which ends there; leave it 0",
    ),
    # a transformer
    ("train_text_encoder", "TRANSFORMER", "is not there for {family}; leave it out"),
    ("memory.attention_binding.name", "TRANSFORMER", f"{MAPS}; leave it none"),
    ("memory.distillation.options.gate=attention", "TRANSFORMER", f"attention {MAPS}; take mask"),
    (
        "PRIOR_ROWS",
        "TRANSFORMER",
        "the rows of prior are about a UNet, and {family} has none; give option 'table', "
        "or take gsnr",
    ),
    (
        "PRIOR_COPIED",
        "TRANSFORMER",
        "placebo: option 'of' names prior, whose rows are about a UNet, and {family} has "
        "none; take gsnr",
    ),
    (
        "FSDP",
        "TRANSFORMER",
        "FSDP is tested on UNets alone, not on {family}; use configs/accelerate/ddp.yaml",
    ),
    (
        "enable_xformers_memory_efficient_attention",
        "TRANSFORMER",
        "xformers has no {attention}, as {family} has; leave it off",
    ),
]


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
        return FACTS[self.key][0] if self.sign == "fact" else self.key

    @property
    def words(self) -> str:
        """The condition as a reader sees it."""
        if self.sign == "fact":
            return FACTS[self.key][1]
        return f"{self.key}{self.sign}{' or '.join(self.values)}"

    def holds(self, config: Any, default: Any, facts: Facts) -> bool | None:
        """Whether it does; None where a fact is not known yet."""
        if self.sign == "fact":
            return FACTS[self.key][2](config, facts)
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


# ---------------------------------------------------------------- the loop
def check_rules(
    config: Any, sources: Mapping[str, str], facts: Facts, about: Collection[str] | None = None
) -> None:
    """Refuse what excludes what, and options without effect.

    `about`: only rows on these facts.
    """
    default = type(config)()
    for first, second, why in INCOMPATIBLE:
        a, b = Condition.of(first), Condition.of(second)
        if about is not None and not {a.key, b.key} & {*about}:
            continue
        if a.holds(config, default, facts) and b.holds(config, default, facts):
            where = f" ({sources[a.about]})" if a.about in sources else ""
            words = facts.words(config) | _values(config, a, "a") | _values(config, b, "b")
            raise UserError(f"{a.about}{where}: {why.format(**words)}")
    check_needs(config, sources, facts, about)


def check_needs(
    config: Any, sources: Mapping[str, str], facts: Facts, about: Collection[str] | None = None
) -> None:
    """Refuse options without effect."""
    default = type(config)()
    for key, field in fields_of(type(config)):
        needs = field.metadata.get("needs")
        if needs and (about is None or needs in about):
            _check_need(config, default, sources, facts, key, needs, field.metadata["idle"])


def _values(config: Any, condition: Condition, name: str) -> dict[str, Any]:
    key = condition.about
    return {name: key, f"{name}_value": value_of(config, key) if condition.sign != "fact" else ""}


def _check_need(
    config: Any,
    default: Any,
    sources: Mapping[str, str],
    facts: Facts,
    key: str,
    needs: str,
    idle: str,
) -> None:
    """Refuse an option without effect, or warn of it where a file may hold it."""
    changed = value_of(config, key) != value_of(default, key)
    as_flag = sources.get(key) == FLAGS
    if not (changed or as_flag and idle != "refused"):
        return
    conditions = [Condition.of(text) for text in needs.split(" or ")]
    if any(condition.holds(config, default, facts) is not False for condition in conditions):
        return
    where = f" ({sources.get(key, 'default')})"
    needed = " or ".join(condition.words for condition in conditions)
    line = f"{key}{where}: needs {needed}, without which it has no effect"
    if as_flag or idle == "refused":
        raise UserError(line)
    if idle == "said" and key in sources:
        warn(line)


def tables(cls: type) -> str:
    """Both tables, as research/settings.md shows them."""
    lines = ["| option | has an effect with | in a file without it |", "|---|---|---|"]
    idle = {"refused": "refused", "said": "a warning", "kept": "kept"}
    for key, field in fields_of(cls):
        if needs := field.metadata.get("needs"):
            words = " or ".join(f"{Condition.of(text).words}" for text in needs.split(" or "))
            lines.append(f"| `{key}` | {words} | {idle[field.metadata['idle']]} |")
    lines += ["", "| setting | not beside |", "|---|---|"]
    for first, second, _ in INCOMPATIBLE:
        lines.append(f"| {_cell(first)} | {_cell(second)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return Condition.of(text).words.replace("|", " or ")
