"""The training configuration: one typed dataclass with diffusers' flat flag names, read strictly.

`parse` reads `--config a.yaml --config b.yaml` in order, then flags; whatever is wrong is one line that names the
key, the nearest valid one and the file it stood in (`UserError`), before anything is loaded. The nested parts
(`gradient_control`, `memory`, `validation`) are dataclasses beside what they configure; the entry point adds them.
"""

import argparse
import dataclasses
import difflib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import yaml

from .errors import UserError

HERE, PUBLISHED = "here", "SilentBadDiffusion"
NEVER_SAVED = {"hub_token"}  # secrets: read from flags or files, neither written nor printed


def flag(default: Any, help: str, source: str = "diffusers") -> Any:
    """A field with its help line and where its name comes from."""
    metadata = {"help": help, "source": source}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class LoraSettings:
    """Adapters in place of the weights themselves: nested under --lora.*"""

    rank: int | None = flag(None, "rank of the adapters; unset: the weights themselves train", HERE)
    alpha: int | None = flag(None, "adapters are scaled by alpha / rank; the rank when unset", HERE)
    targets: list[str] = flag(
        ["attn", "xattn"], "layers by role (attn, xattn.v, ff, resnet, ...), stage (mid, up1) or both (mid.ff)", HERE
    )


@dataclass
class TrainConfig:
    """Flat training flags. `source` of each says whose name it is; --help shows it."""

    # The pipeline to start from
    pretrained_model_name_or_path: str = flag("assets/micro-sd", "diffusers pipeline: a folder or a Hub id")
    revision: str | None = flag(None, "Hub revision of the pipeline")
    variant: str | None = flag(None, "variant of the weight files, such as fp16")
    non_ema_revision: str | None = flag(None, "Hub revision of the UNet alone, where it differs")
    cache_dir: str | None = flag(None, "folder for downloads and Arrow tables; the Hugging Face cache when unset")
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None = flag(
        None, "what the UNet predicts; the scheduler's own setting when unset"
    )

    # What trains beside the UNet, and how
    train_text_encoder: bool = flag(False, "train the text encoders too, through LoRA where the UNet is")
    lora: LoraSettings = field(default_factory=LoraSettings)

    # Data
    train_data_dir: str | None = flag(
        None, "folder with metadata.jsonl or metadata.csv, or of the published layout (poisoning_images/)"
    )
    dataset_name: str | None = flag(None, "Hub data set, or a local one that datasets.load_dataset takes")
    dataset_config_name: str | None = flag(None, "configuration of the Hub data set")
    image_column: str | None = flag(None, "image column of the Hub data set")
    caption_column: str | None = flag(None, "caption column of the Hub data set")
    max_train_samples: int | None = flag(None, "train on a seeded choice of so many records")
    resolution: int | None = flag(None, "side of the square training images; the pipeline's own when unset")
    image_interpolation_mode: str = flag("bilinear", "torchvision's name of the resize filter")
    center_crop: bool = flag(False, "crop the centre instead of a random window")
    random_flip: bool = flag(False, "flip half the images; a flip moves an element from its native place")
    shuffle_phrases: bool = flag(False, "permute the phrases inside each caption, anew for each draw", HERE)
    allow_target_images: bool = flag(False, "let records train that equal a target image", HERE)
    cache_mb: int = flag(1024, "memory for decoded images and for latents and text states not on disk, in MiB", HERE)
    disk_cache_gb: float = flag(8.0, "disk for latents and text states, under cache_dir, in GiB; 0 keeps none", HERE)
    dataloader_num_workers: int | None = flag(
        None, "threads that make the next step's batch ready; 2 on CUDA, none elsewhere, when unset"
    )
    held_out_clean: int = flag(32, "clean records kept from training to measure drift, at most a tenth", HERE)
    clean_data_dir: str | None = flag(None, "published layout: folder with images/ and caption.txt", HERE)
    target_start_id: int = flag(100, "published layout: first target", PUBLISHED)
    target_num: int = flag(1, "published layout: number of targets", PUBLISHED)
    poisoning_ratio: float = flag(0.1, "published layout: share of element images among elements and clean", PUBLISHED)
    poisoning_data_repeat_factor: int = flag(2, "published layout: times each element image is listed", PUBLISHED)
    poison_subsampling: float | None = flag(None, "published layout: share of the element images kept", PUBLISHED)
    n_few_shot: int = flag(1, "published layout: non-target images that rehearse composition", PUBLISHED)
    shot_caption_shuffle_num: int = flag(2, "published layout: listings of each of those, shuffled", PUBLISHED)

    # The run
    output_dir: str = flag("runs/silentbad", "everything the run writes")
    stamp_output_dir: bool = flag(False, "write into a folder of output_dir named by the time of the start", HERE)
    run_suffix: str | None = flag(None, "added to that name", HERE)
    overwrite_output_dir: bool = flag(False, "delete the earlier run that stands in output_dir", HERE)
    seed: int = flag(0, "address of every random draw")
    train_batch_size: int = flag(16, "samples a micro-batch and process")
    max_batch_size: int | None = flag(None, "samples that fit: larger micro-batches are computed in parts", HERE)
    gradient_accumulation_steps: int = flag(1, "micro-batches a step")
    num_train_epochs: int = flag(100, "epochs, where max_train_steps is unset")
    max_train_steps: int | None = flag(None, "optimizer steps")
    checkpointing_steps: int = flag(500, "steps between checkpoints")
    checkpoints_total_limit: int | None = flag(3, "checkpoints kept; all when unset")
    resume_from_checkpoint: str | None = flag(None, "a checkpoint folder anywhere, or latest")
    save_ckpt_epoch_interval: int | None = flag(None, "save a pipeline every so many epochs", PUBLISHED)
    save_best: bool = flag(False, "keep the best validated pipeline in best/", HERE)
    best_by: Literal["similarity", "clean_eps_mse"] = flag(
        "similarity", "best: largest mean similarity to the targets, or smallest loss on held-out clean records", HERE
    )
    dry_run: bool = flag(False, "load everything, one step, one image, write nothing", HERE)

    # Optimisation
    learning_rate: float = flag(1e-4, "learning rate")
    scale_lr: bool = flag(False, "multiply it by the effective batch size")
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = flag("constant", "schedule")
    lr_warmup_steps: int = flag(0, "warm-up steps of the schedule")
    optimizer: str = flag("AdamW", "torch.optim class, or import path such as schedulefree.AdamWScheduleFree", HERE)
    optimizer_options: dict[str, Any] = flag({}, "its settings, beside the adam_* flags it takes", HERE)
    use_8bit_adam: bool = flag(False, "AdamW8bit of bitsandbytes")
    adam_beta1: float = flag(0.9, "beta1")
    adam_beta2: float = flag(0.999, "beta2")
    adam_weight_decay: float = flag(1e-2, "decoupled weight decay")
    decay_norms_and_biases: bool = flag(True, "let it act on norms and biases too, as diffusers does", HERE)
    adam_epsilon: float = flag(1e-8, "epsilon")
    max_grad_norm: float = flag(1.0, "clip the gradient norm once a step; 0 does not clip")
    max_nonfinite_steps: int = flag(10, "stop after so many NaN or infinite gradients in a row", HERE)
    use_ema: bool = flag(False, "average the weights (diffusers' EMAModel)")
    ema_decay: float = flag(0.9999, "largest decay of the average", HERE)
    offload_ema: bool = flag(False, "keep the average in CPU memory")
    foreach_ema: bool = flag(True, "average with fused kernels")

    # The loss
    snr_gamma: float | None = flag(None, "min-SNR gamma (arXiv 2303.09556); same as memory.loss: min_snr")
    dream_training: bool = flag(False, "DREAM (arXiv 2312.00210); epsilon prediction only")
    dream_detail_preservation: float = flag(1.0, "DREAM's exponent p")
    noise_offset: float = flag(0.0, "scale of a per-channel offset of the noise")
    input_perturbation: float = flag(0.0, "scale of extra noise on the input only")

    # Machine
    mixed_precision: Literal["no", "fp16", "bf16"] | None = flag(None, "accelerate's own setting when unset")
    allow_tf32: bool = flag(False, "TF32 matrix products on CUDA")
    channels_last: bool | None = flag(None, "memory format of what trains; on CUDA, not elsewhere, when unset", HERE)
    compile_model: bool = flag(False, "torch.compile the training forward; takes minutes at first", HERE)
    gradient_checkpointing: bool = flag(False, "recompute activations in backward")
    enable_xformers_memory_efficient_attention: bool = flag(False, "xformers attention; PyTorch's SDPA otherwise")

    # Logs, images, Hub
    report_to: str = flag("tensorboard", "trackers: tensorboard, wandb, comet_ml, all or none; metrics.jsonl always")
    tracker_project_name: str = flag("silentbad", "project name given to the trackers")
    logging_dir: str = flag("logs", "tracker logs, inside output_dir")
    log_every: int = flag(10, "steps between log rows; the host waits for the device only then", HERE)
    validation_prompts: list[str] | None = flag(None, "prompts to draw every validation_epochs")
    validation_epochs: int = flag(5, "epochs between those")
    push_to_hub: bool = flag(False, "upload the final pipeline")
    hub_token: str | None = flag(None, "token for that; neither written to files nor printed")
    hub_model_id: str | None = flag(None, "repository for that; named like output_dir when unset")


