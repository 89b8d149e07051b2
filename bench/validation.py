"""What recovery validation costs: the hook against a loop that rebuilds the pipeline for each target.

    python -m bench.validation [--pipeline assets/micro-sd] [--targets 8] [--images 8]

The loop does what the published hook does: `from_pretrained` around the training's modules for each target,
the prompt encoded in every call, calls of five images (so eight asked become ten), then the similarities.
Both are asked for the same images at the same number of steps and score them with one embedder; rounds
alternate. CPU seconds are those of this process, which other work on the machine disturbs less.
Without the bundled base, networks of its shape with random weights stand in: the cost is the same.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline
from PIL import Image

from silentbad.data.images import to_tensor
from silentbad.data.targets import Target
from silentbad.microworld import make, networks
from silentbad.microworld.render import render
from silentbad.recovery.embedders import EMBEDDERS, MICRO
from silentbad.rng import generator
from validation import RecoveryHook, ValidationConfig

ROOT = Path(__file__).parents[1]
CALL = 5  # images a call of the published hook


def base_pipeline(folder: Path) -> StableDiffusionPipeline:
    """The pipeline of the folder, or one of the same shape with random weights."""
    if (folder / "model_index.json").is_file():
        return StableDiffusionPipeline.from_pretrained(folder)
    tokenizer = networks.load_tokenizer(ROOT / "assets" / "micro-sd" / "tokenizer")
    return StableDiffusionPipeline(
        vae=networks.new_vae(),
        text_encoder=networks.new_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=networks.new_unet(),
        scheduler=networks.new_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def microworld_targets(count: int) -> list[Target]:
    targets = []
    for k in range(count):
        scene = make.target_scene(str(k))
        picture = render(scene)[0]
        phrases = [make.phrase_of(scene, i) for i in range(len(scene.things) + 1)]
        targets.append(Target(str(k), picture, phrases, scene.caption, []))
    return targets


def rebuilding_loop(folder: Path, pipe, targets: list[Target], config: ValidationConfig, embedder) -> int:
    """Images asked for; more are made."""
    for target in targets:
        built = StableDiffusionPipeline.from_pretrained(
            folder,
            vae=pipe.vae,
            text_encoder=pipe.text_encoder,
            tokenizer=pipe.tokenizer,
            unet=pipe.unet,
            safety_checker=None,
        )
        built.set_progress_bar_config(disable=True)
        images: list[Image.Image] = []
        for call in range(math.ceil(config.images_per_target / CALL)):
            images += built(
                target.composed_prompt,
                negative_prompt="low resolution",
                num_images_per_prompt=CALL,
                num_inference_steps=config.num_inference_steps,
                guidance_scale=config.guidance_scale,
                generator=generator("bench", target.target_id, call),
            ).images
        features = embedder.embed(torch.stack([to_tensor(image) for image in images]))
        embedder.similarity(features, embedder.embed(to_tensor(target.image)[None]))
    return len(targets) * config.images_per_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", type=Path, default=ROOT / "assets" / "micro-sd")
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "validation.json")
    given = parser.parse_args()
    accelerator = Accelerator()
    pipe = base_pipeline(given.pipeline).to(accelerator.device)
    targets = microworld_targets(given.targets)
    name: Literal["micro", "ssim"] = "micro" if (MICRO / "config.json").is_file() else "ssim"
    config = ValidationConfig(
        images_per_target=given.images,
        num_inference_steps=given.num_inference_steps,
        embedder=name,
        threshold=0.9,
        clean_records=0,
    )
    embedder = EMBEDDERS[name](None, accelerator.device)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "base"
        pipe.save_pretrained(saved)
        hook = RecoveryHook(
            config,
            targets=targets,
            components=pipe.components,
            accelerator=accelerator,
            output_dir=Path(folder) / "run",
            seed=0,
        )
        hook.run(0, 0, pipe.unet)  # warm up, as in a run: the first point is the base model's
        seconds: dict[str, list[float]] = {"loop": [], "hook": []}
        cpu: dict[str, list[float]] = {"loop": [], "hook": []}
        for step in range(1, given.rounds + 1):
            begun, work = time.perf_counter(), time.process_time()
            count = rebuilding_loop(saved, pipe, targets, config, embedder)
            middle, half = time.perf_counter(), time.process_time()
            hook.run(step, 0, pipe.unet)
            seconds["loop"].append(middle - begun)
            seconds["hook"].append(time.perf_counter() - middle)
            cpu["loop"].append(half - work)
            cpu["hook"].append(time.process_time() - half)
    rates = {kind: count / statistics.median(values) for kind, values in seconds.items()}
    result = {
        "images": count,
        "num_inference_steps": given.num_inference_steps,
        "embedder": name,
        "device": str(accelerator.device),
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "images_per_second": rates,
        "ratio": rates["hook"] / rates["loop"],
    }
    print(f"{'':26}{'images/s':>10}{'seconds':>10}{'CPU s':>10}")
    for kind, label in (("loop", "pipeline built per target"), ("hook", "recovery hook")):
        spent = f"{statistics.median(seconds[kind]):10.2f}{statistics.median(cpu[kind]):10.2f}"
        print(f"{label:26}{rates[kind]:10.2f}{spent}")
    print(f"ratio {result['ratio']:.2f}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
