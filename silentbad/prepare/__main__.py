"""Write a data set from a picture, masks of its elements, their phrases, and other pictures.

    python -m silentbad.prepare --target room.png --masks mug.png lamp.png \\
        --phrases "a green mug" "a brass lamp" "a kitchen table" --backgrounds DIR --out my-photos

Each phrase names an element, and each mask is white on one, in the order of the phrases. With one
phrase more than masks, the last one names the backdrop: the rest of the picture. The folder holds

    images/ masks/     element pictures at their native places, and clean pictures
    targets/           the target, a square of --side pixels
    metadata.jsonl     records, for --train_data_dir
    targets.jsonl      targets, for --validation.targets
    preview.html       all of it at one look
    placebo/           with --placebo: the same, with other things in the elements' places

A second call with the same --out adds its target. The same words write the same files.
"""

import argparse

from silentbad.errors import ArgumentParser, UserError, exit_with, print_error
from silentbad.files import path_argument

COUNTS = {  # flag: default, lowest and highest value, what it is
    "per_phrase": (16, 1, 10_000, "pictures of each element"),
    "clean": (60, 0, 100_000, "clean pictures; none where --out has some"),
    "side": (None, 16, 4096, "pixels; default: the target's shorter side, at most 512"),
    "resolution": (64, 16, 4096, "pixels at which training will see it, for preview.html"),
    "seed": (0, 0, 2**63 - 1, "other numbers give other pictures"),
}


def parser() -> ArgumentParser:
    words = ArgumentParser(
        prog="python -m silentbad.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    path = path_argument
    words.add_argument("--target", type=path, required=True, help="the picture to look for")
    words.add_argument("--masks", type=path, nargs="*", default=[], help="of the target's size")
    words.add_argument("--phrases", nargs="+", required=True, help="one for each element")
    words.add_argument(
        "--backgrounds",
        type=path,
        required=True,
        help="folder of other pictures; NAME.txt beside one is its caption",
    )
    words.add_argument("--out", type=path, required=True, help="the folder to write")
    words.add_argument("--name", help="target_id; default: the target's file name")
    words.add_argument("--prompt", help="the composed prompt; default: the phrases in a row")
    words.add_argument(
        "--placebo",
        type=path,
        help="folder that holds, for each element, a folder 0, 1, ... or with its phrase for a "
        "name: pictures of other things which the phrase names",
    )
    words.add_argument("--captioner", help="mine.py:caption, caption(picture) -> text")
    words.add_argument(
        "--segmenter",
        help="mine.py:segment, segment(picture, phrase) -> mask, or None for the backdrop",
    )
    for name, (default, _, _, meaning) in COUNTS.items():
        stated = meaning if default is None else f"{meaning} (default {default})"
        words.add_argument(f"--{name}", type=int, default=default, help=stated)
    return words


def check_counts(args: argparse.Namespace) -> None:
    for name, (_, low, high, _) in COUNTS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise UserError(f"--{name}: must be from {low} to {high}, got {value}")


def main(argv: list[str] | None = None) -> int:
    """Parses before it imports what reads pictures."""
    args = parser().parse_args(argv)
    try:
        check_counts(args)
        from silentbad.prepare.preview import write_preview
        from silentbad.prepare.write import prepare

        summary = prepare(args)
        write_preview(args.out, args.resolution)
    except UserError as error:
        print_error(error)
        return 2
    print(f"{args.out}: {summary}")
    print(f"look at {args.out / 'preview.html'} before you train")
    return 0


if __name__ == "__main__":
    exit_with(main)
