"""Pictures that were drawn elsewhere: `GivenPictures` takes the place of a sampler."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from silentbad.data.images import open_image, picture_files, resize, to_tensor
from silentbad.data.targets import Target
from silentbad.errors import UserError, warn
from silentbad.files import check_folder
from silentbad.measure.generation import Item, controls
from silentbad.measure.samples import slugs
from silentbad.model.latents import AT_ONCE, round_trip
from silentbad.progress import Bar

LARGEST_SIDE = 512  # pixels; pictures are compared at no larger side unless --resolution is given
SQUASHED = 0.05  # a picture whose aspect ratio differs by more from its target's gives a warning


class Given(NamedTuple):
    """A picture file, and the item it shows: a target's composed prompt, or a control."""

    item: Item
    file: Path


def given_pictures(folder: Path, targets: Sequence[Target]) -> list[Given]:
    """The pictures of each target, in folder/TARGET_ID, or of one target in the folder itself;
    those of a control prompt are in a folder of its name there.

    Raises UserError where a target has none, and where a folder is not named after a control."""
    pictures: list[Given] = []
    for j, name in enumerate(slugs([target.target_id for target in targets])):
        place = folder / name
        if not place.is_dir() and len(targets) == 1:
            place = folder
        check_folder("--pictures", place, "each target has one of its own")
        cells = [*controls(list(targets), j, seed=0, unrelated="")]
        folders = {"composed": place}
        for inner in sorted(path for path in place.iterdir() if path.is_dir()):
            if inner.name not in cells:
                near = difflib.get_close_matches(inner.name, cells, n=1)
                right = f"did you mean {near[0]}?" if near else f"controls: {', '.join(cells)}"
                raise UserError(f"--pictures: {inner} is no control's folder; {right}")
            folders[inner.name] = inner
        for cell, of_cell in folders.items():
            files = picture_files(of_cell)
            if not files:
                raise UserError(f"--pictures: {of_cell} holds no picture")
            pictures += [
                Given(
                    Item(cell=cell, target=j, image=i, prompt=cell, address=targets[j].target_id),
                    file,
                )
                for i, file in enumerate(files)
            ]
    return pictures


class GivenPictures:
    """The part of a sampler's interface that a measurement uses, with pictures from files.

    Pictures are brought to `side` pixels a side. `round_trip` goes through the autoencoder `vae`;
    without one it leaves pictures as they are."""

    prefix = "--"
    precision = None
    tokenizer = None

    def __init__(
        self,
        pictures: Sequence[Given],
        targets: Sequence[Target],
        batch: int,
        *,
        side: int | None = None,
        vae: Any = None,
    ):
        self.items = [given.item for given in pictures]
        self.images = {item: open_image(file, "--pictures") for item, file in pictures}
        self.batch = batch
        self.vae = vae
        self.decodes = vae is not None
        smallest = min(min(image.size) for image in self.images.values())
        self.side = side or min(LARGEST_SIDE, max(8, smallest - smallest % 8))
        self.say_squashed(pictures, targets)

    def say_squashed(self, pictures: Sequence[Given], targets: Sequence[Target]) -> None:
        """Warn where pictures have another aspect ratio than their target."""
        squashed = []
        for item, file in pictures:
            sizes = (self.images[item].size, targets[item.target].image.size)
            shapes = [width / height for width, height in sizes]
            if max(shapes) > (1 + SQUASHED) * min(shapes):
                squashed.append(file)
        if squashed:
            warn(
                f"--pictures: {len(squashed)} have another shape than their target and are "
                f"squashed to it; first {squashed[0]}"
            )

    def plan(self, targets: Sequence[Target], full: bool, described: bool) -> list[Item]:
        """The items of all pictures; controls only if `full`."""
        return [item for item in self.items if full or item.cell == "composed"]

    def using(self, *_: Any) -> AbstractContextManager[None]:
        """Does nothing: no model draws."""
        return nullcontext()

    def map(
        self,
        items: list[Item],
        work: Callable[[list[Item], Tensor, Tensor], list],
        show: bool = False,
    ) -> Iterator[Any]:
        """`work(chunk, images, magnitudes)` over all items, as `Sampler.map`; magnitudes: nan."""
        for start in range(0, len(items), self.batch):
            chunk = items[start : start + self.batch]
            pictures = [to_tensor(self.images[item])[None] for item in chunk]
            side = (self.side, self.side)
            images = torch.cat([resize(picture, side) for picture in pictures])
            yield from work(chunk, images, torch.full((len(chunk),), float("nan")))

    def round_trip(self, images: Tensor, bar: Bar | None = None) -> Tensor:
        """Images (B,3,S,S) in [0,1] after the autoencoder."""
        parts = []
        for part in images.split(AT_ONCE):
            parts.append(part if self.vae is None else round_trip(self.vae, part))
            if bar is not None:
                bar.update(len(part))
        return torch.cat(parts)
