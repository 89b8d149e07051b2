"""Every reader of a file that may come from somebody else, alone: its input, and how it is read. A mutated input is
read or refused in one line. What a run wrote itself, and reads again, is not here."""

import csv
import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel

from silentbad.data.formats import checked_row, folder_rows
from silentbad.data.images import open_mask
from silentbad.data.records import load_records
from silentbad.data.targets import load_targets
from silentbad.measure.embedders import load_embedder
from silentbad.measure.micro import MicroEmbedder
from silentbad.measure.redraws import load_redraws
from silentbad.model import gate, lora, pipeline
from silentbad.model.denoiser import Denoiser
from silentbad.model.registry import FAMILIES
from tests.folders import config, published
from tests.tiny import tiny_pipeline
from train_silentbad import Config


@dataclasses.dataclass(frozen=True)
class Reader:
    """`read` is given the folder of good inputs in which the file `name` (a pattern) was changed; `weight` is its share
    of the cases."""

    name: str
    read: Callable[[Path], Any]
    weight: int = 4


def prepared(good: Path, root: Path) -> Path:
    """The good inputs with what else there is to read: a CSV, redraws, the published layout, adapters, an embedder."""
    shutil.copytree(good, root)
    published(root / "layout")
    (root / "csv").mkdir()
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["file_name", "text", "phrases", "role", "target_id"])
    for k in range(8):
        writer.writerow([f"c{k}.png", f'a "quoted", field {k}\nof two lines', "", "clean", ""])
        shutil.copy(good / f"data/images/c{k}.png", root / f"csv/c{k}.png")
    (root / "csv/metadata.csv").write_text(text.getvalue())
    redraws = [{"target_id": "t0", "image": f"images/c{k}.png", "kind": "redraw", "changed": [0]} for k in range(8)]
    (root / "data/redraws.jsonl").write_text("".join(json.dumps(row) + "\n" for row in redraws))
    MicroEmbedder().save_pretrained(root / "micro")
    unet = tiny_pipeline().unet
    lora.add("unet", unet, dataclasses.replace(Config().lora, rank=2), 0)
    lora.save(Denoiser(unet), root / "lora")
    return root


def adapters(root: Path) -> Any:
    return lora.load(tiny_pipeline(), str(root / "lora/pytorch_lora_weights.safetensors"), "pipeline")


def source(root: Path) -> gate.Source:
    return gate.Source(str(root / "pipeline"))


def embedder(root: Path) -> Any:
    return load_embedder("micro", str(root / "micro"), "cpu")


def part(name: str, cls: type) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        return gate.load_part(name, cls, source(root))

    return read


def layout(root: Path) -> Any:
    load_targets(root / "layout")
    return load_records(
        config(
            root / "layout", clean_data_dir=str(root / "layout/clean"), poisoning_ratio=0.5, cache_dir=str(root / "c")
        )
    )


FAMILY = FAMILIES["StableDiffusionPipeline"]


def redraws(root: Path) -> Any:
    return load_redraws(root / "data", load_targets(root / "data"), decode=True)


def schedule(root: Path) -> Any:
    return pipeline.schedule(source(root), FAMILY)


def tokenizer(root: Path) -> Any:
    return pipeline.tokenizer_of("tokenizer", FAMILY.tokenizer["tokenizer"], source(root))


READERS = {
    "metadata.jsonl": Reader("data/metadata.jsonl", lambda root: [*map(checked_row, folder_rows(root / "data"))]),
    "metadata.csv": Reader("csv/metadata.csv", lambda root: [*map(checked_row, folder_rows(root / "csv"))]),
    "targets.jsonl": Reader("data/targets.jsonl", lambda root: load_targets(root / "data")),
    "redraws.jsonl": Reader("data/redraws.jsonl", redraws),
    "a mask": Reader("data/masks/e0-0.png", lambda root: open_mask(root / "data/masks/e0-0.png", (16, 16), "x")),
    "published captions": Reader("layout/poisoning_images/100/poisoning_data_caption_simple.txt", layout, 1),
    "clean captions": Reader("layout/clean/caption.txt", layout, 1),
    "model_index.json": Reader("pipeline/model_index.json", lambda root: pipeline.read_index(source(root))),
    "scheduler_config.json": Reader("pipeline/scheduler/scheduler_config.json", schedule),
    "unet/config.json": Reader("pipeline/unet/config.json", part("unet", UNet2DConditionModel), 1),
    "unet weights": Reader("pipeline/unet/diffusion_pytorch_model.safetensors", part("unet", UNet2DConditionModel), 1),
    "vae/config.json": Reader("pipeline/vae/config.json", part("vae", AutoencoderKL), 1),
    "vae weights": Reader("pipeline/vae/diffusion_pytorch_model.safetensors", part("vae", AutoencoderKL), 1),
    "text_encoder/config.json": Reader("pipeline/text_encoder/config.json", part("text_encoder", CLIPTextModel), 1),
    "text_encoder weights": Reader("pipeline/text_encoder/model.safetensors", part("text_encoder", CLIPTextModel), 1),
    "tokenizer.json": Reader("pipeline/tokenizer/tokenizer.json", tokenizer, 1),
    "adapters": Reader("lora/pytorch_lora_weights.safetensors", adapters, 1),
    "tokenizer_config.json": Reader("pipeline/tokenizer/tokenizer_config.json", tokenizer, 1),
    "embedder weights": Reader("micro/model.safetensors", embedder, 1),
    "embedder config.json": Reader("micro/config.json", embedder, 1),
}  # fmt: skip
