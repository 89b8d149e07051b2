"""What recovery validation costs: the hook against the published ways, and whether images and scores are the same.

    python -m bench.validation [--pipeline assets/micro-sd] [--targets 8] [--images 8]

The published ways build a pipeline around the training's modules for each target, encode the prompt in every call and
score the wholes. One makes its images one by one (as diffusers' `log_validation`), the other five a call (as the
published attack's hook, where eight asked become ten). The hook scores every element as well. All are asked for the
same images from the same noise, score them with one embedder, and take turns; the ratios are of this process's CPU
seconds, which other work on the machine disturbs less than wall time.

Equal quality: similarities of the hook's images less those of the images made one by one, and the share of strict
decisions that agree. Thresholds of these decisions lie in the middle of each target's (and element's) similarities,
where the smallest change flips one.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline
from torch import Tensor

from bench.recovery_table import goals, grid
from silentbad.data.images import to_tensor
from silentbad.data.targets import Target
from silentbad.measure.embedders import EMBEDDERS, Embedder
from silentbad.rng import generator, noise
from validation import RecoveryHook, ValidationConfig
from worlds.microworld import make
from worlds.microworld.render import backdrop_mask, render

ROOT = Path(__file__).parents[1]
LOOPS = {"one by one": 1, "five a call": 5}  # images a call
RESULTS = ROOT / "bench" / "results" / "validation.json"
STEPS = 20  # of an image
ROUNDS = 3
BAR = 3.0  # times the images of the loop one by one, in equal CPU time


def microworld_targets(count: int) -> list[Target]:
    """The first targets of the microworld, each thing and the backdrop with its mask."""
    targets = []
    for k in range(count):
        scene = make.target_scene(str(k))
        picture, masks = render(scene)
        phrases = [make.phrase_of(scene, i) for i in range(len(scene.things) + 1)]
        targets.append(Target(str(k), picture, phrases, scene.caption, [*masks, backdrop_mask(masks)]))
    return targets


def rebuilding_loop(
    folder: Path, pipe: Any, targets: list[Target], config: ValidationConfig, embedder: Embedder, call: int
) -> Tensor:
    """The images (T*N,3,H,W) asked for, `call` of them made together; the last call may make more."""
    all_images, asked = [], config.images_per_target
    shape = (pipe.unet.config.in_channels, *[pipe.unet.config.sample_size] * 2)
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
        images: list[Tensor] = []
        for k in range(math.ceil(asked / call)):
            places = list(range(k * call, (k + 1) * call))
            images += built(
                target.composed_prompt,
                num_images_per_prompt=call,
                num_inference_steps=config.num_inference_steps,
                guidance_scale=config.guidance_scale,
                generator=generator("bench", target.target_id, k),
                latents=noise(shape, 0, f"validation/{target.target_id}", 0, places),
                output_type="pt",
            ).images
        of_target = torch.stack(images)
        embedder.paired(embedder.embed(of_target), embedder.reference(to_tensor(target.image)[None]))
        all_images.append(of_target[:asked])
    return torch.cat(all_images)


def scores_of_hook(hook: RecoveryHook) -> np.ndarray:
    """Similarities of the last measurement's images, one list a target: rows of the whole and of each element."""
    scores = hook.history[-1].raw
    assert scores is not None, "there is no average of the weights"
    similarities = [[of_target.sims, *(e.sims for e in of_target.elements)] for of_target in scores.targets.values()]
    return _even(similarities)


def scores_of_images(hook: RecoveryHook, images: Tensor) -> np.ndarray:
    """The same of images (T*N,3,H,W)."""
    similarities = []
    for j, of_target in enumerate(images.chunk(len(hook.targets))):
        rows = hook.measure.similar(of_target, [j] * len(of_target))
        similarities.append([[r["sim"] for r in rows], *zip(*(r["elements"] for r in rows), strict=True)])
    return _even(similarities)


def _even(found: list[Any]) -> np.ndarray:
    """(T,E,N); targets with fewer elements are filled with nan."""
    most = max(map(len, found))
    return np.array([[*own, *[[math.nan] * len(own[0])] * (most - len(own))] for own in found], float)


