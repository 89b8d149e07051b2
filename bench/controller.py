"""Cost of gradient control on the UNet of SD 1.5: time and memory a step, beside the rule it replaces.

    python -m bench.controller [--smoke]

Random weights, float32 (on CUDA: bf16 autocast), batch 1 at 64x64 latents: the smallest and so the least
favourable step. The parts are timed apart, so that weights, gradients, activations and Adam's moments never
stand in memory together: step = forward + backward + clipping + AdamW. Medians; a refresh every 10 steps is
counted in. Seconds are wall clock on CUDA, processor time on a CPU, which other work disturbs less.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel

from bench.recovery_table import goals, grid
from gradient_control import SCALE_RULES, Controller, GradientControlConfig, adjust_gradient_scale
from silentbad.device import device_name

SD15 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
SMALL = {"block_out_channels": (32, 64, 128, 128), "cross_attention_dim": 64, "attention_head_dim": 4}
REFRESH = 10
ARMS = [*SCALE_RULES, "prior+gsnr"]


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each repeat."""
    seconds = []
    for _ in range(repeats):
        start = clock(device)
        work()
        seconds.append(clock(device) - start)
    return seconds


class PeakMemory:
    """MiB above the start at the highest point inside: allocated (CUDA) or resident (CPU, the kernel's own
    mark).
    """

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL(None).malloc_trim(0)  # what earlier arms freed would hide what this one takes
            Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
            self.start = self._resident("VmRSS")
        return self

    def __exit__(self, *_) -> None:
        end = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else self._resident("VmHWM")
        self.mib = (end - self.start) / 2**20

    @staticmethod
    def _resident(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def random_unet(config: dict, device: torch.device) -> UNet2DConditionModel:
    with torch.device("meta"):
        unet = UNet2DConditionModel(**config)
    unet.to_empty(device=device)
    for parameter in unet.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return unet


def forward_backward(unet: UNet2DConditionModel, device: torch.device) -> None:
    x = torch.randn(1, 4, unet.config.sample_size or 64, unet.config.sample_size or 64, device=device)
    text = torch.randn(1, 77, unet.config.cross_attention_dim, device=device)
    unet.zero_grad()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = (unet(x, torch.tensor([500], device=device), text).sample - x).square().mean()
    loss.backward()


def original_path(unet: UNet2DConditionModel, scales: list[torch.Tensor]) -> None:
    """What the inherited script did after each backward, line for line but for one bug fix in its rule."""
    gradients = [p.grad.detach().clone() if p.grad is not None else torch.zeros_like(p) for p in unet.parameters()]
    means = torch.stack([g.abs().mean() for g in gradients])
    scales[0] = scales[0] * 0.9 + means / (means.sum() + 1e-10) * 0.1
    for index, parameter in enumerate(unet.parameters()):
        if parameter.grad is not None:
            parameter.grad.data *= scales[0][index].item()


def refill(unet: UNet2DConditionModel) -> None:
    """Gradients of usual size again: scaling them by 1/686 time after time would reach slow subnormal
    numbers.
    """
    for parameter in unet.parameters():
        parameter.grad.normal_(std=1e-3)


def time_controller(unet: UNet2DConditionModel, name: str, device: torch.device, rounds: int) -> dict:
    """Seconds a step of one rule, refreshes counted in, and its extra memory."""
    with PeakMemory(device) as memory:
        control = Controller(unet, GradientControlConfig(name=name, warmup=0, refresh=REFRESH))
        control.attach(torch.optim.SGD(control.param_groups(), lr=0.0))
        plain: list[float] = []
        refreshing: list[float] = []
        for step in range(1, (rounds + 1) * REFRESH + 1):
            start = clock(device)
            control.after_backward(True, "rehearsal")
            control.before_step(step)
            control.after_step()
            if step > REFRESH:  # the first round allocates
                (plain if step % REFRESH else refreshing).append(clock(device) - start)
    seconds = statistics.median(plain) * (REFRESH - 1) + statistics.median(refreshing)
    return {"seconds": seconds / REFRESH, "extra_mib": memory.mib}


def time_step(unet: UNet2DConditionModel, device: torch.device, repeats: int) -> dict[str, float]:
    """Seconds of the parts of a step without control."""
    parts = {"forward_backward": timed(lambda: forward_backward(unet, device), device, repeats)}
    parameters = list(unet.parameters())
    parts["clip"] = timed(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0), device, repeats)
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)
    parts["adamw"] = timed(optimizer.step, device, repeats + 1)[1:]
    return {name: statistics.median(seconds) for name, seconds in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small UNet, seconds instead of minutes")
    parser.add_argument("--repeats", type=int, default=3, help="timings of each part of the step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    unet = random_unet(SMALL if arguments.smoke else SD15, device)
    forward_backward(unet, device)  # allocates, and leaves gradients for the rules to read

    rows = {name: time_controller(unet, name, device, arguments.repeats) for name in ARMS}
    scales = [torch.ones(len(list(unet.parameters())), device=device)]
    work = {
        "original code path": lambda: original_path(unet, scales),
        "its rule, written anew": lambda: adjust_gradient_scale(unet, scales[0], [p.grad for p in unet.parameters()]),
    }
    for name, once in work.items():
        refill(unet)
        with PeakMemory(device) as memory:
            once()
        seconds = []
        for _ in range(3 * arguments.repeats):  # page faults make these spread
            refill(unet)
            seconds += timed(once, device, 1)
        rows[name] = {"seconds": statistics.median(seconds), "all": seconds, "extra_mib": memory.mib}
    parts = time_step(unet, device, arguments.repeats)
    report(rows, parts, unet, arguments, device)


def report(rows: dict, parts: dict, unet: torch.nn.Module, arguments: argparse.Namespace, device) -> None:
    step, dearest = sum(parts.values()), max(rows[name]["seconds"] for name in ARMS)
    count = sum(p.numel() for p in unet.parameters())
    original = rows["original code path"]["seconds"]
    reached = {
        "control <= 1 % of the step": dearest <= 0.01 * step,
        "extra memory <= 64 MiB": max(rows[name]["extra_mib"] for name in ARMS) <= 64,
        "original path >= 20 x prior+gsnr": original >= 20 * rows["prior+gsnr"]["seconds"],
        "original path >= 20 x the dearest rule": original >= 20 * dearest,
    }
    result = {"smoke": arguments.smoke, "parameters": count, "step": parts, "control": rows, "goals": reached}
    machine = {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "cpu": device_name("cpu"),
        "torch": torch.__version__,
        "load": os.getloadavg(),
    }
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    result["machine"] = machine
    print(table(result) + "\n" + goals(reached))
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    path = folder / ("controller-smoke.json" if arguments.smoke else "controller.json")
    path.write_text(json.dumps(result, indent=1) + "\n")


def table(measured: dict) -> str:
    """Seconds and memory of each scale rule beside a step of SD 1.5's UNet."""
    step = sum(measured["step"].values())
    labels = {"original code path": "the original code path", "its rule, written anew": "its rule, rewritten"}
    lines = [("a step without control", f"{step:.2f}", "", "")]
    for name, cost in measured["control"].items():
        share = f"{100 * cost['seconds'] / step:.2f} %"
        label = labels.get(name, f"`{name}`")
        lines.append((label, f"{cost['seconds']:.4f}", share, f"{cost['extra_mib']:.0f} MiB"))
    machine, size = measured["machine"], measured["parameters"] / 1e6
    text = (
        f"Median seconds on one machine ({machine['device']}, threads: {machine['threads']}, fp32, batch 1 at 64x64\n"
        f"latents, {size:.1f} M parameters; processor time on a CPU), from `bench/results/controller.json`:\n\n"
    )
    return text + grid(("path", "seconds a step", "share of the step", "extra memory"), lines)


if __name__ == "__main__":
    main()
