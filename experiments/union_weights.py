"""Every element of a union has an equal part of the loss. Measured: 0.50 of the images in place of
0.75 on one development target (trial code, power 1), no gain on another (power 0.5), nor on eight
at once (0.47 at power 1, without 0.51, areas shuffled 0.55); a run each."""

import numpy as np
import torch
from PIL import Image

from silentbad.memory.masks import area, fitted_mask
from silentbad.memory.rehearsal import Others, pairwise
from silentbad.settings.types import NotNegative, Small, Unit, Weight


def union_weights(
    record: dict,
    g: torch.Generator,
    others: Others,
    *,
    share: Unit = 0.25,
    elements: Small | None = 2,
    backdrop: bool = False,
    feather: NotNegative = 1.5,
    power: Weight = 1.0,
    shuffled: bool = False,
) -> dict | None:
    """`pairwise`, with each place of the union weighted by 1/area^power of the element there, and
    places outside by the mean.

    At power 1 each element has an equal part of the loss, at 0 it is `pairwise`. Controls: power
    -1, and areas `shuffled` over the elements."""
    union = pairwise(
        record, g, others, share=share, elements=elements, backdrop=backdrop, feather=feather
    )
    if union is None:
        return None
    info = others.info
    drawn = info.element_of(record["index"])
    assert drawn is not None, "a union is of elements"
    target = info.target[drawn]
    joined = [j for j in info.elements_of[target] if info.phrase[j] in union["phrases"]]
    size = union["image"].size
    masks = [fitted_mask(mask, size) for j in joined if (mask := others.mask(j))]
    masks.sort(key=area, reverse=True)  # in the order in which they cover each other

    places = np.where(np.asarray(union["mask"]) >= 128, 0, -1)
    for k, mask in enumerate(masks[1:], start=1):
        places[np.asarray(mask) >= 128] = k
    areas = np.array([max((places == k).mean(), 1e-3) for k in range(len(masks))])
    of = areas[torch.randperm(len(areas), generator=g).numpy()] if shuffled else areas
    weights = of**-power
    outside = (weights * areas).sum() / areas.sum()
    levels = np.append(weights, outside)  # place -1 is the last
    counted = (255 * levels / levels.max()).round().astype(np.uint8)[places]
    return {**union, "counted": Image.fromarray(counted)}
