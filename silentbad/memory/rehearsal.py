"""Rehearsal of composition: a drawn record is replaced by another that joins phrases or elements.

`check_union` is the one place that decides how much of a target a picture may show, and it takes no
option.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image, ImageChops

from silentbad import rng
from silentbad.data.buckets import stretch
from silentbad.data.elements import DataInfo
from silentbad.data.phrases import phrases_in
from silentbad.errors import UserError, user_errors
from silentbad.memory.masks import area, fitted, fitted_mask, overlaid
from silentbad.settings.memory import PLACED, ROLES
from silentbad.settings.registries import Parts
from silentbad.settings.types import NotNegative, Small, Unit
from silentbad.settings.user_code import is_place


def check_union(elements: int, of: int, target_id: str) -> None:
    """Refuse a picture or caption with more than k - 1 of a target's k elements: it would be the
    target itself."""
    if elements > max(of - 1, 1):
        raise UserError(
            f"memory.rehearsal: a union of {elements} elements rebuilds target '{target_id}', "
            f"which has {of}; at most {max(of - 1, 1)} may be shown together"
        )


@dataclass(frozen=True)
class Others:
    """The records that a rehearsal may join to a drawn one. `load(index, picture=True)` gives a
    whole record: index, image, resized, mask, text, phrases, role, target_id, element_id, without
    `picture` no image; `masks` holds estimated ones by element."""

    info: DataInfo
    load: Callable[..., dict]
    masks: dict[int, Image.Image]

    def mask_of(self, record: dict, element: int) -> Image.Image | None:
        """The record's own mask, or the one estimated for its element, if there is one."""
        return record["mask"] or self.masks.get(element)

    def mask(self, element: int) -> Image.Image | None:
        """`mask_of` the element's first record."""
        return self.mask_of(self.load(int(self.info.rows[element][0]), picture=False), element)

    @cached_property
    def shares(self) -> list[float]:
        """The share of the picture that each element's mask covers; 0 where there is none."""
        masks = map(self.mask, range(len(self.info.rows)))
        return [area(mask) / (mask.width * mask.height) if mask else 0.0 for mask in masks]


# A rehearsal gets a drawn record (a dict of Reader.load) and returns a replacement, or None.
def no_rehearsal(record: dict, g: torch.Generator, others: Others) -> dict | None:
    """Every record is shown as it is."""
    return None


def shuffled(options: list, g: torch.Generator) -> list:
    return [options[i] for i in torch.randperm(len(options), generator=g).tolist()]


def any_record(info: DataInfo, element: int, g: torch.Generator) -> int:
    """A record of this element."""
    rows = info.rows[element]
    return int(rows[int(torch.randint(len(rows), (), generator=g))])


def leak_free(
    record: dict, g: torch.Generator, others: Others, *, share: Unit = 0.5, parts: Unit = 0.5
) -> dict | None:
    """A non-target picture captioned by its own phrases in shuffled order: all of them, or with
    probability `parts` a proper subset. No caption names more than k-1 phrases of a target."""
    if record["role"] == "element" or float(torch.rand((), generator=g)) >= share:
        return None
    record = others.load(record["index"])
    shown = shuffled(record["phrases"] or [], g)
    if len(shown) < 2:
        return None
    if float(torch.rand((), generator=g)) < parts:
        shown = shown[: int(torch.randint(1, len(shown), (), generator=g))]
    united = (0, 0)
    for target in others.info.elements_of:
        phrases = others.info.phrases_of(target)
        named = [p for p in shown if p in phrases]
        excess = named[max(len(phrases) - 1, 1) :]
        shown = [p for p in shown if p not in excess]
        check_union(len(named) - len(excess), len(phrases), target)
        united = max(united, (len(named) - len(excess), len(phrases)))
    return {
        **record,
        "phrases": shown,
        "text": ", ".join(shown),
        "role": "rehearsal",
        "united": united,
    }


def stretched(other: dict, record: dict) -> bool:
    """Whether a picture would be stretched, and its element moved, over the record's."""
    return stretch(other["resized"], record["resized"]) > 0.05


