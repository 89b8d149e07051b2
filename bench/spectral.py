"""Cost of spectral updates on a UNet's own matrices: arms interleaved in one process, as shares of the first.

    python -m bench.spectral [--unet DIR] [--repeats N] [--smoke]

Gradients are drawn once. Seconds are processor time on a CPU, wall clock on CUDA; ratios are medians
over repeats, in which every arm runs once, so that other work falls on all alike.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import nn

from silentbad.control.spectral import SpectralAdamW, split

ARMS: dict[str, list[str]] = {  # gradient_control.spectral_except
    "default": [],
    "AdamW for time": ["time"],
    "AdamW for time, proj": ["time", "proj"],
}


def optimizer_of(unet: nn.Module, arm: str) -> SpectralAdamW:
    groups = split([{"params": [*unet.parameters()], "name": "all"}], unet, ARMS[arm])
    return SpectralAdamW(groups, lr=1e-3, weight_decay=0.0)


def seconds(work: Any, device: torch.device) -> float:
    """Of one `work.step()`: of the processor on a CPU, else of the clock, the device waited for."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    started = clock()
    work.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Prints the table; returns {arm: seconds over the default's}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unet", default="assets/micro-sd/unet", help="folder of a UNet")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="two repeats")
    given = parser.parse_args(arguments)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unet = UNet2DConditionModel.from_pretrained(given.unet).to(device)
    generator = torch.Generator().manual_seed(0)
    for p in unet.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p)

    optimizers = {arm: optimizer_of(unet, arm) for arm in ARMS}
    for optimizer in optimizers.values():
        optimizer.step()  # makes its state
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(2 if given.smoke else given.repeats):
        for arm, optimizer in optimizers.items():
            times[arm].append(seconds(optimizer, device))

    ratios = {}
    print(f"{'arm':<24}{'ms':>8}{'ratio':>8}")
    for arm, taken in times.items():
        pairs = zip(taken, times["default"], strict=True)
        ratios[arm] = statistics.median(mine / default for mine, default in pairs)
        print(f"{arm:<24}{1e3 * statistics.median(taken):>8.1f}{ratios[arm]:>8.2f}")
    return ratios


if __name__ == "__main__":
    main()
