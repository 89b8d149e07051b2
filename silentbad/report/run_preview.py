"""One page before a run: what training sees, and what a verdict will be measured against.

A shifted mask, a cut head, a wrong phrase, a target that nobody could recognise at this size: each
is seen at a glance here, and nowhere later.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from silentbad.data.images import resize, to_pil, to_tensor
from silentbad.errors import brief, writing
from silentbad.model.latents import decode
from silentbad.report import pages
from silentbad.report.evidence import range_text
from silentbad.report.pages import Shot, Table

if TYPE_CHECKING:
    from silentbad.loop.assembly import Run
    from validation import RecoveryHook

SAMPLES = 24  # that training draws first
DRAWS = 16  # effective batches that are looked through for unions, at most
UNIONS = 6
SHADE = 0.35  # of the brightness, outside a mask


def write_preview(run: "Run", file: str | Path) -> Path:
    """The page into a file. Trains nothing."""
    samples, unions = drawn(run)
    data: dict[str, Any] = {
        "records": len(run.records),
        "samples": samples,
        "unions": unions,
        "targets": [],
        "side": None,
    }
    if run.recovery is not None:
        data["side"] = run.recovery.sampler.side
        data["targets"] = of_targets(run.recovery, run.accelerator.unwrap_model(run.model))
    path = Path(file)
    with writing(str(path.parent), path.name):
        path.write_text(pages.render("preview.html.j2", data), encoding="utf-8")
    return path


# -- what training sees ------------------------------------------------------------------------
def drawn(run: "Run") -> tuple[list[Shot], list[Shot]]:
    """The run's first samples, as their latents hold them, and the first unions."""
    samples: list[Shot] = []
    unions: list[Shot] = []
    for draw in range(DRAWS):
        for batch in run.loader.draw(draw):
            pictures = as_trained(run, batch, draw)
            for i, picture in enumerate(pictures):
                joined = batch["united"][i]
                if len(samples) < SAMPLES:
                    samples.append(sample_shot(picture, batch, i))
                elif joined and len(unions) < UNIONS:
                    unions.append(sample_shot(picture, batch, i))
        if len(samples) >= SAMPLES and len(unions) >= UNIONS:
            break
    return samples, unions


def as_trained(run: "Run", batch: dict[str, Any], draw: int) -> Tensor:
    """A micro-batch's pictures (B,3,H,W) in [0,1] as its latents hold them."""
    with torch.no_grad():
        latents = run.encoder.latents(batch, draw)
        vae = run.parts.vae
        images = decode(vae, latents.to(vae.device))
    return (images.float().cpu() / 2 + 0.5).clamp(0, 1)


def sample_shot(picture: Tensor, batch: dict[str, Any], i: int) -> Shot:
    """A sample with its caption; dark outside its mask."""
    masked = bool(batch["has_mask"][i])
    if masked:
        height, width = picture.shape[-2:]
        mask = resize(batch["mask"][i][None].float().cpu(), (height, width))[0]
        picture = picture * (SHADE + (1 - SHADE) * mask)
    phrases = ", ".join(batch["phrases"][i] or ()) or "no phrase"
    role = batch["role"][i] + ("" if masked else ", no mask")
    return pages.shot(levels(picture), brief(batch["text"][i]), f"{role}: {phrases}")


def levels(picture: Tensor) -> np.ndarray:
    """A picture (3,H,W) in [0,1] -> (H,W,3) uint8."""
    return np.asarray(to_pil(picture))


# -- what a verdict is measured against ---------------------------------------------------------
def of_targets(recovery: "RecoveryHook", model: Any) -> list[dict[str, Any]]:
    """Each target, its elements, one null of each kind, and its ranges."""
    ranges = recovery.calibrate(model)
    shown: list[dict[str, Any]] = []
    for j, (target, told) in enumerate(zip(recovery.targets, ranges, strict=True)):
        picture = to_tensor(target.image)
        side = (recovery.sampler.side, recovery.sampler.side)
        small = resize(picture[None], side)
        with recovery.using(model):
            decoded = recovery.sampler.round_trip(small)[0]
            nulls = recovery.measure.one_null_of_each_kind(j)
        width, height = target.image.size
        strip = [
            pages.shot(levels(picture), "the target's file", f"{width}x{height}"),
            pages.shot(levels(decoded), "through the autoencoder", f"{side[0]}x{side[1]}"),
        ]
        for phrase, mask in zip(target.phrases, target.masks, strict=False):
            if mask is not None:
                inside = resize(to_tensor(mask)[None, :1], side)[0]
                strip.append(
                    pages.shot(levels(decoded * (SHADE + (1 - SHADE) * inside)), phrase, "its mask")
                )
        rows = [["the whole", range_text(told.whole)]]
        for phrase, part in zip(target.phrases, told.elements, strict=False):
            rows.append(
                [phrase, "no mask: nothing is known of it" if part is None else range_text(part)]
            )
        shown.append(
            {
                "name": target.target_id,
                "prompt": target.composed_prompt,
                "strip": strip,
                "nulls": [
                    pages.shot(levels(null.picture), null.kind, changes(target, null))
                    for null in nulls
                ],
                "ranges": Table(["of", "range"], rows),
            }
        )
    return shown


def changes(target: Any, null: Any) -> str:
    """Which elements a null changes."""
    if null.changed is None:
        return "changes all"
    return "changes " + ", ".join(target.phrases[k] for k in null.changed)
