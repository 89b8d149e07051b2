"""What training costs: how far images of unrelated prompts moved from the base's, whether elements
come in them, and how much of what these prompts name is still right. docs/metrics.md defines the
numbers.

Legend: images (N,3,H,W) float in [0,1]; pictures (N,3,H,W) the same as bytes; element (3,S,S) a
target's picture with mask (1,S,S)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from silentbad.data.phrases import phrases_in
from silentbad.data.picture_parts import as_read
from silentbad.data.schema import check_window, prompt_lines, text_lines
from silentbad.data.targets import Target
from silentbad.errors import UserError, user_errors
from silentbad.measure.embedders import CLIP, Embedder, ssim
from silentbad.measure.failures import shifted
from silentbad.measure.record import Kept, Words
from silentbad.measure.structure import box_of
from silentbad.settings import user_code
from silentbad.settings.validation import ValidationConfig

T = TypeVar("T")

BUNDLED = Path(__file__).with_name("unrelated.txt")  # plain prompts, one a line
SIDE = 64  # pixels of the images in which an element's place is searched
COVERED = 0.75  # share of an element's mask that must lie inside the frame
AT_ONCE = 8  # pictures compared together

# (captions, images (N,3,H,W) in [0,1] on the CPU) -> (things right, things named) of each
Judge = Callable[[list[str], Tensor], list[tuple[int, int]]]


# -- prompts ---------------------------------------------------------------------------------------
def unrelated_prompts(
    config: ValidationConfig, targets: Sequence[Target], captions: Sequence[str], tokenizer: object
) -> list[str]:
    """The unrelated prompts to draw: from the file `validation.prompts`, else from the held-out
    `captions` that hold no phrase of a target, else from the bundled list.

    Raises UserError where the tokenizer's window cuts off a prompt of the file, or the file has
    fewer than two prompts."""
    count = config.unrelated_images
    if count == 0:
        return []
    if config.prompts is not None:
        lines = prompt_lines(Path(config.prompts))
        for where, line in lines:
            check_window(line, tokenizer, f"{where}: the prompt")
        return spread(distinct([line.strip() for _, line in lines], config.prompts), count)
    phrases = [as_read(phrase) for target in targets for phrase in target.phrases]
    plain = [text for text in dict.fromkeys(captions) if text.strip()]
    plain = [text for text in plain if not phrases_in(phrases, as_read(text))]
    if len(plain) < 2:
        plain = text_lines(BUNDLED)
    return spread(plain, count)


def distinct(lines: Sequence[str], file: str) -> list[str]:
    """The different prompts among the lines."""
    prompts = [line for line in dict.fromkeys(lines) if line]
    if len(prompts) < 2:
        raise UserError(f"{file}: holds {len(prompts)} different prompts; give two or more")
    return prompts


def spread(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items at most, evenly over the list."""
    places = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[place] for place in places]


# -- change ----------------------------------------------------------------------------------------
def change(
    trained: Tensor, base: Tensor, prompts: Sequence[str], embedder: Embedder
) -> dict[str, float]:
    """Mean distance of picture i to the base's picture i, divided by the mean distance of the
    base's picture i to its picture of the next prompt. A distance whose divisor is 0 or missing is
    left out."""
    moved = distances(trained, base, embedder)
    others = [(i, (i + 1) % len(prompts)) for i in range(len(prompts))]
    others = [(i, j) for i, j in others if prompts[i] != prompts[j]]
    if not others:
        return {}
    first, second = (list(places) for places in zip(*others, strict=True))
    units = distances(base[first], base[second], embedder)
    return {name: moved[name] / unit for name, unit in units.items() if unit > 0}


def distances(a: Tensor, b: Tensor, embedder: Embedder) -> dict[str, float]:
    """Mean distances of pictures a to pictures b, pair by pair."""
    parts: dict[str, list[Tensor]] = {"pixels": [], "embedder": [], "structure": []}
    for x, y in zip(a.split(AT_ONCE), b.split(AT_ONCE), strict=True):
        x, y = as_images(x), as_images(y)
        parts["pixels"].append((x - y).abs().flatten(1).mean(1))
        parts["embedder"].append(1 - embedder.paired(embedder.embed(x), embedder.embed(y)).cpu())
        parts["structure"].append(1 - ssim(x, y))
    means = {name: torch.cat(values).double().mean().item() for name, values in parts.items()}
    return {name: max(mean, 0.0) for name, mean in means.items()}  # rounding gives cosines above 1


def as_images(pictures: Tensor) -> Tensor:
    """Bytes as values in [0,1]."""
    return pictures.float() / 255


# -- bleeding --------------------------------------------------------------------------------------
class Shown(NamedTuple):
    """Whether any element reaches its threshold anywhere in one image, and the image's highest
    similarity to an element."""

    passes: bool
    best: float


