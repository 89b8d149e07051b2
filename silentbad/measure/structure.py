"""Fine structure of a region, compared as SSIM compares contrast and structure.

A copy detector that forgives what an autoencoder blurs also forgives a wall without its bricks.
This score asks for the detail itself: what remains of a picture when its local mean is taken away.

Legend: x (B,3,S,S) in [0,1]; m (1,S,S) in {0,1}; h (B,3,S,S) detail of x inside m.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SIGMA = 2.0  # pixels, of the local mean; coarser structure is the copy detector's part
EDGE = 2  # pixels inside a mask's edge that are left out: there the neighbours show
FEWEST = 16  # pixels that must remain of a mask without its edge
FAINT = 1e-4  # variance below which detail is not seen (SSIM's C2 for a contrast of 0.01)


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


def inner(mask: Tensor) -> Tensor:
    """A mask (1,S,S) as 0 and 1 without its edge, where enough of it remains."""
    hard = (mask > 0.5).float()
    if hard.all():
        return hard
    core = -F.max_pool2d(-hard[None], 2 * EDGE + 1, 1, EDGE)[0]
    return core if core.sum() >= FEWEST else hard


def detail(x: Tensor, mask: Tensor) -> Tensor:
    """x less its local mean inside a mask (1,S,S), 0 outside, over the root of the mask's size: the
    squared norm of the result (B,3,S,S) is the variance of the detail."""
    m = inner(mask)[None].to(x)
    local_mean = blur(x * m) / blur(m).clamp_min(1e-6)
    return (x - local_mean) * m / (3 * m.sum()).clamp_min(1).sqrt()


def structure(a: Tensor, b: Tensor) -> Tensor:
    """Details (N,3,S,S), and as many or one -> (N,) in [-1,1]: 1 for equal ones, 0 for unrelated.

    The contrast and structure terms of SSIM (Wang et al. 2004, equation 13 without luminance),
    pooled over the region: (2 cov + C2) / (var + var + C2).
    """
    covariance = (a * b).flatten(1).sum(1)
    variances = a.square().flatten(1).sum(1) + b.square().flatten(1).sum(1)
    return (2 * covariance + FAINT) / (variances + FAINT)
