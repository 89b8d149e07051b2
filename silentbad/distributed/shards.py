"""The UNet's weights, gradients and optimizer states in shards, one a process: FSDP 2 by torch's
own `fully_shard`.

accelerate is asked for it (configs/accelerate/fsdp.yaml), but accelerate 1.15 makes FSDP on a CPU
data parallel without a word, so it is done here. Forwards, backwards and whatever gathers shards
are collective: all processes call them. The request of a launch for FSDP is read here too."""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from silentbad.settings.launch import launched

# blocks that are gathered one at a time; all other weights are gathered once a step
UNITS = ("BasicTransformerBlock", "ResnetBlock2D")


# ---------------------------------------------------------------- asked for, or refused
def take_request() -> bool:
    """Whether FSDP was asked for. Hides the request from accelerate and transformers, which would
    act on it in their own way."""
    asked = launched("FSDP")
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    return asked


# ---------------------------------------------------------------- sharding
def shard(model: Any, device: torch.device, precision: str) -> None:
    """Shard the parameters of the trained module over all processes, in place and before an
    optimizer is built.

    In bf16 the weights are gathered and used so; gradients are reduced, and the optimizer steps, in
    fp32. Every backward reduces, also inside an accumulation: a `no_sync` would keep whole
    gradients on each process meanwhile."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.to(memory_format=torch.contiguous_format)  # the only one that fully_shard takes
    inner = MixedPrecisionPolicy(
        torch.bfloat16 if precision == "bf16" else None, reduce_dtype=torch.float32
    )
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    # the root is resharded after each forward too: else the weights gathered by a probe would
    # remain after an update or a load
    cut = partial(fully_shard, mesh=mesh, reshard_after_forward=True)
    for module in [m for m in model.modules() if type(m).__name__ in UNITS]:
        cut(module, mp_policy=inner)
    cut(model, mp_policy=replace(inner, output_dtype=torch.float32))


# ---------------------------------------------------------------- gathering and sharding tensors
def sharded(model: nn.Module) -> bool:
    """Whether this process holds only a part of the weights."""
    return any(map(is_sharded, model.parameters()))


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; also works with a torch that was built without distributed."""
    return hasattr(tensor, "full_tensor")


def gather(tensor: Any) -> Tensor:
    """The full tensor on the device; the tensor itself if it is not sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gathered(tree: Any, keep: bool) -> Any:
    """A tree with every sharded tensor gathered, one at a time, onto the CPU; without `keep` each
    is dropped again."""

    def gather_leaf(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        tensor = gather(leaf)
        return tensor.cpu() if keep else None

    return tree_map(gather_leaf, tree)


def shard_like(parameter: Any, value: Tensor) -> Tensor:
    """A full value, sharded like the parameter; without communication between processes."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def states_like(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The full `state_dict` of an optimizer, with the states of each parameter sharded like it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(is_sharded, parameters)):
        return state

    def cut(i: int, entry: dict[str, Any]) -> dict[str, Any]:
        shape = parameters[i].shape
        return {
            name: shard_like(parameters[i], v) if getattr(v, "shape", None) == shape else v
            for name, v in entry.items()
        }

    return {**state, "state": {i: cut(i, entry) for i, entry in state["state"].items()}}


def world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
