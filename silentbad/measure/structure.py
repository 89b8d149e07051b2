"""Scores of fine structure and colour in a region, and the masks inside which pictures are judged.

A copy detector that tolerates the blur of an autoencoder also tolerates a wall without its bricks
and a picture in grey. Two more scores detect these: one compares the detail that remains when the
local mean is subtracted, the other the colours of places.

Legend: x (B,3,S,S) in [0,1]; m (1,S,S) in {0,1}; h (B,3,S,S) detail of x inside m, c (B,3,S/4,S/4)
its colours.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from silentbad.data.images import RIM

SIGMA = 2.0  # pixels, of the local mean; the copy detector compares coarser structure
PLACE = 4  # pixels of a side, whose mean colour is compared
LEFT = 0.5  # least share of a region that stays when its rim is removed
# standard deviation of detail below which a surface is plain, and its detail noise
CONTRAST = 0.02
FAINT = CONTRAST**2  # SSIM's C2
STEEP = 8  # exponent for a difference of chroma: the small differences of copies cost nothing


Box = tuple[slice, slice]  # rows, columns


# -- what is judged ----------------------------------------------------------------------------
def inner(mask: Tensor) -> Tensor:
    """A mask (1,S,S) as 0 and 1 without its rim; a small region keeps half of its pixels, and so
    more of its rim."""
    hard = (mask > 0.5).float()
    for pixels in range(rim_of(mask.shape[-1]), 0, -1):
        core = -widened(-hard, pixels)
        if core.sum() >= LEFT * hard.sum():
            return core
    return hard


def whole_of(masks: Sequence[Tensor | None], inners: Sequence[Tensor | None]) -> Tensor | None:
    """The mask (1,S,S) inside which a whole picture is judged: the inner parts of its elements, and
    the area that no mask covers, without its rim. None (all of it) where no element has a mask."""
    given = [(mask > 0.5).float() for mask in masks if mask is not None]
    if not given:
        return None
    covered = torch.stack(given).amax(0)
    free = 1 - widened(covered, rim_of(covered.shape[-1]))
    return torch.stack([free, *(part for part in inners if part is not None)]).amax(0)


def widened(x: Tensor, pixels: int) -> Tensor:
    """The highest of x (1,S,S) within so many pixels; nothing is outside the picture."""
    return F.max_pool2d(x[None], 2 * pixels + 1, 1, pixels)[0]


def box_of(mask: Tensor) -> Box:
    """The smallest box around the region of a mask (1,H,W)."""
    rows = (mask[0] > 0.5).any(1).nonzero()[:, 0]
    columns = (mask[0] > 0.5).any(0).nonzero()[:, 0]
    return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)


def rim_of(side: int) -> int:
    """RIM in pixels of a picture of `side`."""
    return round(RIM * side)


# -- the two scores ----------------------------------------------------------------------------
def blur(x: Tensor, sigma: float = SIGMA) -> Tensor:
    """x (B,C,H,W) under a Gaussian window of `sigma` pixels, zero outside."""
    reach = int(3 * sigma)
    places = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    window = torch.exp(-places.square() / (2 * sigma**2))
    window = window / window.sum()
    channels = x.shape[1]
    rows = window.view(1, 1, 1, -1).expand(channels, 1, 1, -1)
    columns = window.view(1, 1, -1, 1).expand(channels, 1, -1, 1)
    x = F.conv2d(x, rows, padding=(0, reach), groups=channels)
    return F.conv2d(x, columns, padding=(reach, 0), groups=channels)


def detail(x: Tensor, mask: Tensor) -> Tensor:
    """x minus its local mean inside a mask (1,S,S) of 0 and 1, 0 outside, divided by the root of
    the mask's size: the squared norm of the result (B,3,S,S) is the variance of the detail."""
    m = mask[None].to(x)
    local_mean = blur(x * m) / blur(m).clamp_min(1e-6)
    return (x - local_mean) * m / (3 * m.sum()).clamp_min(1).sqrt()


def colours(x: Tensor, mask: Tensor) -> Tensor:
    """The chroma (B,3,S/4,S/4) of the mean of each place inside a mask (1,S,S) of 0 and 1, times
    the fourth root of the place's share of the mask."""
    m = mask[None].to(x)
    share = F.avg_pool2d(m, PLACE)
    mean = F.avg_pool2d(x * m, PLACE) / share.clamp_min(1e-6)
    chroma = mean - mean.mean(1, keepdim=True)
    return chroma * (share / share.sum().clamp_min(1e-6)).pow(1 / 4)


def structure(a: Tensor, b: Tensor) -> Tensor:
    """Details (N,3,S,S) and (N or 1,3,S,S) -> scores (N,) in [-1,1]: 1 where they are equal or both
    absent, 0 where they are unrelated.

    The contrast and structure terms of SSIM (Wang et al. 2004, equation 13 without luminance),
    pooled over the region: (2 cov + C2) / (var + var + C2).
    """
    covariance = (a * b).flatten(1).sum(1)
    variances = a.square().flatten(1).sum(1) + b.square().flatten(1).sum(1)
    return (2 * covariance + FAINT) / (variances + FAINT)


def same_colours(a: Tensor, b: Tensor, tint: float) -> Tensor:
    """Colours (N,3,h,w) and (N or 1,3,h,w) -> (N,) in [0,1]: exp(-(d / tint)^STEEP), where d^4 is
    the mean over places of the fourth power of the difference, so that a few stripes of another
    colour count."""
    of_places = (a - b).square().mean(1)
    fourth = of_places.square().flatten(1).sum(1) / tint**4
    return (-fourth.pow(STEEP / 4)).exp()
