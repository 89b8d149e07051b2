"""ZeRO 2 by DeepSpeed's engine: each process keeps a part of the optimizer's states and of the reduced gradients.

accelerate is asked for it (configs/accelerate/deepspeed.yaml), but its wrapper lets the engine step inside `backward`,
before our rates, our clip and our look at whether gradients are finite. So the engine is driven here: it reduces in a
backward, and steps in `update`. Weights stay whole, in fp32. What gathers or sums parts is collective: all processes
call it.
"""

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

RELEASE = "0.19."  # of DeepSpeed; what begins with an underscore below may be otherwise in another
STAGE = 2

ENGINE = {
    "train_micro_batch_size_per_gpu": 1,  # asked for; the engine only reports it
    "zero_optimization": {
        "stage": STAGE,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_bucket_size": 50_000_000,
        "compute_grad_norm": False,
    },
    "gradient_clipping": 0.0,  # its default is 1
    "zero_allow_untested_optimizer": True,
    "timers": {"throughput": {"enabled": False}},  # it waits for the device in every forward
}


def release() -> str:
    """DeepSpeed's, or none."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return "none"


@dataclass
class Part:
    """What this process holds of a tensor: `values` (n,), which begin at its element `first`; others hold the rest."""

    shape: torch.Size
    first: int
    values: Tensor

    def full_tensor(self) -> Tensor:
        """All of it, on every process."""
        flat = self.values.new_zeros(self.shape.numel())
        flat[self.first : self.first + len(self.values)] = self.values
        dist.all_reduce(flat)
        return flat.view(self.shape)

    def strided(self, count: int, stride: int) -> Tensor:
        """Its elements 0, stride, ... (count,); zeros in the place of what others hold."""
        out, end = self.values.new_zeros(count), self.first + len(self.values)
        start, stop = -(-self.first // stride), min(-(-end // stride), count)
        if start < stop:
            out[start:stop] = self.values[start * stride - self.first :: stride][: stop - start]
        return out


# ---------------------------------------------------------------- gradients, whatever holds them
def parted(parameter: Tensor) -> bool:
    return hasattr(parameter, "_hp_mapping")


def gradients(parameters: Iterable[Tensor]) -> list[Any]:
    """Of each parameter its gradient (shards, where it is in shards), under ZeRO this process's part; or None."""
    return [_part(p) if parted(p) else p.grad for p in parameters]


def _part(parameter: Any) -> Part:
    """A part of a reduced gradient: a view, so that what changes it reaches the step."""
    if parameter._hp_mapping is None:
        return Part(parameter.shape, 0, parameter.new_zeros(0))
    values = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    return Part(parameter.shape, _place(parameter)[0], values.view(-1))


def _place(parameter: Any) -> tuple[int, int, int]:
    """Where this process's part begins in the parameter, where in its group's flat tensor, and its length."""
    if (mapping := parameter._hp_mapping) is None:
        return 0, 0, 0
    inside, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
    return inside.start, flat.start, inside.numel


def held(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The tensors behind `gradients`, without what is missing: to be scaled in place."""
    return [g.values if isinstance(g, Part) else g for g in gradients(parameters) if g is not None]


def summed(tensor: Tensor, over: Iterable[Any]) -> Tensor:
    """The sum over all processes, where any of `over` is a part; elsewhere the tensor itself."""
    if any(isinstance(each, Part) for each in over):
        dist.all_reduce(tensor)
    return tensor


# ---------------------------------------------------------------- the engine
class Zero:
    """Stands where the optimizer stands: its step, and its state as one process would hold it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        device = next(model.parameters()).device
        os.environ.setdefault("DS_ACCELERATOR", device.type)  # else a CPU run on a machine with a GPU takes the GPU
        import deepspeed

        if device.type == "cpu":  # an operator for inference, which it would compile for minutes first
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.groups = [group["params"] for group in optimizer.param_groups]  # the engine puts flat ones in their place
        self.optimizer = optimizer
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=ENGINE)[0]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def backward(self, loss: Tensor, last: bool) -> None:
        """Reduce a loss's gradients into the parts; with the `last` of an update they are complete."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        parts = self.engine.optimizer.averaged_gradients
        parts.update(dict.fromkeys(parts))  # a skipped step leaves them

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's, its tensors as parts that `shards.gathered` gathers one at a time."""
        inner, numbers, state = self.optimizer.state_dict(), itertools.count(), {}
        for k, (group, parameters) in enumerate(zip(inner["param_groups"], self.groups, strict=True)):
            group["params"] = list(itertools.islice(numbers, len(parameters)))
            size = self.param_groups[k]["params"][0].shape
            for i, p in zip(group["params"], parameters, strict=True):
                first, start, n = _place(p)
                state[i] = {
                    key: Part(p.shape, first, value[start : start + n]) if value.shape == size else value.clone()
                    for key, value in inner["state"].get(k, {}).items()
                }
        return {"state": {i: entry for i, entry in state.items() if entry}, "param_groups": inner["param_groups"]}

    def load_state_dict(self, whole: dict[str, Any]) -> None:
        """A whole optimizer's; the weights have been loaded."""
        self.engine.optimizer.refresh_fp32_params()  # the parts that the optimizer steps are copies
        groups: list[dict[str, Any]] = []
        state: dict[int, Any] = {}
        for k, (group, parameters) in enumerate(zip(whole["param_groups"], self.groups, strict=True)):
            flat = self.param_groups[k]["params"][0]
            groups.append({**group, "params": [k]})
            for i, p in zip(group["params"], parameters, strict=True):
                first, start, n = _place(p)
                for key, value in whole["state"].get(i, {}).items():
                    mine = state.setdefault(k, {})
                    if value.shape == p.shape:
                        part = value.reshape(-1)[first : first + n]
                        mine.setdefault(key, torch.zeros_like(flat, device=part.device))[start : start + n] = part
                    else:
                        mine[key] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