def pairwise(
    record: dict,
    g: torch.Generator,
    others: Others,
    *,
    share: Unit = 0.25,
    elements: Small | None = 2,
    backdrop: bool = False,
    feather: NotNegative = 1.5,
) -> dict | None:
    """Pictures of `elements` elements of one target (null: k-1, the most allowed), pasted over each
    other at their native places; the mask is their union. `backdrop`: the target's largest element
    is always one of them.

    The larger element lies behind. The caption names the elements in shuffled order, then the other
    things in the picture behind, which remain visible.
    """
    info = others.info
    i = info.element_of(record["index"])
    if i is None or float(torch.rand((), generator=g)) >= share:
        return None
    siblings = info.elements_of[info.target[i]]
    of = len(info.phrases_of(info.target[i]))
    joined = shuffled([j for j in siblings if j != i], g)
    if backdrop:
        largest = max(siblings, key=others.shares.__getitem__)
        joined.sort(key=lambda j: j != largest)
    joined = joined[: min(elements or of, of - 1) - 1]
    record = others.load(record["index"])
    mask = others.mask_of(record, i)
    if not joined or mask is None:
        return None
    layers = {i: (record, mask)}
    for j in joined:
        other = others.load(any_record(info, j, g))
        if stretched(other, record):
            continue
        other_mask = others.mask_of(other, j)
        if other_mask is not None:
            layers[j] = (other, other_mask)
    check_union(len(layers), of, info.target[i])
    if len(layers) < 2:
        return None
    size = record["image"].size
    pictures = {j: fitted(layer["image"], mask, size) for j, (layer, mask) in layers.items()}
    behind, image, mask = overlaid(pictures, feather)
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
        "united": (len(layers), of),
    }


def joint_captions(
    record: dict, g: torch.Generator, others: Others, *, share: Unit = 0.5
) -> dict | None:
    """An element's own picture under a caption that names more of its target: two to k-1 phrases in
    shuffled order.

    The other elements are not shown, and the loss ignores their places (`counted` is 0 there). So
    the model learns the caption at the place of this element, and not that the others are absent.
    """
    info = others.info
    i = info.element_of(record["index"])
    if i is None or float(torch.rand((), generator=g)) >= share:
        return None
    siblings = info.elements_of[info.target[i]]
    of = len(info.phrases_of(info.target[i]))
    mask = others.mask_of(record, i)
    if of < 3 or len(siblings) < 2 or mask is None:
        return None
    mask = fitted_mask(mask, record["image"].size)
    more = int(torch.randint(1, of - 1, (), generator=g))
    named = [i, *shuffled([j for j in siblings if j != i], g)[:more]]
    check_union(len(named), of, info.target[i])
    counted = Image.new("L", mask.size, 255)
    for j in named[1:]:
        other = others.load(any_record(info, j, g), picture=False)
        if stretched(other, record) or (place := others.mask_of(other, j)) is None:
            return None
        counted.paste(0, mask=fitted_mask(place, mask.size))
    phrases = shuffled([info.phrase[j] for j in named], g)
    return {
        **record,
        "mask": mask,
        "counted": ImageChops.lighter(counted, mask),
        "phrases": phrases,
        "text": ", ".join(phrases),
        "element_id": info.keys[i].removeprefix(f"{info.target[i]}/"),
        "united": (len(named), of),
    }


def pairwise_captions(
    record: dict,
    g: torch.Generator,
    others: Others,
    *,
    share: Unit = 0.25,
    elements: Small | None = 2,
    backdrop: bool = False,
    feather: NotNegative = 1.5,
    captions: Unit = 0.5,
) -> dict | None:
    """`pairwise`, and `joint_captions` on a share of the records that it leaves alone."""
    union = pairwise(
        record, g, others, share=share, elements=elements, backdrop=backdrop, feather=feather
    )
    return union or joint_captions(record, g, others, share=captions)


REHEARSAL = Parts(
    {
        "none": no_rehearsal,
        "leak_free": leak_free,
        "joint_captions": joint_captions,
        "pairwise": pairwise,
        "pairwise_captions": pairwise_captions,
    },
    key="memory.rehearsal.name",
    takes="record g others",
)


