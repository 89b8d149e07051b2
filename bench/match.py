"""Whether spectral updates need a base that Muon trained: `python -m bench.match [--smoke]`.

    python -m bench.match --times 1                each arm at its own rate
    python -m bench.match --times 1,0.5,2 --results bench/results/match-rates.jsonl    three rates, on a second base
    python -m bench.kept --arms adamw_2026 --factor 64 --steps 200 --base runs/carry/adamw --targets ... --results ...
                                                   there AdamW in fewer steps, at 32 and 64
    python -m bench.match --smoke                  a base and two runs of a few steps each, in minutes

Muon trained the UNet of the bundled base; AdamW trained Stable Diffusion's. Here AdamW trains one of the bundled size
from scratch, on the same scenes, autoencoder and text encoder (`bench.carry`'s build, which resumes where it was
stopped). The arms of `bench.kept` fine-tune it, all layers and the decoder alone, by spectral updates and by AdamW, on
the same data; only the optimizer, its rate and the steps differ. Every run becomes one JSON line of
bench/results/match.jsonl; a run that is stored is not made again, and several processes may work on it once the base is
there. The protocol is research/protocol.md#what-is-frozen-targets-from-2874.

By the processor seconds of a step, the build takes more than two hours, the runs at one rate about one more.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench import kept
from bench.carry import ADAMW, build
from bench.kept import ARMS_SAID, base_among, line
from bench.published_table import interval, markdown
from bench.recovery import ROOT
from bench.recovery_table import stored

RESULTS = Path(__file__).parent / "results" / "match.jsonl"
RATES = RESULTS.with_name("match-rates.jsonl")  # on a second training of the base
TARGETS = ";".join(map(str, range(2874, 2882)))
PAIRS = {"recommended_2026": "adamw_2026", "decoder_2026": "decoder_adamw_2026"}  # spectral -> AdamW
ARMS = tuple(arm for pair in PAIRS.items() for arm in pair)
OVER = ("arm, steps, lr x", "less", "targets", "strict rate", "kept, kinds shown", "kinds not shown")
Cell = tuple[str, int, float]  # arm, steps, rate


def cell(arm: str, times: float = 1, steps: int | None = None) -> Cell:
    """An arm at so many times its own rate, in its own steps unless others are given."""
    factor, own = kept.KEPT_AT[arm]
    return arm, steps or own, times * factor


AT_OWN = [(cell(spectral), cell(adamw)) for spectral, adamw in PAIRS.items()]
TIMES = ((1, 1), (0.5, 0.5), (1, 2))  # of spectral updates' own rate, of AdamW's
AT_RATES = [
    *((cell(spectral, a), cell(adamw, b)) for spectral, adamw in PAIRS.items() for a, b in TIMES),
    *((cell("recommended_2026"), cell("adamw_2026", times, steps=200)) for times in (2, 4)),
]


def bases(rows: list[dict], again: list[dict], bundled: list[dict]) -> str:
    """Things right of all that are named, by guidance, of these bases and of the bundled one: Markdown."""
    runs = {"trained by AdamW": rows, "by AdamW, a second time": again, "by Muon, bundled": bundled}
    return kept.drawn_right({name: base_among(of_base) for name, of_base in runs.items()})


def runs_of(rows: list[dict]) -> dict[Cell, list[dict]]:
    """Runs by arm, steps and rate."""
    runs: dict[Cell, list[dict]] = defaultdict(list)
    for row in rows:
        if row["arm"] in ARMS:
            runs[row["arm"], row["steps"], row["factor"]].append(row)
    return runs


def lines_of(rows: list[dict]) -> list[list[str]]:
    """The cells of each arm and rate, under ARMS_SAID with the rate after the arm."""
    base = base_among(rows)
    runs = runs_of(rows)
    lines = []
    for run in sorted(runs, key=lambda run: (ARMS.index(run[0]), *run[1:])):
        arm, _, factor = run
        name, *cells = line(arm, runs[run], base)
        lines.append([name, f"{factor:g}", *cells])
    return lines


def table(rows: list[dict]) -> str:
    """A line an arm and rate: Markdown."""
    return markdown((ARMS_SAID[0], "lr x", *ARMS_SAID[1:]), lines_of(rows))


def rates(rows: list[dict]) -> str:
    """The same in few columns: Markdown."""
    lines = [[arm, *cells[:3], *cells[4:7]] for arm, *cells in lines_of(rows)]
    return markdown(("arm", "lr x", "steps", "targets", "strict rate", "kept, kinds shown", "kinds not shown"), lines)


def differences(rows: list[dict], pairs: Sequence[tuple[Cell, Cell]] = AT_OWN) -> str:
    """What spectral updates add over AdamW, in pairs of targets, by arm, steps and rate of each: Markdown."""
    base = base_among(rows)
    runs = runs_of(rows)
    lines = []
    for spectral, adamw in pairs:
        others = {row["target"]: row for row in runs.get(adamw, [])}
        both = [(row, others[row["target"]]) for row in runs.get(spectral, []) if row["target"] in others]
        if not both:
            continue
        gains = [[a["rate"] - b["rate"] for a, b in both]]
        for kinds in kept.MICRO.both:
            shares = (kept.lowest([*of_arm], base, kinds)[1] for of_arm in zip(*both, strict=True))
            gains.append([a - b for a, b in zip(*shares, strict=True)])
        cells = (f"`{arm}`, {steps}, {factor:g}" for arm, steps, factor in (spectral, adamw))
        lines.append([*cells, str(len(both)), *(interval(values, "+.2f") for values in gains)])
    return markdown(OVER, lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", default="1", help="rates, as multiples of each arm's own, separated by ','")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "carry", help="folder of the base")
    parser.add_argument("--unet_steps", type=int, help="steps of its build, in place of its own")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    more: list[str] = []
    pool = 4096
    if args.smoke:
        work = args.work.with_name("match-smoke")
        small = {"arms": "decoder_2026,decoder_adamw_2026", "targets": "103", "unet_steps": 4}
        vars(args).update(small, work=work, results=work / "match.jsonl")
        more, pool = ["--steps", "12", "--images", "2", "--captions", "12"], 64
    args.work.mkdir(parents=True, exist_ok=True)
    base = build(ADAMW, args.work, args.unet_steps, pool)
    for times in args.times.split(","):
        for arm in args.arms.split(","):
            factor = float(times) * kept.KEPT_AT[arm][0]
            run = {"arms": arm, "factor": factor, "base": base, "targets": args.targets, "results": args.results}
            kept.main([word for name, value in run.items() for word in (f"--{name}", str(value))] + more)
    rows = stored(args.results)
    print(bases(rows, stored(RATES), stored(kept.RESULTS)), table(rows), differences(rows), sep="\n\n")


if __name__ == "__main__":
    main()
