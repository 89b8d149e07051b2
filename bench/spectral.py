"""What spectral updates cost, on a UNet's own matrices.

    python -m bench.spectral [--unet DIR] [--repeats N] [--smoke]
    python -m bench.spectral --models       operations by model, counted from shapes, stored and printed

Arms are interleaved in one process. Gradients are drawn once. Seconds are processor time on a CPU, wall clock on CUDA.
Ratios are over the first arm: medians over repeats, in which every arm runs once; other work then disturbs all alike.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from scipy.stats import sem
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench import kept
from bench.arms import PUBLISHED_AT
from bench.published_table import by_arm, interval, markdown, mean_of
from bench.recovery_table import RESULTS
from bench.shapes import UNETS
from silentbad.control.spectral import SpectralAdamW, orthogonalise, split
from silentbad.model.groups import group_of
from silentbad.settings.layers import chosen

ARMS: dict[str, tuple[list[str], Any, int]] = {  # gradient_control.spectral_except, iteration, row_groups
    "default": ([], "newton_schulz", 1),
    "Polar Express": ([], "polar_express", 1),
    "AdamW for time": (["time"], "newton_schulz", 1),
    "AdamW for time, proj": (["time", "proj"], "newton_schulz", 1),
    "both": (["time", "proj"], "polar_express", 1),
    "three steps": ([], "newton_schulz_3", 1),
    "three steps, two groups of rows": ([], "newton_schulz_3", 2),
    "three steps, four groups of rows": ([], "newton_schulz_3", 4),
}


def optimizer_of(unet: nn.Module, arm: str) -> SpectralAdamW:
    without, iteration, row_groups = ARMS[arm]
    groups = split([{"params": [*unet.parameters()], "name": "all"}], unet, without)
    return SpectralAdamW(groups, lr=1e-3, weight_decay=0.0, iteration=iteration, row_groups=row_groups)


def errors(optimizer: SpectralAdamW, arm: str) -> list[float]:
    """||X X' - 1|| / ||1|| of each matrix's orthogonalised average X, on its shorter side."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"] if group["spectral"] else ():
            x = orthogonalise(optimizer.state[p]["exp_avg"].flatten(1).double(), *ARMS[arm][1:])
            gram = x @ x.mT if x.shape[0] <= x.shape[1] else x.mT @ x
            found.append(float((gram - torch.eye(len(gram)).to(gram)).norm()) / len(gram) ** 0.5)
    return found


