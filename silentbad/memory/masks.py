"""Masks of elements: pasted together, estimated from a stack of pictures, and turned into weights
of the loss.

Pure functions of PIL images and tensors. `paste` never blurs one element into another.
"""

import torch
import torch.nn.functional as F
from PIL import Image, ImageChops, ImageFilter, ImageStat

from silentbad.errors import UserError
from silentbad.settings.registries import Examples, Expected, Parts
from silentbad.settings.types import Share


def paste(
    base: Image.Image,
    base_mask: Image.Image,
    other: Image.Image,
    other_mask: Image.Image,
    feather: float,
) -> tuple[Image.Image, Image.Image]:
    """Put `other`'s element at its own place onto `base` -> (picture, union mask); RGB and L images
    of one size.

    Inside `other_mask` the pixels are other's, inside the rest of `base_mask` they are base's; the
    feather (Gaussian radius in pixels) runs outside both masks, so neither element bleeds into the
    other.
    """
    soft = other_mask.filter(ImageFilter.GaussianBlur(feather))
    alpha = ImageChops.lighter(other_mask, ImageChops.multiply(soft, ImageChops.invert(base_mask)))
    return Image.composite(other, base, alpha), ImageChops.lighter(base_mask, other_mask)


def overlaid(
    layers: dict[int, tuple[Image.Image, Image.Image]], feather: float
) -> tuple[int, Image.Image, Image.Image]:
    """Paste pictures (RGB) with masks (L), all of one size, by the area of their masks. The largest
    lies behind, otherwise a backdrop would cover the things before it -> (key of the picture
    behind, picture, union mask)."""
    behind, *before = sorted(layers, key=lambda k: -area(layers[k][1]))
    image, mask = layers[behind]
    for k in before:
        image, mask = paste(image, mask, *layers[k], feather)
    return behind, image, mask


def fitted(
    image: Image.Image, mask: Image.Image, size: tuple[int, int]
) -> tuple[Image.Image, Image.Image]:
    """A picture (RGB) and its mask (L) at this size; the mask keeps its hard edge."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return image.convert("RGB"), fitted_mask(mask, size)


def fitted_mask(mask: Image.Image, size: tuple[int, int]) -> Image.Image:
    return mask.convert("L").resize(size, Image.Resampling.NEAREST)


def area(mask: Image.Image) -> float:
    """Pixels that a mask (L) covers."""
    return ImageStat.Stat(mask).sum[0] / 255


def otsu(values: torch.Tensor) -> torch.Tensor:
    """The threshold that maximises the variance between two classes (Otsu 1979), exact over the
    sorted values."""
    v = values.flatten().double().sort().values
    n0 = torch.arange(1, v.numel(), dtype=v.dtype)
    n1 = v.numel() - n0
    s0 = v.cumsum(0)[:-1]
    gap = s0 / n0 - (v.sum() - s0) / n1
    k = int((n0 * n1 * gap.square()).argmax())
    return (v[k] + v[k + 1]) / 2


def estimate_mask(stack: torch.Tensor, smooth: int = 3, floor: float = 1e-3) -> torch.Tensor:
    """The mask of an element, (1,H,W) in {0,1}, from its pictures (n>=4,C,H,W): the pixels that
    stay the same across them.

    The spread of a pixel is the two-thirds quantile of the squared distance from the median
    picture. So things that stand before a backdrop in some pictures leave no holes in its mask, as
    they do with the variance. Its logarithm is box-smoothed and split in two by Otsu's threshold;
    `floor` (of the mean variance) keeps exact repeats from dominating. If all pictures are equal,
    the mask is ones. Raises UserError for fewer than four.
    """
    if len(stack) < 4:
        raise UserError(
            f"memory.region: estimating a mask takes at least 4 pictures of a "
            f"phrase, found {len(stack)}"
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


# A region weight of mask (B,1,H,W), has_mask (B,), estimated (B,1,h,w) or None and size (h,w) is
# (B,1,h,w) of mean one over each picture, so that the loss is sum(w err)/sum(w).
def everywhere(mask, has_mask, estimated, size):
    """An even weight."""
    return torch.ones((len(mask), 1, *size), device=mask.device)


def region_weight(mask: torch.Tensor, size: tuple[int, int], outside: float) -> torch.Tensor:
    """mask (B,1,H,W) -> weight (B,1,h,w): 1 inside, `outside` elsewhere, divided by the mean."""
    w = outside + (1 - outside) * F.interpolate(mask.float(), size=size, mode="area")
    return w / w.mean(dim=(2, 3), keepdim=True)


def counted_only(weight: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """A region weight (B,1,h,w) times `counted` (B,1,H,W), divided by its mean; 0 everywhere where
    nothing counts, as in a random window without the element."""
    w = weight * F.interpolate(counted, size=weight.shape[-2:], mode="area")
    return w / w.mean(dim=(2, 3), keepdim=True).clamp_min(1e-6)


def given_mask(mask, has_mask, estimated, size, *, outside: Share = 0.2):
    """The record's own mask; an even weight where it has none."""
    return region_weight(torch.where(has_mask[:, None, None, None], mask, 1.0), size, outside)


def estimated_mask(mask, has_mask, estimated, size, *, outside: Share = 0.2):
    """The record's own mask, or the one estimated from its element's pictures, estimated
    (B,1,h,w)."""
    of_records = F.interpolate(mask.float(), size=size, mode="area")
    mask = torch.where(has_mask[:, None, None, None], of_records, estimated)
    return region_weight(mask, size, outside)


def region_examples() -> Examples:
    """Two masks, one of which a record has."""
    mask = torch.zeros(2, 1, 8, 8)
    mask[..., 2:6, 2:6] = 1
    has_mask = torch.tensor([True, False])
    estimated = F.interpolate(mask, size=(4, 4), mode="area")
    yield (mask, has_mask, estimated, (4, 4)), Expected((2, 1, 4, 4), total=32)


REGION = Parts(
    {"none": everywhere, "mask": given_mask, "estimated": estimated_mask},
    key="memory.region.name",
    takes="mask has_mask estimated size",
    examples=region_examples,
)
