"""What tests of recovery share: random pictures and targets, a hook over them, embedders with random weights."""

from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image

from silentbad.data.images import to_pil, to_tensor
from silentbad.data.targets import Target
from silentbad.measure.calibrate import scored_target, thresholds
from silentbad.measure.nearest import TrainingPicture
from silentbad.measure.record import ElementThreshold, Threshold
from silentbad.rng import generator
from tests.tiny import TOKENIZER, tiny_pipeline
from validation import RecoveryHook, ValidationConfig


def smooth(*address, side: int = 16) -> Image.Image:
    """A random picture of broad blobs."""
    coarse = torch.rand(1, 3, 4, 4, generator=generator(*address))
    return to_pil(torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)[0])


def some_targets(n: int = 2) -> list[Target]:
    box = np.zeros((16, 16), np.uint8)
    box[2:9, 3:12] = 255
    masks = [Image.fromarray(box), None, Image.fromarray(255 - box)]
    return [
        Target(f"t{i}", smooth("target", i), ["a red cat", "a hat", f"on beach {i}"], None, masks) for i in range(n)
    ]


def make_hook(folder, pipe=None, targets=None, trained: bool = False, **options) -> RecoveryHook:
    pipe = pipe or tiny_pipeline()
    clean = [{"pixel_values": to_tensor(smooth("clean", i)) * 2 - 1, "text": f"a house {i}"} for i in range(5)]
    settings = dict(embedder="ssim", images_per_target=3, num_inference_steps=2, guidance_scale=3.0)
    config = ValidationConfig(**{**settings, **options})
    targets = targets or some_targets()
    hook = RecoveryHook(
        config,
        targets=targets,
        components=pipe.components,
        held_out={"clean": clean, "element": clean[:2]},
        training=[TrainingPicture(f"record {i}", to_tensor(smooth("shown", i)), ()) for i in range(3)],
        accelerator=Accelerator(cpu=True),
        output_dir=folder,
        seed=0,
    )
    if not trained:  # a random autoencoder leaves nothing of a picture
        hook.measure.reference = "raw"
    return hook


def thresholds_of_redraws(nulls: list[dict], rate: float) -> tuple[Threshold, ElementThreshold]:
    """The thresholds that rows of redraws ask for; a copy scores 1."""
    scored = []
    for j in range(max(row["target"] for row in nulls) + 1):
        elements = next(len(row["elements"]) for row in nulls if row["target"] == j)
        copies = [{"target": j, "sim": 1.0, "elements": [1.0] * elements}]
        scored.append(scored_target(j, nulls, copies))
    return thresholds(scored, rate, None)


def shifted(unet, amount: float = 0.02):
    """Another model: every weight moved a little."""
    with torch.no_grad():
        for i, p in enumerate(unet.parameters()):
            p.add_(amount * torch.randn(p.shape, generator=generator("shift", i)))
    return unet


def saved_embedder(name: str, folder: Path) -> str | None:
    """Random weights of each kind, saved as their users have them."""
    if name == "micro":
        from silentbad.measure.micro import MicroEmbedder

        MicroEmbedder().save_pretrained(folder)
    elif name == "sscd":
        net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 16))
        torch.jit.trace(net.eval(), torch.rand(1, 3, 320, 320)).save(str(folder / "sscd.pt"))
        return str(folder / "sscd.pt")
    elif name == "clip":
        from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        side = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        text = dict(**side, vocab_size=len(tokenizer), max_position_embeddings=20, eos_token_id=tokenizer.eos_token_id)
        vision = dict(**side, image_size=32, patch_size=8)
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    elif name == "dinov2":
        from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

        Dinov2Model(
            Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
        ).save_pretrained(folder)
        BitImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    else:
        return None
    return str(folder)
