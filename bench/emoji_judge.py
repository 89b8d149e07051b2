"""What a copy detector lets pass in the emoji world: `python -m bench.emoji_judge --base DIR [--trained FOLDER]`.

The bundled detector has never seen a drawing of this world; `--trained` names a detector that `worlds.emoji.build
--stage embedder` wrote, measured beside it on the same pictures. As in bench/instrument.py: for each target, nulls of
every kind and true copies (the autoencoder's round trip, a shift, gain, noise) are scored, whole and element by
element; thresholds come from other nulls of the same target. `artist` is the hardest: only the artist of one thing
differs. Targets that the results' file has under the same settings are not measured again.

    2700-2715   bench/results/emoji-judge.json       before nulls that look like the target were left out
    2716-2731   bench/results/emoji-judge-2716.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from tqdm import tqdm

from bench import instrument
from bench.instrument import AlignedSSIM, Detector, by_kind, measure, pictures_of, rate_of, scored
from bench.recovery import drawing
from bench.recovery_table import grid
from silentbad.data.images import to_tensor
from silentbad.files import sha256
from silentbad.measure.embedders import MICRO
from worlds.emoji import make
from worlds.emoji.nulls import ELEMENT_NULLS, SCENE_NULLS, hard_null
from worlds.emoji.sets import HELD_OUT
from worlds.emoji.world import EMOJI

RESULTS = Path(__file__).parent / "results" / "emoji-judge-2716.json"
TARGETS = range(2716, 2732)
TESTED = (*SCENE_NULLS, *ELEMENT_NULLS)
WORDS = {
    "redraw": "free redraw of the caption",
    "attributes": "same words and places, other artists and poses",
    "artists": "all things by other artists, their poses and the backdrop exact",
    "rearranged": "elements exact, rearranged",
    "other_backdrop": "things exact, another kind of backdrop",
    "redrawn": "one element redrawn in place",
    "artist": "one thing by another artist, all else exact",
    "pose": "one thing in another pose",
    "recoloured": "one thing recoloured",
    "missing": "one thing missing",
    "moved": "one thing moved by 4 to 8 pixels",
    "copy": "true copy",
}
IN_PLACE = ("redrawn", "moved")  # 5 % may pass; 1 % of every other kind


class Target(instrument.Target):
    """A target of the emoji world, and pictures to score against it."""

    of = make.TARGETS
    tested = TESTED

    def kind_of(self, thing: Any) -> str:
        return "unseen artist" if thing.artist == HELD_OUT else "known artist"

    def nulls(self, kind: str, count: int, split: str) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        """`count` pictures of the kind (N,3,64,64) in [0,1], and the elements that each changes."""
        rngs = [EMOJI.rng("instrument", split, self.name, kind, i) for i in range(count)]
        nulls = [hard_null(kind, rng, self.scene, i) for i, rng in enumerate(rngs)]
        pictures = [to_tensor(EMOJI.render(null.scene)[0]) for null in nulls]
        return torch.stack(pictures), [null.changed for null in nulls]


def measured(name: str, judges: dict, vae: AutoencoderKL, args: argparse.Namespace) -> dict:
    """What each judge lets pass of one target."""
    target = Target(name)
    calibration, tested = pictures_of(target, vae, None, args)
    columns = {
        judge: measure(by_kind, target, scored(of, target, calibration), scored(of, target, tested))
        for judge, of in judges.items()
    }
    for column in columns.values():
        del column["verdicts"]
    return {"columns": columns}


COLUMNS = {"micro": "", "trained": "trained, ", "ssim": "structural similarity, "}
LEVELS = {"micro": ("whole", "element", "strict"), "trained": ("whole", "element", "strict"), "ssim": ("strict",)}


def table(results: dict) -> str:
    """What passes, by kind of picture: mean over targets of each target's rate, and its interval."""
    judges = [judge for judge in COLUMNS if judge == "micro" or results.get(judge)]
    levels = [(judge, level) for judge in judges for level in LEVELS[judge]]
    lines = []
    for kind, said in WORDS.items():
        limit = ">= 0.95" if kind == "copy" else "<= 0.05" if kind in IN_PLACE else "<= 0.01"
        rates = [rate_of(results, judge, kind, level) for judge, level in levels]
        lines.append([said, limit, *map(instrument.rate_said, rates)])
    head = ["picture", "may pass", *(COLUMNS[judge] + level for judge, level in levels)]
    parts = [f"{len(results['targets'])} targets.", grid(head, lines)]
    for judge in ("micro", "trained"):  # room between true copies and thresholds, by who drew the element
        if judge in judges:
            parts.append(f"The {'bundled' if judge == 'micro' else judge} detector:")
            parts.append(instrument.by_element(results, column=judge))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="comma-separated seeds")
    parser.add_argument("--calibration", type=int, default=34, help="nulls of each kind and element")
    parser.add_argument("--pictures", type=int, default=15, help="tested pictures of each kind per target")
    parser.add_argument("--trained", type=Path, help="folder of a second detector")
    parser.add_argument("--ssim", action="store_true", help="structural similarity as a second judge")
    parser.add_argument("--base", type=Path, required=True, help="pipeline whose autoencoder makes the copies")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    vae = instrument.autoencoder(args.base)
    detectors = {"micro": MICRO} | ({"trained": args.trained} if args.trained else {})
    judges: dict = {name: Detector(folder) for name, folder in detectors.items()}
    judges |= {"ssim": AlignedSSIM()} if args.ssim else {}
    settings = {
        "calibration": args.calibration,
        "pictures": args.pictures,
        "ssim": args.ssim,
        "detector": sha256(MICRO / "model.safetensors"),
        **({"trained": sha256(args.trained / "model.safetensors")} if args.trained else {}),
        "autoencoder": args.base.name,
        "drawing": drawing("emoji"),
    }
    results: dict = {**settings, "targets": instrument.known(args.results, settings)}
    for name in tqdm([name for name in args.targets.split(",") if name not in results["targets"]], desc="targets"):
        results["targets"][name] = measured(name, judges, vae, args)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
