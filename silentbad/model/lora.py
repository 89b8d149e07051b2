"""LoRA (2106.09685) through peft: layers chosen by the roles of `silentbad.model.groups`, saved as others load it.

W x + (alpha / rank) B A x: W stays frozen, A (rank, in) and B (out, rank) train in fp32, B from zero.
"""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.training_utils import cast_training_params
from diffusers.utils import convert_state_dict_to_kohya
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

from silentbad.errors import UserError, reading
from silentbad.model.gate import check_finite, finite, quietly
from silentbad.model.groups import ROLE_ORDER, group_of
from silentbad.rng import addressed_seed

KOHYA = "kohya.safetensors"
STAGES = ("stem", *(f"{part}{i}" for part in ("down", "up") for i in range(4)), "mid", "text1", "text2")
ROLES = [role for role in ROLE_ORDER if role not in ("norm", "embed")]  # what peft can adapt


def chosen(targets: list[str], group: str) -> bool:
    """Whether a target names the group stage.role: by role ("attn", "xattn.v"), stage ("mid") or both ("up1.ff")."""
    names = (group, group.partition(".")[2])
    return any(fnmatchcase(name, pattern) for name in names for t in targets for pattern in (t, f"{t}.*"))


def check(config: Any) -> None:
    """Refuse LoRA settings that name no layer, before any weights load."""
    lora = config.lora
    if lora.rank is None and (lora.alpha is not None or lora.targets != type(lora)().targets):
        raise UserError("lora.rank: is missing; alpha and targets act on LoRA alone")
    for key in ("rank", "alpha"):
        if (value := getattr(lora, key)) is not None and value < 1:
            raise UserError(f"lora.{key}: must be at least 1, got {value}")
    for target in lora.targets:
        if not any(chosen([target], f"{stage}.{role}") for stage in STAGES for role in ROLES):
            raise UserError(f"lora.targets: {target!r} names no layer; roles are {', '.join(ROLES)}")
    if not lora.targets:
        raise UserError("lora.targets: names no layer; attn and xattn are the default")


def add(name: str, module: Any, lora: Any, seed: int) -> None:
    """Freeze a component of the pipeline and put adapters on the layers that `lora.targets` choose."""
    layers = [
        path
        for path, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and chosen(lora.targets, group_of(f"{name}.{path}.weight"))
    ]
    if not layers:
        raise UserError(f"lora.targets: {', '.join(lora.targets)} names no layer of {name}")
    if name != "unet" and not any("self_attn" in path for path in layers):
        raise UserError(f"lora.targets: {name} needs attn among them; diffusers loads no adapters without")
    module.requires_grad_(False)
    with torch.random.fork_rng([]):
        torch.manual_seed(addressed_seed(seed, "lora", name))
        module.add_adapter(LoraConfig(r=lora.rank, lora_alpha=lora.alpha or lora.rank, target_modules=layers))
    cast_training_params(module, dtype=torch.float32)


def present(module: nn.Module) -> bool:
    return hasattr(module, "peft_config")


def state(name: str, module: Any) -> dict[str, torch.Tensor]:
    """The adapters of a component, on the CPU, by the names that every diffusers and kohya knows."""
    tensors = get_peft_model_state_dict(module, save_embedding_layers=False)
    tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    flat = name != "unet" and not hasattr(module, "text_model")  # transformers 5 dropped a level of CLIPTextModel
    return {f"text_model.{key}": value for key, value in tensors.items()} if flat else tensors


def save(model: Any, folder: Path, xl: bool) -> None:
    """pytorch_lora_weights.safetensors for `load_lora_weights`, and the same for kohya's readers."""
    layers = {name: state(name, module) for name, module in model.named_children()}
    about = {
        f"{name}_lora_adapter_metadata": module.peft_config["default"].to_dict()
        for name, module in model.named_children()
    }
    kind = StableDiffusionXLPipeline if xl else StableDiffusionPipeline
    kind.save_lora_weights(folder, **{f"{name}_lora_layers": part for name, part in layers.items()}, **about)
    alpha = float(model.unet.peft_config["default"].lora_alpha)
    flat = {f"{name}.{key}": value for name, tensors in layers.items() for key, value in tensors.items()}
    kohya = convert_state_dict_to_kohya(flat)
    kohya = {key if xl else key.replace("lora_te1_", "lora_te_"): value for key, value in kohya.items()}
    kohya = {key: torch.tensor(alpha) if key.endswith(".alpha") else value for key, value in kohya.items()}
    save_file(kohya, folder / KOHYA)


def load(pipe: Any, path: str, base: str) -> None:
    """Put saved adapters on a pipeline: every pair of the file on a layer, all of them finite.

    Raises UserError where a half is missing, a layer is not there or the file cannot be read.
    """
    failed = f"--lora {path}: no adapters of '{base}'"
    options = {"unet_config": pipe.unet.config} if isinstance(pipe, StableDiffusionXLPipeline) else {}
    with quietly(), reading(failed):
        tensors = pipe.lora_state_dict(path, use_safetensors=True, **options)[0]
    bad = sorted(name for name, values in tensors.items() if not finite(values))
    if bad:
        raise UserError(f"{failed} (NaN or infinite values in {bad[0]}, {len(bad)} tensors in all)")
    halves = {name: _other_half(name) for name in tensors}
    alone = sorted(name for name, other in halves.items() if other and other not in tensors)
    if alone:
        raise UserError(f"{failed} ({alone[0]} has no other half, {len(alone)} tensors in all)")
    with quietly(), reading(failed):
        pipe.load_lora_weights(path, use_safetensors=True)
    modules = [module for name in ("unet", "text_encoder", "text_encoder_2") if (module := getattr(pipe, name, None))]
    found = [name for module in modules for name, _ in module.named_parameters() if ".lora_" in name]
    wanted = sum(other is not None for other in halves.values())
    if len(found) != wanted or not wanted:
        raise UserError(f"{failed} ({wanted} tensors in the file, {len(found)} on its layers)")
    for module in modules:
        check_finite(module, failed, "lora_")


HALVES = (("lora_A", "lora_B"), ("lora.down", "lora.up"), ("lora_down", "lora_up"))


def _other_half(name: str) -> str | None:
    """The name of B where this is an A, or the other way; None where it is neither (an alpha)."""
    for a, b in HALVES:
        for mine, other in ((a, b), (b, a)):
            if f"{mine}." in name:
                return name.replace(f"{mine}.", f"{other}.")
    return None
