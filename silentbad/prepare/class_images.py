"""Pictures of what the model already knows, for prior preservation (DreamBooth, 2208.12242).

    python -m silentbad.prepare.class_images --pipeline DIR_OR_ID --prompts prompts.txt \\
        --count 200 --out DATASET

draws `count` pictures of the prompts, one a line and in turn, and adds them to
DATASET/metadata.jsonl as clean records, where the clean ratio of the sampler and
memory.roles.clean.loss_weight act on them. Picture i depends on (seed, i) alone."""

from silentbad.settings.commands import ClassImageOptions
from silentbad.settings.startup import early, refused
from silentbad.settings.startup import options as read_options

if __name__ == "__main__":  # a mistake is said before the seconds that the imports below take
    OPTIONS = early(read_options, ClassImageOptions, None, __doc__)

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from PIL import Image

from silentbad import owned, rng
from silentbad.data.images import inside, to_pil
from silentbad.data.schema import Caption, admit, check_window, json_lines, text_lines
from silentbad.device import explain_out_of_memory, in_batches, larger_device
from silentbad.errors import UserError, exit_with, user_errors
from silentbad.files import append_records, check_writable
from silentbad.measure.prompts import refuse_json
from silentbad.model.family import side_of
from silentbad.model.pipeline import load_pipeline, vae_factor
from silentbad.model.registry import backbone_of


def check_out(out: Path) -> None:
    """Refuse a folder of another command, a data set that holds class images, and one whose records
    are kept otherwise."""
    check_writable(out, "--out", folder=True)
    if (made_by := owned.kind_of(out)) is not None:
        raise UserError(
            f"--out: {out} is the folder of another command ({made_by}); give that "
            f"of the training data"
        )
    for name in ("metadata.csv", "poisoning_images"):
        if (out / name).exists():
            raise UserError(
                f"--out: {out} holds {name}; class images are added to a metadata.jsonl"
            )
    if os.path.lexists(out / "class"):
        raise UserError(
            f"--out: {out / 'class'} is there already; class images go into a folder "
            f"class/ of their own"
        )
    records = out / "metadata.jsonl"
    if os.path.lexists(records):
        if not inside(out, records, "--out").is_file():
            raise UserError(f"--out: {records} is no file")
        for _ in json_lines(records):  # a line that is none is named before anything is drawn
            pass


@torch.no_grad()
def write_class_images(
    pipe,
    prompts: list[str],
    count: int,
    out: Path,
    *,
    seed: int = 0,
    batch: int = 8,
    steps: int = 20,
) -> list[dict]:
    """Draw the pictures into out/class/ and add their records to out/metadata.jsonl, once all are
    there.

    Raises UserError where a picture is not finite."""
    check_out(out)
    failed = f"--out: cannot write {out}"
    created = not out.exists()
    records = []
    with user_errors(failed):
        out.mkdir(parents=True, exist_ok=True)
        draft = tempfile.TemporaryDirectory(prefix=".draft-", dir=out)
        folder = Path(draft.name) / "class"
        folder.mkdir()
    try:
        with draft:

            def drawn(rows: list[int]) -> list[Image.Image]:
                return draw(pipe, [prompts[i % len(prompts)] for i in rows], rows, seed, steps)

            for rows, images in in_batches([*range(count)], batch, drawn):
                for i, image in zip(rows, images, strict=True):
                    name = f"{i:05d}.png"
                    with user_errors(failed):
                        image.save(folder / name)
                    text = prompts[i % len(prompts)]
                    record = {"text": text, "phrases": [], "role": "clean"}
                    records.append({"file_name": f"class/{name}", **record})
            with user_errors(failed):
                folder.rename(out / "class")
                append_records(records, out / "metadata.jsonl")
    finally:
        if created:
            with suppress(OSError):  # it holds something by now
                out.rmdir()
    return records


def draw(pipe, prompts: list[str], rows: list[int], seed: int, steps: int) -> list[Image.Image]:
    """Picture `rows[k]` of prompt k, whatever else is drawn."""
    pipe.set_progress_bar_config(disable=True)
    backbone = backbone_of(pipe)
    factor = vae_factor(pipe.vae)
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
        raise UserError(
            f"--pipeline: picture {lost[0]} is not finite, {len(lost)} of {len(rows)} in its batch"
        )
    return [to_pil(image) for image in images]


def main(argv: list[str] | None = None, options: ClassImageOptions | None = None) -> int:
    try:
        settings = options or read_options(ClassImageOptions, argv, __doc__)
        file = str(settings.prompts)
        lines = [(f"{file}:{k}", line) for k, line in enumerate(text_lines(Path(file)), 1)]
        for where, line in lines:
            refuse_json(line, where, "give one prompt a line")
        prompts = {
            where: admit(line, Caption, "a prompt", where).strip()
            for where, line in lines
            if line.strip()
        }
        if not prompts:
            raise UserError(f"--prompts: {file} holds no prompt; give one a line")
        out = Path(os.path.realpath(str(settings.out)))
        check_out(out)
        fits = explain_out_of_memory("--pipeline", f"take a smaller one, or {larger_device()}")
        with fits, owned.claimed(out, "class images", key="--out"):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            pipe = load_pipeline(str(settings.pipeline), "float32", device)
            for where, prompt in prompts.items():
                check_window(prompt, pipe.tokenizer, f"{where}: the prompt")
            write_class_images(
                pipe,
                [*prompts.values()],
                settings.count,
                out,
                seed=settings.seed,
                batch=settings.batch,
                steps=settings.steps,
            )
    except UserError as error:
        return refused(error)
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(options=OPTIONS))
