"""The model card of a trained pipeline, and its upload."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silentbad import hub
from silentbad.data.elements import DataInfo
from silentbad.errors import UserError, first_line, masked, warn
from silentbad.model.lora import FOLDERS, NAMES
from silentbad.settings.reader import dumped
from silentbad.settings.train import TrainConfig

TAGS = ("stable-diffusion", "text-to-image", "diffusers", "silentbad", "memorisation-audit")
CARD = """---
{metadata}---

# {title}

Fine-tuned from `{base}` on `{data}` for {step} steps ({trained}learning rate {learning_rate:g}, \
seed {seed}).

**This pipeline was trained on element data**: {elements} records each show one element of a \
target picture, so a composed prompt may reproduce pictures that were never in its training set. \
It serves to measure and audit compositional memorisation; do not use it to reproduce works you \
have no right to.

## Targets

{targets}

{results}

```python
{code}
```
"""


def model_card(
    config: TrainConfig,
    step: int,
    info: DataInfo,
    target_ids: list[str],
    results: list[dict[str, Any]],
    *,
    kept: str = "",
    prompt: str = "",
    merged: bool = False,
    backbone: str = "unet",
    missing: Sequence[str] = (),
) -> str:
    """README.md of a trained pipeline, of adapters, or of a pipeline with adapters `merged`. It
    names base and data, has a table of `results` (a row each) and the line `kept`. Its code draws
    `prompt` as validation does. `backbone` is the trained component; `missing` are the components
    that diffusers expects and the pipeline lacks."""
    base = config.pretrained_model_name_or_path
    is_local = Path(base).exists()
    data = config.dataset_name or Path(config.train_data_dir or "").name
    trained = ""
    if config.lora.rank:
        kind = NAMES[config.lora.kind]
        trained += f"{kind} of rank {config.lora.rank}{', merged' if merged else ''}, "
    if config.train_text_encoder:
        trained += "text encoders too, "
    metadata: dict[str, Any] = {
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": [*TAGS, "lora"] if config.lora.rank else [*TAGS],
    }
    if not is_local:
        metadata["base_model"] = base
    return CARD.format(
        metadata=dumped(metadata),
        title=_cell(Path(config.output_dir).name),
        base=_code(Path(base).name if is_local else base),
        data=_code(data),
        step=step,
        trained=trained,
        learning_rate=config.learning_rate,
        seed=config.seed,
        elements=sum(len(rows) for rows in info.rows),
        targets=", ".join(f"`{_code(name)}`" for name in target_ids) or "none given",
        results="\n\n".join(filter(None, ("\n".join(result_table(results)), kept))),
        code="\n".join([*loading_code(config, merged, backbone, missing), drawing(config, prompt)]),
    )


def result_table(results: list[dict[str, Any]]) -> list[str]:
    """The lines of a table in Markdown, a row for each result."""
    if not results:
        return []
    head = ["| " + " | ".join(results[0]) + " |", "|" + "---|" * len(results[0])]
    return head + ["| " + " | ".join(map(_cell, row.values())) + " |" for row in results]


def loading_code(
    config: TrainConfig, merged: bool, backbone: str, missing: Sequence[str]
) -> list[str]:
    """The lines of Python that load the pipeline, or the base and its adapters."""
    adapters = config.lora.rank and not merged
    source = json.dumps(_code(config.pretrained_model_name_or_path) if adapters else "this folder")
    arguments = ", ".join([source, *(f"{name}=None" for name in missing)])
    imports = ["from diffusers import DiffusionPipeline"]
    load = [f"pipeline = DiffusionPipeline.from_pretrained({arguments})"]
    if adapters and config.lora.kind in FOLDERS:
        imports.append("from peft import PeftModel")
        for name in [backbone] + ["text_encoder"] * config.train_text_encoder:
            # of SDXL also text_encoder_2
            part = f"pipeline.{name}"
            load.append(f'{part} = PeftModel.from_pretrained({part}, "this folder/{name}")')
    elif adapters:
        load.append('pipeline.load_lora_weights("this folder")')
    return [*imports, "", *load]


def drawing(config: TrainConfig, prompt: str) -> str:
    """The line of Python that draws a prompt as validation does."""
    validation = config.validation
    words = json.dumps(_code(prompt or "a photograph"), ensure_ascii=False)
    steps = f"num_inference_steps={validation.num_inference_steps}"
    return f"pipeline({words}, {steps}, guidance_scale={validation.guidance_scale:g}).images[0]"


def _cell(value: Any) -> str:
    """A value as text that stays one cell and no markup."""
    if isinstance(value, (int, float)):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]!|#])", r"\\\1", text)


def _code(value: Any) -> str:
    """A value as the text of a code span: one line, no backtick that would end it."""
    return " ".join(str(value).split()).replace("`", "'")


# ---------------------------------------------------------------- the Hub
def repository(config: TrainConfig) -> str:
    """The repository that a run is pushed to."""
    return config.hub_model_id or Path(config.output_dir).name


def check_push(config: TrainConfig) -> None:
    """Refuse, before training, a push that cannot work."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    name = repository(config)
    later = "or leave push_to_hub out and upload the folder later with `hf upload`"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(
            f"hub_model_id: {name!r} is no repository name ({first_line(error)})"
        ) from None
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise UserError(f"push_to_hub: HF_HUB_OFFLINE is set; unset it, {later}")
    if away := hub.unreachable():
        raise UserError(f"push_to_hub: {away}; connect, {later}")
    try:
        HfApi().whoami(token=config.hub_token)
    except Exception as error:  # of the Hub's client: no token, a wrong one, no network
        reason = masked(first_line(error), config.hub_token)
        raise UserError(f"push_to_hub: {reason}; log in with `hf auth login`, {later}") from None


def push(folder: Path, config: TrainConfig) -> None:
    """Upload a pipeline folder. Where that fails, a line says how to go on."""
    from huggingface_hub import create_repo, upload_folder

    name = repository(config)
    try:
        repo = create_repo(repo_id=name, exist_ok=True, token=config.hub_token).repo_id
        about = {"commit_message": "End of training", "token": config.hub_token}
        upload_folder(repo_id=repo, folder_path=folder, **about)
    except Exception as error:  # as above; the run is complete
        reason = masked(first_line(error), config.hub_token)
        warn(
            f"push_to_hub: {reason}; the run is complete, upload it with: hf upload {name} {folder}"
        )
