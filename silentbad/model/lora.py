"""Adapters through peft: layers chosen by the roles of `silentbad.model.groups`, saved in formats
that other programs load.

W stays frozen; the added part trains in fp32 and starts at zero. s = alpha / rank.
  lora  W + s B A, with A (rank, in) and B (out, rank)                               (2106.09685)
  dora  m (W + s B A) / ||W + s B A||, norms over the inputs, m (out,) trained too    (2402.09353)
  loha  W + s (A1 B1) * (A2 B2), a product of entries                                (2108.06098)
  lokr  W + s C kron D; D = A B where its rank is below half its side                (2309.14859)"""

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.training_utils import cast_training_params
from peft import (
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftConfig,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from silentbad import hub
from silentbad.errors import UserError, user_errors
from silentbad.files import check_local
from silentbad.model.gate import finite, quietly
from silentbad.model.groups import group_of
from silentbad.model.registry import FAMILIES, family_of_pipeline
from silentbad.rng import addressed_seed
from silentbad.settings.layers import chosen
from silentbad.settings.train import LoraSettings

KOHYA = "kohya.safetensors"
NAMES = {"lora": "LoRA", "dora": "DoRA", "loha": "LoHa", "lokr": "LoKr"}
FOLDERS = ("loha", "lokr")  # diffusers has no file for these: a folder of peft's for each component
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
COMPONENTS = list(
    dict.fromkeys(
        name for family in FAMILIES.values() for name in (family.backbone, *family.encoders)
    )
)


def target_layers(name: str, module: nn.Module, lora: LoraSettings) -> dict[str, str]:
    """{path: group} of the layers of a component that `lora.targets` choose."""
    paths = [
        path for path, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))
    ]
    groups = {path: group_of(f"{name}.{path}.weight") for path in paths}
    layers = {path: group for path, group in groups.items() if chosen(lora.targets, group)}
    if not layers:
        raise UserError(f"lora.targets: {', '.join(lora.targets)} names no layer of {name}")
    return layers


def add(
    name: str, module: Any, lora: LoraSettings, seed: int, layers: list[str] | None = None
) -> None:
    """Freeze a component of the pipeline and put adapters on layers of it: on all that
    `lora.targets` choose where `layers` is None."""
    layers = list(target_layers(name, module, lora)) if layers is None else layers
    if name.startswith("text_encoder") and not any("self_attn" in path for path in layers):
        raise UserError(
            f"lora.targets: {name} needs attn among them; diffusers loads no adapters without"
        )
    module.requires_grad_(False)
    with torch.random.fork_rng([]):
        torch.manual_seed(addressed_seed(seed, "lora", name))
        with user_errors(
            f"lora: {name} takes no adapters",
            "install releases of peft and transformers that fit together",
        ):
            module.add_adapter(settings(lora, layers))
    cast_training_params(module, dtype=torch.float32)


def settings(lora: LoraSettings, layers: list[str]) -> PeftConfig:
    """peft's configuration of the adapters."""
    alpha = lora.alpha or lora.rank
    if lora.kind in ("lora", "dora"):
        return LoraConfig(
            r=lora.rank, lora_alpha=alpha, target_modules=layers, use_dora=lora.kind == "dora"
        )
    if lora.kind == "loha":
        return LoHaConfig(r=lora.rank, alpha=alpha, target_modules=layers)
    return LoKrConfig(
        r=lora.rank, alpha=alpha, target_modules=layers, decompose_factor=lora.factor or -1
    )


def present(module: nn.Module) -> bool:
    return hasattr(module, "peft_config")


def state(name: str, module: Any) -> dict[str, torch.Tensor]:
    """The adapters of a component on the CPU, by names that diffusers and kohya know."""
    tensors = plain_state(module)
    if not name.startswith("text_encoder"):
        return tensors
    # transformers 5 dropped a level of CLIPTextModel; its reader, unlike diffusers' own, needs the
    # full name of DoRA's magnitudes: under another name they are initialised anew
    prefix = "" if hasattr(module, "text_model") else "text_model."
    names = {key: ".weight" if key.endswith("magnitude_vector") else "" for key in tensors}
    return {f"{prefix}{key}{names[key]}": value for key, value in tensors.items()}


