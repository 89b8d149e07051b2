"""Rivals of the scan that need a trained model: `python -m bench.attribution`.

A model is trained on elements (the published setting's `recommended` arm), and its images of the hidden composed prompt
are attributed to the records. D-TRAK (arXiv 2311.00500): a record's feature is the gradient of the model output's mean
square over TIMESTEPS and noise, projected; a record's score for an image is phi (Phi^T Phi + l I)^-1 phi', averaged
over the images. Segment masks, after CopyrightShield (2412.01528): the same within the region of each element, and a
record has the highest of its standardised scores. Both are told the hidden prompt, the second also the elements' masks,
and both get the best threshold in hindsight. The scan of the same folder is told nothing.

Targets: 3012 to 3017 are reported, those of the audit; below 1000 are for development. A row is a target in
bench/results/attribution.jsonl; a stored one is not made again.
"""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.transforms.v2.functional as F
from diffusers import StableDiffusionPipeline
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from bench.arms import PUBLISHED
from bench.published_table import interval, markdown
from bench.recovery import measure_targets
from bench.recovery_table import stored
from bench.shield import f1
from bench.shield_models import Plan, data_of, scan_of, trained
from silentbad.measure.intervals import detection
from silentbad.rng import generator

RESULTS = Path(__file__).parent / "results" / "attribution.jsonl"
TARGETS = ";".join(map(str, range(3012, 3018)))
TIMESTEPS = 10  # of a record's feature
WIDTH = 4096  # numbers that a gradient is projected to
QUERIES = 8  # images of the composed prompt
RIVALS = {"D-TRAK": 0.1, "segment masks": 1.0}  # l, in units of the mean of the kernel's diagonal: best on target 105
HEAD = ("detector", "is told", "targets", "F1", "lowest F1", "AUC", "processor s a data set")


# -- features ----------------------------------------------------------------------------------------------
class Features:
    """Projected gradients (M,WIDTH) of a picture's output, over the whole and within masks."""

    def __init__(self, pipe: StableDiffusionPipeline, masks: Tensor):
        """`masks` (M,h,w) are of latent cells, in [0,1]."""
        self.pipe, self.masks = pipe, masks
        self.weights = list(pipe.unet.requires_grad_(True).eval().parameters())
        count, draw = sum(p.numel() for p in self.weights), generator("attribution", "projection")
        self.bucket = torch.randint(WIDTH, (count,), generator=draw)  # a sparse projection: each weight has one place
        self.sign = torch.randint(2, (count,), generator=draw).float() * 2 - 1
        steps = pipe.scheduler.config.num_train_timesteps
        self.timesteps = (torch.arange(TIMESTEPS) + 0.5).mul(steps / TIMESTEPS).long()

    def __call__(self, image: Tensor, caption: str, address: str) -> Tensor:
        """Of an image (3,H,W) in [0,1] under its caption; the noise is drawn by the address."""
        pipe = self.pipe
        with torch.no_grad():
            z = pipe.vae.encode(image[None] * 2 - 1).latent_dist.mean * pipe.vae.config.scaling_factor
            ids = pipe.tokenizer([caption], padding="max_length", truncation=True, return_tensors="pt").input_ids
            text = pipe.text_encoder(ids).last_hidden_state.expand(TIMESTEPS, -1, -1)
            z = z.expand(TIMESTEPS, -1, -1, -1)
            noise = torch.randn(z.shape, generator=generator("attribution", address))
            noisy = pipe.scheduler.add_noise(z, noise, self.timesteps)
        square = pipe.unet(noisy, self.timesteps, text).sample.square().mean((0, 1))
        return torch.stack([self.projected((square * mask).sum() / mask.sum()) for mask in self.masks])

    def projected(self, value: Tensor) -> Tensor:
        """The value's gradient, (WIDTH,)."""
        gradient = torch.autograd.grad(value, self.weights, retain_graph=True)
        flat = torch.cat([g.flatten() for g in gradient])
        return torch.zeros(WIDTH).index_add_(0, self.bucket, flat * self.sign)


def attribution(records: Tensor, queries: Tensor, damping: float) -> Tensor:
    """Each record's score (N,), the mean over the queries, from features (N,k) and (Q,k)."""
    kernel = records @ records.T
    damped = kernel + damping * kernel.diagonal().mean() * torch.eye(len(kernel))
    return torch.linalg.solve(damped, records @ queries.T).mean(1)