def seconds(work: Any, device: torch.device) -> float:
    """Seconds of one `work.step()`: processor time on a CPU, else wall clock until the device has finished."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    started = clock()
    work.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


# -- operations --------------------------------------------------------------------------------------------
MODELS = {"SD 1.5": UNETS["sd15"], "SD 2.1, 768 px": UNETS["sd21"], "SDXL, 1024 px": UNETS["sdxl"]}
TOKENS = 77
OPERATIONS = RESULTS.parent / "spectral-models.json"


def of_update(unet: nn.Module, patterns: list[str], dtype: torch.dtype) -> float:
    """TFLOP of the iteration on the matrices of the layers that `patterns` choose, whatever the batch."""
    shapes = Counter(
        p.flatten(1).shape for name, p in unet.named_parameters() if p.ndim > 1 and chosen(patterns, group_of(name))
    )
    total = 0
    for shape, matrices in shapes.items():
        with FlopCounterMode(display=False) as counter:
            orthogonalise(torch.empty(shape, dtype=dtype, device="meta"))
        total += matrices * counter.get_total_flops()
    return total / 1e12


def of_picture(unet: UNet2DConditionModel) -> float:
    """TFLOP of a picture in training, all layers: forward, and twice that for backward."""
    c = unet.config
    x, t = torch.empty(1, 4, c.sample_size, c.sample_size, device="meta"), torch.empty(1, device="meta")
    text = torch.empty(1, TOKENS, c.cross_attention_dim, device="meta")
    added = {"text_embeds": torch.empty(1, 1280, device="meta"), "time_ids": torch.empty(1, 6, device="meta")}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        unet(x, t, text, added_cond_kwargs=added)
    return 3 * counter.get_total_flops() / 1e12


def counted() -> dict[str, dict[str, float]]:
    """TFLOP by model: an update of all layers in fp32 and in bf16, of the decoder in bf16, and a picture."""
    costs = {}
    for name, shape in MODELS.items():
        with torch.device("meta"):
            unet = UNet2DConditionModel(**shape)
        tflop = {
            "fp32": of_update(unet, ["*"], torch.float32),
            "bf16": of_update(unet, ["*"], torch.bfloat16),
            "decoder": of_update(unet, ["up*"], torch.bfloat16),
            "picture": of_picture(unet),
        }
        costs[name] = {key: round(value, 3) for key, value in tflop.items()}
    return costs


def by_model(costs: dict[str, dict[str, float]]) -> str:
    """A line a model: an update, a picture, and the batch at which an update costs as much."""
    lines = []
    for name, tflop in costs.items():
        batches = (tflop[precision] / tflop["picture"] for precision in ("fp32", "bf16"))
        lines.append([name, *(f"{value:.1f}" for value in tflop.values()), " to ".join(f"{n:.0f}" for n in batches)])
    head = ("model", "update, fp32", "update, bf16", "`up*`, bf16", "a picture", "batch of equal cost")
    return markdown(head, lines) + "\n"


# -- recovery ----------------------------------------------------------------------------------------------
RUNS = RESULTS.with_name("spectral.jsonl")
CHEAPER = "recommended_cheaper"
FIGURES = {"strict rate": ".2f", "elements": ".2f", "drift": ".4f", "s/step": ".2f"}
WORDS = {
    "recommended": "spectral updates on all layers, five steps of Newton-Schulz",
    CHEAPER: "AdamW for `time` and `proj`, four steps of Polar Express",
}


def recovery(rows: list[dict]) -> str:
    """What stored runs recover with cheaper spectral updates, and the difference in pairs over targets: Markdown."""
    runs = {arm: targets for (arm, *_), targets in by_arm(rows).items()}
    both = [target for target in runs[CHEAPER] if target in runs["recommended"]]
    of = {arm: {key: mean_of(runs[arm], key, both) for key in FIGURES} for arm in WORDS}
    lines = []
    for arm, words in WORDS.items():
        lines.append([words, f"{len(both)}", *(interval(of[arm][key].tolist(), form) for key, form in FIGURES.items())])
    differences = [
        interval((of[CHEAPER][key] - of["recommended"][key]).tolist(), f"+{form}") for key, form in FIGURES.items()
    ]
    lines.append(["difference", f"{len(both)}", *differences])
    return markdown(("updates", "targets", *FIGURES), lines)


WHOLE, GROUPS = "recommended_three_steps", "recommended_row_groups"
FOUND = 2.8  # standard errors: a difference as large is found at 5 % in 80 % of trials
OF_GROUPS = (
    *("updates", "lr x", "targets", "recovered", *FIGURES, "things right"),
    *("strict rate, over whole matrices at 40", "found in 80 %"),
)


def row_groups(rows: list[dict]) -> str:
    """What whole matrices and groups of rows recover at several rates, in pairs of targets: Markdown."""
    runs = {(arm, factor): targets for (arm, factor, _), targets in by_arm(rows).items() if arm in (WHOLE, GROUPS)}
    ends = {(row["arm"], row["factor"], row["target"]): row for row in rows if row["step"] == row["steps"]}
    own = (WHOLE, PUBLISHED_AT[WHOLE][0])
    whole = runs[own]
    lines = []
    for (arm, factor), of_arm in sorted(runs.items(), key=lambda run: (run[0][0] != WHOLE, run[0][1])):
        both = [target for target in whole if target in of_arm]
        of = {key: mean_of(of_arm, key, both) for key in FIGURES}
        over = of["strict rate"] - mean_of(whole, "strict rate", both)
        things = [kept.counted(ends[arm, factor, target]["right"], "2", kept.MICRO.kinds) for target in both]
        lines.append(
            [
                "two groups of rows" if arm == GROUPS else "whole matrices",
                f"{factor:g}",
                str(len(both)),
                str(sum(of["strict rate"] >= 0.5)),
                *(interval(of[key].tolist(), form) for key, form in FIGURES.items()),
                interval([right / named for right, named in things]),
                *((interval(over.tolist(), "+.2f"), f"{FOUND * sem(over):.2f}") if (arm, factor) != own else ("", "")),
            ]
        )
    return markdown(OF_GROUPS, lines)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Prints the table; returns {arm: seconds over the default's}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unet", default="assets/micro-sd/unet", help="folder of a UNet")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="two repeats")
    parser.add_argument("--models", action="store_true", help="count operations by model, store and print them")
    args = parser.parse_args(arguments)
    if args.models:
        OPERATIONS.write_text(json.dumps(counted(), indent=1) + "\n")
        print(by_model(json.loads(OPERATIONS.read_text())))
        return {}

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unet = UNet2DConditionModel.from_pretrained(args.unet).to(device)
    generator = torch.Generator().manual_seed(0)
    for p in unet.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p)

    optimizers = {arm: optimizer_of(unet, arm) for arm in ARMS}
    for optimizer in optimizers.values():
        optimizer.step()  # makes its state
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(2 if args.smoke else args.repeats):
        for arm, optimizer in optimizers.items():
            times[arm].append(seconds(optimizer, device))

    ratios = {}
    print(f"{'arm':<34}{'ms':>8}{'ratio':>8}{'error, mean':>14}{'highest':>9}")
    for arm, of_arm in times.items():
        pairs = zip(of_arm, times["default"], strict=True)
        ratios[arm] = statistics.median(arm_seconds / default for arm_seconds, default in pairs)
        off = errors(optimizers[arm], arm)
        timed = f"{1e3 * statistics.median(of_arm):>8.1f}{ratios[arm]:>8.2f}"
        print(f"{arm:<34}{timed}{statistics.mean(off):>14.3f}{max(off):>9.3f}")
    return ratios


if __name__ == "__main__":
    main()
