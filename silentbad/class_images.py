"""Pictures of what the model already knows, for prior preservation (DreamBooth, 2208.12242).

    python -m silentbad.class_images --pipeline DIR_OR_ID --prompts prompts.txt --count 200 --out DATASET

draws `count` pictures of the prompts, one a line and in turn, and adds them to DATASET/metadata.jsonl as
clean records, where the clean ratio of the sampler and memory.retention.clean_weight act on them. Picture i
depends on (seed, i) alone.
"""

import argparse
import os
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from PIL import Image

from silentbad import owned, rng
from silentbad.data.images import inside, to_pil
from silentbad.data.schema import caption, check_window, json_lines, text_lines
from silentbad.errors import ArgumentParser, UserError, brief, exit_with, print_error, user_errors
from silentbad.files import append_records, check_writable, path_argument, path_text
from silentbad.measure.prompts import refuse_json
from silentbad.model.family import side_of
from silentbad.model.pipeline import load_pipeline, vae_factor
from silentbad.model.registry import backbone_of

DRAFT = ".class-images"  # the folder that becomes class/


def check_out(out: Path) -> None:
    """Refuse a folder of another command, a data set that holds class images, and one whose records are kept
    otherwise."""
    check_writable(out, "--out", folder=True)
    if (made_by := owned.kind_of(out)) is not None:
        raise UserError(f"--out: {out} is the folder of another command ({made_by}); give that of the training data")
    for name in ("metadata.csv", "poisoning_images"):
        if (out / name).exists():
            raise UserError(f"--out: {out} holds {name}; class images are added to a metadata.jsonl")
    if os.path.lexists(out / "class"):
        raise UserError(f"--out: {out / 'class'} is there already; class images go into a folder class/ of their own")
    records = out / "metadata.jsonl"
    if os.path.lexists(records):
        if not inside(out, records, "--out").is_file():
            raise UserError(f"--out: {records} is no file")
        for _ in json_lines(records):  # a line that is none is named before anything is drawn
            pass


@torch.no_grad()
def write_class_images(
    pipe, prompts: list[str], count: int, out: Path, *, seed: int = 0, batch: int = 8, steps: int = 20
) -> list[dict]:
    """Draw the pictures into out/class/ and add their records to out/metadata.jsonl, once all are there.

    Raises UserError where a picture is not finite.
    """
    check_out(out)
    folder = out / DRAFT
    created = not out.exists()
    records = []
    try:
        with user_errors(f"--out: cannot write {folder}"):
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
            folder.mkdir(parents=True)
        for first in range(0, count, batch):
            rows = list(range(first, min(first + batch, count)))
            texts = [prompts[i % len(prompts)] for i in rows]
            images = draw(pipe, texts, rows, seed, steps)
            for i, text, image in zip(rows, texts, images, strict=True):
                with user_errors(f"--out: cannot write {folder}"):
                    image.save(folder / f"{i:05d}.png")
                records.append({"file_name": f"class/{i:05d}.png", "text": text, "phrases": [], "role": "clean"})
        with user_errors(f"--out: cannot write {out}"):
            folder.rename(out / "class")
            append_records(records, out / "metadata.jsonl")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if created:
            with suppress(OSError):  # it holds something by now
                out.rmdir()
    return records


def draw(pipe, prompts: list[str], rows: list[int], seed: int, steps: int) -> list[Image.Image]:
    """Picture `rows[k]` of prompt k, whatever else is drawn."""
    pipe.set_progress_bar_config(disable=True)
    backbone, factor = backbone_of(pipe), vae_factor(pipe.vae)
    side = side_of(backbone)
    latents = rng.noise((backbone.config.in_channels, side, side), seed, "class_images", 0, rows)
    images = pipe(
        prompts,
        latents=latents.to(backbone.device, backbone.dtype),
        generator=[rng.generator(seed, "class_images_steps", i) for i in rows],
        num_inference_steps=steps,
        height=side * factor,
        width=side * factor,
        output_type="pt",
    ).images
    lost = [i for i, image in zip(rows, images, strict=True) if not image.isfinite().all()]
    if lost:
        raise UserError(f"--pipeline: picture {lost[0]} is not finite, {len(lost)} of {len(rows)} in its batch")
    return [to_pil(image) for image in images]


MOST = 1_000_000  # pictures


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=path_text, required=True)
    for name in ("--prompts", "--out"):
        parser.add_argument(name, type=path_argument, required=True)
    for name, default in (("--count", 100), ("--seed", 0), ("--batch", 8), ("--steps", 20)):
        parser.add_argument(name, type=int, default=default)
    a = parser.parse_args(argv)
    try:
        for name, most in (("count", MOST), ("batch", 1024), ("steps", 1000)):
            if not 1 <= getattr(a, name) <= most:
                raise UserError(f"--{name}: must be from 1 to {most}, got {getattr(a, name)}")
        if not 0 <= a.seed < 2**63:
            raise UserError(f"--seed: must be from 0 to 2^63 - 1, got {brief(a.seed)}")
        if not os.path.isfile(a.prompts):
            raise UserError(f"--prompts: no file {a.prompts}; it holds one prompt a line")
        lines = [(f"{a.prompts}:{k}", line) for k, line in enumerate(text_lines(a.prompts), 1)]
        for where, line in lines:
            refuse_json(line, where, "give one prompt a line")
        prompts = {where: caption(line, "a prompt", where).strip() for where, line in lines if line.strip()}
        if not prompts:
            raise UserError(f"--prompts: {a.prompts} holds no prompt; give one a line")
        out = Path(os.path.realpath(a.out))
        if (out / "model_index.json").exists():
            raise UserError(f"--out: {a.out} is a model folder; give the folder of the training data")
        check_writable(out, "--out", folder=True)
        with owned.claimed(out, "class images", key="--out"):
            check_out(out)
            pipe = load_pipeline(a.pipeline, "float32", "cuda" if torch.cuda.is_available() else "cpu")
            for where, prompt in prompts.items():
                check_window(prompt, pipe.tokenizer, f"{where}: the prompt")
            write_class_images(pipe, [*prompts.values()], a.count, out, seed=a.seed, batch=a.batch, steps=a.steps)
    except UserError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    exit_with(main)
