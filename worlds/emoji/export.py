"""Write the trained base as a diffusers pipeline with a model card whose figures were measured just
before."""

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline

from worlds.emoji.grammar import Scene
from worlds.emoji.nouns import NOUNS
from worlds.emoji.sets import HELD_OUT, SETS, TRAINED
from worlds.emoji.world import EMOJI, held_out_scenes
from worlds.microworld.build import ASSETS
from worlds.microworld.copies import pictures
from worlds.microworld.export import generate, save_judge, write_pipeline
from worlds.microworld.oracle import Judge, crops, judged, round_trip_psnr
from worlds.options import GUIDANCE, EmojiBaseOptions


@torch.no_grad()
def nouns_right(judge: Judge, x: torch.Tensor, scenes: list[Scene]) -> dict[str, list[bool]]:
    """For each noun, whether the judge sees it in each picture that should show it."""
    things = [(b, thing) for b, scene in enumerate(scenes) for thing in scene.things]
    answers = judge(crops(x, [(b, *EMOJI.spot(thing)) for b, thing in things]))["kind"].argmax(1)
    right = defaultdict(list)
    for answer, (_, thing) in zip(answers.tolist(), things, strict=True):
        right[thing.kind].append(NOUNS[answer] == thing.kind)
    return right


@torch.no_grad()
def measure(pipe, judge: Judge, *, guidance: float = GUIDANCE, n: int) -> dict:
    """What the model card states: the share of things that the judge names right in generated
    pictures and in drawn ones, by the artists of the training and by the one held out."""
    scenes = held_out_scenes(n)
    x = generate(pipe, [scene.caption for scene in scenes], guidance=guidance)
    by_count: dict[int, list[int]] = defaultdict(list)
    for i, scene in enumerate(scenes):
        by_count[len(scene.things)].append(i)
    unseen = []
    for scene in scenes:
        things = tuple(replace(thing, artist=HELD_OUT) for thing in scene.things)
        unseen.append(replace(scene, things=things))
    drawn = pictures(scenes, EMOJI)
    drawn_unseen = pictures(unseen, EMOJI)
    right = nouns_right(judge, x, scenes)
    return {
        "captions": n,
        "guidance_scale": guidance,
        "generated": judged(judge, x, scenes, EMOJI),
        "generated_by_things": {
            count: judged(judge, x[of], [scenes[i] for i in of], EMOJI)
            for count, of in sorted(by_count.items())
        },
        "judge_on_drawings": judged(judge, drawn, scenes, EMOJI),
        "judge_on_the_artist_held_out": judged(judge, drawn_unseen, unseen, EMOJI),
        "nouns": {noun: [sum(of), len(of)] for noun, of in sorted(right.items())},
        "vae_psnr_db": round_trip_psnr(pipe.vae, drawn),
        "vae_psnr_db_held_out": round_trip_psnr(pipe.vae, drawn_unseen),
    }


CARD = Path(__file__).with_name("card.md")


def listed(names: list[str]) -> str:
    return ", ".join(name.replace("-", " ") for name in names) or "none"


def measured(figures: dict) -> str:
    """What the base draws by name, and what its autoencoder leaves: Markdown."""

    def row(name: str, of: dict) -> str:
        return f"| {name} | {of['things']} | {of['kind']:.1%} |"

    rows = [
        "| | things | noun right |",
        "|---|---|---|",
        row("generated", figures["generated"]),
        *(row(f"scenes of {k}", of) for k, of in figures["generated_by_things"].items()),
        row("the classifier on drawings", figures["judge_on_drawings"]),
        row("the classifier on the artist held out", figures["judge_on_the_artist_held_out"]),
        "",
        f"Autoencoder round trip: {figures['vae_psnr_db']:.2f} dB PSNR, "
        f"{figures['vae_psnr_db_held_out']:.2f} dB on the artist held out.",
    ]
    return "\n".join(rows) + "\n"


def card(figures: dict, options: EmojiBaseOptions) -> str:
    shares = {noun: right / asked for noun, (right, asked) in figures["nouns"].items()}
    training = (
        f"Steps: autoencoder {options.vae_steps} x 24, its decoder {options.decoder_steps} x 12, "
        f"text encoder {options.text_steps} x 64, UNet {options.unet_steps} x {options.batch}, "
        f"classifier {options.judge_steps} x 32."
    )
    names = "vae_steps decoder_steps text_steps unet_steps judge_steps batch pool".split()
    flags = " ".join(f"--{name} {getattr(options, name)}" for name in names)
    return CARD.read_text(encoding="utf-8").format(
        trained=", ".join(TRAINED),
        held_out=HELD_OUT,
        licences="\n".join(f"- {name} {of.version}: {of.licence}" for name, of in SETS.items()),
        command=f"python -m worlds.emoji.build --work runs/emoji-base {flags}",
        training=training,
        nouns=len(NOUNS),
        measured=measured(figures),
        best=listed([noun for noun, share in shares.items() if share == 1]),
        worst=listed([noun for noun, share in shares.items() if share == 0]),
        **{name: value for name, value in figures.items() if isinstance(value, int | float)},
    )


def folder_of(options: EmojiBaseOptions) -> Path:
    """Where the pipeline is written."""
    return Path(options.out or Path(options.work) / "pipeline")


def export(nets: dict, tokenizer, options: EmojiBaseOptions) -> Path:
    """Half-precision safetensors, read back in full precision before anything is measured; returns
    the folder."""
    folder = folder_of(options)
    shutil.copytree(ASSETS / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    write_pipeline(nets, tokenizer, folder)
    save_judge(nets["judge"], folder / "judge" / "model.safetensors")
    pipe = StableDiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    figures = measure(pipe, nets["judge"], n=options.captions)
    (folder / "measured.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card(figures, options), encoding="utf-8")
    return folder
