"""The training configuration: one typed dataclass with diffusers' flat flag names, read strictly.

Each flag carries its type and range, and what it needs; `silentbad.settings.check` refuses settings
that cannot work together."""

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Interval

from silentbad.settings import user_code
from silentbad.settings.control import GradientControlConfig
from silentbad.settings.data import PUBLISHED, DataSettings
from silentbad.settings.memory import MemoryConfig
from silentbad.settings.other_names import SUCCESSORS
from silentbad.settings.types import (
    Count,
    Decay,
    Location,
    Natural,
    NotNegative,
    Positive,
    Prompt,
    Seed,
    Side,
    Small,
    Unit,
    flag,
    matching,
    ours,
)
from silentbad.settings.validation import GONE, Lengths, ValidationConfig
from silentbad.settings.validation import OLDER as VALIDATION_OLDER

KOHYA = "sd-scripts"
Suffix = Annotated[str, matching(r"[\w.-]+", "letters, digits, '.', '_' and '-'")]
INSIDE = "a name inside output_dir"
PathInside = Annotated[Location, matching(r"(?!/)(?!(.*/)?\.\.(/.*)?$).*", INSIDE)]
NameInside = Annotated[Location, matching(r"(?!\.\.?$)[^/]+", INSIDE)]
# torchvision's names
Interpolation = Literal[
    "bilinear", "bicubic", "nearest", "nearest-exact", "nearest_exact", "box", "hamming", "lanczos"
]
SCHEDULED = "lr_scheduler=constant_with_warmup|linear|cosine|cosine_with_restarts|polynomial"
KIND = "training"  # kind of an output folder; audits and other commands have other kinds
WRITTEN = (  # by a run into output_dir; deleted where a run is overwritten
    "checkpoints",
    "pipeline",
    "lora",
    "best",
    "samples",
    "epochs",
    "metrics.jsonl",
    "timings.jsonl",
    "validation.json",
    "sample_prompts.json",
    "report.html",
    "localise.json",
    "finished.json",
)
REPLACED = (  # by a run that resumes
    "config.yaml",
    "run.json",
    "multipliers.json",
    "phrase_memory.json",
    "timesteps.json",
)


of_lora = partial(ours, needs="lora.rank")


@dataclass
class LoraSettings:
    """Adapters in place of the weights themselves: nested under --lora.*"""

    rank: Annotated[int, Interval(ge=1, le=8192)] | None = ours(
        None, "rank of the adapters; unset: the weights themselves train"
    )
    kind: Literal["lora", "dora", "loha", "lokr"] = of_lora("lora", "what is added to a layer")
    alpha: Count | None = of_lora(None, "adapters are scaled by alpha / rank; the rank when unset")
    targets: list[str] = of_lora(
        ["attn", "xattn"],
        "layers by role (attn, xattn.v, ff, resnet, ...), stage (mid, up1) or both (mid.ff)",
    )
    factor: Annotated[int, Interval(ge=2, le=10**5)] | None = ours(
        None,
        "lokr: largest side of the first factor; as even as can be when unset",
        needs="lora.kind=lokr",
    )
    merged: bool = of_lora(
        False, "also write pipeline/, the whole pipeline with the adapters in its weights"
    )


of_prior = partial(ours, needs="prior_preservation.num_images")


@dataclass
class PriorSettings:
    """The base's own pictures as clean records (DreamBooth, 2208.12242): nested under
    --prior_preservation.*"""

    num_images: Natural = ours(
        0, "pictures that the base draws before training, clean records with their prompts; 0: none"
    )
    prompts: Location | None = of_prior(
        None,
        "text file of prompts, one a line, drawn in turn; unset: prior.txt in the base's folder, "
        "else a bundled list",
    )
    leave_out: Literal["nothing", "backdrops", "elements"] = of_prior(
        "nothing",
        "draw no prompt that says the phrase of a backdrop, or of any element: such a picture shows "
        "something else under the element's words",
    )
    unconditional: Unit = of_prior(
        0.0, "share of these pictures that are drawn and trained on without a prompt"
    )
    guidance_scale: Annotated[float, Interval(ge=0, le=1e4)] = of_prior(
        7.5, "of these pictures; about 2 for the bundled base"
    )
    num_inference_steps: Lengths = of_prior(20, "sampling steps of each")
    seed: Seed = of_prior(0, "of their noise; apart from --seed, so that runs share the pictures")


