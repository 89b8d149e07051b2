"""The module that trains: built, placed, compiled, averaged, and its trained parameters saved
and loaded."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from silentbad.distributed.shards import shard_like
from silentbad.model import diffusion, lora
from silentbad.model.family import Family
from silentbad.model.forwards import convolve
from silentbad.model.groups import group_of
from silentbad.model.registry import FAMILIES
from silentbad.settings.layers import narrowed
from silentbad.settings.optimizer_facts import path_of
from silentbad.settings.train import TrainConfig


class Denoiser(nn.Module):
    """The backbone, called like diffusers' UNet, and the text encoders if they train.

    `schedule` is the noise schedule; without one the timesteps are passed on unchanged."""

    def __init__(
        self,
        backbone: nn.Module,
        family: Family | None = None,
        schedule: Any = None,
        **text_encoders: nn.Module,
    ):
        super().__init__()
        self.family = family or FAMILIES["StableDiffusionPipeline"]
        self.schedule = schedule
        self.text_encoders = list(text_encoders)
        for name, module in {self.family.backbone: backbone, **text_encoders}.items():
            self.add_module(name, module)

    @property
    def backbone(self) -> nn.Module:
        """The backbone alone."""
        return getattr(self, self.family.backbone)

    def forward(
        self,
        noisy_latents: Tensor,
        timesteps: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        tokens: list[Tensor] | None = None,
        nonempty: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """The prediction (B,C,h,w) under text states, or `tokens` with gradients."""
        if tokens is not None:
            encoders = {name: getattr(self, name) for name in self.text_encoders}
            width = self.family.widths(self.backbone, encoders)[0]
            encoder_hidden_states, pooled = self.family.encode(encoders, tokens, nonempty, width)
            if pooled is not None:
                added_cond_kwargs = {**(added_cond_kwargs or {}), "text_embeds": pooled}
        assert encoder_hidden_states is not None, "neither states nor tokens"
        # a copy in half precision needs inputs of its dtype; otherwise autocast converts them
        dtype = noisy_latents.dtype
        added = {
            k: v if k == "time_ids" else v.to(dtype) for k, v in (added_cond_kwargs or {}).items()
        }
        timesteps = diffusion.model_time(self.schedule, timesteps)
        model_pred = self.family.predict(
            self.backbone, noisy_latents, timesteps, encoder_hidden_states.to(dtype), added
        )
        return SimpleNamespace(sample=model_pred) if return_dict else (model_pred,)


def backbone_in(model: Any) -> Any:
    """The backbone of a `Denoiser`; any other model is its own backbone."""
    return model.backbone if isinstance(model, Denoiser) else model


def make_trainable(
    config: TrainConfig, family: Family, schedule: Any, backbone: Any, encoders: dict[str, Any]
) -> Denoiser:
    """The module that trains; every parameter that shall not is frozen."""
    trained = {family.backbone: backbone, **(encoders if config.train_text_encoder else {})}
    for module in encoders.values():
        module.requires_grad_(False).eval()
    layers = layers_to_train(config, family, trained)
    for name, module in trained.items():
        if config.lora.rank is not None:
            lora.add(name, module, config.lora, config.seed, list(layers[name]))
        else:
            for path, parameter in module.named_parameters():
                parameter.requires_grad_(path in layers[name])
        for parameter in family.unused(name, module):
            parameter.requires_grad_(False)
        module.train()
        if config.gradient_checkpointing and module is backbone:
            module.enable_gradient_checkpointing(recomputed)
        elif config.gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
    return Denoiser(trained.pop(family.backbone), family, schedule, **trained)


def recomputed(module: nn.Module, *inputs: Any) -> Any:
    """Run a block whose activations are recomputed in backward. If nothing in it or before it
    trains it runs plainly, because checkpointing would only keep its inputs."""
    tensors = [*module.parameters(), *(x for x in inputs if isinstance(x, Tensor))]
    if any(x.requires_grad for x in tensors):
        return checkpoint(module, *inputs, use_reentrant=False)
    return module(*inputs)


def layers_to_train(
    config: TrainConfig, family: Family, components: dict[str, nn.Module]
) -> dict[str, dict[str, str]]:
    """{component: {name: group}} of the parameters that train, or that adapters sit on."""
    layers: dict[str, dict[str, str]] = {}
    for name, module in components.items():
        if config.lora.rank is not None:
            layers[name] = lora.target_layers(name, module, config.lora)
            continue
        unused = {id(parameter) for parameter in family.unused(name, module)}
        named = module.named_parameters()
        paths = [path for path, parameter in named if id(parameter) not in unused]
        layers[name] = {path: group_of(f"{name}.{path}") for path in paths}
    could = "this model" if config.lora.rank is None else "those that lora.targets choose"
    return layers if config.train_layers is None else narrowed(layers, config.train_layers, could)


def to_device(model: torch.nn.Module, config: TrainConfig, device: torch.device) -> torch.nn.Module:
    """The trained module on its device, in the memory format in which its convolutions are
    fastest. bitsandbytes makes weights contiguous at its first update, and so they begin."""
    contiguous = path_of(config)[1].startswith("bitsandbytes")
    fastest = device.type == "cuda" and not contiguous
    last = fastest if config.channels_last is None else config.channels_last
    model.to(device)
    if last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def training_forward(model: torch.nn.Module, config: TrainConfig, precision: str) -> Callable:
    """The forward of a training step: compiled where asked, for the one shape that a micro-batch
    has. Otherwise linear layers run as convolutions on a CPU; in bf16 they gain nothing by it."""
    if not config.compile_model:
        if precision == "no":
            convolve(model)
        return model
    import torch._functorch.config

    # gradients by source walk the graph twice
    torch._functorch.config.donated_buffer = False
    return torch.compile(model, dynamic=False)


def make_ema(model: torch.nn.Module, config: TrainConfig, device: torch.device) -> EMAModel | None:
    """diffusers' average of the trained weights, on the CPU when offloaded."""
    if not config.use_ema:
        return None
    parameters = [p for p in model.parameters() if p.requires_grad]
    ema = EMAModel(parameters, decay=config.ema_decay, foreach=config.foreach_ema)
    ema.to("cpu" if config.offload_ema else device)
    if config.offload_ema and device.type == "cuda":
        ema.pin_memory()
    return ema


def backward_scale(accelerator: Any) -> float:
    """What accelerator.backward multiplies a loss by."""
    scaler = accelerator.scaler
    return (1.0 if scaler is None else scaler.get_scale()) / accelerator.gradient_accumulation_steps


# ---------------------------------------------------------------- saving
def trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that train, by name."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def load_trained(module: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Copy saved parameters into the ones that train; ValueError unless both are the same set."""
    parameters = trained(module)
    if {name: value.shape for name, value in saved.items()} != {
        name: value.shape for name, value in parameters.items()
    }:
        raise ValueError(
            f"it holds {len(saved)} other tensors than the {len(parameters)} that train"
        )
    for name, parameter in parameters.items():
        parameter.copy_(shard_like(parameter, saved[name]))
