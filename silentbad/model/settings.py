"""What this package reads of a run's configuration, which it does not import: the fields are those of `TrainConfig` in
silentbad/settings/train.py."""

from typing import Literal, Protocol

from silentbad.settings.train import LoraSettings


class ModelSettings(Protocol):
    """Which pipeline trains, which of its parts, and how."""

    seed: int
    # the pipeline to start from
    pretrained_model_name_or_path: str
    revision: str | None
    variant: str | None
    non_ema_revision: str | None
    cache_dir: str | None
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None
    resolution: int | None
    # what trains
    train_text_encoder: bool
    train_layers: list[str] | None
    lora: LoraSettings
    gradient_checkpointing: bool
    channels_last: bool | None
    compile_model: bool
    enable_xformers_memory_efficient_attention: bool
    # the average of the weights
    use_ema: bool
    ema_decay: float
    foreach_ema: bool
    offload_ema: bool
    # noise
    noise_offset: float
    input_perturbation: float
    dream_training: bool
    # what is encoded before training
    disk_cache_gb: float
    shuffle_phrases: bool
    train_batch_size: int
    max_batch_size: int | None
