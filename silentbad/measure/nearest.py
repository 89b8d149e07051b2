"""The training pictures beside the generations: is an image composed, or a copy of one picture that was shown?

A composed prompt that brings back one training picture has not composed anything. So each image is compared with the
pictures of the training set; how similar the base model's images are to them, which it never saw, is the null
(data copying, arXiv 2212.03860, takes the nearest training picture too).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from silentbad.data.images import resize
from silentbad.measure.embedders import Embedder


class TrainingPictures:
    """Features of pictures (3,H,W) in [0,1] with their names, embedded as they come: the pictures are not kept."""

    def __init__(self, pictures: Iterable[tuple[str, Tensor]], embedder: Embedder, side: int):
        self.embedder, self.names, features = embedder, list[str](), list[Tensor]()
        for name, picture in pictures:
            self.names.append(name)
            features.append(embedder.embed(resize(picture[None], (side, side))))
        self.features = torch.cat(features) if features else None

    def __bool__(self) -> bool:
        return self.features is not None

    def nearest(self, images: Tensor) -> list[tuple[float, str]]:
        """Images (B,3,H,W) in [0,1] -> (similarity, name) of the most similar training picture, of each."""
        assert self.features is not None, "asked where there are no pictures"
        best = self.embedder.similarity(self.embedder.embed(images), self.features).double().max(dim=1)
        return [(s, self.names[i]) for s, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
