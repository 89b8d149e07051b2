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

from pathlib import Path

from silentbad.errors import UserError, exit_with
from silentbad.settings.commands import PrepareOptions
from silentbad.settings.startup import options, refused


def main(argv: list[str] | None = None) -> int:
    """Parse the options before the imports that read pictures."""
    try:
        settings = options(PrepareOptions, argv, __doc__)
        from silentbad.prepare.write import prepare

        out = Path(str(settings.out))
        summary = prepare(settings)
    except UserError as error:
        return refused(error)
    print(f"{out}: {summary}")
    print(f"look at {out / 'preview.html'} before you train")
    return 0


if __name__ == "__main__":
    exit_with(main)
