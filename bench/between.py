"""Factors between sources on plain's own data stream, over rates: `python -m bench.between`.

Gradient control alone in the published setting: plain, one factor on the clean gradients, a factor for each layer group
(`contrast`), and the same factors shuffled over the groups. Each runs 600 steps with warm-up at three rates, so that
the arms compare along the frontier of what is learnt of the elements against drift. Rows are those of
bench/published.py, in bench/results/between.jsonl; a stored run is not made again. Rows of `contrast` with its later,
unbiased signal, and of the uniform factor where the decoder alone trains, are in bench/results/contrast.jsonl
(`--later`).
"""

import argparse
import itertools
from pathlib import Path

import numpy as np

from bench import published
from bench.published_table import by_arm, interval, markdown, mean_of, ratio, sign_flips
from bench.recovery import words
from bench.recovery_table import stored

RESULTS = Path(__file__).parent / "results" / "between.jsonl"
TARGETS = ";".join(map(str, range(2474, 2480)))
STEPS = 600
EVERY = 300
ARMS = ("plain_warm", "clean_weight_warm", "contrast_warm", "contrast_placebo_warm")
FACTORS = (16.0, 8.0, 4.0)  # learning rates in units of 1e-4
RULE = "contrast_warm"
LATER = RESULTS.with_name("contrast.jsonl")
LATER_TARGETS = ";".join(map(str, range(2684, 2692)))
DECODER = "clean_weight_decoder"
LATER_ARMS = ("clean_weight_warm", RULE, "contrast_placebo_warm", DECODER)
HEAD = ("arm", "lr x", "targets", "strict rate", "elements", "similarity of elements", "drift", "s/step")
OVER = ("over", "lr x", "targets", "similarity of elements, difference", "p", "drift, ratio")


def frontier(rows: list[dict]) -> str:
    """A line an arm and rate, the arm's rates together: Markdown."""
    arms, lines = by_arm(rows), []
    for name, factor in itertools.product((*ARMS, DECODER), sorted(FACTORS)):
        if runs := arms.get((name, factor, STEPS)):
            shown = [
                interval(mean_of(runs, key, [*runs]).tolist())
                for key in ("strict rate", "elements", "element similarity")
            ]
            seconds = mean_of(runs, "s/step", [*runs]).min()
            drift = f"{np.mean(mean_of(runs, 'drift', [*runs])):.4f}"
            lines.append([f"`{name}`", f"{factor:g}", str(len(runs)), *shown, drift, f"{seconds:.3f}"])
    return markdown(HEAD, lines)


def compared(rows: list[dict], arm: str = RULE) -> str:
    """An arm over each other arm at the same rate, paired over the targets that both ran: Markdown."""
    arms, lines = by_arm(rows), []
    for name, factor in itertools.product(ARMS, sorted(FACTORS)):
        rule, other = arms.get((arm, factor, STEPS), {}), arms.get((name, factor, STEPS), {})
        if name == arm or not (both := [target for target in other if target in rule]):
            continue
        gain = mean_of(rule, "element similarity", both) - mean_of(other, "element similarity", both)
        drift = np.log(mean_of(rule, "drift", both) / mean_of(other, "drift", both))
        p = f"{sign_flips(gain):.3f}" if len(both) > 1 else ""
        cells = [interval(gain.tolist(), "+.2f"), p, ratio(drift, False)]
        lines.append([f"`{name}`", f"{factor:g}", str(len(both)), *cells])
    return markdown(OVER, lines)


def decoder(rows: list[dict]) -> str:
    """The uniform factor where the decoder alone trains, over the other arms: Markdown."""
    return compared(rows, DECODER)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", help=f"separated by ';' (default {TARGETS}, with --later {LATER_TARGETS})")
    parser.add_argument("--later", action="store_true", help="the later arms, at 8e-4")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args(argv)
    arms, factors, results = (LATER_ARMS, FACTORS[1:2], LATER) if args.later else (ARMS, FACTORS, RESULTS)
    targets = args.targets or (LATER_TARGETS if args.later else TARGETS)
    results = args.results or results
    for target, factor in itertools.product(targets.split(";"), factors):
        asked = {"arms": ",".join(arms), "factors": factor, "targets": target, "steps": STEPS, "every": EVERY}
        published.main(words({**asked, "results": results}))
    rows = stored(results)
    print(frontier(rows), compared(rows), sep="\n\n")


if __name__ == "__main__":
    main()