def quality(reference: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """How far similarities (T,E,N) are from others, and how many strict decisions agree."""
    gap = np.abs(found - reference)
    middle = np.quantile(np.nan_to_num(reference), 0.5, axis=2, keepdims=True)
    strict, other = (((x >= middle) | np.isnan(x)).all(1) for x in (reference, found))
    single = np.isfinite(reference)
    return {
        "similarities": int(single.sum()),
        "largest_difference": float(np.nanmax(gap)),
        "mean_difference": float(np.nanmean(gap)),
        "decisions_agree": float(((reference >= middle) == (found >= middle))[single].mean()),
        "strict_agree": float((strict == other).mean()),
        "strict_images": int(strict.sum()),
        "images": int(strict.size),
    }


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, CPU seconds, result."""
    begun, spent = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - begun, time.process_time() - spent, result


def measure(hook: RecoveryHook, loops: Mapping[str, Callable[[], Tensor]], unet: Any, rounds: int) -> dict[str, Any]:
    """Times of every way, and the quality of the hook's scores in fp32 and under bf16 autocast."""
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    images: dict[str, Tensor] = {}
    scores: dict[str, np.ndarray] = {}
    own = hook.accelerator.autocast
    casts = {"hook": own, "hook, bf16": partial(torch.autocast, hook.accelerator.device.type, torch.bfloat16)}

    def note(name: str, work: Callable[[], Any]) -> Any:
        wall, spent, result = timed(work)
        seconds.setdefault(name, []).append(wall)
        cpu.setdefault(name, []).append(spent)
        return result

    step = 0
    for _ in range(rounds):
        for name, loop in loops.items():
            images[name] = note(name, loop)
        for name, autocast in casts.items():
            step, hook.accelerator.autocast = step + 1, autocast
            note(name, partial(hook.run, step, 0, unet))
            scores[name] = scores_of_hook(hook)
    hook.accelerator.autocast = own
    reference = scores_of_images(hook, images["one by one"])
    scores["five a call"] = scores_of_images(hook, images["five a call"])
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "quality": {name: quality(reference, found) for name, found in scores.items()},
    }


def ratios(cpu: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """CPU time of each loop over that of the hook, median over rounds, by way of the hook."""
    return {
        name: {loop: statistics.median(a / b for a, b in zip(cpu[loop], spent, strict=True)) for loop in LOOPS}
        for name, spent in cpu.items()
        if name not in LOOPS
    }


def share_of_backbone(hook: RecoveryHook, unet: Any) -> float:
    """Share of the hook's CPU time that is the backbone's forward passes."""
    spent, begun = 0.0, 0.0

    def start(*_: Any) -> None:
        nonlocal begun
        begun = time.process_time()

    def stop(*_: Any) -> None:
        nonlocal spent
        spent += time.process_time() - begun

    hooks = [unet.register_forward_pre_hook(start), unet.register_forward_hook(stop)]
    _, total, _ = timed(partial(hook.run, hook.history[-1].step + 1, 0, unet))
    for one in hooks:
        one.remove()
    return spent / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", type=Path, default=ROOT / "assets" / "micro-sd")
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--images", type=int, default=8)
    args = parser.parse_args()
    accelerator = Accelerator()
    pipe = StableDiffusionPipeline.from_pretrained(args.pipeline).to(accelerator.device)
    targets = microworld_targets(args.targets)
    config = ValidationConfig(
        images_per_target=args.images,
        num_inference_steps=STEPS,
        embedder="micro",
        threshold=0.9,
        clean_records=0,
        controls="never",
    )
    embedder = EMBEDDERS["micro"](None, accelerator.device)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "base"
        pipe.save_pretrained(saved)
        shared: dict[str, Any] = dict(targets=targets, accelerator=accelerator, output_dir=Path(folder) / "run", seed=0)
        hook = RecoveryHook(config, components=pipe.components, **shared)
        hook.run(0, 0, pipe.unet)  # warm up, as in a run: the first point is the base model's
        loops = {
            name: partial(rebuilding_loop, saved, pipe, targets, config, embedder, call) for name, call in LOOPS.items()
        }
        measured = measure(hook, loops, pipe.unet, ROUNDS)
        share = share_of_backbone(hook, pipe.unet)
    result = {
        "images": args.targets * args.images,
        "num_inference_steps": STEPS,
        "embedder": "micro",
        "device": str(accelerator.device),
        "threads": torch.get_num_threads(),
        **measured,
        "backbone_share": share,
        "ratios": ratios(measured["cpu_seconds"]),
        "bar": BAR,
    }
    print(table(result))
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def table(measured: dict) -> str:
    """CPU time of the recovery hook against the published ways, and how equal its scores are."""
    lines = []
    for name, spent in measured["cpu_seconds"].items():
        row = [name, f"{statistics.median(spent) / measured['images']:.3f}"]
        if name in measured["ratios"]:
            ratio, equal = measured["ratios"][name], measured["quality"][name]
            row += [f"{ratio['one by one']:.2f}", f"{ratio['five a call']:.2f}", f"{equal['largest_difference']:.1e}"]
            row += [f"{equal['mean_difference']:.1e}", f"{100 * equal['strict_agree']:.0f} %"]
        lines.append((*row, *[""] * (7 - len(row))))
    head = ("way", "CPU seconds an image", "times one by one", "times five a call")
    text = grid((*head, "largest difference", "mean difference", "strict decisions alike"), lines)
    ratio = measured["ratios"]["hook"]
    reached = {f"at least {measured['bar']:g} times {way}, in fp32": ratio[way] >= measured["bar"] for way in ratio}
    share = f"\nOf the hook's CPU time {100 * measured['backbone_share']:.0f} % is the backbone's.\n\n"
    return text + share + goals(reached)


if __name__ == "__main__":
    main()
