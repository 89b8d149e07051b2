"""Write the trained base as a diffusers pipeline with a model card whose figures were measured just
before.

`python -m worlds.microworld.export --pipeline assets/micro-sd` measures a pipeline that
already exists."""

from silentbad.settings.startup import early, options, refused
from worlds.options import GUIDANCE, BaseOptions, MeasureOptions

if __name__ == "__main__":  # a mistake is said before the seconds that the imports below take
    OPTIONS = early(options, MeasureOptions, None, __doc__)

import json
import tempfile
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from silentbad.errors import UserError, exit_with, user_errors
from silentbad.progress import Bar
from silentbad.rng import generator
from worlds.interface import World
from worlds.microworld.copies import pictures, to_bytes
from worlds.microworld.networks import new_scheduler
from worlds.microworld.oracle import Judge, judged, round_trip_psnr
from worlds.microworld.world import CAPTIONS, MICROWORLD, held_out_scenes


@torch.no_grad()
def generate(
    pipe, captions: list[str], *, steps: int = 25, guidance: float = GUIDANCE, batch=64
) -> torch.Tensor:
    """Pictures of the captions, (N,3,64,64) in [-1,1], with addressed noise."""
    pipe.set_progress_bar_config(disable=True)
    images = []
    for start in Bar(range(0, len(captions), batch), desc="generate"):
        part = captions[start : start + batch]
        draws = [generator("microworld", "held-out noise", start + i) for i in range(len(part))]
        out = pipe(
            part,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=draws,
            output_type="pt",
        )
        images.append(out.images.cpu() * 2 - 1)
    return torch.cat(images)


@torch.no_grad()
def measure(pipe, judge: Judge, *, guidance: float = GUIDANCE, n: int = CAPTIONS) -> dict:
    """What the model card states: accuracies of generated scenes, the judge's own on renders,
    the round trip's PSNR."""
    scenes = held_out_scenes(n)
    x = generate(pipe, [scene.caption for scene in scenes], guidance=guidance)
    renders = pictures(scenes)
    by_count = {k: judged(judge, x[k - 1 :: 3], scenes[k - 1 :: 3]) for k in (1, 2, 3)}
    return {
        "captions": n,
        "guidance_scale": guidance,
        "generated": judged(judge, x, scenes),
        "generated_by_things": by_count,
        "judge_on_renders": judged(judge, renders, scenes),
        "vae_psnr_db": round_trip_psnr(pipe.vae, renders),
    }