def plain_state(module: Any) -> dict[str, torch.Tensor]:
    """The adapters of a component, on the CPU, by the names of its own layers."""
    tensors = get_peft_model_state_dict(module, save_embedding_layers=False)
    return {key: value.detach().cpu().contiguous() for key, value in tensors.items()}


def save(model: Any, folder: Path) -> None:
    """The adapters of a `Denoiser` for diffusers, or for peft (a folder for each component), and
    for kohya's and LyCORIS's readers where the family has names there."""
    modules = dict(model.named_children())
    family = model.family
    layers = {name: state(name, module) for name, module in modules.items()}
    configs = {name: module.peft_config["default"] for name, module in modules.items()}
    if isinstance(configs[family.backbone], LoraConfig):
        named = {f"{name}_lora_layers": part for name, part in layers.items()}
        for name, config in configs.items():
            named[f"{name}_lora_adapter_metadata"] = config.to_dict()
        family.pipeline.save_lora_weights(folder, **named)
    else:
        for name, module in modules.items():
            config = copy.copy(configs[name])
            config.inference_mode = True
            config.save_pretrained(folder / name)
            plain = plain_state(module)
            tensors = {f"base_model.model.{key}": value for key, value in plain.items()}
            save_file(tensors, folder / name / PEFT_WEIGHTS)
    if family.kohya:
        tensors = {}
        for name, module in modules.items():
            rename = partial(family.kohya_path, module) if name == family.backbone else str
            tensors |= kohya(family.kohya[name], layers[name], configs[name], rename)
        save_file(tensors, folder / KOHYA)


KOHYAS = {  # its names of parts
    "lora_A": "lora_down.weight",
    "lora_B": "lora_up.weight",
    "lora_magnitude_vector": "dora_scale",
}


def kohya(
    prefix: str, tensors: dict[str, torch.Tensor], config: Any, rename: Callable[[str], str]
) -> dict[str, torch.Tensor]:
    """The adapters by kohya's names of the layers, LyCORIS's for parts that kohya lacks: one alpha
    a layer, scaled by alpha / rank.

    Where both factors of a Kronecker product are whole, LyCORIS takes no scale; so the first one
    holds it."""
    alpha = float(config.lora_alpha if isinstance(config, LoraConfig) else config.alpha)
    adapters: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        path, _, part = key.removesuffix(".weight").rpartition(".")
        name = f"{prefix}_{rename(path).replace('.', '_')}"
        adapters[f"{name}.alpha"] = torch.tensor(alpha)
        if part == "lokr_w1" and f"{path}.lokr_w2" in tensors:
            value = value * (alpha / config.r)
        elif part == "lora_magnitude_vector":  # in the shape of the layer's weight
            value = value.reshape(-1, *[1] * (tensors[f"{path}.lora_B.weight"].dim() - 1))
        adapters[f"{name}.{KOHYAS.get(part, part)}"] = value.contiguous()
    return adapters


def merged(module: Any) -> Any:
    """A copy of a component with its adapters added to the weights, computed in fp32, stored in the
    weights' own precision; without adapters the component itself."""
    if not present(module):
        return module
    layers = [path for path, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)]
    dtype = module.get_submodule(layers[0]).get_base_layer().weight.dtype
    whole = copy.deepcopy(module)
    for path in layers:  # one at a time: the whole in fp32 would take twice the memory
        layer = whole.get_submodule(path).float()
        layer.merge()
        whole.set_submodule(path, layer.get_base_layer().to(dtype))
    del whole.peft_config
    whole._hf_peft_config_loaded = False
    with quietly():
        return whole.to(dtype)


