"""The checks of a configuration that need no weights, no records and no torch: values, names,
combinations, files."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from silentbad import bundled, owned
from silentbad.errors import UserError, warn
from silentbad.files import check_file, check_folder, check_local
from silentbad.settings import user_code
from silentbad.settings.control import check_control
from silentbad.settings.launch import check_launch, launched
from silentbad.settings.layers import ADAPTED_GROUPS, EVERY_GROUP, check_patterns
from silentbad.settings.memory import check_memory
from silentbad.settings.optimizer_facts import check_optimizer, read_optimizer
from silentbad.settings.registries import Offered, from_source
from silentbad.settings.rules import FACTS, Facts, check_rules, meanings, put, value_of
from silentbad.settings.train import KIND, REPLACED, WRITTEN, TrainConfig
from silentbad.settings.types import check_options, check_values
from silentbad.settings.validation import check_files, target_file

MEMORY = {  # {slot of `memory`, or key inside a slot: the registry of the names that it may have}
    "sampler": "memory_reinforce:SAMPLERS",
    "timesteps": "memory_reinforce:TIMESTEPS",
    "loss": "memory_reinforce:LOSSES",
    "region": "silentbad.memory.masks:REGION",
    "rehearsal": "silentbad.memory.rehearsal:REHEARSAL",
    "distillation": "memory_reinforce:AUXILIARY['distillation']",
    "retention": "memory_reinforce:AUXILIARY['retention']",
    "loss.error": "memory_reinforce:ERRORS",
}
SCALE_RULES = "gradient_control:SCALE_RULES"


def memory_registries() -> dict:
    """What the slots of `memory` may name, read from the sources."""
    return {
        slot: Offered(
            from_source(place), f"memory.{slot}" if "." in slot else f"memory.{slot}.name"
        )
        for slot, place in MEMORY.items()
    }


def check(config: TrainConfig, sources: dict[str, str]) -> None:
    """Refuse settings that cannot run. Raises UserError with one line that names the key."""
    check_numbers(config)
    check_names(config)
    optimizer = read_optimizer(config)
    facts = Facts(optimizer=optimizer, sharded=launched("FSDP"))
    check_rules(config, sources, facts)
    if optimizer is not None:
        check_optimizer(config, optimizer)
    check_launch()
    # a run would write into its inputs, or delete them
    validation = config.validation
    inputs = {
        "train_data_dir": config.train_data_dir,
        "clean_data_dir": config.clean_data_dir,
        "dataset_name": config.dataset_name,
        "pretrained_model_name_or_path": config.pretrained_model_name_or_path,
        "sample_prompts": config.sample_prompts,
        "prior_preservation.prompts": config.prior_preservation.prompts,
        "validation.targets": target_file(validation.targets),
        "validation.embedder_path": validation.embedder_path,
        "validation.clip_path": validation.clip_path,
        "validation.placebo": validation.placebo,
        "validation.prompts": validation.prompts,
    }
    owned.refuse_overlap(config.output_dir, inputs, (*WRITTEN, *REPLACED))
    if validation.targets is not None and FACTS["AVERAGE_UNMEASURED"].holds(config, facts):
        warn(
            "validation.weights=raw measures the raw weights; "
            "the pipeline that is saved holds their average"
        )


def check_part(**part: object) -> None:
    """Refuse settings of one part, such as `memory`, that exclude each other; for use without a run."""
    check_rules(TrainConfig(**part), {}, Facts())  # type: ignore[arg-type]


def check_warm_up(config: TrainConfig, steps: int, length: str) -> None:
    """Refuse a warm-up that is no shorter than the run of `steps`, which a message calls `length`."""
    warmup = config.lr_warmup_steps
    if config.lr_scheduler != "constant" and warmup >= steps:
        raise UserError(f"lr_warmup_steps: {warmup} leaves nothing of {length}")


def check_numbers(config: TrainConfig) -> None:
    """Refuse values that do not fit together, and a run without data."""
    if config.train_data_dir is None and config.dataset_name is None and not config.print_groups:
        raise UserError("train_data_dir: is missing; give it or dataset_name")
    if (steps := config.max_train_steps) is not None:
        check_warm_up(config, steps, f"max_train_steps {steps}")
    rate = config.learning_rate
    if config.lr_scheduler == "polynomial" and rate <= 1e-7:
        raise UserError(f"learning_rate: must be above 1e-7, where polynomial ends, got {rate:g}")
    few = config.validation.first_images
    images = config.validation.images_per_target
    if config.validation.targets is not None and few > images:
        raise UserError(
            f"validation.first_images: is {few}, of {images} images_per_target; give fewer, or 0 "
            "for all"
        )


def check_names(config: TrainConfig) -> None:
    """Refuse unknown rules, samplers, losses, hooks and layers, and options they do not take."""
    check_hooks(config)
    rules = Offered(from_source(SCALE_RULES), "gradient_control.name")
    check_control(config.gradient_control, rules)
    check_memory(config.memory, memory_registries())
    check_patterns("lora.targets", config.lora.targets, ADAPTED_GROUPS, "any that adapters fit")
    check_patterns("train_layers", config.train_layers, EVERY_GROUP, "any model")
    if config.validation.targets is not None:
        check_values(config.validation, "validation.")


def check_hooks(config: TrainConfig) -> None:
    """Refuse hooks whose file is missing, and options that they do not take."""
    for place, values in config.hook_options.items():
        if place not in config.hooks:
            raise UserError(f"hook_options: {place} is none of the hooks")
        if not isinstance(values, dict):
            raise UserError(f"hook_options: {place}: must be option: value pairs")
    for place in filter(user_code.is_place, config.hooks):
        values = config.hook_options.get(place, {})
        check_options("hooks", Offered({}, "hooks"), place, values, key="hook_options")


def check_inputs(config: TrainConfig) -> None:
    """Refuse files and folders that are not there."""
    check_folder("train_data_dir", config.train_data_dir)
    check_folder("clean_data_dir", config.clean_data_dir)
    check_local("pretrained_model_name_or_path", config.pretrained_model_name_or_path)
    for key in ("sample_prompts", "prior_preservation.prompts"):
        check_file(key, value_of(config, key), "it holds one prompt a line")
    if config.validation.targets is not None:
        check_files(config.validation)
    asked = config.resume_from_checkpoint
    if asked and asked != "latest" and not Path(config.output_dir, "checkpoints", asked).exists():
        check_folder("resume_from_checkpoint", asked, "give a step-N folder, or latest")
    # a resume is checked later, by its checkpoint; a stamped folder is new
    if not (asked or config.stamp_output_dir or config.print_groups):
        check_output(config)


def check_output(config: TrainConfig) -> None:
    """Refuse an output folder that holds a run, unless that is to be resumed or overwritten, and
    one with files that no run wrote."""
    folder = Path(config.output_dir)
    logs = () if config.report_to == "none" else Path(config.logging_dir).parts[:1]
    owned.refuse_foreign(folder, KIND, (*WRITTEN, *REPLACED, *logs))
    run_files = runs_files(config)
    if run_files and not (config.resume_from_checkpoint or config.overwrite_output_dir):
        raise UserError(
            f"output_dir {folder}: holds a run already ({run_files[0].name}); resume it with "
            "--resume_from_checkpoint latest, delete it with --overwrite_output_dir, or "
            "choose another folder"
        )


def runs_files(config: TrainConfig) -> list[Path]:
    """The files of an earlier run in the output folder, by which it is recognised."""
    pipeline = "pipeline" if config.lora.rank is None else "lora"
    names = ("metrics.jsonl", "checkpoints", pipeline, "validation.json")
    return [path for name in names if (path := Path(config.output_dir) / name).exists()]


def with_base(config: TrainConfig) -> TrainConfig:
    """The configuration with the path of the bundled pipeline, found from any current folder."""
    return replace(
        config, pretrained_model_name_or_path=bundled(config.pretrained_model_name_or_path)
    )


def merged(config: TrainConfig) -> TrainConfig:
    """The configuration with the settings that its flags of ALIASES stand for."""
    merged_config = deepcopy(config)
    for _, key, value in meanings(config):
        put(merged_config, key, value)
    return merged_config
