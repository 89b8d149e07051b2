"""Rates by layer on top of `recommended`, in the published setting: `python -m bench.layerwise`.

Four runs a target, each of 200 steps: `recommended` at its rate and at half of it, with `gsnr` at twice its rate, and
with the shuffled placebo of `gsnr` at twice its rate. A rule may shift the mean rate too, so the half rate stands
beside it. Rows are those of bench/published.py, in bench/results/layerwise.jsonl; a stored run is not made again.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np

from bench import published
from bench.published_table import (
    HEAD,
    Runs,
    by_arm,
    interval,
    lines_of,
    markdown,
    mean_of,
    ratio,
    sign_flips,
    times_sooner,
)
from bench.recovery import words
from bench.recovery_table import stored

RESULTS = Path(__file__).parent / "results" / "layerwise.jsonl"
TARGETS = ";".join(map(str, range(2300, 2312)))
STEPS = 200
EVERY = 20
RUNS = (  # arm, learning rate in units of 1e-4
    ("recommended", 40.0),
    ("recommended_gsnr", 80.0),
    ("recommended", 20.0),
    ("recommended_gsnr_placebo", 80.0),
)
RULE = ("recommended_gsnr", 80.0, STEPS)
OVER = ("over", "lr x", "targets", "times sooner", "p", "drift, ratio", "strict rate, difference")


def by_run(rows: list[dict]) -> str:
    """A line an arm and rate: Markdown."""
    shown = [
        i
        for i, column in enumerate(HEAD)
        if "plain" not in column and column not in ("p (Holm)", "the same in seconds")
    ]
    return markdown([HEAD[i] for i in shown], [[line[i] for i in shown] for line in lines_of(rows)])


def compared(rows: list[dict]) -> str:
    """The rule over each other run, paired over the targets that both ran: Markdown."""
    arms = by_arm(rows)
    return markdown(OVER, [over(arms[RULE], runs, *key[:2]) for key, runs in arms.items() if key != RULE])


def over(rule: Runs, other: Runs, arm: str, factor: float) -> list[str]:
    """Cells under OVER. A time is that of the first evaluation which shows a recovery that lasts, for both; never
    counts as the last step. Drift is that of the last step."""
    both = [target for target in other if target in rule]
    first = {
        name: {t: [{**run, "not yet": run["strict"]} for run in runs[t]] for t in both}
        for name, runs in (("rule", rule), ("other", other))
    }
    logs = times_sooner(first["other"], first["rule"], STEPS)
    drift = np.log(mean_of(rule, "drift", both) / mean_of(other, "drift", both))
    rates = mean_of(rule, "strict rate", both) - mean_of(other, "strict rate", both)
    gain = interval(rates.tolist(), "+.2f")
    return [
        f"`{arm}`",
        f"{factor:g}",
        str(len(both)),
        ratio(logs, False),
        f"{sign_flips(logs):.4f}",
        ratio(drift, False),
        gain,
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=TARGETS, help="separated by ';'")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    for target, (arm, factor) in itertools.product(args.targets.split(";"), RUNS):
        asked = {"arms": arm, "factors": factor, "targets": target, "steps": STEPS, "every": EVERY, "nulls": "target"}
        published.main(words({**asked, "results": args.results}))
    rows = stored(args.results)
    print(by_run(rows), compared(rows), sep="\n\n")


if __name__ == "__main__":
    main()
