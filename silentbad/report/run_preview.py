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
from silentbad.measure.calibrate import one_null_of_each_kind
from silentbad.model.latents import decode
from silentbad.report import pages
from silentbad.report.evidence import range_text
from silentbad.report.pages import Shot, Table

if TYPE_CHECKING:
    from silentbad.loop.assembly import Run
    from validation import RecoveryHook

SAMPLES = 24  # the first samples of training, which are shown
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
    mask = batch["mask"][i] if batch["has_mask"][i] else None
    phrases = ", ".join(batch["phrases"][i] or ()) or "no phrase"
    role = batch["role"][i] + (", no mask" if mask is None else "")
    return shot_of(picture, brief(batch["text"][i]), f"{role}: {phrases}", mask)


def shot_of(picture: Tensor, caption: str, score: str, mask: Tensor | None = None) -> Shot:
    """A picture (3,H,W) in [0,1] of the page; dark outside a mask (1,h,w)."""
    if mask is not None:
        height, width = picture.shape[-2:]
        inside = resize(mask[None].float().cpu(), (height, width))[0]
        picture = picture * (SHADE + (1 - SHADE) * inside)
    return pages.shot(np.asarray(to_pil(picture)), caption, score)


# -- what a verdict is measured against ---------------------------------------------------------
def of_targets(recovery: "RecoveryHook", model: Any) -> list[dict[str, Any]]:
    """Each target, its elements, one null of each kind, and its ranges."""
    ranges = recovery.calibrate_base(model)
    side = recovery.sampler.side
    shown: list[dict[str, Any]] = []
    for j, (target, measured) in enumerate(zip(recovery.targets, ranges, strict=True)):
        picture = to_tensor(target.image)
        with recovery.using(model):
            decoded = recovery.sampler.round_trip(resize(picture[None], (side, side)))[0]
            nulls = one_null_of_each_kind(recovery.measure, j)
        width, height = target.image.size
        strip = [
            shot_of(picture, "the target's file", f"{width}x{height}"),
            shot_of(decoded, "through the autoencoder", f"{side}x{side}"),
        ]
        for phrase, mask in zip(target.phrases, target.masks, strict=False):
            if mask is not None:
                strip.append(shot_of(decoded, phrase, "its mask", to_tensor(mask)[:1]))
        rows = [["the whole", range_text(measured.whole)]]
        for phrase, part in zip(target.phrases, measured.elements, strict=False):
            nothing = "no mask: nothing is known of it"
            rows.append([phrase, nothing if part is None else range_text(part)])
        shown.append(
            {
                "name": target.target_id,
                "prompt": target.composed_prompt,
                "strip": strip,
                "nulls": [shot_of(n.picture, n.kind, changes(target, n)) for n in nulls],
                "ranges": Table(["of", "range"], rows),
            }
        )
    return shown


def changes(target: Any, null: Any) -> str:
    """Which elements a null changes."""
    if null.changed is None:
        return "changes all"
    return "changes " + ", ".join(target.phrases[k] for k in null.changed)
