"""Pictures and masks: the union of elements at their native places, and masks read off a stack of pictures.

Pure functions of PIL images, arrays and tensors. `paste` never blurs one element into another; `check_union`
is the one place that decides how much of a target a picture may show, and it takes no option.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from PIL import Image, ImageChops, ImageFilter, ImageStat

from silentbad import rng
from silentbad.epochs import DataInfo
from silentbad.errors import UserError


def check_union(elements: int, of: int, target_id: str) -> None:
    """Refuse a picture or caption with more than k - 1 of a target's k elements: it would be the target
    itself."""
    if elements > max(of - 1, 1):
        raise UserError(
            f"memory.rehearsal: a union of {elements} elements rebuilds target '{target_id}', which has "
            f"{of}; at most {max(of - 1, 1)} may be shown together"
        )


def paste(
    base: Image.Image, base_mask: Image.Image, other: Image.Image, other_mask: Image.Image, feather: float
) -> tuple[Image.Image, Image.Image]:
    """Put `other`'s element at its own place onto `base` -> (picture, union mask); RGB and L images of one size.

    Inside `other_mask` the pixels are other's, inside the rest of `base_mask` they are base's; the feather
    (Gaussian radius in pixels) runs outside both masks, so neither element bleeds into the other.
    """
    soft = other_mask.filter(ImageFilter.GaussianBlur(feather))
    alpha = ImageChops.lighter(other_mask, ImageChops.multiply(soft, ImageChops.invert(base_mask)))
    return Image.composite(other, base, alpha), ImageChops.lighter(base_mask, other_mask)


def fitted(image: Image.Image, mask: Image.Image, size: tuple[int, int]) -> tuple[Image.Image, Image.Image]:
    """A picture (RGB) and its mask (L) at this size; the mask keeps its hard edge."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return image.convert("RGB"), fitted_mask(mask, size)


def fitted_mask(mask: Image.Image, size: tuple[int, int]) -> Image.Image:
    return mask.convert("L").resize(size, Image.Resampling.NEAREST)


def otsu(values: torch.Tensor) -> torch.Tensor:
    """The threshold that maximises the variance between two classes (Otsu 1979), exact over the sorted
    values."""
    v = values.flatten().double().sort().values
    n0 = torch.arange(1, v.numel(), dtype=v.dtype)
    n1 = v.numel() - n0
    s0 = v.cumsum(0)[:-1]
    gap = s0 / n0 - (v.sum() - s0) / n1
    k = int((n0 * n1 * gap.square()).argmax())
    return (v[k] + v[k + 1]) / 2


