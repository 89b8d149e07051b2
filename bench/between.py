"""Factors between sources on plain's own data stream, over rates: `python -m bench.between`.

Gradient control alone in the published setting: plain, one factor on the clean gradients, a factor for each layer group
(`contrast`), and the same factors shuffled over the groups. Each runs 600 steps with warm-up at three rates, so that
the arms compare along the frontier of what is learnt of the elements against drift. Rows are those of
bench/published.py, in bench/results/between.jsonl; a stored run is not made again.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np

from bench import published
from bench.published_table import Runs, by_arm, interval, markdown, ratio, sign_flips
from bench.recovery import words
from bench.recovery_table import stored

RESULTS = Path(__file__).parent / "results" / "between.jsonl"
TARGETS = ";".join(map(str, range(2474, 2480)))
STEPS, EVERY = 600, 300
ARMS = ("plain_warm", "clean_weight_warm", "contrast_warm", "contrast_placebo_warm")
FACTORS = (16.0, 8.0, 4.0)  # learning rates in units of 1e-4
RULE = "contrast_warm"
HEAD = ("arm", "lr x", "targets", "strict rate", "elements", "similarity of elements", "drift", "s/step")
OVER = ("over", "lr x", "targets", "similarity of elements, difference", "p", "drift, ratio")


def means(runs: Runs, key: str, targets: list[str] | None = None) -> np.ndarray:
    """(T,) of each target, over its seeds, at the last step."""
    return np.array([np.mean([run[key] for run in runs[target]]) for target in targets or runs])


def frontier(rows: list[dict]) -> str:
    """A line an arm and rate, the arm's rates together: Markdown."""
    arms, lines = by_arm(rows), []
    for name, factor in itertools.product(ARMS, sorted(FACTORS)):
        if runs := arms.get((name, factor, STEPS)):
            shown = [interval(means(runs, key).tolist()) for key in ("strict rate", "elements", "element similarity")]
            seconds = means(runs, "s/step").min()
            drift = f"{np.mean(means(runs, 'drift')):.4f}"
            lines.append([f"`{name}`", f"{factor:g}", str(len(runs)), *shown, drift, f"{seconds:.3f}"])
    return markdown(HEAD, lines)


def compared(rows: list[dict]) -> str:
    """The layer-wise rule over each other arm at the same rate, paired over the targets that both ran: Markdown."""
    arms, lines = by_arm(rows), []
    for name, factor in itertools.product(ARMS, sorted(FACTORS)):
        rule, other = arms.get((RULE, factor, STEPS), {}), arms.get((name, factor, STEPS), {})
        if name == RULE or not (both := [target for target in other if target in rule]):
            continue
        gain = means(rule, "element similarity", both) - means(other, "element similarity", both)
        drift = np.log(means(rule, "drift", both) / means(other, "drift", both))
        p = f"{sign_flips(gain):.3f}" if len(both) > 1 else ""
        cells = [interval(gain.tolist(), "+.2f"), p, ratio(drift, False)]
        lines.append([f"`{name}`", f"{factor:g}", str(len(both)), *cells])
    return markdown(OVER, lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=TARGETS, help="separated by ';'")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    for target, factor in itertools.product(args.targets.split(";"), FACTORS):
        asked = {"arms": ",".join(ARMS), "factors": factor, "targets": target, "steps": STEPS, "every": EVERY}
        published.main(words({**asked, "results": args.results}))
    rows = stored(args.results)
    print(frontier(rows), compared(rows), sep="\n\n")


if __name__ == "__main__":
    main()
