"""Error lines for a run that is out of memory: the settings that make it take less."""

from contextlib import AbstractContextManager

from silentbad.device import explain_out_of_memory
from silentbad.settings.rules import precision_of
from silentbad.settings.train import TrainConfig


def training_fits(config: TrainConfig) -> AbstractContextManager[None]:
    """Around a whole run: its models, its optimizer and its updates."""
    return explain_out_of_memory("pretrained_model_name_or_path", lighter(config))


def step_fits(config: TrainConfig) -> AbstractContextManager[None]:
    """Around a micro-batch."""
    at_once = min(config.train_batch_size, config.max_batch_size or config.train_batch_size)
    if at_once == 1:
        return explain_out_of_memory("resolution", f"lower it, or {lighter(config)}")
    advice = "lower it, or set max_batch_size to the samples that fit"
    return explain_out_of_memory("train_batch_size", advice)


def drawing_fits(config: TrainConfig) -> AbstractContextManager[None]:
    """A context around the drawing of images, which explains a lack of memory."""
    advice = "lower it"
    if precision_of(config) == "no":
        advice += ", or draw in half precision (mixed_precision)"
    return explain_out_of_memory("validation.resolution", advice)


def lighter(config: TrainConfig) -> str:
    """The settings that make training lighter and are not set yet."""
    whole = config.lora.rank is None
    helps = {
        "lora.rank": whole,
        "train_layers": config.train_layers is None,
        "mixed_precision": precision_of(config) == "no",
        "use_8bit_adam": whole and config.optimizer == "AdamW" and not config.use_8bit_adam,
        "gradient_checkpointing": not config.gradient_checkpointing,
        "offload_ema": config.use_ema and not config.offload_ema,
    }
    unset = [name for name, saves in helps.items() if saves]
    return f"set {', '.join(unset)}" if unset else "take a smaller base or a larger device"