def check_replaced(name: str, given: dict, replaced: Any, info: DataInfo) -> None:
    """Refuse a return value of a user's rehearsal that is no complete record, or that joins a whole
    target by its caption or its `united`."""
    failed = f"memory.rehearsal.name: {name} returns"
    if not isinstance(replaced, dict):
        raise UserError(f"{failed} {type(replaced).__name__}, not a record or None")
    if missing := [key for key in (*given, "image", "text") if key not in replaced]:
        raise UserError(f"{failed} a record without {missing[0]}")
    if replaced["role"] not in ROLES:
        raise UserError(f"{failed} role {replaced['role']!r}, not {', '.join(ROLES)}")
    for target in info.elements_of:
        phrases = info.phrases_of(target)
        named = phrases_in(filter(None, phrases), replaced["text"])
        check_union(len(named), len(phrases), target)
    elements, of = replaced.get("united") or (0, 0)
    check_union(elements, of, replaced["target_id"])


class Rehearsal:
    """Returns the record that replaces a drawn one, or None to keep it; a pure function of (record,
    (draw, position)).

    `united` of a replacement is (n, k): it joins n of the k elements or phrases of a target.
    Raises UserError where no target has enough elements to join, or more than k - 1 are asked for.
    """

    def __init__(
        self,
        name: str,
        options: dict,
        *,
        info: DataInfo,
        seed: int,
        load: Callable,
        masks: dict[int, Image.Image],
    ):
        self.name = name
        self.function = REHEARSAL[name]
        self.options = options
        self.seed = seed
        self.others = Others(info, load, masks)
        # a target may show two elements together where it has three, of which one may be withheld
        sizes = {
            target: len(info.phrases_of(target))
            for target, elements in info.elements_of.items()
            if len(elements) > 1 and len(info.phrases_of(target)) > 2
        }
        if name in PLACED and not sizes:
            raise UserError(
                f"memory.rehearsal.name={name}: no target has three elements, so no two may be "
                "shown or named together; take none, or leak_free where clean captions join "
                "phrases"
            )
        joined = [i for target in sizes for i in info.elements_of[target]]
        if name in PLACED and (unnamed := [info.keys[i] for i in joined if not info.phrase[i]]):
            raise UserError(
                f"memory.rehearsal.name={name}: element {unnamed[0]!r} has no phrase, and phrases "
                "are the captions of unions; give its records phrases, or take none"
            )
        if name.startswith("pairwise") and (wanted := options.get("elements", 2)) is not None:
            if wanted < 2:
                raise UserError("memory.rehearsal.options.elements: must be 2 or more, or null")
            for target, size in sizes.items():
                check_union(wanted, size, target)

    def __call__(self, record: dict, address: tuple[int, int]) -> dict | None:
        g = rng.generator(self.seed, "rehearsal", *address)
        if not is_place(self.name):
            return self.function(record, g, self.others, **self.options)
        with user_errors(f"memory.rehearsal.name: {self.name} fails"):
            replaced = self.function(record, g, self.others, **self.options)
        if replaced is not None:
            check_replaced(self.name, record, replaced, self.others.info)
        return replaced


class Rehearsed:
    """How many rehearsals this process has trained on, and the largest union among them, (n, k);
    part of the checkpoint.

    Counted when a step takes its batches, not in the loader threads, which run ahead of it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.largest = (0, 0)

    def add(self, united: list[tuple[int, int] | None]) -> None:
        """Take in the `united` of a batch."""
        joined = [(int(u[0]), int(u[1])) for u in united if u is not None]
        self.count += len(joined)
        self.largest = max((self.largest, *joined), key=lambda u: u[0] / max(u[1], 1))

    def state_dict(self) -> dict:
        return {"count": self.count, "largest": list(self.largest)}

    def load_state_dict(self, state: dict) -> None:
        elements, of = state["largest"]
        self.count = state["count"]
        self.largest = (elements, of)
