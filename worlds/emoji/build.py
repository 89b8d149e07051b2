"""Train the emoji world's base, from the bundled base's weights.

    python -m worlds.emoji.build --work DIR [--stage vae|text|unet|...]

Stages as of the microworld (`worlds.microworld.build`), each resumable at any moment from
its last checkpoint in `--work`: the autoencoder, the text encoder, the UNet; its decoder alone; the
judge, a classifier of nouns that measures what the base draws. Then `export` writes the pipeline
with its measured model card to `--out`.

`--stage embedder`, which `all` leaves out, trains the bundled copy detector on this world's hard
nulls and writes it to `embedder` beside the pipeline, for `--validation.embedder_path`."""

import sys

from silentbad.settings import startup
from worlds.options import EmojiBaseOptions

if __name__ == "__main__":  # report a mistake before the slow imports below
    OPTIONS = startup.early(startup.options, EmojiBaseOptions, None, __doc__)

from typing import Any

import torch
from diffusers import StableDiffusionPipeline

from silentbad import bundled
from silentbad.errors import UserError, exit_with, user_errors
from silentbad.measure.embedders import MICRO
from silentbad.measure.micro import MicroEmbedder
from worlds.emoji.export import export, folder_of
from worlds.emoji.sets import SETS, artist
from worlds.emoji.world import EMOJI
from worlds.microworld.build import ASSETS, run
from worlds.microworld.networks import load_tokenizer

STAGES = ("vae", "decoder", "text", "unet", "judge")  # of `all`


def networks(folder: str) -> dict[str, Any]:
    """A pipeline's networks and the bundled detector, by the names of their stages. Raises
    UserError."""
    with user_errors(f"--begin {folder}: cannot be loaded"):
        pipe = StableDiffusionPipeline.from_pretrained(bundled(folder), torch_dtype=torch.float32)
    detector = MicroEmbedder.from_pretrained(MICRO).requires_grad_(True)
    return {
        "vae": pipe.vae,
        "text": pipe.text_encoder,
        "unet": pipe.unet,
        "embedder": detector,
    }


def main(argv: list[str] | None = None, options: EmojiBaseOptions | None = None) -> None:
    """Raises SystemExit(2) after a mistake."""
    try:
        options = options or startup.options(EmojiBaseOptions, argv, __doc__)
        if options.threads:
            torch.set_num_threads(options.threads)
        for name in SETS:
            artist(name)  # fetched and drawn before anything is trained
        wanted = STAGES if options.stage in ("all", "export") else (options.stage,)
        nets: dict[str, Any] = run(options, wanted, EMOJI, networks(options.begin))
    except UserError as error:
        sys.exit(startup.refused(error))
    if options.stage == "embedder":
        nets["embedder"].save_pretrained(folder_of(options) / "embedder")
    if options.stage in ("all", "export"):
        print(
            (export(nets, load_tokenizer(ASSETS / "tokenizer"), options) / "README.md").read_text()
        )


if __name__ == "__main__":
    exit_with(lambda: main(options=OPTIONS))