def grid(pipe, columns: int = 6, rows: int = 3) -> Image.Image:
    """Generations of the first held-out captions at four times their size."""
    scenes = held_out_scenes(columns * rows)
    x = generate(pipe, [s.caption for s in scenes])
    pixels = to_bytes(x).permute(0, 2, 3, 1).numpy()
    sheet = Image.new("RGB", (columns * 264 - 8, rows * 264 - 8), "white")
    for i, picture in enumerate(pixels):
        sheet.paste(
            Image.fromarray(picture).resize((256, 256), 0),
            ((i % columns) * 264, (i // columns) * 264),
        )
    return sheet


CARD = Path(__file__).with_name("card.md")
BEGIN = "<!-- detector: written by `python -m bench.instrument --reported` -->"
END = "<!-- /detector -->"


def detector_section(folder: Path, text: str | None = None) -> str:
    """The card's section on the copy detector between its marks: `text`, or what the card there
    has by now."""
    card = folder / "README.md"
    if text is None:
        old = card.read_text(encoding="utf-8") if card.is_file() else ""
        text = old.split(BEGIN)[1].split(END)[0].strip() if BEGIN in old else "Not measured yet."
    return f"{BEGIN}\n{text}\n{END}"


def update_detector(folder: Path, text: str, figures: dict) -> None:
    """Put a new section and its figures into a card that exists."""
    card = folder / "README.md"
    measured = folder / "measured.json"
    old = card.read_text(encoding="utf-8")
    before, rest = old.split(BEGIN)
    card.write_text(before + detector_section(folder, text) + rest.split(END)[1], encoding="utf-8")
    figures_before = json.loads(measured.read_text(encoding="utf-8"))
    measured.write_text(
        json.dumps({**figures_before, "detector": figures}, indent=1) + "\n", encoding="utf-8"
    )


def write_card(folder: Path, pipe, figures: dict, training: str) -> None:
    def row(name, f):
        return f"| {name} | {f['things']} | {f['kind']:.1%} | {f['colour']:.1%} | {f['both']:.1%} |"

    rows = [row("generated", figures["generated"])]
    rows += [row(f"scenes of {k}", f) for k, f in figures["generated_by_things"].items()]
    rows += [row("the judge on renders", figures["judge_on_renders"])]
    millions = {
        name: sum(p.numel() for p in getattr(pipe, part).parameters()) / 1e6
        for name, part in (("text", "text_encoder"), ("vae", "vae"), ("unet", "unet"))
    }
    text = CARD.read_text(encoding="utf-8").format(
        window=pipe.tokenizer.model_max_length,
        rows="\n".join(rows),
        training=training,
        detector=detector_section(folder),
        **millions,
        **{k: v for k, v in figures.items() if not isinstance(v, dict)},
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    measured = folder / "measured.json"
    figures_before = json.loads(measured.read_text(encoding="utf-8")) if measured.is_file() else {}
    detector_figures = {
        name: figures_before[name] for name in ("detector",) if name in figures_before
    }
    measured.write_text(
        json.dumps({**figures, **detector_figures}, indent=1) + "\n", encoding="utf-8"
    )


def save_judge(judge: Judge, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.half().contiguous() for k, v in judge.state_dict().items()}, path)


def load_judge(path: Path, world: World = MICROWORLD) -> Judge:
    judge = Judge(world)
    judge.load_state_dict({k: v.float() for k, v in load_file(path).items()})
    return judge.eval().requires_grad_(False)


def assemble(nets: dict, tokenizer) -> StableDiffusionPipeline:
    return StableDiffusionPipeline(
        vae=nets["vae"],
        text_encoder=nets["text"],
        tokenizer=tokenizer,
        unet=nets["unet"],
        scheduler=new_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def write_pipeline(nets: dict, tokenizer, folder: Path) -> None:
    """The pipeline's parts in half precision beside the tokenizer that `folder` holds."""
    with tempfile.TemporaryDirectory() as tmp:
        assemble(nets, tokenizer).to(dtype=torch.float16).save_pretrained(tmp)
        for part in ("vae", "text_encoder", "unet", "scheduler"):
            (folder / part).mkdir(parents=True, exist_ok=True)
            for file in (Path(tmp) / part).iterdir():
                (folder / part / file.name).write_bytes(file.read_bytes())
        # transformers loads in the precision its configuration names: full, so that a plain
        # from_pretrained runs
        config = folder / "text_encoder" / "config.json"
        config.write_text(
            json.dumps({**json.loads(config.read_text()), "dtype": "float32"}, indent=2) + "\n"
        )
        (folder / "model_index.json").write_bytes((Path(tmp) / "model_index.json").read_bytes())


def export(nets: dict, tokenizer, folder: Path, args: BaseOptions) -> None:
    """Half-precision safetensors, read back in full precision before anything is measured."""
    write_pipeline(nets, tokenizer, folder)
    nets["embedder"].save_pretrained(folder / "embedder")
    save_judge(nets["judge"], folder / "judge" / "model.safetensors")
    training = (
        f"Steps: autoencoder {args.vae_steps} x 24, its decoder {args.decoder_steps} x 12, text "
        f"encoder {args.text_steps} x 64, UNet {args.unet_steps} x {args.batch}, copy detector "
        f"{args.embedder_steps} x 12 groups of 6 pictures, judge {args.judge_steps} x 32."
    )
    pipe = StableDiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    write_card(
        folder, pipe, measure(pipe, load_judge(folder / "judge" / "model.safetensors")), training
    )
    grid(pipe).save(folder.parents[1] / "docs" / "images" / "micro-sd.png")
    print((folder / "README.md").read_text())


def loaded(folder: Path) -> tuple[StableDiffusionPipeline, Judge]:
    """A pipeline with its judge. Raises UserError where the folder holds none."""
    with user_errors(f"--pipeline {folder}: cannot be loaded"):
        pipe = StableDiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    with user_errors(
        f"--pipeline {folder}: needs judge/model.safetensors, as `worlds.microworld.build` has it"
    ):
        return pipe, load_judge(folder / "judge" / "model.safetensors")


def main(argv: list[str] | None = None, settings: MeasureOptions | None = None) -> int:
    try:
        settings = settings or options(MeasureOptions, argv, __doc__)
        pipe, judge = loaded(Path(str(settings.pipeline)))
    except UserError as error:
        return refused(error)
    print(json.dumps(measure(pipe, judge, guidance=settings.guidance), indent=1))
    if settings.grid:
        grid(pipe).save(settings.grid)
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(settings=OPTIONS))
