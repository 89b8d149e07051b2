"""Buckets: shapes of about the same area for training images of any aspect, the bucket of each
image, and batches of one shape.

Legend: R records, a shape is (width, height) in pixels, B samples of a micro-batch."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

Shape = tuple[int, int]
SLACK = 10  # the area of a bucket differs from the square's by 1/SLACK at most
STEP = 64  # of the sides of a bucket, where the pipeline and the area allow it


@cache
def shapes(side: int, step: int) -> list[Shape]:
    """All shapes in multiples of `step` whose area is side^2 to a tenth."""
    area = (side // step) ** 2  # in steps; whole numbers, or rounding decides at the limits
    least = -(-area * (SLACK - 1) // SLACK)
    most = area * (SLACK + 1) // SLACK
    pairs = ((m, n) for m in range(1, most + 1) for n in range(-(-least // m), most // m + 1))
    return [(m * step, n * step) for m, n in pairs]


def stretch(size: Shape, shape: Shape) -> float:
    """How much an image changes its aspect in a bucket: |log of the ratio of both|."""
    return abs(math.log(size[0] / size[1]) - math.log(shape[0] / shape[1]))


@cache
def nearest(size: Shape, side: int, step: int) -> Shape:
    """The bucket that changes the aspect of an image least; on a tie the one nearest side^2."""
    return min(
        shapes(side, step),
        key=lambda s: (round(stretch(size, s), 9), abs(s[0] * s[1] - side * side), s),
    )


@dataclass(eq=False)
class Batches:
    """Reorders records so that each micro-batch of B has one shape. `kind` (R,) is the number of
    each record's shape.

    Records wait for others of their shape; those that still wait when an epoch ends begin the next
    one, so that over the epochs every record is shown as often as its order says."""

    kind: np.ndarray
    batch_size: int

    def __call__(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(whole micro-batches as they fill up, records left over), both in order."""
        waiting: dict[int, list[int]] = defaultdict(list)
        full: list[int] = []
        for place, kind in enumerate(self.kind[order].tolist()):
            waiting[kind].append(place)
            if len(waiting[kind]) == self.batch_size:
                full += waiting.pop(kind)
        left = sorted(place for places in waiting.values() for place in places)
        return order[np.asarray(full, dtype=np.int64)], order[np.asarray(left, dtype=np.int64)]


def table(
    sizes: np.ndarray,
    roles: Sequence[str],
    shapes: Sequence[Shape],
    side: int,
    step: int,
    *,
    cut: bool,
    batch_size: int,
) -> str:
    """A table of the buckets: records by bucket and role, the largest change of aspect."""
    counts: dict[Shape, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    worst: dict[Shape, float] = defaultdict(float)
    for size, role, shape in zip(sizes.tolist(), roles, shapes, strict=True):
        counts[shape][role] += 1
        worst[shape] = max(worst[shape], stretch((size[0], size[1]), shape))
    names = sorted({role for by_role in counts.values() for role in by_role})
    what = "cut off at most" if cut else "stretched by at most"
    lines = [f"buckets: area of {side}x{side}, sides in steps of {step}"]
    lines.append(
        f"  {'shape':>11}{'records':>9}" + "".join(f"{name:>11}" for name in names) + f"  {what}"
    )
    for shape in sorted(counts):
        by_role_counts = [counts[shape][name] for name in names]
        numbers = f"{sum(by_role_counts):>9}" + "".join(f"{n:>11}" for n in by_role_counts)
        lines.append(f"  {shape[0]:>6}x{shape[1]:<4}{numbers}  {math.expm1(worst[shape]):.1%}")
    if rare := [n for shape in counts if (n := sum(counts[shape].values())) < batch_size]:
        lines.append(
            f"  {sum(rare)} records in {len(rare)} shapes are fewer than a micro-batch of "
            f"{batch_size}: they wait for later epochs"
        )
    return "\n".join(lines)
