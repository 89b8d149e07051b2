"""What the hard nulls of every world have in common: a null, the nulls that ask nothing of a
world's things but a place, and kinds by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MOVE = (4.0, 8.0)  # pixels
WITHIN = (10.0, 54.0)  # a moved thing's centre stays here, so that it stays in the picture


@dataclass(frozen=True)
class Null:
    """A scene that is no copy; `changed` are the indices of the elements that differ from the
    target's: of scene.things, or len(things) for the backdrop."""

    scene: Any  # of the world whose null it is
    changed: tuple[int, ...]

    @property
    def element(self) -> int | None:
        """The one element that differs; None if several do."""
        return self.changed[0] if len(self.changed) == 1 else None


def things_of(scene: Any) -> tuple[int, ...]:
    """Every thing, without the backdrop."""
    return tuple(range(len(scene.things)))


def everything(scene: Any) -> tuple[int, ...]:
    """Every element."""
    return tuple(range(len(scene.things) + 1))


def with_thing(scene: Any, element: int, thing: Any) -> Null:
    """The scene with another thing in the place of one."""
    things = (*scene.things[:element], thing, *scene.things[element + 1 :])
    return Null(replace(scene, things=things), (element,))


def one_missing(rng: np.random.Generator, scene: Any, element: int) -> Null:
    """The thing is not there; a hat may stay without its wearer."""
    things = scene.things[:element] + scene.things[element + 1 :]
    return Null(replace(scene, things=things, order=()), (element,))


def one_moved(
    rng: np.random.Generator, scene: Any, element: int, distance: tuple[float, float] = MOVE
) -> Null:
    """The thing is shifted by `distance` (least, most; pixels) in a direction that keeps it in
    the picture."""
    thing = scene.things[element]
    low, high = WITHIN
    x, y = thing.centre
    # a hat may be nearer to the edge already
    low = min(low, x, y)
    high = max(high, x, y)
    far = rng.uniform(*distance)
    for _ in range(100):
        turn = rng.uniform(0, 2 * np.pi)
        new = (x + far * np.cos(turn), y + far * np.sin(turn))
        if all(low <= v <= high for v in new):
            break
    # the texture moves along: it is drawn about the centre
    return with_thing(scene, element, replace(thing, centre=new))


@dataclass(frozen=True)
class Kinds:
    """A world's nulls by name."""

    of_scene: Mapping[str, Callable[[np.random.Generator, Any], Null]]
    of_element: Mapping[str, Callable[[np.random.Generator, Any, int], Null]]
    with_backdrop: Sequence[str]  # of an element: these also change the backdrop alone

    def changeable(self, kind: str, scene: Any) -> list[int]:
        """The elements that this kind can change alone."""
        return list(range(len(scene.things) + (kind in self.with_backdrop)))

    def turns(self, kind: str, scene: Any) -> int:
        """How many nulls of the kind go round once: as many as it changes elements alone, else
        one."""
        return len(self.changeable(kind, scene)) if kind in self.of_element else 1

    def draw(
        self, kind: str, rng: np.random.Generator, scene: Any, turn: int | None = None
    ) -> Null:
        """A null of the kind. Kinds with one changed element take the elements by turns, or one at
        random. Raises KeyError for an unknown kind."""
        if kind in self.of_scene:
            return self.of_scene[kind](rng, scene)
        elements = self.changeable(kind, scene)
        at = int(rng.integers(len(elements))) if turn is None else turn % len(elements)
        return self.of_element[kind](rng, scene, elements[at])
