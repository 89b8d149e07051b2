"""How far training moved the weights, by stage: relative norm, and the largest singular value of a
change over that of its matrix.

theta_0 is read again from the base's own file, tensor by tensor, so that no run keeps two copies.
With adapters, the change is the matrix that they add."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import Tensor, nn

from silentbad.measure.record import StageSize
from silentbad.model.gate import Source
from silentbad.model.groups import stage_of
from silentbad.model.lora import present
from silentbad.rng import generator

STEPS = 12  # of the power iteration
STEMS = ("diffusion_pytorch_model", "model")  # of diffusers' and of transformers' files

# component -> {name: theta_0}; None where it is not available
Base = Callable[[str], "Mapping[str, Tensor] | None"]
Moved = tuple[str, Tensor, Tensor | None]  # name, theta_0, theta - theta_0 (None: unchanged)


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for. Names before which
    transformers 4 wrote "text_model." are known without it too."""

    def __init__(self, file: Path):
        self.file = file
        with safe_open(file, "pt") as tensors:
            keys = list(tensors.keys())
        self.names = {key.removeprefix("text_model."): key for key in keys} | {
            key: key for key in keys
        }

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.file, "pt") as tensors:
            return tensors.get_tensor(self.names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def base_files(source: Source, revisions: Mapping[str, str | None] | None = None) -> Base:
    """The weights of a pipeline's components, from a folder or the Hub's cache; a component in
    several files is left out. `revisions` are those of single components."""

    def component(name: str) -> Mapping[str, Tensor] | None:
        revision = (revisions or {}).get(name) or source.revision
        variants = [f".{source.variant}", ""] if source.variant else [""]
        for part in (f"{stem}{variant}.safetensors" for stem in STEMS for variant in variants):
            path = f"{name}/{part}"
            if Path(source.path).is_dir():
                file: Any = Path(source.path) / path
            else:
                options = {"cache_dir": source.cache_dir, "revision": revision}
                file = try_to_load_from_cache(source.path, path, **options)
            if isinstance(file, str | Path) and Path(file).is_file():
                return TensorFile(Path(file))
        return None

    return component


def base_modules(components: Mapping[str, Any]) -> Base:
    """The weights of a pipeline in memory."""

    def component(name: str) -> Mapping[str, Tensor] | None:
        module = components.get(name)
        return None if module is None else dict(module.named_parameters())

    return component


@torch.no_grad()
def stage_sizes(modules: Mapping[str, nn.Module], base: Base) -> dict[str, StageSize] | None:
    """The change of each stage of these components, in their order, without unchanged stages. None
    where theta_0 is not available."""
    before_squared: dict[str, float] = defaultdict(float)
    change_squared: dict[str, float] = defaultdict(float)
    singular: dict[str, float] = defaultdict(float)
    for component, module in modules.items():
        tensors = changes(component, module, base)
        if tensors is None:
            return None
        for name, before, change in tensors:
            stage = stage_of(f"{component}.{name}")
            before_squared[stage] += before.float().square().sum().item()
            if change is None or not change.any():
                continue
            change_squared[stage] += change.float().square().sum().item()
            if change.ndim > 1 and (usual := largest_singular_value(before)) > 0:
                ratio = largest_singular_value(change) / usual
                singular[stage] = max(singular[stage], ratio)
    return {
        stage: StageSize((change_squared[stage] / total) ** 0.5, singular[stage])
        for stage, total in before_squared.items()
        if change_squared[stage] > 0 and total > 0
    }


def changes(component: str, module: nn.Module, base: Base) -> Iterator[Moved] | None:
    """The tensors of a component; None where theta_0 is not available."""
    parameters = dict(module.named_parameters())
    if any(p.is_meta or hasattr(p, "to_local") for p in parameters.values()):
        return None
    if present(module):
        layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
        whole = any(any(getattr(layer, "use_dora", {}).values()) for layer in layers)
        return None if whole else _of_adapters(module)
    before = base(component)
    if before is None or any(
        name not in before or before[name].shape != p.shape for name, p in parameters.items()
    ):
        return None
    return _of_weights(parameters, before)


def _of_weights(parameters: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Iterator[Moved]:
    for name, parameter in parameters.items():
        before = base[name].to(parameter.device, torch.float32)
        yield name, before, parameter.float() - before


def _of_adapters(module: nn.Module) -> Iterator[Moved]:
    """The weights under adapters with the adapters' change, and all other weights without one."""
    adapted = {
        f"{path}.base_layer.weight": layer
        for path, layer in module.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }
    added = [f"{path.removesuffix('base_layer.weight')}" for path in adapted]
    for name, parameter in module.named_parameters():
        if name in adapted:
            layer: Any = adapted[name]
            delta = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
            yield name.replace(".base_layer", ""), parameter, delta
        elif ".base_layer." in name or not any(name.startswith(path) for path in added):
            yield name, parameter, None


def largest_singular_value(weight: Tensor) -> float:
    """The largest singular value of a matrix, or of a kernel as (out, rest), by power iteration."""
    matrix = weight.flatten(1).float()
    right = torch.randn(matrix.shape[1], generator=generator("singular value", matrix.shape[1]))
    right = right.to(matrix.device)
    value = torch.zeros((), device=matrix.device)
    for _ in range(STEPS):
        left = matrix @ right
        right = matrix.T @ (left / left.norm().clamp(min=1e-30))
        value = right.norm()
        right = right / value.clamp(min=1e-30)
    return value.item()