# -- judging -----------------------------------------------------------------------------------------------
def best_f1(scores: np.ndarray, truth: np.ndarray) -> float:
    """The highest F1 that any threshold on the scores (N,) has."""
    hits = np.cumsum(truth[np.argsort(-scores, kind="stable")])
    return float((2 * hits / (np.arange(1, len(truth) + 1) + truth.sum())).max())


def judged(scores: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    told = detection(scores[truth].tolist(), scores[~truth].tolist())
    assert told is not None, "each data set holds both"
    return {"f1": best_f1(scores, truth), "auc": told.auc}


def measure(target: str, plan: Plan) -> dict[str, Any]:
    """What the two rivals and the scan find in the data set of a target."""
    data = data_of("elements", target, plan)
    (truth,) = stored(data / "targets.jsonl")
    rows = stored(data / "metadata.jsonl")
    elements = np.asarray([row["role"] == "element" for row in rows])
    _, scan = scan_of(data)
    flagged = np.zeros(len(rows), bool)
    flagged[[one["index"] for one in scan["suspects"]]] = True
    figures: dict[str, Any] = {"scan": f1(flagged, elements)}
    history, out = trained("recommended", data, target, plan, PUBLISHED["recommended"])
    pipe = StableDiffusionPipeline.from_pretrained(out / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    start = time.process_time()
    with torch.no_grad():
        drawn = pipe(
            truth["prompt"],
            num_images_per_prompt=QUERIES,
            num_inference_steps=12,
            guidance_scale=2.0,
            generator=generator("attribution", target),
            output_type="pt",
        ).images
    features = Features(pipe, cells([data / name for name in truth["masks"]], pipe.unet.config.sample_size))
    queries = torch.stack([features(image, truth["prompt"], f"query {k}") for k, image in enumerate(drawn)])
    records = torch.stack(
        [
            features(picture(data / row["file_name"]), row["text"], row["file_name"])
            for row in tqdm(rows, desc="records", leave=False)
        ]
    )
    scores = {name: attributed(records, queries, damping) for name, damping in RIVALS.items()}
    figures["D-TRAK"] = judged(scores["D-TRAK"][0], elements)
    figures["segment masks"] = judged(standard(scores["segment masks"][1:]).max(0), elements)
    shutil.rmtree(out)
    strict = history["strict"][plan.steps]
    return {"found": figures, "strict": strict, "seconds": time.process_time() - start, "records": len(rows)}


def attributed(records: Tensor, queries: Tensor, damping: float) -> np.ndarray:
    """Scores (M,N) by mask, from features (N,M,k) and (Q,M,k)."""
    pairs = zip(records.unbind(1), queries.unbind(1), strict=True)
    return np.stack([attribution(features, asked, damping).double().numpy() for features, asked in pairs])


def standard(scores: np.ndarray) -> np.ndarray:
    """Each row less its mean, in its standard deviations."""
    return (scores - scores.mean(1, keepdims=True)) / scores.std(1, keepdims=True)


def picture(file: Path) -> Tensor:
    return F.to_dtype(F.to_image(Image.open(file).convert("RGB")), torch.float32, scale=True)


def cells(masks: list[Path], side: int) -> Tensor:
    """The whole and each mask (M,side,side), as the share of each latent cell."""
    read = [F.resize(F.to_dtype(F.to_image(Image.open(m).convert("L")), torch.float32, True), [side]) for m in masks]
    return torch.cat([torch.ones(1, side, side), *read])


# -- command -----------------------------------------------------------------------------------------------
def table(rows: list[dict]) -> str:
    """A line a detector: Markdown."""
    if not rows:
        return "No run is stored yet."
    told = {"D-TRAK": "the model, the prompt", "segment masks": "the model, the prompt, the masks", "scan": "nothing"}
    lines = []
    for name, what in told.items():
        of_detector = [row["found"][name] for row in rows]
        f = [one["f1"] for one in of_detector]
        auc = interval([one["auc"] for one in of_detector]) if "auc" in of_detector[0] else ""
        seconds = f"{np.mean([row['seconds'] for row in rows]):.0f}" if name != "scan" else ""
        lines.append([name, what, str(len(rows)), interval(f), f"{min(f):.2f}", auc, seconds])
    return markdown(HEAD, lines)


def main(argv: list[str] | None = None) -> None:
    plan = Plan()
    measure_targets(
        __doc__, TARGETS, RESULTS, lambda target: [{"target": target, **measure(target, plan)}], table, argv
    )


if __name__ == "__main__":
    main()
