"""The UNet's weights, gradients and optimizer states in shards, one a process: FSDP 2 by torch's own `fully_shard`.

accelerate is asked for it (configs/accelerate/fsdp.yaml), but accelerate 1.15 makes FSDP on a CPU data parallel without
a word, so it is done here. Forwards, backwards and whatever gathers shards are collective: all processes call them.
What launches ask for is sorted out here too.
"""

import os
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from silentbad.errors import UserError

UNITS = ("BasicTransformerBlock", "ResnetBlock2D")  # gathered one at a time; what is beside them, once a step
ELEMENTWISE = ("AdamW", "Adam", "SGD")  # optimizers whose step needs no more of a tensor than the shard
INSTEAD = "use configs/accelerate/ddp.yaml"


# ---------------------------------------------------------------- asked for, or refused
def launched(name: str) -> bool:
    """Whether `accelerate launch` was told to use FSDP, DEEPSPEED or MEGATRON_LM."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true")


def take_over() -> bool:
    """Whether FSDP was asked for; accelerate and transformers, which would act on it in their own way, do not see it
    any more."""
    asked = launched("FSDP")
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    return asked


class ShardSettings(Protocol):
    """What launches in parts read of a run's configuration."""

    train_text_encoder: bool
    lora: Any  # silentbad.model.settings.LoraSettings
    gradient_control: Any  # gradient_control.GradientControlConfig
    memory: Any  # memory_reinforce.MemoryConfig
    optimizer: str
    use_8bit_adam: bool
    use_ema: bool
    compile_model: bool
    channels_last: bool | None
    mixed_precision: Literal["no", "fp16", "bf16"] | None


def check(config: ShardSettings) -> None:
    """Refuse launches that are none of ours and, in ours, what does not work in shards; before anything loads."""
    for name in ("DEEPSPEED", "MEGATRON_LM"):
        if launched(name):
            raise UserError(
                f"accelerate: {name} takes the optimizer's step away from the loop; use configs/accelerate/ddp.yaml, "
                "or fsdp.yaml for weights and states in shards"
            )
    if launched("FSDP"):
        for key, wrong, why in unfit_fsdp(config):
            if wrong:
                raise UserError(f"{key}: {why}")


def unfit_fsdp(config: ShardSettings) -> list[tuple[str, bool, str]]:
    """(key, whether it was set so, why FSDP cannot have it and what can) of what does not work in shards."""
    memory, environment = config.memory, os.environ.get
    control = config.gradient_control
    precision = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    optimizer = "AdamW8bit" if config.use_8bit_adam else config.optimizer.removeprefix("torch.optim.")
    takes = f"gives each process a shard of a tensor, {optimizer} may need it whole; take {', '.join(ELEMENTWISE)}"
    reads = f"takes gradients apart before FSDP has reduced them; turn it off, or {INSTEAD}"
    copies = f"keeps a second UNet beside the shards, whole; turn it off, or {INSTEAD}"
    return [
        (
            "fsdp_version",
            environment("FSDP_VERSION", "1") != "2",
            "only FSDP 2 shards here; set 2, as configs/accelerate/fsdp.yaml does",
        ),
        (
            "fsdp_offload_params",
            environment("FSDP_OFFLOAD_PARAMS", "").lower() == "true",
            "shards stay on their device; set false",
        ),
        (
            "num_processes",
            int(os.environ.get("WORLD_SIZE", "1")) < 2,
            "FSDP has nothing to shard in one process; use configs/accelerate/gpu.yaml",
        ),
        (
            "mixed_precision",
            precision not in ("no", "bf16"),
            f"FSDP trains in bf16 or no here, not in {precision}, whose loss scale does not know shards",
        ),
        ("optimizer", optimizer not in ELEMENTWISE, f"FSDP {takes}"),
        ("lora.rank", config.lora.rank is not None, f"FSDP shards what trains, and adapters are small; {INSTEAD}"),
        ("train_text_encoder", config.train_text_encoder, f"FSDP shards the UNet alone; {INSTEAD}"),
        ("compile_model", config.compile_model, "FSDP acts inside a step's passes, untested compiled; leave it off"),
        ("channels_last", bool(config.channels_last), "FSDP shards contiguous weights only; leave it off"),
        ("gradient_control.conflict", control.conflict, reads),
        ("gradient_control.transform", control.transform != "none", reads),
        ("gradient_control.name", control.uses_hypergradient, reads),
        ("gradient_control.between.name", control.between.layerwise, reads),
        ("gradient_control.spectral", control.spectral, "takes a matrix whole, FSDP in shards; turn it off"),
        ("memory.loss_balance.name", config.memory.loss_balance.name != "fixed", reads),
        ("use_ema", config.use_ema, copies),
        ("memory.distillation.name", memory.distillation.name != "none", copies),
        ("memory.retention.name", memory.retention.name != "none", copies),
        (
            "memory.attention_binding.name",
            memory.attention_binding.name != "none",
            f"reads layers inside what FSDP gathers, untested; leave it none, or {INSTEAD}",
        ),
    ]


# ---------------------------------------------------------------- sharding
def shard(model: Any, device: torch.device, precision: str) -> None:
    """Cut the parameters of what trains over all processes, in place and before an optimizer is built.

    In bf16 the weights are gathered and used so; gradients are reduced, and the optimizer steps, in fp32. Every
    backward reduces, also inside an accumulation: a `no_sync` would keep whole gradients on each process meanwhile.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.to(memory_format=torch.contiguous_format)  # the only one that fully_shard takes
    inner = MixedPrecisionPolicy(torch.bfloat16 if precision == "bf16" else None, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    # also the root is cut again after each forward: else weights a probe gathered would outlive an update or a load
    cut = partial(fully_shard, mesh=mesh, reshard_after_forward=True)
    for module in [m for m in model.modules() if type(m).__name__ in UNITS]:
        cut(module, mp_policy=inner)
    cut(model, mp_policy=replace(inner, output_dtype=torch.float32))


# ---------------------------------------------------------------- whole again, and back
def sharded(model: nn.Module) -> bool:
    """Whether this process holds a part alone of the weights."""
    return any(map(is_sharded, model.parameters()))


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, asked so that a torch built without distributed need not know what that is."""
    return hasattr(tensor, "full_tensor")


def gather(tensor: Any) -> Tensor:
    """A tensor without shards, on the device; itself where it has none."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gathered(tree: Any, keep: bool) -> Any:
    """A tree with every shard gathered, one tensor at a time: onto the CPU, or where not `keep` dropped again."""

    def gather_leaf(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        tensor = gather(leaf)
        return tensor.cpu() if keep else None

    return tree_map(gather_leaf, tree)


def shard_like(parameter: Any, value: Tensor) -> Tensor:
    """A whole value cut as the parameter is; no process needs another for it."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def states_like(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A whole optimizer's `state_dict` with each parameter's states cut as the parameter is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(is_sharded, parameters)):
        return state

    def cut(i: int, entry: dict[str, Any]) -> dict[str, Any]:
        shape = parameters[i].shape
        return {
            name: shard_like(parameters[i], v) if getattr(v, "shape", None) == shape else v for name, v in entry.items()
        }

    return {**state, "state": {i: cut(i, entry) for i, entry in state["state"].items()}}


def world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