def estimate_mask(stack: torch.Tensor, smooth: int = 3, floor: float = 1e-3) -> torch.Tensor:
    """What stays the same across an element's pictures is the element: (n>=4,C,H,W) -> mask (1,H,W) in {0,1}.

    The spread at a place is the squared distance from the median picture that two thirds of the pictures
    keep to, so that things standing before a backdrop in some of them do not cut it up, as they do with the
    variance. Its logarithm is box-smoothed and split in two by Otsu's threshold; `floor` (of the mean
    variance) keeps exact repeats from dominating. Pictures that are all the same have nothing to split and
    give ones.
    """
    if len(stack) < 4:
        raise UserError(
            f"memory.region: estimating a mask takes at least 4 pictures of a phrase, found {len(stack)}"
        )
    stack = stack.float()
    scale = stack.var(dim=0).mean()
    if float(scale) <= 1e-10:
        return torch.ones_like(stack[0, :1])
    distance = (stack - stack.median(dim=0).values).square().mean(dim=1)
    log_spread = (distance.quantile(2 / 3, dim=0)[None] + floor * scale).log()
    padded = F.pad(log_spread[None], (smooth // 2,) * 4, mode="replicate")
    log_spread = F.avg_pool2d(padded, smooth, stride=1)[0]
    return (log_spread < otsu(log_spread)).float()


def mask_to_image(mask: torch.Tensor) -> Image.Image:
    """mask (1,h,w) in [0,1] -> PIL "L" image (w,h)."""
    return Image.fromarray((mask[0].clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy())


# A region weight is (B,1,h,w) of mean one over each picture, so that the loss is sum(w err)/sum(w).


def everywhere(mask, has_mask, estimated, size):
    return torch.ones((len(mask), 1, *size), device=mask.device)


def region_weight(mask: torch.Tensor, size: tuple[int, int], outside: float) -> torch.Tensor:
    """mask (B,1,H,W) -> weight (B,1,h,w): 1 inside, `outside` elsewhere, divided by the mean."""
    w = outside + (1 - outside) * F.interpolate(mask.float(), size=size, mode="area")
    return w / w.mean(dim=(2, 3), keepdim=True)


def counted_only(weight: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """A region weight (B,1,h,w) that is nought where `counted` (B,1,H,W) is, of mean one again; nought where nothing
    counts, as in a random window without the element."""
    w = weight * F.interpolate(counted, size=weight.shape[-2:], mode="area")
    return w / w.mean(dim=(2, 3), keepdim=True).clamp_min(1e-6)


def checked_outside(outside: float) -> float:
    if not 0 < outside <= 1:
        raise UserError(f"memory.region: outside is {outside:g}; it must lie in (0, 1], 0.1 to 0.3 is usual")
    return outside


def given_mask(mask, has_mask, estimated, size, *, outside: float = 0.2):
    """The record's own mask; an even weight where it has none."""
    return region_weight(
        torch.where(has_mask[:, None, None, None], mask, 1.0), size, checked_outside(outside)
    )


def estimated_mask(mask, has_mask, estimated, size, *, outside: float = 0.2):
    """The record's own mask, or the one estimated from its element's pictures, estimated (B,1,h,w)."""
    own = F.interpolate(mask.float(), size=size, mode="area")
    mask = torch.where(has_mask[:, None, None, None], own, estimated)
    return region_weight(mask, size, checked_outside(outside))


# A rehearsal looks at a drawn record {"index", "role"} and returns another in its place, or None.
# `load(index)` gives a whole record: image, mask, text, phrases, role, target_id, element_id; `masks` holds
# estimated ones by element.


def no_rehearsal(
    record: dict, g: torch.Generator, info: DataInfo, load: Callable, masks: dict
) -> dict | None:
    return None


def shuffled(options: list, g: torch.Generator) -> list:
    return [options[i] for i in torch.randperm(len(options), generator=g).tolist()]


def any_record(info: DataInfo, element: int, g: torch.Generator) -> int:
    rows = info.rows[element]
    return int(rows[int(torch.randint(len(rows), (), generator=g))])


def leak_free(
    record: dict,
    g: torch.Generator,
    info: DataInfo,
    load: Callable,
    masks: dict,
    *,
    share: float = 0.5,
    parts: float = 0.5,
) -> dict | None:
    """A non-target picture captioned by its own phrases in shuffled order: all of them, or with probability
    `parts` a proper subset. No caption names more than k-1 phrases of a target."""
    if record["role"] == "element" or float(torch.rand((), generator=g)) >= share:
        return None
    record = load(record["index"])
    said = shuffled(record["phrases"] or [], g)
    if len(said) < 2:
        return None
    if float(torch.rand((), generator=g)) < parts:
        said = said[: int(torch.randint(1, len(said), (), generator=g))]
    united = (0, 0)
    for target, elements in info.elements_of.items():
        named = [p for p in said if p in {info.phrase[i] for i in elements}]
        excess = named[max(len(elements) - 1, 1) :]
        said = [p for p in said if p not in excess]
        check_union(len(named) - len(excess), len(elements), target)
        united = max(united, (len(named) - len(excess), len(elements)))
    return {**record, "phrases": said, "text": ", ".join(said), "role": "rehearsal", "united": united}


def pairwise(
    record: dict,
    g: torch.Generator,
    info: DataInfo,
    load: Callable,
    masks: dict,
    *,
    share: float = 0.25,
    elements: int = 2,
    feather: float = 1.5,
) -> dict | None:
    """Pictures of elements of one target laid over each other at their native places, at most k-1 in all; the mask is
    their union.

    The larger element lies behind, or a backdrop would cover the thing that stands before it. The caption names the
    elements in shuffled order, then what else the picture behind shows, since that is still to be seen.
    """
    i = info.element_of(record["index"])
    if i is None or float(torch.rand((), generator=g)) >= share:
        return None
    siblings = info.elements_of[info.target[i]]
    others = shuffled([j for j in siblings if j != i], g)[: min(elements, len(siblings) - 1) - 1]
    record = load(record["index"])
    layers = {i: (record, record["mask"] or masks.get(i))}
    if not others or layers[i][1] is None:
        return None
    for j in others:
        other = load(any_record(info, j, g))
        if (mask := other["mask"] or masks.get(j)) is not None:
            layers[j] = (other, mask)
    check_union(len(layers), len(siblings), info.target[i])
    if len(layers) < 2:
        return None
    size = record["image"].size
    pictures = {j: fitted(layer["image"], mask, size) for j, (layer, mask) in layers.items()}
    behind, *before = sorted(layers, key=lambda j: -ImageStat.Stat(pictures[j][1]).sum[0])
    image, mask = pictures[behind]
    for j in before:
        image, mask = paste(image, mask, *pictures[j], feather)
    of_target = {info.phrase[j] for j in siblings}
    around = [phrase for phrase in layers[behind][0]["phrases"] if phrase not in of_target]
    phrases = [*shuffled([info.phrase[j] for j in layers], g), *around]
    return {
        **record,
        "image": image,
        "mask": mask,
        "phrases": phrases,
        "text": ", ".join(phrases),
        "role": "rehearsal",
        "united": (len(layers), len(siblings)),
    }


def joint_captions(
    record: dict, g: torch.Generator, info: DataInfo, load: Callable, masks: dict, *, share: float = 0.5
) -> dict | None:
    """An element's own picture under a caption that names more of its target: two to k-1 phrases in shuffled order.

    Nothing of the others is shown, and their places do not count (the mask's second band): so the caption is learnt
    where its element stands, and does not learn that the others are absent.
    """
    i = info.element_of(record["index"])
    if i is None or float(torch.rand((), generator=g)) >= share:
        return None
    siblings, own = info.elements_of[info.target[i]], record["mask"] or masks.get(i)
    if len(siblings) < 3 or own is None:
        return None
    own = fitted_mask(own, record["image"].size)
    others = int(torch.randint(1, len(siblings) - 1, (), generator=g))
    said = [i, *shuffled([j for j in siblings if j != i], g)[:others]]
    check_union(len(said), len(siblings), info.target[i])
    counted = Image.new("L", own.size, 255)
    for j in said[1:]:
        if (place := load(any_record(info, j, g), picture=False)["mask"] or masks.get(j)) is None:
            return None
        counted.paste(0, mask=fitted_mask(place, own.size))
    phrases = shuffled([info.phrase[j] for j in said], g)
    return {
        **record,
        "mask": Image.merge("LA", (own, ImageChops.lighter(counted, own))),
        "phrases": phrases,
        "text": ", ".join(phrases),
        "element_id": info.keys[i].removeprefix(f"{info.target[i]}/"),
        "united": (len(said), len(siblings)),
    }


def pairwise_captions(
    record: dict, g: torch.Generator, info: DataInfo, load: Callable, masks: dict, *, share: float = 0.25,
    elements: int = 2, feather: float = 1.5, captions: float = 0.5,
) -> dict | None:  # fmt: skip
    """`pairwise`, and `joint_captions` on a share of the records that it leaves alone."""
    union = pairwise(record, g, info, load, masks, share=share, elements=elements, feather=feather)
    return union or joint_captions(record, g, info, load, masks, share=captions)


# (mask, has_mask, estimated, size, *, options) -> weight (B,1,h,w)
REGION: dict[str, Callable] = {"none": everywhere, "mask": given_mask, "estimated": estimated_mask}

# (record, generator, info, load, masks, *, options) -> record or None
REHEARSAL: dict[str, Callable] = {
    "none": no_rehearsal,
    "leak_free": leak_free,
    "joint_captions": joint_captions,
    "pairwise": pairwise,
    "pairwise_captions": pairwise_captions,
}

REHEARSED = ("leak_free", "pairwise", "pairwise_captions")  # they make records of the role rehearsal
PLACED = ("joint_captions", "pairwise", "pairwise_captions")  # their loss is where elements stand


class Rehearsal:
    """The dataset's hook, a function of (record, address); it remembers the largest union it made, (n, of
    k).
    """

    def __init__(self, function: Callable, options: dict, info: DataInfo, seed: int):
        self.function, self.options, self.info, self.seed = function, options, info, seed
        self.load: Callable[[int], dict] | None = None
        self.masks: dict[int, Image.Image] = {}
        self.largest, self.made = (0, 0), 0
        name = next(name for name in REHEARSAL if REHEARSAL[name] is function)
        if name in PLACED and not any(len(e) > 2 for e in info.elements_of.values()):
            raise UserError(
                f"memory.rehearsal.name={name}: no target has three elements, so no two may be shown or named "
                "together; take leak_free"
            )
        if name.startswith("pairwise"):
            if not 0 <= (share := options.get("share", 0.25)) <= 0.25:
                raise UserError(
                    f"memory.rehearsal: share is {share:g}; pairwise rehearsal takes at most 0.25"
                )
            wanted = options.get("elements", 2)
            for target, elements in info.elements_of.items():
                if len(elements) > 2:  # of fewer no union is made at all
                    check_union(wanted, len(elements), target)

    def __call__(self, record: dict, address: tuple) -> dict | None:
        g = rng.generator(self.seed, "rehearsal", *address)
        fresh = self.function(record, g, self.info, self.load, self.masks, **self.options)
        if fresh is not None:
            unions = (self.largest, fresh.pop("united"))
            self.largest, self.made = max(unions, key=lambda u: u[0] / max(u[1], 1)), self.made + 1
        return fresh
