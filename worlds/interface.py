"""What a world gives to the code that trains a base on it and writes its data sets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from silentbad.rng import addressed_seed


@dataclass(frozen=True)
class World:
    """Scenes, their pictures, and what their captions say.

    A scene has `things`, a `backdrop`, `phrases` in the order of its `caption`; a thing and a
    backdrop have a `phrase`, and a thing has a `place` and the attributes that it has `named`."""

    name: str  # of its streams of randomness
    sample_scene: Callable[..., Any]  # (rng, detail=, count=, max_count=) -> scene
    render: Callable[..., Any]  # scene -> picture (RGB, 64x64), masks of its things (L)
    places: Mapping[str, tuple[int, int]]  # name -> centre (x, y) in pixels
    backdrops: Sequence[str]
    # what a phrase says of its thing, as class indices: field -> number of answers
    fields: Mapping[str, int]
    answers: Callable[[Any], dict[str, int]]  # of a thing
    nothing: Mapping[str, int]  # the answers where no thing is named
    # what the judge looks for: field -> its words; and where
    judged: Mapping[str, Sequence[str]]
    spot: Callable[[Any], tuple[float, float]]  # thing -> (x, y) in pixels
    # what a copy detector is trained on
    terse_scene: Callable[[np.random.Generator], Any]  # phrases say as little as a target's
    null_kinds: tuple[Sequence[str], Sequence[str]]  # of the whole scene, of one element
    null: Callable[[str, np.random.Generator, Any], Any]  # (kind, rng, scene) -> Null
    # what data sets without a hidden picture are made of
    sample_thing: Callable[..., Any]  # (rng, place, detail=) -> thing
    sample_backdrop: Callable[[np.random.Generator], Any]
    scene: Callable[[tuple, Any], Any]  # (things, backdrop) -> scene
    separate: Mapping[str, Any] = field(default_factory=dict)  # of `sample_scene`: no thing worn

    def rng(self, stream: str, *address: int | str) -> np.random.Generator:
        """The world's own streams; no experiment's seed shares an address with them."""
        return np.random.default_rng(addressed_seed(self.name, stream, *address))


def answer(thing: Any, field: str, words: Sequence[str] | Mapping[str, Any], word: str) -> int:
    """The class index of what a phrase says in a field; the last class is "unsaid"."""
    return list(words).index(word) if field in thing.named else len(words)
