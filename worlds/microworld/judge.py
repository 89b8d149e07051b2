"""How many of the things that a caption of this world names are right in its image.

    --validation.judge worlds/microworld/judge.py:things_right

A thing counts where its phrase names its place; it is right when a classifier sees its kind there,
and its colour where that is named."""

import re
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from silentbad import ROOT
from silentbad.data.images import resize
from worlds.microworld.export import load_judge
from worlds.microworld.grammar import COLOURS, KINDS, PLACES, SIZES, TEXTURES
from worlds.microworld.oracle import Judge, crops

WEIGHTS = ROOT / "assets" / "micro-sd" / "judge" / "model.safetensors"
SIDE = 64


class Named(NamedTuple):
    """A thing as its phrase has it."""

    kind: str
    colour: str | None
    place: str


def one_of(words: object, name: str = "") -> str:
    """A regular expression for any of the words, as a named group where it has a name."""
    return f"({f'?P<{name}>' if name else '?:'}{'|'.join(map(str, words))})"  # type: ignore[call-overload]


THING = re.compile(
    rf"\ban? (?:{one_of(SIZES)} )?(?:{one_of(COLOURS, 'colour')} )?(?:{one_of(TEXTURES)} )?"
    rf"{one_of(KINDS, 'kind')} {one_of(PLACES, 'place')}\b"
)


def things(caption: str) -> list[Named]:
    """The things of a caption whose place it names."""
    return [Named(m["kind"], m["colour"], m["place"]) for m in THING.finditer(caption)]


@cache
def judge() -> Judge:
    """The classifier of what is at a place."""
    return load_judge(WEIGHTS)


@torch.no_grad()
def things_right(captions: list[str], images: Tensor) -> list[tuple[int, int]]:
    """(things right, things named) of each image (N,3,H,W) in [0,1]."""
    named = [(i, thing) for i, caption in enumerate(captions) for thing in things(caption)]
    right = [0] * len(captions)
    if named:
        x = resize(images.cpu().float(), (SIDE, SIDE)) * 2 - 1
        network = judge()
        logits = network(crops(x, [(i, *PLACES[thing.place]) for i, thing in named]))
        seen = {
            field: [network.words[field][k] for k in logits[field].argmax(1).tolist()]
            for field in ("kind", "colour")
        }
        for (i, thing), kind, colour in zip(named, seen["kind"], seen["colour"], strict=True):
            right[i] += kind == thing.kind and thing.colour in (None, colour)
    counts = [sum(of == i for of, _ in named) for i in range(len(captions))]
    return list(zip(right, counts, strict=True))