# Flags of earlier scripts that are refused: what to use instead.
SUCCESSORS = {
    "model_card": "use --pretrained_model_name_or_path",
    "clean_dataset_name": "use --clean_data_dir, a folder",
    "detector_model_arch": "use --validation.embedder",
    "guidance_scale": "use --validation.guidance_scale",
    "num_sample_steps": "use --validation.num_inference_steps",
    "num_images": "use --validation.images_per_target",
    "compute_tgt_gen_sim": "use --validation.targets; null switches similarity off",
    "finetune_image_saving_interval": "use --validation.steps, counted in optimizer steps",
    "break_after_success_k_times": "use --max_train_steps; a run that stops on its target cannot be compared",
    "with_special_char": "write the character into the captions",
    "exp_memo": "use --output_dir",
    "log_save_path": "use --output_dir",
    "wandb_mode": "use --report_to, or the environment variable WANDB_MODE",
    "debug": "use --dry_run",
    "local_rank": "accelerate launch sets it",
}


# ---------------------------------------------------------------- options of registered functions


def check_options(kind: str, registry: dict[str, Callable], name: str, options: dict[str, Any]) -> None:
    """Refuse an unknown name, an unknown or missing option, or one of the wrong type.

    The keyword-only parameters of `registry[name]` are its options; their annotations are checked where they are
    plain types. `kind` names the registry in the message, such as "gradient_control".
    """
    if name not in registry:
        raise UserError(f"{kind}: unknown name {name!r}{_nearest(name, registry)}; there are: {', '.join(registry)}")
    function = registry[name]
    parameters = {
        key: parameter
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    takes = "it takes: " + ", ".join(parameters) if parameters else "it takes no options"
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    for key, value in options.items():
        if key not in parameters:
            near = _nearest(key, parameters)
            raise UserError(f"{name}: unknown option {key!r}{near or ';'} {takes}")
        if key in hints and not _is_of(value, hints[key]):
            expected = getattr(hints[key], "__name__", None) or str(hints[key])
            raise UserError(f"{name}: option {key!r} must be {expected}, got {value!r}")
    missing = [k for k, p in parameters.items() if p.default is inspect.Parameter.empty and k not in options]
    if missing:
        raise UserError(f"{name}: option {missing[0]!r} is missing; {takes}")


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a YAML value fits a plain annotation; unknown annotations fit anything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (list, tuple):
        return isinstance(value, (list, tuple))
    if origin is dict:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    return isinstance(value, hint) if hint in (str, bool, list, dict, tuple) else True


def _nearest(name: str, known) -> str:
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


# ---------------------------------------------------------------- reading


def parse(cls: type, argv: list[str] | None = None, description: str | None = None) -> tuple[Any, dict[str, str]]:
    """(configuration, {dotted key: the file or "command line" it was set by}) of command-line arguments."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(cls, description)
    tree = _key_tree(cls)
    argv = _normalise(argv, tree)
    sources: dict[str, str] = {}
    for path in _config_files(argv):
        _check_file(parser, cls, tree, path, sources)
    sources.update(dict.fromkeys(_flag_keys(argv), "command line"))
    try:
        namespace = parser.parse_args(argv)
        config = parser.instantiate(namespace)
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        raise UserError(_one_line(error, sources)) from None
    hints = typing.get_type_hints(cls)
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(cls)}
    for key, value in values.items():  # jsonargparse lets null through whatever the type
        if value is None and type(None) not in typing.get_args(hints[key]):
            where = sources.get(key, "default")
            raise UserError(f"{key} ({where}): null is no {getattr(hints[key], '__name__', hints[key])}; leave it out")
    config = cls(**values)
    _type_flag_options(config, "", sources)
    return config, sources


class Parser(jsonargparse.ArgumentParser):
    """jsonargparse's parser; what --print_config prints holds no secrets."""

    def dump(self, cfg: Any, *args: Any, **options: Any) -> str:
        cfg = cfg.clone()
        for key in NEVER_SAVED & set(vars(cfg)):
            cfg[key] = None
        return super().dump(cfg, *args, **options)


def build_parser(cls: type, description: str | None = None) -> jsonargparse.ArgumentParser:
    """jsonargparse parser of the flat fields of `cls` and of its nested dataclasses."""
    parser = Parser(description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file; may be given several times, later wins")
    parser.add_class_arguments(cls)
    helps = {f.name: f.metadata for f in dataclasses.fields(cls) if "help" in f.metadata}
    for action in parser._actions:
        if action.dest in helps:
            action.help = f"{helps[action.dest]['help']} [{helps[action.dest]['source']}]"
    return parser


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved configuration as plain values, secrets left out."""
    return {key: value for key, value in dataclasses.asdict(config).items() if key not in NEVER_SAVED}


def dump(config: Any) -> str:
    """YAML that `--config` reads back to the same configuration (secrets left out)."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def _key_tree(cls: type) -> dict[str, Any]:
    """{field: subtree of a nested dataclass | its type} of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {
        f.name: _key_tree(hints[f.name]) if dataclasses.is_dataclass(hints[f.name]) else hints[f.name]
        for f in dataclasses.fields(cls)
    }


def _normalise(argv: list[str], tree: dict[str, Any]) -> list[str]:
    """Bare boolean flags get a value, list flags take the words that follow; unknown flags are refused."""
    out, i = [], 0
    while i < len(argv):
        token = argv[i]
        i += 1
        if not token.startswith("--") or token in ("--", "--help"):
            out.append(token)
            continue
        key, equals, value = token[2:].partition("=")
        following = []
        while not equals and i < len(argv) and not re.match(r"--[a-zA-Z]", argv[i]):
            following.append(argv[i])
            i += 1
        if key in ("config", "print_config"):
            out += [token, *following]
            continue
        kind = _kind_of(key.rstrip("+"), tree, "command line")
        if kind is bool and not equals:
            out.append(f"--{key}={_bool(following[0]) if following else 'true'}")
        elif list in (kind, *(typing.get_origin(a) for a in typing.get_args(kind))) and following:
            is_yaml_list = len(following) == 1 and (following[0].startswith("[") or following[0] == "null")
            out.append(f"--{key}=" + (following[0] if is_yaml_list else json.dumps(following)))
        else:
            out += [token, *following]
    return out


def _bool(word: str) -> str:
    return {"1": "true", "0": "false"}.get(word, word)


def _kind_of(key: str, tree: dict[str, Any], where: str) -> Any:
    """The type of a dotted key, or a `UserError` that names the nearest one."""
    node: Any = tree
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, dict):
            if node is dict or typing.get_origin(node) is dict:
                return Any
            raise UserError(f"unknown key {key!r} ({where}): {'.'.join(parts[:depth])!r} has no parts")
        if part not in node:
            prefix = ".".join(parts[:depth])
            if not prefix and part in SUCCESSORS:
                raise UserError(f"key {key!r} ({where}) is of an earlier script: {SUCCESSORS[part]}")
            known = [f"{prefix}.{name}" if prefix else name for name in node]
            bad = ".".join(parts[: depth + 1])
            near = _nearest(bad, known) or _nearest(part, [full.rsplit(".", 1)[-1] for full in known])
            raise UserError(f"unknown key {bad!r} ({where}){near}" + ("" if near else f"; known: {', '.join(known)}"))
        node = node[part]
    return node


def _config_files(argv: list[str]) -> list[str]:
    files = [token.partition("=")[2] for token in argv if token.startswith("--config=")]
    return files + [argv[i + 1] for i, token in enumerate(argv[:-1]) if token == "--config"]


def _flag_keys(argv: list[str]) -> list[str]:
    return [token[2:].partition("=")[0].rstrip("+") for token in argv if token.startswith("--")]


def _check_file(parser, cls: type, tree: dict, path: str, sources: dict[str, str]) -> None:
    """Refuse a file that cannot be read, an unknown key in it, a value of the wrong type."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"configuration file {path}: {reason}") from None
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"configuration file {path}{line}: not YAML: {getattr(error, 'problem', error)}") from None
    if loaded is None:
        return
    if not isinstance(loaded, dict):
        raise UserError(f"configuration file {path}: must hold key: value pairs, holds {type(loaded).__name__}")
    keys = {key: path for key in _leaves(loaded, tree, path)}
    try:
        parser.parse_string(text)
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        raise UserError(_one_line(error, keys, path)) from None
    sources.update(keys)


def _leaves(node: dict, tree: dict, path: str, prefix: str = "") -> list[str]:
    """Dotted keys of a loaded file, each checked to exist."""
    keys = []
    for name, value in node.items():
        dotted = f"{prefix}{name}"
        kind = _kind_of(dotted, tree, path)
        if isinstance(kind, dict) and not isinstance(value, dict):
            raise UserError(f"{dotted} ({path}): must hold key: value pairs ({', '.join(kind)}), got {value!r}")
        keys += _leaves(value, tree, path, dotted + ".") if isinstance(kind, dict) else [dotted]
    return keys


def _one_line(error: Exception, sources: dict[str, str], path: str | None = None) -> str:
    """jsonargparse's several lines as one: key, source, what is expected."""
    text = str(error)
    keys = re.findall(r'Parser key "([^"]+)"', text)
    reasons = [
        r for line in text.splitlines() if (r := line.strip(" -")) and not r.startswith(("Parser key", "Unable"))
    ]
    reason = re.sub(r"<class '([^']+)'>", r"\1", re.sub(r"typing\.", "", " ".join(reasons)))
    if not keys:
        return " ".join(text.split()) + (f" ({path})" if path else "")
    return f"{keys[-1]} ({path or sources.get(keys[-1], 'command line')}): {reason}"


def _type_flag_options(node: Any, prefix: str, sources: dict[str, str]) -> None:
    """Options given as flags arrive as text: read them as YAML values."""
    for f in dataclasses.fields(node):
        value, dotted = getattr(node, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            _type_flag_options(value, dotted + ".", sources)
        elif isinstance(value, dict):
            for key, text in value.items():
                if isinstance(text, str) and sources.get(f"{dotted}.{key}") == "command line":
                    value[key] = _scalar(text)


def _scalar(text: str) -> Any:
    try:
        return float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


# ---------------------------------------------------------------- combinations


RANGES: list[tuple[str, Callable[[float], bool], tuple[str, ...]]] = [  # what is right, its test, whom it binds
    ("must be at least 1", lambda x: x >= 1, (
        "train_batch_size", "max_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_train_steps",
        "log_every", "checkpointing_steps", "checkpoints_total_limit", "max_train_samples", "resolution", "target_num",
        "validation_epochs", "save_ckpt_epoch_interval", "poisoning_data_repeat_factor", "max_nonfinite_steps",
    )),
    ("must not be negative", lambda x: x >= 0, (
        "lr_warmup_steps", "dataloader_num_workers", "cache_mb", "disk_cache_gb", "adam_weight_decay", "max_grad_norm",
        "noise_offset", "input_perturbation", "n_few_shot", "shot_caption_shuffle_num", "target_start_id",
    )),
    ("must be positive and finite", lambda x: 0 < x < float("inf"), ("learning_rate", "adam_epsilon", "snr_gamma")),
    ("must lie in [0, 1)", lambda x: 0 <= x < 1, ("adam_beta1", "adam_beta2", "ema_decay")),
    ("must lie in (0, 1]", lambda x: 0 < x <= 1, ("poisoning_ratio", "poison_subsampling")),
]  # fmt: skip


def check(config: TrainConfig, sources: dict[str, str]) -> None:
    """Refuse values out of range and combinations that cannot work; nothing is loaded yet."""

    def refuse(key: str, problem: str) -> None:
        raise UserError(f"{key} ({sources.get(key, 'default')}): {problem}")

    for right, holds, keys in RANGES:
        for key in keys:
            value = getattr(config, key)
            if value is not None and not holds(value):
                refuse(key, f"{right}, got {value}")
    check_data(config, refuse)
    check_learning(config, refuse)
    check_run(config, refuse)


def check_data(config: TrainConfig, refuse: Callable[[str, str], None]) -> None:
    """One source of data, and flags that belong to it."""
    if config.train_data_dir is None and config.dataset_name is None:
        refuse("train_data_dir", "is missing; give it or dataset_name")
    if config.train_data_dir is not None and config.dataset_name is not None:
        refuse("dataset_name", "excludes train_data_dir; give one of them")
    for key in ("dataset_config_name", "image_column", "caption_column"):
        if getattr(config, key) is not None and config.dataset_name is None:
            refuse(key, "needs dataset_name; a folder names its columns in metadata.jsonl")


def check_learning(config: TrainConfig, refuse: Callable[[str, str], None]) -> None:
    """Optimizer, schedule, average and loss fit each other."""
    if config.use_8bit_adam and config.optimizer != "AdamW":
        refuse("use_8bit_adam", f"excludes optimizer {config.optimizer}; set one of them")
    if config.offload_ema and not config.use_ema:
        refuse("offload_ema", "needs use_ema")
    if config.dream_training and config.prediction_type not in (None, "epsilon"):
        refuse(
            "dream_training",
            f"works with epsilon prediction only; prediction_type is {config.prediction_type}",
        )
    if config.dream_training and config.input_perturbation:
        refuse("dream_training", "excludes input_perturbation; set one of them")
    scheduled = config.lr_scheduler != "constant"
    if scheduled and config.max_train_steps is not None and config.lr_warmup_steps >= config.max_train_steps:
        refuse(
            "lr_warmup_steps",
            f"{config.lr_warmup_steps} leaves nothing of max_train_steps {config.max_train_steps}",
        )
    if config.lr_scheduler == "constant" and config.lr_warmup_steps:
        refuse("lr_warmup_steps", "is ignored by lr_scheduler constant; use constant_with_warmup")


def check_run(config: TrainConfig, refuse: Callable[[str, str], None]) -> None:
    """What is written, logged and uploaded."""
    if config.run_suffix is not None:
        if not config.stamp_output_dir:
            refuse("run_suffix", "needs stamp_output_dir")
        if not re.fullmatch(r"[\w.-]+", config.run_suffix):
            refuse("run_suffix", f"must be letters, digits, '.', '_' and '-', got {config.run_suffix!r}")
    if config.stamp_output_dir and config.resume_from_checkpoint == "latest":
        refuse("stamp_output_dir", "starts a new folder, which has no latest; give the earlier one as output_dir")
    if config.best_by != "similarity" and not config.save_best:
        refuse("best_by", "needs save_best")
    if config.hub_token and config.report_to in ("wandb", "all"):
        refuse("hub_token", f"would be visible to {config.report_to}; log in with hf auth login instead")
    if config.hub_token and not config.push_to_hub:
        refuse("hub_token", "needs push_to_hub")
    trackers = ("tensorboard", "wandb", "comet_ml", "all", "none")
    if config.report_to not in trackers:
        refuse("report_to", f"unknown tracker {config.report_to!r}; there are: {', '.join(trackers)}")
    if config.overwrite_output_dir and config.resume_from_checkpoint:
        refuse("overwrite_output_dir", "excludes resume_from_checkpoint; set one of them")
    if config.validation_prompts is not None and not all(prompt.strip() for prompt in config.validation_prompts):
        refuse("validation_prompts", "holds an empty prompt")
