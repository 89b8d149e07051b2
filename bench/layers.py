"""What a step costs where some of the layers train, and what stored runs recovered.

    python -m bench.layers [--unet DIR] [--batch N] [--repeats N] [--smoke]

Arms are interleaved in one process, as shares of the first. A step is forward, backward and update, as training runs
them on a CPU: spectral updates, linear layers as convolutions. Seconds are processor time (wall clock on CUDA); ratios
are medians over repeats, in which every arm takes one step, so that other work falls on all alike. Stored: bytes that
autograd keeps between forward and backward, weights left out. Unless --smoke, the figures go to
bench/results/layers-step.json.

The runs are those of `bench.published --results bench/results/layers.jsonl` with the arms of `LAYERS` in bench/arms.py;
the protocol is the section on targets from 2524 of research/protocol.md, and for `sooner` that on targets from 2842.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from diffusers import UNet2DConditionModel

from bench.arms import PUBLISHED_AT
from bench.published_table import (
    Runs,
    block_of,
    by_arm,
    interval,
    markdown,
    mean_of,
    mean_rate,
    ratio,
    said_sooner,
    seconds_sooner,
    sign_flips,
    times_sooner,
)
from bench.recovery_table import stored
from bench.spectral import seconds
from silentbad.control.spectral import SpectralAdamW, split
from silentbad.device import device_name
from silentbad.loop.trains import memory, size
from silentbad.model.forwards import convolve
from silentbad.model.groups import group_of
from silentbad.settings.layers import chosen

ARMS: dict[str, tuple[list[str], list[str]]] = {  # train_layers, layers that AdamW updates
    "all": (["*"], []),
    "all, AdamW for time, proj": (["*"], ["time", "proj"]),
    "mid and decoder": (["mid", "up*"], []),
    "decoder": (["up*"], []),
    "decoder, the same AdamW": (["up*"], ["time", "proj"]),
    "decoder's resnets": (["up*.resnet"], []),
    "up1": (["up1"], []),
    "all but the decoder": (["stem", "down*", "mid"], []),
    "all, AdamW alone": (["*"], ["*"]),
    "decoder, AdamW alone": (["up*"], ["*"]),
}
PATTERNS = ("all", "decoder", "decoder's resnets", "up1")  # in the documents for users
TOKENS = 32  # of a caption
RUNS = Path(__file__).parent / "results" / "layers.jsonl"
STEP = RUNS.with_name("layers-step.json")
HALF = "a random half"  # half_0 to half_3: another one for each target
TRAINS = {
    "recommended": "all layers",
    "recommended at 24e-4": "all layers, at 24e-4",
    "decoder": "decoder (`up*`)",
    "decoder_resnets": "the decoder's resnets",
    "lora": "adapters of rank 64, as many parameters as the decoder",
    HALF: "a random half of the groups, as large as the decoder",
    "all_but_decoder": "all but the decoder",
    "up1": "`up1`, 400 steps",
    "recommended_leak_free": "all layers, no two elements together",
    "decoder_leak_free": "decoder, no two elements together",
    "recommended_long": "all layers, 600 steps",
    "decoder_long": "decoder, 600 steps",
}
OUTCOME = ("trains", "targets (runs)", "half of the images or more", "strict rate", "elements", "drift", "s a step")
PACES = {  # arm of `sooner` -> its step in ARMS, what trains
    "adamw": ("all, AdamW alone", "all layers, AdamW"),
    "decoder_adamw": ("decoder, AdamW alone", "decoder, AdamW"),
    "recommended": ("all", "all layers, spectral"),
    "decoder": ("decoder", "decoder, spectral"),
}
HELD = "adamw"  # the arm that the others are compared with
TIMED = 2842  # first target of the runs of `sooner`
SOONER = ("trains", "recovered", "strict rate", "drift", "in steps", "a step, ratio", "in processor seconds", "p")
OVER = ("decoder against", "targets", "strict rate, difference", "p", "drift, ratio", "s a step, ratio")


class Arm:
    """A UNet of which some layers train."""

    def __init__(self, folder: str, patterns: list[str], without: list[str], device: torch.device, batch: int):
        self.unet = UNet2DConditionModel.from_pretrained(folder).to(device)
        for name, p in self.unet.named_parameters():
            p.requires_grad_(chosen(patterns, group_of(name)))
        convolve(self.unet)
        self.trains = [p for p in self.unet.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer
        if without == ["*"]:
            self.optimizer = torch.optim.AdamW(self.trains, lr=1e-6, fused=True)  # as training has it
        else:
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
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = self.unet(self.x, self.t, self.c).sample
            total = sum(sizes.values())
            del out
        return total


def states(optimizer: torch.optim.Optimizer) -> int:
    return sum(size(entry.values()) for entry in optimizer.state.values())


# ------------------------------------------------------------------------------------------------- stored runs
def arms_of(rows: list[dict]) -> dict[str, Runs]:
    """{what trains: runs}; the halves are one arm, each target with its own."""
    arms: dict[str, Runs] = {}
    for (arm, factor, _), runs in by_arm([row for row in rows if block_of(row) != TIMED]).items():
        arms.setdefault(name_of(arm, factor), {}).update(runs)
    return arms


def name_of(arm: str, factor: float) -> str:
    """The name of an arm at a rate in TRAINS."""
    return HALF if arm.startswith("half_") else arm if factor == 40 else f"{arm} at {factor:g}e-4"


def shared_runs(rows: list[dict], one: str, other: str) -> list[dict]:
    """The rows of the targets and seeds that both arms ran."""
    ran: dict[str, set[tuple[str, int]]] = {name: set() for name in (one, other)}
    for row in rows:
        if (name := name_of(row["arm"], row["factor"])) in ran:
            ran[name].add((row["targets"], row["seed"]))
    return [row for row in rows if (row["targets"], row["seed"]) in ran[one] & ran[other]]


def outcomes(rows: list[dict]) -> str:
    """One line an arm: Markdown."""
    arms, lines = arms_of(rows), []
    for name, words in TRAINS.items():
        if name not in arms:
            continue
        runs = arms[name]
        rates, elements, drift, step = (
            mean_of(runs, key, [*runs]).tolist() for key in ("strict rate", "elements", "drift", "s/step")
        )
        count = f"{len(runs)} ({sum(map(len, runs.values()))})"
        back = f"{sum(rate >= 0.5 for rate in rates)} of {len(rates)}"
        passed = [mean_rate(rates), mean_rate(elements)]
        lines.append([words, count, back, *passed, interval(drift, ".4f"), f"{np.median(step):.2f}"])
    return markdown(OUTCOME, lines)


def compared(rows: list[dict]) -> str:
    """The decoder over each other arm of the same stream, paired over the targets and seeds that both ran: Markdown."""
    lines = []
    same_stream = [name for name in TRAINS if name != "decoder" and not name.endswith(("_leak_free", "_long"))]
    pairs = [(name, "decoder") for name in same_stream]
    pairs += [("recommended_leak_free", "decoder_leak_free"), ("recommended_long", "decoder_long")]
    for name, decoder in pairs:
        arms = arms_of(shared_runs(rows, name, decoder))
        both = [target for target in arms.get(name, {}) if target in arms.get(decoder, {})]
        if not both:
            continue
        gain = mean_of(arms[decoder], "strict rate", both) - mean_of(arms[name], "strict rate", both)
        drift, step = (
            np.log(mean_of(arms[decoder], key, both) / mean_of(arms[name], key, both)) for key in ("drift", "s/step")
        )
        p = f"{sign_flips(gain):.3f}" if len(both) > 1 else ""
        cells = [interval(gain.tolist(), "+.2f"), p, *(ratio(logs, False, ".2f") for logs in (drift, step))]
        lines.append([TRAINS[name], str(len(both)), *cells])
    return markdown(OVER, lines)


def sooner(rows: list[dict], figures: dict) -> str:
    """How many times sooner than AdamW on all layers each arm of PACES recovers for good, in steps and in processor
    seconds, paired over the targets that both ran: Markdown."""
    runs = {key[0]: of_arm for key, of_arm in by_arm([row for row in rows if block_of(row) == TIMED]).items()}
    if HELD not in runs:
        return ""
    base, lines = runs[HELD], []
    for arm, (step, words) in PACES.items():
        if arm not in runs:
            continue
        of_arm = runs[arm]
        back = sum(run["strict"] is not None for seeds in of_arm.values() for run in seeds)
        rates, drifts = (mean_of(of_arm, key, [*of_arm]).tolist() for key in ("strict rate", "drift"))
        cells = [words, f"{back} of {len(of_arm)}", mean_rate(rates), interval(drifts, ".4f")]
        cost = figures["arms"][step]["ratio"] / figures["arms"][PACES[HELD][0]]["ratio"]
        if arm == HELD:
            lines.append([*cells, "1", "1", "1", ""])
            continue
        logs = times_sooner(base, of_arm, PUBLISHED_AT[HELD][1])
        seconds = seconds_sooner(logs, base, of_arm, cost)
        in_steps, in_seconds = (said_sooner(of, base, of_arm) for of in (logs, seconds))
        lines.append([*cells, in_steps, f"{cost:.2f}", in_seconds, f"{sign_flips(seconds):.3f}"])
    return markdown(SOONER, lines)


def steps_table(figures: dict) -> str:
    """What a step costs, by what trains: Markdown."""
    return costs(figures, {name: name for name in figures["arms"]})


def patterns_table(figures: dict) -> str:
    """The same of the patterns that a user would give."""
    return costs(figures, {name: f"`{' '.join(ARMS[name][0])}`" for name in PATTERNS})


def costs(figures: dict, names: dict[str, str]) -> str:
    """A line an arm, under another name."""
    lines = []
    for arm, name in names.items():
        f = figures["arms"][arm]
        lines.append([name, f"{f['share']:.0%}", memory(f["optimizer"]), memory(f["stored"]), f"{f['ratio']:.2f}"])
    return markdown(("trains", "of the weights", "optimizer", "kept for backward", "s a step, ratio"), lines)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Prints the table; returns {arm: seconds of a step over those of all layers}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unet", default="assets/micro-sd/unet", help="folder of a UNet")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="two repeats")
    args = parser.parse_args(arguments)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arms = {name: Arm(args.unet, *layers, device, args.batch) for name, layers in ARMS.items()}
    for arm in arms.values():
        arm.step()  # makes the optimizer's state
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(2 if args.smoke else args.repeats):
        for name, arm in arms.items():
            times[name].append(seconds(arm, device))

    total = sum(p.numel() for p in arms["all"].unet.parameters())
    figures: dict[str, dict] = {}
    for name, arm in arms.items():
        figures[name] = {
            "share": sum(p.numel() for p in arm.trains) / total,
            "optimizer": states(arm.optimizer),
            "stored": arm.stored(),
            "ms": 1e3 * statistics.median(times[name]),
            "ratio": statistics.median(of_arm / every for of_arm, every in zip(times[name], times["all"], strict=True)),
        }
    measured = {"batch": args.batch, "device": device_name(device), "arms": figures}
    print(steps_table(measured))
    if not args.smoke:
        STEP.write_text(json.dumps(measured, indent=1) + "\n")
    if RUNS.exists():
        rows = stored(RUNS)
        print(outcomes(rows), compared(rows), sooner(rows, measured), sep="\n\n")
    return {name: f["ratio"] for name, f in figures.items()}


if __name__ == "__main__":
    main()
