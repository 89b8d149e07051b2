"""A model of five tensors under SD's parameter names, with gradients from a seed; light to import."""

from pathlib import Path

import torch
from torch import nn

from gradient_control import (
    Controller,
    GradientControlConfig,
)
from silentbad.control.statistics import GroupStats


def experiment(name, part=""):
    """The place of what stands in experiments/."""
    return f"{Path(__file__).parents[1]}/experiments/{name}.py:{part or name}"


GSNR, PRIOR, CURRICULUM = map(experiment, ("gsnr", "prior", "curriculum"))
AND = experiment("and_distillation", "AndDistillation")
L2SP = experiment("l2_sp", "L2SP")
RATES = [GSNR, PRIOR, experiment("inverse_rms"), experiment("auto_rgn")]  # scale rules
NAMES = {  # of the toy model: one tensor a group, of different sizes
    "mid.xattn.k": "mid_block.attentions.0.transformer_blocks.0.attn2.to_k",
    "mid.xattn.v": "mid_block.attentions.0.transformer_blocks.0.attn2.to_v",
    "mid.ff": "mid_block.attentions.0.transformer_blocks.0.ff.net.2",
    "up1.resnet.conv": "up_blocks.1.resnets.0.conv1",
    "up1.norm": "up_blocks.1.resnets.0.norm1",
}


class Toy(nn.Module):
    """One weight a group under SD's names; `grads` fills the gradients from a seed."""

    def __init__(self, sizes=(400, 900, 1600, 2500, 40), names=()):
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        for path, size in zip(names or NAMES.values(), sizes, strict=True):
            module = self
            for part in path.split("."):
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.weight = nn.Parameter(torch.randn(size, generator=rng))

    def grads(self, step, scale=1.0, mean=0.1):
        rng = torch.Generator().manual_seed(1000 + step)
        for i, p in enumerate(self.parameters()):
            spread = scale * (i + 1)
            noise = torch.randn(p.shape, generator=rng)
            p.grad = (spread * (noise + mean * (i + 1) * p.detach().sign())).to(p.dtype)


def config(name=f"{PRIOR}+{GSNR}", **options):
    return GradientControlConfig(**{"name": name, "warmup": 2, "refresh": 2, "max_log_step": 1.0, **options})


def run(model, control, optimizer, steps, scale=1.0, scheduler=None):
    for step in steps:
        model.grads(step, scale)
        control.after_backward(True, "rehearsal" if step % 3 == 0 else "element")
        control.before_step(step)
        optimizer.step()
        control.after_step()
        if scheduler:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def controlled(model, settings, optimizer=torch.optim.AdamW, lr=1e-3, weight_decay=1e-2, **options):
    control = Controller(model, settings, seed=3)
    optimizer = optimizer(control.param_groups(weight_decay), lr=lr, **options)
    control.attach(optimizer)
    return control, optimizer


def stats_of(scale=1.0, groups=6, **replace):
    rng = torch.Generator().manual_seed(1)
    E = (torch.rand(groups, generator=rng) + 0.1).double() * scale**2
    n = torch.randint(100, 10000, (groups,), generator=rng).double()
    names = ("mid.xattn.v", "mid.xattn.k", "up1.attn.q", "down0.ff", "stem.norm", "up3.resnet.conv")[:groups]
    parts = dict(
        n=n,
        S=E * torch.linspace(0.01, 0.5, groups).double(),
        E=E,
        Q=2 * E,
        L1=(E * n).sqrt(),
        theta=n.sqrt(),
    )
    return GroupStats(**{"names": names, **parts, **replace})


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
