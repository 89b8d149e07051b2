"""Pictures of what the model already knows, for prior preservation (DreamBooth, 2208.12242).

    python -m silentbad.class_images --pipeline DIR_OR_ID --prompts prompts.txt --count 200 --out DATASET

draws `count` pictures of the prompts, one a line and in turn, and adds them to DATASET/metadata.jsonl as
clean records, where the clean ratio of the sampler and memory.retention.clean_weight act on them. Picture i
depends on (seed, i) alone.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline

from silentbad import rng
from silentbad.errors import UserError, say
from silentbad.similarity import pretrained


@torch.no_grad()
def write_class_images(
    pipe, prompts: list[str], count: int, out: Path, *, seed: int = 0, batch: int = 8, steps: int = 20
) -> list[dict]:
    """Draw the pictures into out/class/ and add their records to out/metadata.jsonl, which is replaced at
    once.
    """
    unet, factor = pipe.unet, 2 ** (len(pipe.vae.config.block_out_channels) - 1)
    side, records, folder = unet.config.sample_size, [], out / "class"
    if folder.exists():
        raise UserError(f"--out: {folder} holds class images already; remove it to draw them anew")
    folder.mkdir(parents=True)
    pipe.set_progress_bar_config(disable=True)
    for first in range(0, count, batch):
        rows = list(range(first, min(first + batch, count)))
        said = [prompts[i % len(prompts)] for i in rows]
        latents = rng.noise((unet.config.in_channels, side, side), seed, "class_images", 0, rows)
        streams = [rng.generator(seed, "class_images_steps", i) for i in rows]
        images = pipe(
            said, latents=latents.to(unet.device, unet.dtype), generator=streams, num_inference_steps=steps,
            height=side * factor, width=side * factor,
        ).images  # fmt: skip
        for i, text, image in zip(rows, said, images, strict=True):
            image.save(folder / f"{i:05d}.png")
            records.append({"file_name": f"class/{i:05d}.png", "text": text, "phrases": [], "role": "clean"})
    held = out / "metadata.jsonl"
    text = held.read_text(encoding="utf-8") if held.exists() else ""
    text += "\n" if text and not text.endswith("\n") else ""
    fresh = out / ".metadata.jsonl.tmp"
    fresh.write_text(text + "".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    os.replace(fresh, held)
    return records


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--pipeline", "--prompts", "--out"):
        parser.add_argument(name, required=True)
    for name, default in (("--count", 100), ("--seed", 0), ("--batch", 8), ("--steps", 20)):
        parser.add_argument(name, type=int, default=default)
    a = parser.parse_args(argv)
    try:
        if not (path := Path(a.prompts)).is_file():
            raise UserError(f"--prompts: no file {path}; it holds one prompt a line")
        prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not prompts or a.count < 1:
            raise UserError(
                f"--prompts, --count: at least one prompt and one picture, got {len(prompts)} and {a.count}"
            )
        options = dict(use_safetensors=True, safety_checker=None)
        advice = "a diffusers folder or Hub id"
        pipe = pretrained("--pipeline", StableDiffusionPipeline, a.pipeline, advice, **options)
        pipe.to("cuda" if torch.cuda.is_available() else "cpu")
        write_class_images(pipe, prompts, a.count, Path(a.out), seed=a.seed, batch=a.batch, steps=a.steps)
    except UserError as error:
        say(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
