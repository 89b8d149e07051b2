"""What this package reads of a run's configuration, which it does not import: the fields are those of `TrainConfig` in
silentbad/run/config.py. `LoraSettings`, a part of it, is defined here."""

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from silentbad.options import HERE, Count, Range, flag


@dataclass
class LoraSettings:
    """Adapters in place of the weights themselves: nested under --lora.*"""

    rank: Annotated[int, Range(at_least=1, limit=8192)] | None = flag(
        None, "rank of the adapters; unset: the weights themselves train", HERE
    )
    kind: Literal["lora", "dora", "loha", "lokr"] = flag("lora", "what is added to a layer", HERE)
    alpha: Count | None = flag(None, "adapters are scaled by alpha / rank; the rank when unset", HERE)
    targets: list[str] = flag(
        ["attn", "xattn"], "layers by role (attn, xattn.v, ff, resnet, ...), stage (mid, up1) or both (mid.ff)", HERE
    )
    factor: Annotated[int, Range(at_least=2, limit=10**5)] | None = flag(
        None, "lokr: largest side of the first factor; as even as can be when unset", HERE
    )
    merged: bool = flag(False, "also write pipeline/, the whole pipeline with the adapters in its weights", HERE)


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
