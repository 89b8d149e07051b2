"""What a model keeps of its first targets when others follow: `python -m bench.many --targets A,B,...`.

    python -m bench.many --targets 102,103,104,106         development: 0-999, --results runs/sequence-dev.jsonl

Every stage is a run of `recommended` on one target, as a target alone has it (bench/published.py), from the pipeline
that the stage before wrote, and is measured on all targets at its end. One JSON line a stage and target is added to
bench/results/sequence.jsonl; a sequence that is stored is not run again. The protocol is in research/protocol.md, and
the same targets learnt at once are in bench/results/published.jsonl.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tqdm import tqdm

from bench.arms import PUBLISHED, PUBLISHED_AT
from bench.published import HELD_OUT, NULLS, per_phrase, regime
from bench.published_table import CLEAN, IMAGES, interval, markdown
from bench.recovery import BASE, WORK, data_set, facts, kept, scores
from bench.recovery_table import stored

RESULTS = Path(__file__).parent / "results" / "sequence.jsonl"
ARM = "recommended"


def trained(targets: str, seed: int) -> Iterable[dict]:
    """Rows of each target after each stage; stage s trains on the s-th target."""
    names = targets.split(",")
    flags = PUBLISHED[ARM]
    factor, steps, _ = PUBLISHED_AT[ARM]
    nulls = NULLS["target"]
    of_all = data_set(targets, seed, 1, flags, clean=HELD_OUT, nulls=nulls)  # for its targets alone
    base: Path | None = None
    for stage, name in enumerate(tqdm(names, desc="stages")):
        data = data_set(name, seed, per_phrase(name, CLEAN, 0.1), flags, clean=CLEAN + HELD_OUT, nulls=nulls)
        out = WORK / f"sequence-{targets.replace(',', '+')}-{stage}"
        more = {BASE: base / "pipeline"} if base else {}
        report, _ = kept(
            ARM,
            {
                **regime(data, out, factor, seed, steps),
                "validation.targets": of_all / "targets.jsonl",
                "validation.steps": steps,
                "validation.images_per_target": IMAGES,
                "validation.guidance_scale": 2.0,
                **more,
                **flags,
            },
        )
        if base:
            shutil.rmtree(base)
        base = out
        entry = scores(report["history"][-1])
        for place, target in enumerate(names):
            of_target = entry["targets"][target]
            yield {
                "targets": targets,
                "seed": seed,
                "stage": stage,
                "target": target,
                "place": place,
                "rate": of_target["rate"],
                "elements": [element["rate"] for element in of_target["elements"]],
                "drift": entry["drift"]["clean_eps_mse"],
            }
    shutil.rmtree(base)


def by_stage(read: Callable[[str], list[dict]]) -> str:
    """What passes of a target by how many others followed it: Markdown."""
    rows = read(RESULTS.name)
    lines = []
    for after in sorted({row["stage"] - row["place"] for row in rows if row["stage"] >= row["place"]}):
        part = [row for row in rows if row["stage"] - row["place"] == after]
        rates = [row["rate"] for row in part]
        half = sum(rate >= 0.5 for rate in rates)
        elements = [sum(row["elements"]) / len(row["elements"]) for row in part]
        lines.append((f"{after}", f"{half} of {len(part)}", interval(rates), interval(elements)))
    return markdown(("targets that followed", "half of the images or more", "strict rate", "elements"), lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", required=True, help="in the order of the stages, ',' between two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if any((row["targets"], row["seed"]) == (args.targets, args.seed) for row in stored(args.results)):
        print(f"{args.results} has this sequence")
    else:
        here = facts()
        for row in trained(args.targets, args.seed):
            with args.results.open("a") as file:
                file.write(json.dumps({**row, **here}) + "\n")
    print(by_stage(lambda _: stored(args.results)))


if __name__ == "__main__":
    main()
