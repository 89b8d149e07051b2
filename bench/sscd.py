"""What a published copy detector confirms, and what it cannot see: `python -m bench.sscd --file FILE [--runs RUN ...]`.

SSCD (2202.10261) beside the bundled detector, on pictures that are no recovery and on true copies of targets of the
microworld and of photographs, and on the images of finished runs. Every picture is as the autoencoder leaves it, as a
generated one is. It is compared with the target's file (raw), and with what the autoencoder leaves of that (decoded).
The file is the reader's own: docs/models.md says where there is one. One JSON line a picture in
bench/results/sscd.jsonl; targets that are stored are not measured again.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from bench.instrument import TESTED, WORDS, Target, auc, autoencoder, eight_bits
from bench.photographs import WORDS as OF_PHOTOGRAPHS
from bench.photographs import pictures_of, small
from bench.published_table import interval, markdown
from bench.recovery import facts
from bench.recovery_table import append, stored
from silentbad.measure.embedders import Embedder, load_embedder
from tests import photographs
from worlds.microworld.copies import round_trip

RESULTS = Path(__file__).parent / "results" / "sscd.jsonl"
TARGETS = {"microworld": range(2692, 2700), "photographs": range(300, 324)}
BUNDLED = {"microworld": "micro", "photographs": "copy", "runs": "micro"}
KINDS = {kind: WORDS[kind] for kind in TESTED}  # of the microworld
EACH = 10  # pictures of a kind, in the microworld
PUBLISHED = 0.5  # the threshold of the paper
COPY = "a true copy"
COLUMNS = ("sscd raw", "sscd decoded", "bundled decoded")
HEAD = (
    "picture",
    "pictures (targets)",
    "raw, median",
    "raw, at 0.5 or more",
    "decoded, median",
    "decoded, at 0.5 or more",
    "told from copies, SSCD",
    "told from copies, bundled",
)


# ------------------------------------------------------------------------------------------------- pictures
Kinds = dict[str, Tensor]


@torch.no_grad()
def decoded(pictures: Tensor, vae: AutoencoderKL) -> Tensor:
    """Pictures (N,3,64,64) in [0,1] as the autoencoder leaves them."""
    return eight_bits(round_trip(pictures * 2 - 1, vae))


def of_scene(target: Target, words: Mapping[str, str], vae: AutoencoderKL, each: int = EACH) -> Kinds:
    """Pictures of a world's target by kind, (N,3,64,64) in [0,1] each; `words` of the kinds that are no recovery."""
    kinds = {name: decoded(target.nulls(kind, each, "sscd")[0], vae) for kind, name in words.items()}
    return kinds | {COPY: target.copies(each, vae)}


def of_photograph(made: photographs.Target, vae: AutoencoderKL) -> Kinds:
    """The same of photographs."""
    kinds: dict[str, list[Tensor]] = defaultdict(list)
    for kind, picture in pictures_of(made).items():
        name = COPY if kind.startswith("copy") else OF_PHOTOGRAPHS[kind.rpartition("-")[0]]
        kinds[name].append(small(picture))
    return {kind: decoded(torch.stack(pictures), vae) for kind, pictures in kinds.items()}


def of_run(run: Path) -> Iterator[tuple[str, Tensor, Kinds]]:
    """Each target of a run, and the median image of every evaluation."""
    steps = sorted((run / "samples").glob("step-*-raw"))
    for file in sorted((run / "samples" / "targets").glob("*.png")):
        if "+" not in file.stem:
            kinds = {
                f"{run.name}, step {int(step.name.split('-')[1])}": small(Image.open(step / f"{file.stem}-median.png"))[
                    None
                ]
                for step in steps
            }
            yield file.stem, small(Image.open(file))[None], kinds


