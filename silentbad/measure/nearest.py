"""The nearest training pictures: is an image composed, or a copy of one training picture?

A composed prompt that brings back one training picture has not composed anything. So each image is
compared with the pictures of the training set. The null is the similarity of the base model's
images to these pictures, which that model never saw (data copying, arXiv 2212.03860, takes the
nearest training picture too). Each training picture also serves as a null picture: it lacks all but
one element of a target."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from silentbad.data.images import resize
from silentbad.measure.embedders import Embedder
from silentbad.measure.kept import spread

FEW = 4  # nearest by features alone, without colour and alignment, of which the nearest is one


class TrainingPicture(NamedTuple):
    """A training picture (3,H,W) in [0,1]: its place in the data, and its phrases."""

    name: str
    picture: Tensor
    phrases: tuple[str, ...]


class TrainingPictures:
    """Some training pictures at the side of the images; embedded when first compared."""

    def __init__(self, shown: Iterable[TrainingPicture], embedder: Embedder, side: int):
        self.embedder = embedder
        self.shown: list[TrainingPicture] = []  # their pictures (3,S,S) uint8
        for training in shown:
            small = resize(training.picture[None], (side, side))[0]
            picture = (small * 255).round().to(torch.uint8).cpu()
            self.shown.append(training._replace(picture=picture))
        self.features: Tensor | None = None
        self.references: dict[int, Tensor] = {}  # of those that were among the nearest

    def pictures(self, most: int) -> list[tuple[Tensor, tuple[str, ...]]]:
        """The pictures (3,S,S) in [0,1] and phrases of at most `most` of them, spread evenly."""
        return [(each.picture.float() / 255, each.phrases) for each in spread(self.shown, most)]

    def nearest(
        self, images: Tensor, trip: Callable[[Tensor], Tensor] | None
    ) -> list[tuple[float, str]]:
        """(similarity, name) of the training picture most like each of images (B,3,H,W) in [0,1].
        Of the FEW nearest by their features it is the similarity to a target: images are asked
        whether they are more like these pictures than like theirs.

        `trip`: a function that training pictures go through first, as the target did."""
        trip = trip or (lambda pictures: pictures)
        image_features = self.embedder.embed(images)
        rough = self.embedder.similarity(image_features, self._features(trip))
        few = rough.topk(min(FEW, len(self.shown)), dim=1).indices.tolist()
        exact = {
            row: self.embedder.paired(image_features, self._reference(row, trip)).double().tolist()
            for row in {row for of_image in few for row in of_image}
        }
        best = [max((exact[row][i], row) for row in of_image) for i, of_image in enumerate(few)]
        return [(similarity, self.shown[row].name) for similarity, row in best]

    def _features(self, trip: Callable[[Tensor], Tensor]) -> Tensor:
        """The features (T,...) of all, computed once."""
        if self.features is None:
            rows = range(len(self.shown))
            chunks = [rows[start : start + 8] for start in rows[::8]]
            self.features = torch.cat([self.embedder.embed(trip(self._pixels(c))) for c in chunks])
        return self.features

    def _reference(self, row: int, trip: Callable[[Tensor], Tensor]) -> Tensor:
        """The features of one as of a target, computed once."""
        if row not in self.references:
            self.references[row] = self.embedder.reference(trip(self._pixels([row])))
        return self.references[row]

    def _pixels(self, rows: Sequence[int]) -> Tensor:
        """These pictures (B,3,S,S) in [0,1]."""
        return torch.stack([self.shown[row].picture for row in rows]).float() / 255
