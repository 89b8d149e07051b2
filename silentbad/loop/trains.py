"""The parameters that train, and their memory: the table of --print_groups, and the file sizes of a
forecast."""

from typing import Any

import torch

from silentbad.loop.optimizers import make_optimizer
from silentbad.model import lora
from silentbad.model.denoiser import trained
from silentbad.model.groups import Groups
from silentbad.model.pipeline import Components
from silentbad.settings.train import TrainConfig

PROBE = 64  # largest side of the tensors that an optimizer's memory is counted on


def table(
    config: TrainConfig, parts: Components, groups: Groups, param_groups: list[dict[str, Any]]
) -> str:
    """A row a group of the controller's: tensors, parameters, the optimizer's memory."""
    states = optimizer_bytes(config, param_groups)
    members = {name: [*group.values()] for name, group in groups.members.items()}
    members["total"] = [p for group in members.values() for p in group]
    total = sum(p.numel() for p in members["total"])
    lines = [f"{'group':<22}{'tensors':>8}{'parameters':>15}{'share':>9}{'optimizer':>12}"]
    for name, group in members.items():
        count = sum(p.numel() for p in group)
        state = memory(sum(states[id(p)] for p in group))
        share_of = count / max(total, 1)
        lines.append(f"{name:<22}{len(group):>8}{count:>15,}{share_of:>9.2%}{state:>12}")
    average = weight_bytes(parts) if config.use_ema else 0
    checkpoint = weight_bytes(parts) + sum(states.values()) + average
    what = "adapters" if lora.present(parts.backbone) else "the whole pipeline"
    lines += [
        "",
        f"trains      {share(parts)}",
        f"optimizer   {memory(sum(states.values()))}",
        f"checkpoint  {memory(checkpoint)}",
        f"file        {memory(file_bytes(parts))}, {what}",
    ]
    return "\n".join(lines)


def share(parts: Components) -> str:
    """The number of trained parameters, of all in the components that train, as text."""
    count = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    every = sum(p.numel() for p in parts.model.parameters())
    return f"{count:,} of {every:,} parameters ({count / every:.1%})"


def weight_bytes(parts: Components) -> int:
    """Bytes of the trained weights."""
    return sum(size(trained(module).values()) for module in parts.model.children())


def whole_bytes(parts: Components) -> int:
    """A whole pipeline."""
    models = (parts.backbone, parts.vae, *parts.text_encoders.values())
    return sum(size(model.state_dict().values()) for model in models)


def file_bytes(parts: Components) -> int:
    """Bytes that a run saves: a whole pipeline, or adapters, which are written in two formats."""
    return 2 * weight_bytes(parts) if lora.present(parts.backbone) else whole_bytes(parts)


def optimizer_bytes(config: TrainConfig, param_groups: list[dict[str, Any]]) -> dict[int, float]:
    """{id of a parameter: bytes of its optimizer state}, counted on smaller tensors of as many
    dimensions: averages are as large as their parameter, the rest is a few bytes."""
    probes = []
    likes = []
    for group in param_groups:
        largest = {p.ndim: p for p in sorted(group["params"], key=torch.numel)}
        shapes = [[min(side, PROBE) for side in p.shape] for p in largest.values()]
        small = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        likes.append(dict(zip(largest, small, strict=True)))
        probes.append({**group, "params": small})
    optimizer = make_optimizer(probes, config, 1.0)
    for probe in (p for group in probes for p in group["params"]):
        probe.grad = torch.ones_like(probe)
    optimizer.step()

    bytes_of: dict[int, float] = {}
    for group, like in zip(param_groups, likes, strict=True):
        for p in group["params"]:
            probe = like[p.ndim]
            state = [v for v in optimizer.state[probe].values() if isinstance(v, torch.Tensor)]
            averages = size(value for value in state if value.shape == probe.shape)
            bytes_of[id(p)] = averages * p.numel() / probe.numel() + size(state) - averages
    return bytes_of


def size(tensors: Any) -> int:
    """Bytes of the tensors among these."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def memory(count: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