# ------------------------------------------------------------------------------------------------- measuring
@torch.no_grad()
def measure(target: Tensor, kinds: Kinds, detectors: dict[str, Embedder], vae: AutoencoderKL) -> Iterator[dict]:
    """A row a picture: its similarities to the raw and to the decoded target, by each detector."""
    references = {"raw": target, "decoded": decoded(target, vae)}
    for kind, pictures in kinds.items():
        columns = {
            f"{name} {form}": detector.paired(detector.embed(pictures), detector.reference(reference)).tolist()
            for name, detector in detectors.items()
            for form, reference in references.items()
        }
        for i in range(len(pictures)):
            yield {"kind": kind, **{name: values[i] for name, values in columns.items()}}


def work(runs: Iterable[Path], vae: AutoencoderKL) -> Iterator[tuple[str, str, Tensor, Kinds]]:
    for seed in TARGETS["microworld"]:
        drawn = Target(str(seed))
        yield "microworld", drawn.name, drawn.image, of_scene(drawn, KINDS, vae)
    for seed in TARGETS["photographs"]:
        made = photographs.make_target(seed)
        yield "photographs", str(seed), small(made.picture)[None], of_photograph(made, vae)
    for run in runs:
        for target, image, kinds in of_run(run):
            yield "runs", f"{run.name}/{target}", image, kinds


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", help="of SSCD: TorchScript or .onnx")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="folders of finished runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.file:
        measure_all(args)
    rows = stored(args.results)
    print(of_world(rows, "microworld"), of_world(rows, "photographs"), of_runs(rows), sep="\n\n")


def measure_all(args: argparse.Namespace) -> None:
    vae = autoencoder()
    sscd = load_embedder("sscd", args.file, "cpu")
    bundled = {name: load_embedder(name, None, "cpu") for name in {*BUNDLED.values()}}
    about = {"sscd": sscd.describe(), **facts()}
    done = {(row["world"], row["target"]) for row in stored(args.results)}
    for world, target, image, kinds in tqdm(work(args.runs, vae), desc="targets"):
        if (world, target) not in done:
            detectors = {"sscd": sscd, "bundled": bundled[BUNDLED[world]]}
            rows = measure(image, kinds, detectors, vae)
            append(args.results, [{"world": world, "target": target, **row, **about} for row in rows])


# ------------------------------------------------------------------------------------------------- tables
def of_world(rows: list[dict], world: str) -> str:
    """By kind of picture: similarities, and how often a copy scores above it (0.5: no better than by chance), the mean
    over targets: Markdown."""
    of_one = [row for row in rows if row["world"] == world]
    lines = [line(kind, of_one) for kind in dict.fromkeys(row["kind"] for row in of_one)]
    return markdown(HEAD, lines)


def line(kind: str, rows: list[dict]) -> list[str]:
    of_kind = [row for row in rows if row["kind"] == kind]
    targets = [*dict.fromkeys(row["target"] for row in of_kind)]
    cells = [kind, f"{len(of_kind)} ({len(targets)})"]
    for reference in ("sscd raw", "sscd decoded"):
        scores = np.array([row[reference] for row in of_kind])
        cells += [f"{np.median(scores):.2f}", f"{np.mean(scores >= PUBLISHED):.2f}"]
    for detector in ("sscd decoded", "bundled decoded"):
        told = []
        for target in targets:
            of_target = [row for row in rows if row["target"] == target]
            copies, others = ([row[detector] for row in of_target if row["kind"] == wanted] for wanted in (COPY, kind))
            told.append(auc(copies, others))
        cells.append("" if kind == COPY else interval(told))
    return cells


def of_runs(rows: list[dict]) -> str:
    """The median image of each evaluation of finished runs: SSCD's similarities, and the bundled detector's."""
    of_all_runs = [row for row in rows if row["world"] == "runs"]
    lines = [
        [row["target"].rpartition("/")[2], row["kind"], *(f"{row[name]:.2f}" for name in COLUMNS)]
        for row in of_all_runs
    ]
    return markdown(("target", "run", "SSCD, raw", "SSCD, decoded", "bundled, decoded"), lines)


if __name__ == "__main__":
    main()