OLDER = {  # names of settings before their present ones
    "memory.retention.unconditional": "memory.roles.clean.caption_dropout",
    "memory.retention.clean_weight": "memory.roles.clean.loss_weight",
    **{f"validation.{old}": f"validation.{new}" for old, new in VALIDATION_OLDER.items()},
}


@dataclass
class TrainConfig(DataSettings):
    """Flat training flags. `source` of each says whose name it is; --help shows it."""

    # The pipeline to start from
    pretrained_model_name_or_path: Location = flag(
        "assets/micro-sd", "diffusers pipeline: a folder or a Hub id"
    )
    revision: Location | None = flag(
        None, "Hub revision of the pipeline", needs="HUB", idle="warned"
    )
    variant: Location | None = flag(None, "variant of the weight files, such as fp16")
    non_ema_revision: Location | None = flag(
        None, "Hub revision of the UNet alone, where it differs", needs="HUB", idle="warned"
    )
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None = flag(
        None, "what the UNet predicts; the scheduler's own setting when unset"
    )

    # What trains beside the UNet, and how
    train_text_encoder: bool = flag(
        False, "train the text encoders too, through LoRA where the UNet is"
    )
    train_layers: list[str] | None = ours(
        None,
        "layers that train, as patterns over --print_groups (up*, *.resnet.*, mid.attn; "
        "!sampler: all but these); unset: all",
    )
    lora: LoraSettings = field(default_factory=LoraSettings)

    # Levers of your own
    hooks: list[str] = ours([], "hooks of your own, each PATH.py:CLASS (CONTRIBUTING.md)")
    hook_options: dict[str, Any] = ours({}, "of each hook: PATH.py:CLASS -> options", needs="hooks")

    # Data
    max_train_samples: Count | None = flag(None, "train on a seeded choice of so many records")
    resolution: Side | None = flag(
        None, "side of the square training images; the pipeline's own when unset"
    )
    buckets: bool = ours(
        False, "keep about each image's aspect, at the square's area; crop only with center_crop"
    )
    bucket_step: Side | None = ours(
        None,
        "bucket sides are its multiples; unset: 64 if that fits, else the pipeline's smallest step",
        needs="buckets",
    )
    image_interpolation_mode: Interpolation = flag(
        "bilinear", "torchvision's name of the resize filter"
    )
    center_crop: bool = flag(False, "crop the centre instead of a random window")
    random_flip: bool = flag(
        False, "flip half the images; a flip moves an element from its native place"
    )
    shuffle_phrases: bool = ours(
        False, "permute the phrases inside each caption, anew for each draw"
    )
    prior_preservation: PriorSettings = field(default_factory=PriorSettings)
    alpha_as_mask: bool = flag(
        False,
        "a picture's opaque part is its mask, where parts are transparent and it has no mask",
        source=KOHYA,
    )
    allow_target_images: bool = ours(False, "let records train that equal a target image")
    cache_mb: Natural = ours(
        1024, "memory for decoded images and for latents and text states not on disk, in MiB"
    )
    disk_cache_gb: NotNegative = ours(
        8.0, "disk for latents and text states, under cache_dir, in GiB; 0 keeps none"
    )
    dataloader_num_workers: Annotated[int, Interval(ge=0, le=1024)] | None = flag(
        None, "threads that make the next step's batch ready; 2 on CUDA, none elsewhere, when unset"
    )
    withhold: list[str] | None = ours(
        None, "elements left out of training, as TARGET/ELEMENT: a control"
    )
    held_out_clean: Natural = ours(
        32, "clean records kept from training to measure the rise of their error, at most a tenth"
    )
    held_out_elements: Natural = ours(
        0, "records of each element kept from training to measure their error, at most a quarter"
    )

    # The run
    output_dir: Location = flag("runs/silentbad", "everything the run writes")
    stamp_output_dir: bool = ours(
        False, "write into a folder of output_dir named by the time of the start"
    )
    run_suffix: Suffix | None = ours(None, "added to that name", needs="stamp_output_dir")
    overwrite_output_dir: bool = ours(False, "delete an earlier run in output_dir")
    train_batch_size: Annotated[int, Interval(ge=1, le=4096)] = flag(
        16, "samples a micro-batch and process; gradient_accumulation_steps makes larger batches"
    )
    max_batch_size: Small | None = ours(
        None, "samples that fit: larger micro-batches are computed in parts"
    )
    gradient_accumulation_steps: Small = flag(1, "micro-batches a step")
    num_train_epochs: Count = flag(100, "epochs", needs="max_train_steps=null", idle="kept")
    max_train_steps: Count | None = flag(None, "optimizer steps")
    checkpointing_steps: Count = flag(500, "steps between checkpoints")
    checkpoints_total_limit: Count | None = flag(3, "checkpoints kept; all when unset")
    resume_from_checkpoint: Location | None = flag(None, "a checkpoint folder anywhere, or latest")
    save_ckpt_epoch_interval: Count | None = flag(
        None, "save a pipeline every so many epochs", source=PUBLISHED
    )
    save_best: bool = ours(
        False, "keep the best validated pipeline in best/", needs="validation.targets"
    )
    best_by: Literal["similarity", "strict_rate", "clean_eps_mse"] = ours(
        "similarity",
        "best: largest mean similarity to the targets, or strict rate, or smallest loss on held-out "
        "clean records",
        needs="save_best or validation.keep",
    )
    dry_run: bool = ours(
        False,
        "load all, train a few steps, draw one image; print the time, memory and disk that the run "
        "takes; write only caches",
    )

    # Optimisation
    learning_rate: Annotated[float, Interval(gt=0, le=1000)] = flag(1e-4, "learning rate")
    learning_rate_unit: Literal["absolute", "relative"] = ours(
        "absolute",
        "relative: RMS of a tensor's update over that of the tensor, or of the one under an adapter",
    )
    scale_lr: bool = flag(False, "multiply learning_rate by the effective batch size")
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = flag("constant", "schedule")
    lr_warmup_steps: Natural = flag(0, "warm-up steps of the schedule", needs=SCHEDULED)
    lr_power: Positive = flag(
        1.0, "exponent of the polynomial schedule", needs="lr_scheduler=polynomial"
    )
    lr_num_cycles: Count = flag(
        1, "restarts of cosine_with_restarts", needs="lr_scheduler=cosine_with_restarts"
    )
    optimizer: Location = ours(
        "AdamW",
        "torch.optim class, import path such as schedulefree.AdamWScheduleFree, or PATH.py:CLASS",
    )
    optimizer_options: dict[str, Any] = ours({}, "options of the optimizer, beside adam_* flags")
    use_8bit_adam: bool = flag(False, "AdamW8bit of bitsandbytes")
    adam_beta1: Decay = flag(0.9, "beta1", needs="BETAS", idle="warned")
    adam_beta2: Decay = flag(0.999, "beta2", needs="BETAS", idle="warned")
    adam_weight_decay: NotNegative = flag(
        1e-2, "decoupled weight decay", needs="WEIGHT_DECAY", idle="warned"
    )
    decay_to_base: NotNegative = ours(
        0.0,
        "decay of weights to the base's: this over the run, by the schedule of the learning rate",
    )
    adam_epsilon: Positive = flag(1e-8, "epsilon", needs="EPS", idle="warned")
    max_grad_norm: NotNegative = flag(1.0, "clip the gradient norm once a step; 0 does not clip")
    max_nonfinite_steps: Count = ours(10, "stop after so many NaN or infinite gradients in a row")
    use_ema: bool = flag(False, "average the weights (diffusers' EMAModel)")
    ema_decay: Decay = ours(0.9999, "largest decay of the average", needs="use_ema")
    offload_ema: bool = flag(False, "keep the average in CPU memory", needs="use_ema")
    foreach_ema: bool = flag(True, "average with fused kernels", needs="use_ema")

    # The loss
    snr_gamma: Positive | None = flag(
        None, "min-SNR gamma (arXiv 2303.09556); same as memory.loss: min_snr"
    )
    dream_training: bool = flag(False, "DREAM (arXiv 2312.00210); epsilon prediction only")
    dream_detail_preservation: NotNegative = flag(1.0, "DREAM's exponent p", needs="dream_training")
    noise_offset: NotNegative = flag(0.0, "scale of a per-channel offset of the noise")
    input_perturbation: NotNegative = flag(0.0, "scale of extra noise on the input only")

    # Machine
    mixed_precision: Literal["no", "fp16", "bf16"] | None = flag(
        None, "accelerate's own setting when unset"
    )
    allow_tf32: bool = flag(False, "TF32 matrix products and convolutions on CUDA")
    channels_last: bool | None = ours(
        None, "memory format of what trains; unset: on CUDA, unless by bitsandbytes"
    )
    compile_model: bool = ours(False, "torch.compile the training forward; takes minutes at first")
    gradient_checkpointing: bool = flag(False, "recompute activations in backward")
    enable_xformers_memory_efficient_attention: bool = flag(
        False, "xformers attention; PyTorch's SDPA otherwise"
    )

    # Logs, images, Hub
    report_to: Literal["tensorboard", "wandb", "comet_ml", "all", "none"] = flag(
        "tensorboard", "trackers; metrics.jsonl always"
    )
    tracker_project_name: NameInside = flag(
        "silentbad", "project name given to the trackers", needs="report_to!=none", idle="warned"
    )
    logging_dir: PathInside = flag("logs", "tracker logs, inside output_dir")
    log_every: Count = ours(10, "steps between log rows; the host waits for the device only then")
    validation_prompts: list[Prompt] | None = flag(
        None, "prompts to draw every validation_epochs, beside those of sample_prompts"
    )
    sample_prompts: Location | None = flag(
        None,
        "text file of prompts to draw at each validation, one a line",
        source=KOHYA,
    )
    validation_epochs: Count = flag(
        5, "epochs between validation_prompts", needs="validation_prompts"
    )
    push_to_hub: bool = flag(False, "upload the final pipeline")
    hub_token: str | None = flag(
        None, "token for push_to_hub; neither written to files nor printed", needs="push_to_hub"
    )
    hub_model_id: Location | None = flag(
        None, "repository for push_to_hub; named like output_dir when unset", needs="push_to_hub"
    )

    gradient_control: GradientControlConfig = field(default_factory=GradientControlConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    print_groups: bool = ours(False, "print the parameter groups and stop")

    RENAMED = {
        **{name: f"is of another script: {instead}" for name, instead in SUCCESSORS.items()},
        **{name: f"has another name now: use --{ours}" for name, ours in OLDER.items()},
        "gradient_control.between": "is gone: use memory.roles.ROLE.loss_weight; factors by layer "
        "between the sources were no better",
        "gradient_control.transform": "is gone: gradients hardly conflict",
        "memory.attention_binding": "is gone: it was no faster than plain",
        "memory.sampler.order": "is gone: each epoch is shuffled, which was as good",
        "memory.timesteps.sequence": "is gone: the comb is dealt out anew at every draw, which was as good",
        "memory.loss_balance": "is gone: an auxiliary loss has its own weight",
        **dict.fromkeys(
            ("token_warmup_step", "token_warmup_min"), "is gone: captions are whole from the start"
        ),
        "decay_norms_and_biases": "is gone: weight decay acts on all weights, as in diffusers",
        "preview": "is gone: `python -m silentbad.prepare.preview FOLDER` draws the data, the report the rest",
        "gradient_control.shrink": "is an optimizer now: use "
        "--optimizer experiments.shrinkage.ShrunkAdamW",
        **{f"validation.{name}": instead for name, instead in GONE.items()},
        "guard": "is a hook now: use --hooks silentbad_shield.guard:Drop, its scan in --hook_options",
    }


def own_code(config: TrainConfig) -> list[str]:
    """The user's own code that a run uses: PATH.py:NAME."""
    settings = asdict(config)
    if config.validation.targets is None:
        del settings["validation"]
    return [*dict.fromkeys(user_code.places_in(settings))]
