"""What a step costs where some of the layers train: arms interleaved in one process, as shares of the first.

    python -m bench.layers [--unet DIR] [--batch N] [--repeats N] [--smoke]

A step is forward, backward and update, as training runs them on a CPU: spectral updates, linear layers as
convolutions. Seconds are processor time (wall clock on CUDA); ratios are medians over repeats, in which
every arm takes one step, so that other work falls on all alike. Stored: bytes that autograd keeps
between forward and backward, weights left out.
"""

import argparse
import statistics

import torch
from diffusers import UNet2DConditionModel

from bench.spectral import seconds
from silentbad.control.spectral import SpectralAdamW, split
from silentbad.loop.trains import memory, size
from silentbad.model.forwards import convolve
from silentbad.model.groups import group_of
from silentbad.settings.layers import chosen

ARMS: dict[str, tuple[list[str], list[str]]] = {  # train_layers, gradient_control.spectral_except
    "all": (["*"], []),
    "all, AdamW for time, proj": (["*"], ["time", "proj"]),
    "mid and decoder": (["mid", "up*"], []),
    "decoder": (["up*"], []),
    "decoder, the same AdamW": (["up*"], ["time", "proj"]),
    "decoder's resnets": (["up*.resnet"], []),
    "up1": (["up1"], []),
    "all but the decoder": (["stem", "down*", "mid"], []),
}
TOKENS = 32  # of a caption


class Arm:
    """A UNet of which some layers train."""

    def __init__(self, folder: str, patterns: list[str], without: list[str], device: torch.device, batch: int):
        self.unet = UNet2DConditionModel.from_pretrained(folder).to(device)
        for name, p in self.unet.named_parameters():
            p.requires_grad_(chosen(patterns, group_of(name)))
        convolve(self.unet)
        self.trains = [p for p in self.unet.parameters() if p.requires_grad]
        groups = split([{"params": self.trains, "name": "all"}], self.unet, without)
        self.optimizer = SpectralAdamW(groups, lr=1e-6)
        config = self.unet.config
        generator = torch.Generator().manual_seed(0)
        shape = (batch, config.in_channels, config.sample_size, config.sample_size)
        self.x = torch.randn(shape, generator=generator).to(device)
        self.t = torch.randint(0, 1000, (batch,), generator=generator).to(device)
        self.c = torch.randn((batch, TOKENS, config.cross_attention_dim), generator=generator).to(device)

    def step(self) -> None:
        self.unet(self.x, self.t, self.c).sample.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def stored(self) -> int:
        """Bytes kept for backward."""
        weights = {p.data_ptr() for p in self.unet.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = self.unet(self.x, self.t, self.c).sample
            total = sum(kept.values())
            del out
        return total


def states(optimizer: torch.optim.Optimizer) -> int:
    return sum(size(entry.values()) for entry in optimizer.state.values())


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Prints the table; returns {arm: seconds of a step over those of all layers}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unet", default="assets/micro-sd/unet", help="folder of a UNet")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="two repeats")
    given = parser.parse_args(arguments)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arms = {name: Arm(given.unet, *layers, device, given.batch) for name, layers in ARMS.items()}
    for arm in arms.values():
        arm.step()  # makes the optimizer's state
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(2 if given.smoke else given.repeats):
        for name, arm in arms.items():
            times[name].append(seconds(arm, device))

    ratios = {}
    total = sum(p.numel() for p in arms["all"].unet.parameters())
    print(f"{'trains':<27}{'share':>8}{'optimizer':>12}{'stored':>12}{'ms a step':>11}{'ratio':>8}")
    for name, arm in arms.items():
        pairs = zip(times[name], times["all"], strict=True)
        ratios[name] = statistics.median(mine / every for mine, every in pairs)
        share = sum(p.numel() for p in arm.trains) / total
        cells = f"{share:>8.1%}{memory(states(arm.optimizer)):>12}{memory(arm.stored()):>12}"
        print(f"{name:<27}{cells}{1e3 * statistics.median(times[name]):>11.1f}{ratios[name]:>8.2f}")
    return ratios


if __name__ == "__main__":
    main()
