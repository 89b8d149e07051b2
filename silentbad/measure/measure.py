"""The measurements of a validation on the current weights: similarities of generations, controls,
errors on held-out records, and what is kept on unrelated prompts."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from silentbad.data.images import open_image, resize, to_pil, to_tensor
from silentbad.data.targets import Target
from silentbad.distributed.main_process import on_main
from silentbad.errors import UserError, warn
from silentbad.measure import kept
from silentbad.measure.embedders import CLIP, Embedder
from silentbad.measure.generation import Item, Sampler, left_as_found
from silentbad.measure.intervals import detection
from silentbad.measure.limit import FOLDER, kept_by, kept_share
from silentbad.measure.nearest import TrainingPicture, TrainingPictures
from silentbad.measure.record import ORDERS, ElementThreshold, Kept, Scores, Threshold
from silentbad.measure.redraws import load_redraws, uses_redraws
from silentbad.measure.samples import save
from silentbad.measure.scores import cell_scores, is_recovered
from silentbad.measure.weight_change import Base, stage_sizes
from silentbad.settings.validation import ValidationConfig

# references: the target's file, and what the autoencoder leaves of it
RAW = "raw"
DECODED = "decoded"


OfBase = tuple[Tensor, list[kept.Shown]]  # its pictures of the unrelated prompts, what they show


class ComparedMasks(NamedTuple):
    """The masks (1,h,w) inside which pictures are compared with a target: for the whole (None: all
    of it), and for each element."""

    whole: Tensor | None
    elements: Sequence[Tensor | None]


class References(NamedTuple):
    """Features (1,...) of each target, and of each of its elements (None without a mask)."""

    wholes: list[Tensor]
    elements: list[list[Tensor | None]]


class Measure:
    """Compares images of every target, generated over all ranks, with the target and its elements.

    A row of an image holds its cell, target (index), number, similarities (whole and by element),
    text-conditional magnitude, and `pixels` (h,w,3) of the prompts in ORDERS where they are kept."""

    def __init__(
        self,
        *,
        config: ValidationConfig,
        targets: list[Target],
        sampler: Sampler,
        embedder: Embedder,
        clip: CLIP | None,
        accelerator: Any,
        held_out: dict[str, list[dict[str, Any]]],
        training: Iterable[TrainingPicture],
        folder: Path,
        cache_dir: str | None = None,
        unrelated: Sequence[str] = (),
        judge: kept.Judge | None = None,
        base: Base | None = None,
    ):
        self.config = config
        self.targets = targets
        self.sampler = sampler
        self.embedder = embedder
        self.clip = clip
        self.accelerator = accelerator
        self.held_out = held_out
        self.folder = folder
        self.cache_dir = cache_dir
        self.redraws = load_redraws(config.targets, targets)
        self.uses_redraws = uses_redraws(config, targets, bool(self.redraws), sampler.prefix)
        self.masks = [
            [None if mask is None else to_tensor(mask)[:1] for mask in target.masks or []]
            for target in targets
        ]
        self.compared = [ComparedMasks(*embedder.compared_masks(masks)) for masks in self.masks]
        # the reference is the target's file for renders of a world (with redraws) and for given
        # pictures without a pipeline; else the file after the autoencoder, as for photographs
        decodes = not self.uses_redraws and sampler.decodes
        self.reference = DECODED if decodes else RAW
        self.training = TrainingPictures(training, embedder, sampler.side)
        self.unrelated = list(unrelated)  # prompts on which is measured what training keeps
        self.judge = None if judge is None else (judge, str(config.judge))
        self.base = base  # the weights before training, where they can be read
        self._of_base: OfBase | None = None
        self._references: dict[str, References] = {}

    # ---- over the ranks
    def map_over_ranks(self, items: list[Item], work: Callable[..., Any]) -> list[Any]:
        """`work` on this rank's share of the items; the rows of all ranks, in the items' order."""
        places = self.share(len(items))
        show = self.accelerator.is_local_main_process
        rows = self.sampler.map([items[i] for i in places], work, show)
        return self.gather(list(zip(places, rows, strict=True)))

    def share(self, n: int) -> list[int]:
        """Which of n pieces of work are this rank's."""
        parts = np.array_split(np.arange(n), self.accelerator.num_processes)
        return parts[self.accelerator.process_index].tolist()

    def gather(self, rows: list[tuple[int, Any]]) -> list[Any]:
        return [row for _, row in sorted(gather_object(rows), key=itemgetter(0))]

    # ---- similarities
    def references(self, kind: str) -> References:
        """Features of the targets and of their elements: of their files, or of what the autoencoder
        leaves of them at the side of the images."""
        if kind not in self._references:
            pictures = [to_tensor(target.image)[None] for target in self.targets]
            if kind == DECODED:  # at the side of the images, as training sees them
                side = (self.sampler.side, self.sampler.side)
                pictures = [self.sampler.round_trip(resize(p, side)) for p in pictures]
            with left_as_found():
                wholes = [
                    self.embedder.reference(picture, whole)
                    for picture, (whole, _) in zip(pictures, self.compared, strict=True)
                ]
                elements = [
                    [None if m is None else self.embedder.reference(picture, m) for m in masks]
                    for picture, (_, masks) in zip(pictures, self.compared, strict=True)
                ]
            self._references[kind] = References(wholes, elements)
        return self._references[kind]

    def similar(self, images: Tensor, target_of: list[int]) -> list[dict[str, Any]]:
        """Images (B,3,H,W) -> {target, sim, elements, raw, decoded} each, against its own target
        and that target's elements."""
        rows: list[dict[str, Any]] = [{} for _ in target_of]
        for j in set(target_of):
            places = [i for i, target in enumerate(target_of) if target == j]
            images_of_target = images[places]
            whole = self.compared[j].whole
            features = (
                self.embedder.embed(images_of_target)
                if whole is None
                else self.embedder.of_region(images_of_target, whole.to(images.device))
            )
            both = {
                kind: self.embedder.paired(features, self.references(kind).wholes[j])
                .double()
                .tolist()
                for kind in (RAW, DECODED)
            }
            columns: list[Sequence[float | None]] = [
                [None] * len(places) if mask is None else self._of_element(images_of_target, j, k)
                for k, mask in enumerate(self.compared[j].elements)
            ]
            for n, i in enumerate(places):
                elements = [column[n] for column in columns]
                sims = {kind: values[n] for kind, values in both.items()}
                rows[i] = {"target": j, "sim": sims[self.reference], "elements": elements} | sims
                similarities = [x for x in (rows[i]["sim"], *elements) if x is not None]
                if not np.isfinite(similarities).all():
                    raise UserError(
                        f"{self.embedder.describe()}: a similarity to target "
                        f"{self.targets[j].target_id!r} is not finite"
                    )
        return rows

    def _of_element(self, images: Tensor, j: int, k: int) -> list[float]:
        """Similarities of the images' region to element k of target j, which has a mask."""
        mask = self.compared[j].elements[k]
        feature = self.references(self.reference).elements[j][k]
        assert mask is not None and feature is not None
        features_of_region = self.embedder.of_region(images, mask.to(images.device))
        return self.embedder.paired(features_of_region, feature).double().tolist()

    def score(
        self, items: list[Item], images: Tensor, magnitudes: Tensor, nearest: bool = False
    ) -> list[dict[str, Any]]:
        """A row for each generation; with the `nearest` training picture if asked."""
        rows = self.similar(images, [i.target for i in items])
        for item, row, image, magnitude in zip(items, rows, images, magnitudes, strict=True):
            row.update(cell=item.cell, image=item.image, magnitude=magnitude.item())
            if item.cell in ORDERS and item.target < self.config.sample_targets:
                row["pixels"] = np.asarray(to_pil(image))
        composed = [k for k, item in enumerate(items) if item.cell == "composed"]
        if nearest and self.training.shown and composed:
            trip = self.sampler.round_trip if self.reference == DECODED else None
            most_alike = self.training.nearest(images[composed], trip)
            for k, named in zip(composed, most_alike, strict=True):
                rows[k]["nearest"] = named
        return rows

    # ---- scores
    def evaluate(
        self,
        step: int,
        tag: str,
        threshold: Threshold,
        element_threshold: ElementThreshold,
        *,
        full: bool,
        unrelated: bool,
        final: bool,
    ) -> tuple[Scores, dict[str, list[dict[str, Any]]]]:
        """(scores, rows of images by cell in ORDERS) of the current weights, whose kind is `tag`.
        `full`: of every cell; `unrelated`: also what is kept on the unrelated prompts."""
        config = self.config
        whole = full or step == 0
        images = config.images_per_target
        items = self.sampler.plan(self.targets, full, described=step == 0)
        few = images if whole else config.first_images or images
        counts = partial(is_recovered, threshold=threshold, element_threshold=element_threshold)
        items, rows = self.until_recovered(items, few, partial(self.score, nearest=whole), counts)
        cells: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            cells[row["cell"]].append(row)
        ids = [t.target_id for t in self.targets]
        scores = {
            cell: cell_scores(rows, ids, threshold, element_threshold)
            for cell, rows in cells.items()
        }
        errors = self.errors()
        clean_magnitudes: list[float] = []
        what_is_kept = None
        if unrelated and self.unrelated:
            pictures, clean_magnitudes = self.draw_unrelated()
            what_is_kept = self.compare_unrelated(step, tag, pictures, element_threshold, final)
        for row in cells["composed"]:
            row["recovered"] = counts(row)
        magnitudes = [row["magnitude"] for row in cells["composed"]]
        scores_of_weights = Scores(
            **vars(scores["composed"]),
            cells=scores if full or len(scores) > 1 else None,
            drift=errors,
            detection=detection(magnitudes, clean_magnitudes),
            kept=what_is_kept,
        )
        return scores_of_weights, {cell: cells[cell] for cell in ORDERS if cell in cells}

    def until_recovered(
        self, items: list[Item], few: int, work: Callable[..., Any], counts: Callable[..., bool]
    ) -> tuple[list[Item], list[Any]]:
        """(items, rows) of the first `few` images of each target; if any of these is recovered
        (`counts`), of all images."""
        first = [item for item in items if item.image < few]
        others = [item for item in items if item.image >= few]
        rows = self.map_over_ranks(first, work)
        if not others or not any(map(counts, rows)):
            return first, rows
        return first + others, rows + self.map_over_ranks(others, work)

    def errors(self) -> dict[str, float]:
        """eps-MSE on held-out records by role. Raises UserError where one is not finite."""
        means = {}
        for role, records in self.held_out.items():
            errors_of_rank = self.sampler.eps_errors(
                records, self.share(len(records)), f"validation/{role}"
            )
            if errors := gather_object(errors_of_rank):
                if not np.isfinite(errors).all():
                    raise self.sampler.not_finite(
                        f"the error on held-out {role} records is not finite"
                    )
                means[f"{role}_eps_mse"] = float(np.mean(errors))
        return means

    # ---- what is kept
    def draw_unrelated(self) -> tuple[Tensor, list[float]]:
        """Images of the unrelated prompts as bytes (N,3,H,W), and their text-conditional
        magnitudes."""
        name = "unrelated prompt"
        items = [
            Item(cell=name, target=-1, image=i, prompt=prompt, address=name)
            for i, prompt in enumerate(self.unrelated)
        ]
        rows = self.map_over_ranks(
            items,
            lambda _, x, magnitudes: list(
                zip((x * 255).round().byte().cpu(), magnitudes.tolist(), strict=True)
            ),
        )
        pictures = torch.stack([picture for picture, _ in rows])
        return pictures, [magnitude for _, magnitude in rows]

    def compare_unrelated(
        self,
        step: int,
        tag: str,
        pictures: Tensor,
        element_threshold: ElementThreshold,
        final: bool,
    ) -> Kept | None:
        """What these pictures of the unrelated prompts keep of the base's; the same on all ranks.
        None where the base's pictures are missing.

        Raises UserError where a limit on what is kept cannot be measured."""
        if self.accelerator.is_main_process:
            for i, picture in enumerate(pictures):
                save(to_pil(picture), self._unrelated_file("base" if step == 0 else tag, i))
        self.accelerator.wait_for_everyone()
        shown = self.shown(pictures, element_threshold)
        if step == 0:
            self._of_base = (pictures, shown)
        elif self._of_base is None:
            self._of_base = self._read_base(element_threshold)
        if self._of_base is None:
            return None
        of_base = self._of_base

        def compared() -> Kept:
            with left_as_found():
                return self._compared(pictures, shown, *of_base, final)

        return on_main(self.accelerator.is_main_process, compared)

    def _read_base(self, element_threshold: ElementThreshold) -> OfBase | None:
        """The base's pictures of the unrelated prompts that a run has saved, and what they show;
        None, with a warning, where they are missing. Raises UserError where a limit needs them."""
        files = [self._unrelated_file("base", i) for i in range(len(self.unrelated))]
        if not all(file.is_file() for file in files):
            missing = f"the base's pictures are missing in {self.folder / FOLDER}"
            if self.config.keep is not None:
                raise UserError(
                    f"{self.sampler.prefix}keep: {missing}; start anew, or leave it out"
                )
            warn(f"what is kept is not measured: {missing}")
            return None
        opened = [to_tensor(open_image(file, FOLDER)) for file in files]
        base = (torch.stack(opened) * 255).round().byte()
        return base, self.shown(base, element_threshold)

    def _compared(
        self,
        pictures: Tensor,
        shown: list[kept.Shown],
        base: Tensor,
        shown_base: list[kept.Shown],
        final: bool,
    ) -> Kept:
        """What is kept. Raises UserError where it cannot be measured."""
        prompts = self.unrelated
        key = f"{self.sampler.prefix}judge"
        by = kept_by(self.config)
        changes = kept.change(pictures, base, prompts, self.embedder)
        of_words = kept.words(self.judge, self.clip, prompts, pictures, base, key)
        what_is_kept = kept.summed_up(prompts, changes, shown, shown_base, of_words)
        if self.base is not None and (final or by == "size"):
            what_is_kept.size = stage_sizes(self._modules(), self.base)
        if self.config.keep is not None and kept_share(what_is_kept, by) is None:
            why = {
                "bleeding": "no element has a mask",
                "size": "the base's weights cannot be read from one safetensors file",
            }.get(by, f"the base's value of {by} is 0 or missing")
            raise UserError(f"{self.sampler.prefix}keep: {why}; keep by something else (keep_by)")
        return what_is_kept

    def _modules(self) -> dict[str, Any]:
        """The components with trainable parameters, by their names in the pipeline."""
        family = self.sampler.family
        names = (family.backbone, *family.encoders)
        modules = {name: getattr(self.sampler.pipe, name, None) for name in names}
        return {
            name: module
            for name, module in modules.items()
            if module is not None and any(p.requires_grad for p in module.parameters())
        }

    def _unrelated_file(self, tag: str, i: int) -> Path:
        return self.folder / FOLDER / f"{tag}-{i}.png"

    def shown(self, pictures: Tensor, element_threshold: ElementThreshold) -> list[kept.Shown]:
        """For each picture, whether any element reaches its threshold anywhere in it, and the best
        similarity. Empty where no element has a mask."""
        places = self.share(len(pictures))
        images = kept.as_images(pictures[places]).to(self.accelerator.device)
        side = min(kept.SIDE, pictures.shape[-1])
        best = np.full(len(places), -np.inf)
        passes = np.full(len(places), False)
        with left_as_found():
            small = resize(images, (side, side)).cpu() if places else images
            for j, masks in enumerate(self.masks if places else ()):
                picture = resize(to_tensor(self.targets[j].image)[None], (side, side))[0]
                for k, mask in enumerate(masks):
                    if mask is None:
                        continue
                    small_mask = resize(mask[None].float(), (side, side))[0]
                    similarities = self._anywhere(images, small, picture, small_mask, j, k)
                    best = np.maximum(best, similarities)
                    passes |= np.array(similarities) >= element_threshold.of(j, k)
        rows = [kept.Shown(*row) for row in zip(passes.tolist(), best.tolist(), strict=True)]
        of_all = self.gather(list(zip(places, rows, strict=True)))
        return of_all if any(m is not None for masks in self.masks for m in masks) else []

    def _anywhere(
        self, images: Tensor, small: Tensor, picture: Tensor, mask: Tensor, j: int, k: int
    ) -> list[float]:
        """The highest similarity of each image to an element, wherever it lies."""
        similarity = partial(self._of_element, j=j, k=k)
        similarities: list[float] = []
        parts = (images.split(kept.AT_ONCE), small.split(kept.AT_ONCE))
        for part, small_part in zip(*parts, strict=True):
            similarities += kept.similarities_anywhere(part, small_part, picture, mask, similarity)
        return similarities