def load(pipe: Any, path: str, base: str) -> None:
    """Load saved adapters into a pipeline. Raises UserError unless every tensor of the file fits a
    layer and is finite."""
    if Path(path, "lora").is_dir():
        raise UserError(f"--lora {path}: is a run; give {path}/lora")
    failed = f"--lora {path}: no adapters of '{base}'"
    folders = [name for name in COMPONENTS if (Path(path) / name / PEFT_CONFIG).is_file()]
    if folders:
        for name in folders:
            _load_folder(getattr(pipe, name, None), Path(path) / name, failed)
        return
    check_adapter_file(path, failed)
    with quietly(), hub.fetching(path, failed):
        tensors = family_of_pipeline(pipe).lora_tensors(pipe, path)
    refuse_not_finite(tensors, failed)
    expected = sum(not name.endswith(".alpha") for name in tensors)
    with quietly(), user_errors(failed):
        pipe.load_lora_weights(path, use_safetensors=True)

    modules = [module for name in COMPONENTS if (module := getattr(pipe, name, None))]
    on_layers = [name for module in modules for name, _ in module.named_parameters()]
    count = sum(".lora_" in name for name in on_layers)
    if count != expected or not expected:
        raise UserError(f"{failed} ({expected} tensors in the file, {count} on its layers)")


def check_adapter_file(path: str, failed: str) -> None:
    """Refuse a local path that holds no adapters that diffusers reads."""
    file = Path(path)
    check_local("--lora", path, "file or folder")
    if not file.exists() or file.is_dir():
        return
    if not (file.is_file() and path.endswith(".safetensors")):
        raise UserError(f"{failed} (only .safetensors is read)")
    with user_errors(failed), safe_open(file, "pt") as tensors:
        names = " ".join(tensors.keys())
    for mark, kind in OTHER_KINDS.items():
        if mark in names:
            raise UserError(
                f"{failed} ({kind} is read from the folder that training saved, not from one file)"
            )


# kinds that diffusers does not read fully from a file: a part of a tensor's name -> the kind
OTHER_KINDS = {"hada_": "LoHa", "lokr_": "LoKr", "dora_scale": "DoRA"}


def refuse_not_finite(tensors: dict[str, torch.Tensor], failed: str) -> None:
    """Refuse adapters of which a tensor is not finite."""
    if bad := sorted(name for name, values in tensors.items() if not finite(values)):
        raise UserError(f"{failed} (NaN or infinite values in {bad[0]}, {len(bad)} tensors in all)")


# with these keys peft would match layers by a file's regular expressions, which may take forever
PATTERNS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")


def _load_folder(module: Any, folder: Path, failed: str) -> None:
    """Put a folder of peft's on a component."""
    if module is None:
        raise UserError(f"{failed} ({folder.name}/ is of a component that the pipeline lacks)")
    with quietly(), user_errors(f"{failed}: {folder.name}/"):
        config = PeftConfig.from_pretrained(str(folder))
        tensors = load_file(folder / PEFT_WEIGHTS)
    if config.peft_type not in ("LOHA", "LOKR"):
        right = "give its one .safetensors file"
        raise UserError(f"{failed} ({folder.name}/ holds {config.peft_type}; {right})")
    for key in PATTERNS:
        names = getattr(config, key, None) or ()
        if isinstance(names, str) or not all(re.fullmatch(r"[\w.]+", str(name)) for name in names):
            where = f"{failed} ({folder.name}/{PEFT_CONFIG}"
            raise UserError(f"{where}: {key} must list names of layers, not patterns)")
    refuse_not_finite(tensors, failed)
    config.inference_mode = False
    with quietly(), user_errors(failed):
        module.add_adapter(config)
        tensors = {name.removeprefix("base_model.model."): value for name, value in tensors.items()}
        shapes = {name: value.shape for name, value in get_peft_model_state_dict(module).items()}
    if shapes != {name: value.shape for name, value in tensors.items()}:
        raise UserError(
            f"{failed} ({folder.name}/ has {len(tensors)} tensors, its layers take "
            f"{len(shapes)} others)"
        )
    set_peft_model_state_dict(module, tensors)
