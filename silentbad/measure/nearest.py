"""The nearest training pictures: is an image composed, or a copy of one training picture?

A composed prompt that brings back one training picture has not composed anything. So each image is
compared with the pictures of the training set. The null is the similarity of the base model's
images to these pictures, which that model never saw (data copying, arXiv 2212.03860, takes the
nearest training picture too). Each training picture also serves as a null picture: it lacks all but
one element of a target."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from silentbad.data.images import resize
from silentbad.measure.embedders import Embedder
from silentbad.measure.kept import spread


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

    def pictures(self, most: int) -> list[tuple[Tensor, tuple[str, ...]]]:
        """The pictures (3,S,S) in [0,1] and phrases of at most `most` of them, spread evenly."""
        return [(each.picture.float() / 255, each.phrases) for each in spread(self.shown, most)]

    def nearest(
        self, images: Tensor, trip: Callable[[Tensor], Tensor] | None
    ) -> list[tuple[float, str]]:
        """(similarity, name) of the training picture most like each of images (B,3,H,W) in [0,1].

        `trip`: a function that training pictures go through first, as the target did."""
        if self.features is None:
            parts = []
            for start in range(0, len(self.shown), 8):
                part = [training.picture for training in self.shown[start : start + 8]]
                pictures = torch.stack(part).float() / 255
                pictures = pictures if trip is None else trip(pictures)
                # as a target's: images are asked whether they are more like these than like it
                parts += [self.embedder.reference(picture[None]) for picture in pictures]
            self.features = torch.cat(parts)
        image_features = self.embedder.embed(images)
        best = self.embedder.similarity(image_features, self.features).double().max(dim=1)
        names = [self.shown[i].name for i in best.indices.tolist()]
        return list(zip(best.values.tolist(), names, strict=True))
