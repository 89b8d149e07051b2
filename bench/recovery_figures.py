"""The benchmark's pictures for README and theory, into docs/images.

    python -m bench.recovery_figures curves                     recovery by step from the stored rows, as SVG
    python -m bench.recovery_figures published                  the same of the published setting, and recall by drift
    python -m bench.recovery_figures sweeps                     the same at the end, by the elements' share and base
    python -m bench.recovery_figures many                       the same at the end, by targets learnt at once
    python -m bench.recovery_figures strip --target 1000        generations by step: plain, original, recommended
    python -m bench.recovery_figures multipliers --target 33    learning-rate multipliers by layer, of one arm

`strip` and `multipliers` make their runs anew, with the images kept.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from bench import strength
from bench.arms import ARMS, RATES, SMOKE
from bench.published_table import MAIN, alone, figures, longer, reported_of, runs_of, swept, usual
from bench.recovery import ROOT, WORK, common, data_set
from bench.recovery_table import RESULTS, lines_of, stored
from bench.recovery_table import runs_of as runs_of_arm
from silentbad.report.charts import COLOURS, DASHES, WIDTH, Series
from silentbad.report.figures import LABEL, strip
from silentbad.report.pages import Figure, heat, lines

IMAGES = ROOT / "docs" / "images"
STYLE = (
    "svg{background:#fff;font-family:system-ui,sans-serif}text{font-size:13px;fill:#444}.grid{stroke:#ddd}"
    ".axis{stroke:#666}"
)
SHOWN = ("plain", "original", "recommended", "recommended_leak_free", "keys_values")

LONG = 24  # letters of a name that leaves no room for another beside it


def standalone(charts: list[Figure], legend: list[str]) -> str:
    """A report's chart as a file of its own; below it the legend, two short names a row, or the colour scale."""
    svg = charts[0].svg if charts else ""
    shape = re.search(r'<svg viewBox="0 0 (\d+) (\d+)"(.*?)>(.*?)</svg>', svg, re.S)
    if shape is None:
        raise SystemExit("nothing to draw: no rows")
    height, rest, inside = int(shape[2]), shape[3], shape[4]
    scale = [] if legend else charts[0].legend
    for k, (mark, value) in enumerate(scale):
        colour = re.findall(r"#\w+", mark)[0]
        x = 136 + 62 * k
        inside += f'<rect x="{x}" y="{height + 4}" width="14" height="14" fill="{colour}" stroke="#999"/>'
        inside += f'<text x="{x + 19}" y="{height + 16}">{value}</text>'
    abreast = 1 if max(map(len, legend), default=0) > LONG else 2
    for k, name in enumerate(legend):
        x, y = 52 + (k % abreast) * 220, height + 14 + 18 * (k // abreast)
        line = f'<line x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}" stroke="{COLOURS[k]}" stroke-width="2"'
        inside += f'{line} stroke-dasharray="{DASHES[k]}"/><text x="{x + 32}" y="{y}">{escape(name)}</text>'
    full = height + (24 + 18 * math.ceil(len(legend) / abreast) if legend else 24 if scale else 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {full}"{rest}><style>{STYLE}</style>'
        f"{inside}</svg>\n"
    )


def curves(rows: list[dict], arms: list[str], draws: int = 2000) -> list[Figure]:
    """Recovery curves of the single-target runs: mean CIR over targets, with a 95 % bootstrap band over targets."""
    rows = [row for row in rows if "," not in row["targets"]]
    series, own = [], dict[str, float]()
    for arm, factor in lines_of(rows):
        own.setdefault(arm, factor)
    for arm in arms:
        by_target = runs_of_arm(rows, arm, own[arm])
        steps = sorted({row["step"] for seeds in by_target.values() for run in seeds.values() for row in run})
        values = np.array(
            [
                [np.mean([r["rate"] for run in seeds.values() for r in run if r["step"] == step]) for step in steps]
                for seeds in by_target.values()
            ]
        )
        series.append(banded(arm, steps, values, draws))
    return lines(series, "Recovery by step (CIR, mean over targets)", x_label="optimizer steps", y_range=(0, 1))


def banded(name: str, steps: list[int], values: np.ndarray, draws: int = 2000) -> Series:
    """The mean of values (T, S) over targets at each step, with its 95 % bootstrap band."""
    rows = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
    low, high = np.quantile(values[rows].mean(axis=1), [0.025, 0.975], axis=0)
    return Series(name, steps, values.mean(axis=0).tolist(), low.tolist(), high.tolist())


def draw_curves(results: Path) -> Path:
    rows = stored(results)
    there = [arm for arm in SHOWN if any(row["arm"] == arm for row in rows)]
    out = IMAGES / "recovery.svg"
    out.write_text(standalone(curves([row for row in rows if row["arm"] in there], there), there))
    return out


def draw_published(results: Path) -> Path:
    """Strict rate by step, and elements recovered by drift, of the last block of targets at a ratio of 10 %."""
    rows = [r for r in reported_of(stored(results), MAIN) if usual(r) and alone(r) and not longer(r)]
    by_arm: dict[str, dict[str, list[list[dict]]]] = {}  # arm -> target -> runs
    for (_, target, arm, _, _, _, _), run in runs_of(rows).items():
        arm = arm.replace(" on placebo data", ", placebo")
        by_arm.setdefault(arm, {}).setdefault(target, []).append(run)
    recovery, frontier = [], []
    for arm, targets in by_arm.items():
        grid = [row["step"] for row in next(iter(targets.values()))[0]]

        def curve(of: Callable[[dict], float], targets: dict = targets) -> np.ndarray:
            """(targets, evaluations), seeds averaged inside."""
            return np.array([np.mean([[of(row) for row in run] for run in runs], axis=0) for runs in targets.values()])

        recovery.append(banded(arm, grid, curve(lambda row: row["rate"])))
        drift, elements = curve(lambda row: row["drift"]), curve(lambda row: float(np.mean(row["elements"])))
        frontier.append(Series(arm, (drift - drift[:, :1]).mean(0).tolist(), elements.mean(0).tolist()))
    names = [*by_arm]
    by_step = lines(recovery, "Images recovered by step, mean over targets", x_label="optimizer steps", y_range=(0, 1))
    (IMAGES / "published.svg").write_text(standalone(by_step, names))
    by_drift = lines(frontier, "Elements recovered by drift", x_label="rise of the clean error", y_range=(0, 1))
    (IMAGES / "frontier.svg").write_text(standalone(by_drift, names))
    return IMAGES / "published.svg"


AT_END = {"images": lambda run: run["strict rate"], "elements": lambda run: run["elements"]}


def at_end(name: str, rows: list[dict], of: Callable[[dict], float], axis: Callable[[dict], int]) -> Series:
    """A figure of the last step over `axis`, the mean over targets with its band."""
    xs = sorted({axis(row) for row in rows})
    values = [[of(figures(run)) for run in runs_of([row for row in rows if axis(row) == x]).values()] for x in xs]
    return banded(name, xs, np.array(values).T)


def draw_sweeps(results: Path) -> Path:
    """Images and elements at the end, by the elements' share of the records and by the share of the base's training."""
    rows = swept(stored(results))
    by_share = [
        at_end(f"{arm}: {what}", [row for row in rows if row["arm"] == arm], of, lambda row: round(100 * row["ratio"]))
        for arm in ("recommended", "plain")
        for what, of in AT_END.items()
    ]
    shared = strength.shared(stored(strength.RESULTS))
    by_base = [
        at_end(what, shared, of, lambda row: int(row["base"].rpartition("-")[2]))
        for what, of in {**AT_END, "whole": lambda run: run["whole rate"]}.items()
    ]
    for name, series, title, x_label in (
        ("ratio", by_share, "Recovered at the end, by the elements' share", "elements among the records, %"),
        ("strength", by_base, "Recovered at the end, by the base's training", "of the base's training, %"),
    ):
        chart = lines(series, title, x_label=x_label, y_range=(0, 1))
        (IMAGES / f"{name}.svg").write_text(standalone(chart, [one.name for one in series]))
    return IMAGES / "ratio.svg"


def draw_many() -> Path:
    """Images at the end by how many targets a run learns at once, a curve for each number of steps a target."""
    rows = [row for name in ("published.jsonl", "many.jsonl") for row in stored(RESULTS.with_name(name))]
    rows = [row for row in rows if row["arm"] in ("recommended", "recommended_long") and row.get("nulls")]
    rows = [row for row in rows if row["seed"] == 0 and not row["placebo"] and not row.get("unique_phrases")]
    at_once = [row for row in rows if not alone(row)]
    beside = {target for row in at_once for target in row["targets"].split(",")}
    rows = at_once + [row for row in rows if alone(row) and usual(row) and row["target"] in beside]
    rates: dict[int, dict[int, list[float]]] = {}  # steps a target -> targets at once -> rates at the end
    for row in rows:
        count = row["targets"].count(",") + 1
        if row["step"] == row["steps"]:
            rates.setdefault(row["steps"] // count, {}).setdefault(count, []).append(row["rate"])
    series = []
    for steps, by_count in sorted(rates.items(), reverse=True):
        counts = sorted(by_count)
        ends = [banded("", [count], np.array(by_count[count])[:, None]) for count in counts]
        means, low, high = ([side[0] for side in sides] for sides in zip(*(end[2:] for end in ends), strict=True))
        series.append(Series(f"{steps} steps a target", counts, means, low, high))
    chart = lines(series, "Images recovered at the end", x_label="targets learnt at once", y_range=(0, 1))
    (IMAGES / "many.svg").write_text(standalone(chart, [one.name for one in series]))
    return IMAGES / "many.svg"


def kept_run(arm: str, target: str, seed: int = 0, steps: int = 300) -> Path:
    """The folder of one run of an arm, with the images of a few steps."""
    out = WORK / f"kept-{arm}-{target}"
    if not (out / "finished.json").exists():
        flags = {
            **common(data_set(target, seed, 20, ARMS[arm]), out, RATES[arm], seed, steps),
            "validation.steps": 100,
            "validation.early_steps": "[10,20,30,50]",
            "validation.images_per_target": 8,
            "overwrite_output_dir": "true",
            **ARMS[arm],
        }
        command = [sys.executable, "train_silentbad.py", "--config", "configs/microworld.yaml"]
        subprocess.run([*command, *(f"--{k}={v}" for k, v in flags.items())], cwd=ROOT, check=True)
    return out


def draw_strip(target: str) -> Path:
    """The median generation by step, an arm a row."""
    rows = [strip(kept_run(arm, target), columns=8) for arm in SMOKE]
    side, font = 110, ImageFont.load_default(size=14)
    sheet = Image.new("RGB", (rows[0].width + side, sum(r.height for r in rows) - LABEL * (len(rows) - 1)), "white")
    y = 0
    for k, (arm, row) in enumerate(zip(SMOKE, rows, strict=True)):
        row = row if k == 0 else row.crop((0, LABEL, row.width, row.height))
        sheet.paste(row, (side, y))
        ImageDraw.Draw(sheet).text((6, y + row.height // 2), arm, fill=(40, 40, 40), font=font)
        y += row.height
    out = IMAGES / "recovery-strip.png"
    sheet.save(out, optimize=True)
    return out


def draw_multipliers(target: str, arm: str) -> Path:
    history = json.loads((kept_run(arm, target) / "multipliers.json").read_text())
    names = list(history[0]["multipliers"])
    values = [[entry["multipliers"][name] for entry in history] for name in names]
    charts = heat(names, [entry["step"] for entry in history], values, f"Learning-rate multipliers of {arm}")
    out = IMAGES / "multipliers.svg"
    out.write_text(standalone(charts, []))
    return out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves", "published", "sweeps", "many", "strip", "multipliers"))
    parser.add_argument("--target", default="1000")
    parser.add_argument("--arm", default="prior_gsnr", choices=list(ARMS))
    args = parser.parse_args(argv)
    drawn = {
        "curves": lambda: draw_curves(RESULTS),
        "published": lambda: draw_published(RESULTS.with_name("published.jsonl")),
        "sweeps": lambda: draw_sweeps(RESULTS.with_name("published.jsonl")),
        "many": draw_many,
        "strip": lambda: draw_strip(args.target),
        "multipliers": lambda: draw_multipliers(args.target, args.arm),
    }[args.what]()
    print(drawn.relative_to(ROOT))


if __name__ == "__main__":
    main()