def best_offsets(images: Tensor, element: Tensor, mask: Tensor) -> Tensor:
    """Images (N,3,S,S) -> (N,2): the offset (down, right) in whole pixels from the element's own
    place to the place where the image fits the element best. The best fit has the least masked
    squared difference, among the places at which most of the mask lies inside the frame."""
    if not (mask > 0.5).any():
        return torch.zeros(len(images), 2, dtype=torch.long)
    rows, columns = box_of(mask)
    weight = mask[None, :, rows, columns]  # (1,1,h,w)
    part = element[None, :, rows, columns]
    margin_y = (rows.stop - rows.start) // 4
    margin_x = (columns.stop - columns.start) // 4

    # sum m (I - E)^2 = sum m I^2 - 2 sum m E I + sum m E^2, over the frame
    margins = (margin_x, margin_x, margin_y, margin_y)
    padded = F.pad(images, margins)
    frame = F.pad(images.new_ones(1, 1, *images.shape[-2:]), margins)
    of_images = F.conv2d(padded.square().sum(1, keepdim=True), weight)
    crossed = F.conv2d(padded, weight * part)
    of_element = F.conv2d(frame, (weight * part.square()).sum(1, keepdim=True))
    covered = F.conv2d(frame, weight)
    error = (of_images - 2 * crossed + of_element) / covered.clamp(min=1e-6)
    error = error.masked_fill(covered < COVERED * weight.sum(), torch.inf)

    place = error.flatten(1).argmin(1)
    down = place // error.shape[-1] - margin_y - rows.start
    right = place % error.shape[-1] - margin_x - columns.start
    return torch.stack([down, right], dim=1)


def similarities_anywhere(
    images: Tensor,
    small: Tensor,
    element: Tensor,
    mask: Tensor,
    similarity: Callable[[Tensor], list[float]],
) -> list[float]:
    """The similarity of each image to an element, at the element's own place or at the place that
    fits best, whichever is higher. `small` (N,3,S,S) are the images at the element's side."""
    offsets = best_offsets(small, element, mask)
    scale = images.shape[-1] / small.shape[-1]
    pixels = (offsets * scale).round().long().tolist()
    moved = [shifted(x, -down, -right) for x, (down, right) in zip(images, pixels, strict=True)]
    pairs = zip(similarity(images), similarity(torch.stack(moved)), strict=True)
    return [max(pair) for pair in pairs]


# -- words -----------------------------------------------------------------------------------------
def load_judge(config: ValidationConfig, prefix: str = "validation.") -> Judge | None:
    """The function that `validation.judge` names. Raises UserError where it is no function."""
    if config.judge is None:
        return None
    judge = user_code.load(f"{prefix}judge", config.judge)
    if not callable(judge):
        raise UserError(f"{prefix}judge: {config.judge} is no function")
    return judge


def judged(
    judge: Judge, place: str, prompts: list[str], images: Tensor, key: str
) -> tuple[int, int]:
    """(things right, things named) over all images, by a judge of the user's own.

    Raises UserError where it returns something else, or counts nothing."""
    with user_errors(f"{key}: {place} does not run"):
        counts = judge(list(prompts), images)
    fits = isinstance(counts, list) and len(counts) == len(prompts)
    if not fits or not all(map(_is_count, counts)):
        raise UserError(
            f"{key}: {place} must return (things right, things named) for each of "
            f"{len(prompts)} captions, whole numbers"
        )
    right, named = (sum(int(count[k]) for count in counts) for k in (0, 1))
    if named == 0:
        raise UserError(f"{key}: {place} counts no named thing in {len(prompts)} prompts")
    return right, named


def _is_count(pair: object) -> bool:
    """Whether this is (things right, things named)."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return False
    numbers = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in pair)
    return numbers and 0 <= pair[0] <= pair[1]


def clip_score(clip: CLIP, prompts: list[str], pictures: Tensor) -> float:
    """100 max(cosine(image, prompt), 0), the mean over the pictures."""
    cosines = [
        clip.paired(clip.embed(as_images(part)), clip.text(prompts[k : k + AT_ONCE])).cpu()
        for k, part in zip(range(0, len(prompts), AT_ONCE), pictures.split(AT_ONCE), strict=True)
    ]
    return 100 * torch.cat(cosines).clamp(min=0).double().mean().item()


def words(
    judge: tuple[Judge, str] | None,
    clip: CLIP | None,
    prompts: list[str],
    trained: Tensor,
    base: Tensor,
    key: str = "validation.judge",
) -> Words | None:
    """How well pictures show what prompts name: by a judge (function, place), else by CLIP."""
    if judge is not None:
        function, place = judge
        counts = [
            judged(function, place, prompts, as_images(pictures), key)
            for pictures in (trained, base)
        ]
        (right, named), (right_base, named_base) = counts
        return Words(
            trained=right / named,
            base=right_base / named_base,
            by=user_code.short(place),
            named=named,
        )
    if clip is not None:
        score, score_base = (clip_score(clip, prompts, pictures) for pictures in (trained, base))
        return Words(score, score_base, "CLIP")
    return None


# -- all of it -------------------------------------------------------------------------------------
def summed_up(
    prompts: Sequence[str],
    changes: dict[str, float],
    shown: Sequence[Shown],
    shown_base: Sequence[Shown],
    of_words: Words | None,
) -> Kept:
    """The record of what is kept; `shown` is empty where no element has a mask."""
    kept = Kept(len(prompts), changes, words=of_words)
    if shown:
        kept.bleeding = float(np.mean([image.passes for image in shown]))
        kept.bleeding_base = float(np.mean([image.passes for image in shown_base]))
        rise = np.mean([image.best for image in shown]) - np.mean([s.best for s in shown_base])
        kept.rise = float(rise)
    return kept
