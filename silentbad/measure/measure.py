"""What a validation measures of the weights in place: similarities of generations, controls, drift."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from silentbad.data.images import open_image, to_pil, to_tensor
from silentbad.data.targets import Target
from silentbad.errors import UserError, warn
from silentbad.measure.counterfactuals import KINDS, SCENES, Masks, counterfactuals
from silentbad.measure.embedders import CLIP, Embedder, lpips, region, ssim
from silentbad.measure.generation import Item, Sampler, left_as_found, plan, reordered
from silentbad.measure.nearest import TrainingPictures
from silentbad.measure.record import ElementThreshold, Scores, Threshold
from silentbad.measure.samples import save
from silentbad.measure.scores import cell_scores, is_recovered, length_scores, quadrants
from silentbad.measure.settings import MeasureSettings
from silentbad.measure.statistics import detection
from silentbad.measure.thresholds import Redraw, load_redraws, thresholds
from silentbad.settings.types import off_default

# Where the null pictures come from, as the report says it.
REDRAWS = "redraws of the captions"
COUNTERFACTUALS = "counterfactuals drawn by the base model"
BASE = "base model's images of the prompts"


def null_source(
    config: MeasureSettings, targets: Sequence[Target], redraws: bool, base: bool = True, prefix: str = "validation."
) -> str:
    """Where the null pictures come from; "" where the threshold is given and there are none.

    `redraws`: whether there are some; `base`: whether the base model is at hand, which alone can draw nulls. Raises
    UserError, which begins with `prefix`, where what `calibration` asks for is not there.
    """
    asked, masked = config.calibration, any(m is not None for t in targets for m in t.masks or [])
    if asked == "redraws" and not redraws:
        raise UserError(f"{prefix}calibration: redraws needs a redraws.jsonl beside the targets")
    if asked == "counterfactuals" and not masked:
        raise UserError(f"{prefix}calibration: counterfactuals needs a mask for an element in targets.jsonl")
    if asked == "redraws" and "null_images" in off_default(config):
        raise UserError(f"{prefix}null_images: has no effect, since calibration redraws draws no nulls; leave it out")
    none = config.threshold is not None and asked == "auto" and not redraws
    idle = {"false_positive_rate", "null_images"} & {*off_default(config)}
    if idle and config.threshold is not None and (none or not masked):  # else elements are calibrated
        raise UserError(f"{prefix}{min(idle)}: calibrates a threshold, and one is given; leave one out")
    if redraws and asked in ("auto", "redraws"):
        return REDRAWS
    if none:
        return ""
    if not base and asked != "auto":
        raise UserError(f"{prefix}calibration: {asked} needs the base model: --baseline, or in training step 0")
    if not base:
        raise UserError(
            f"{prefix}threshold: nothing to calibrate on; give a number, --baseline, or a redraws.jsonl beside the "
            "targets (in training: run the hook at step 0)"
        )
    return COUNTERFACTUALS if asked == "counterfactuals" or (asked == "auto" and masked) else BASE


class Measure:
    """Generates images of every target over all ranks and compares them with the target and its elements.

    `config` is a ValidationConfig. The rows of an image hold its cell, target (index), number, similarities (whole and
    by element) and text-conditional magnitude; `pixels` (h,w,3) of the composed prompt's images where they are kept.
    """

    def __init__(
        self,
        config: MeasureSettings,
        targets: list[Target],
        sampler: Sampler,
        embedder: Embedder,
        clip: CLIP | None,
        accelerator: Any,
        seed: int,
        held_out: dict[str, list[dict[str, Any]]],
        training: Iterable[tuple[str, Tensor]],
        folder: Path,
    ):
        self.config, self.targets, self.sampler, self.embedder, self.clip = config, targets, sampler, embedder, clip
        self.accelerator, self.seed, self.held_out, self.folder = accelerator, seed, held_out, folder
        self.redraws = load_redraws(config.targets, targets)
        source = null_source(config, targets, bool(self.redraws), prefix=sampler.prefix)
        if source == REDRAWS and "null_images" in off_default(config):
            warn(f"{sampler.prefix}null_images: has no effect beside redraws.jsonl, which holds the null pictures")
        self.masks = [[None if m is None else to_tensor(m)[:1] for m in t.masks or []] for t in targets]
        pictures = [to_tensor(t.image)[None] for t in targets]
        with left_as_found():
            self.features = [embedder.reference(x) for x in pictures]
            self.training = TrainingPictures(training, embedder, sampler.side)
            self.elements = [
                [None if m is None else embedder.reference(x, m) for m in masks]
                for x, masks in zip(pictures, self.masks, strict=True)
            ]

    def take(self, sampler: Sampler) -> None:
        """Generate with another pipeline from now on."""
        self.sampler = sampler

    # ---- over the ranks
    def map_over_ranks(self, items: list[Item], work: Callable[..., Any]) -> list[Any]:
        """`work` on this rank's share of the items; the rows of all ranks, in the items' order."""
        mine = self.share(len(items))
        show = self.accelerator.is_local_main_process
        rows = self.sampler.map([items[i] for i in mine], work, show)
        return self.gather(list(zip(mine, rows, strict=True)))

    def share(self, n: int) -> list[int]:
        """Which of n pieces of work are this rank's."""
        parts = np.array_split(np.arange(n), self.accelerator.num_processes)
        return parts[self.accelerator.process_index].tolist()

    def gather(self, rows: list[tuple[int, Any]]) -> list[Any]:
        return [row for _, row in sorted(gather_object(rows), key=itemgetter(0))]

    # ---- similarities
    def similar(self, images: Tensor, target_of: list[int]) -> list[dict[str, Any]]:
        """Images (B,3,H,W) -> {target, sim, elements} each, against its own target and that target's elements."""
        rows: list[dict[str, Any]] = [{} for _ in target_of]
        for j in set(target_of):
            mine = [i for i, k in enumerate(target_of) if k == j]
            seen = self.embedder.embed(images[mine])
            sims = self.embedder.paired(seen, self.features[j]).double().tolist()
            columns = [self._of_element(images[mine], j, k) for k in range(len(self.elements[j]))]
            parts = [list(x) for x in zip(*columns, strict=True)] if columns else [[] for _ in mine]
            for i, s, p in zip(mine, sims, parts, strict=True):
                rows[i] = {"target": j, "sim": s, "elements": p}
                if not np.isfinite([x for x in (s, *p) if x is not None]).all():
                    name = self.targets[j].target_id
                    raise UserError(f"{self.embedder.describe()}: a similarity to target {name!r} is not finite")
        return rows

    def _of_element(self, images: Tensor, j: int, k: int) -> list[float | None]:
        """Similarities of the images' region to element k of target j; None without a mask."""
        mask, feature = self.masks[j][k], self.elements[j][k]
        if mask is None or feature is None:
            return [None] * len(images)
        seen = self.embedder.embed(region(images, mask.to(images.device)))
        return self.embedder.paired(seen, feature).double().tolist()

    def between(self, images: Tensor) -> list[list[float]]:
        """Similarities (B,B) of images to each other."""
        seen = self.embedder.embed(images)
        return self.embedder.similarity(seen, seen).double().tolist()

    def score(
        self, items: list[Item], images: Tensor, magnitudes: Tensor, nearest: bool = False
    ) -> list[dict[str, Any]]:
        """A row for each generation; those of the composed prompt with the `nearest` training picture if asked."""
        rows = self.similar(images, [i.target for i in items])
        for item, row, image, magnitude in zip(items, rows, images, magnitudes.tolist(), strict=True):
            row.update(cell=item.cell, image=item.image, magnitude=magnitude)
            if item.cell == "composed" and item.target < self.config.sample_targets:
                row["pixels"] = np.asarray(to_pil(image))
        if nearest and self.training and (own := [k for k, i in enumerate(items) if i.cell == "composed"]):
            for k, found in zip(own, self.training.nearest(images[own]), strict=True):
                rows[k]["nearest"] = found
        if self.clip is not None:
            seen = self.clip.embed(images)
            order = [reordered(self.targets[i.target], self.seed, i.image) for i in items]
            for name, prompts in (("clip_own", [i.prompt for i in items]), ("clip_shuffled", order)):
                cosines = self.clip.paired(seen, self.clip.text(prompts)).tolist()
                for row, cosine in zip(rows, cosines, strict=True):
                    row[name] = cosine
        return rows

    # ---- thresholds
    def calibrate(self, step: int) -> tuple[Threshold, ElementThreshold]:
        """Thresholds of the whole and of elements: given, or from the null set; the same on all ranks."""
        config, rows = self.config, list[Any]()
        source = null_source(config, self.targets, bool(self.redraws), step == 0, self.sampler.prefix)
        if source == REDRAWS:
            rows = self._of_redraws(self.redraws)
        elif source == COUNTERFACTUALS:
            rows = self._of_counterfactuals(self.masks, KINDS)
        elif source == BASE:
            rows = self._of_counterfactuals([[] for _ in self.targets], SCENES)
        return thresholds(rows, config.threshold, config.false_positive_rate, source)

    def _of_counterfactuals(self, masks: Masks, kinds: Sequence[str]) -> list[Any]:
        """Null rows of pictures that the base draws, whole ones and elements inside their masks; kept in the cache."""
        found = counterfactuals(
            self.sampler,
            self.targets,
            masks,
            self.config.null_images,
            self.seed,
            kinds=kinds,
            cache=Path(datasets.config.HF_DATASETS_CACHE) / "silentbad",
            share=self.share,
            show=self.accelerator.is_local_main_process,
            say=self.accelerator.print,
        )
        rows = []
        for null in found:
            row = self.similar(null.image[None].to(self.accelerator.device), [null.target])[0]
            rows.append((null.number, {**row, "kind": null.kind, "changed": null.changed}))
        return self.gather(rows)

    def _of_redraws(self, redraws: list[Redraw]) -> list[Any]:
        """Null rows, in batches of one target and size."""
        mine, rows = self.share(len(redraws)), []
        batches: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, i in enumerate(mine):
            batches[redraws[i].target, place // self.config.max_batch].append(i)
        for (target, _), part in batches.items():
            alike: dict[torch.Size, dict[int, Tensor]] = defaultdict(dict)
            for i in part:
                image = to_tensor(open_image(redraws[i].file, "redraws.jsonl"))
                alike[image.shape][i] = image
            for images in alike.values():
                similar = self.similar(torch.stack([*images.values()]), [target] * len(images))
                for i, row in zip(images, similar, strict=True):
                    rows.append((i, {**row, "kind": redraws[i].kind, "changed": redraws[i].changed}))
        return self.gather(rows)

    # ---- scores
    def evaluate(
        self,
        step: int,
        full: bool,
        drift: bool,
        threshold: Threshold,
        element_threshold: ElementThreshold,
        base_lengths: dict[str, dict[str, float]],
    ) -> tuple[Scores, list[dict[str, Any]]]:
        """Scores of the weights in place: of the composed prompt, with every cell beside them if full; its rows."""
        images, unrelated = self.config.images_per_target, self.config.unrelated
        items = plan(self.targets, images, self.seed, full, unrelated, described=step == 0)
        few = images if full or step == 0 else self.config.first_images or images
        counts = partial(is_recovered, threshold=threshold, element_threshold=element_threshold)
        items, rows = self.until_recovered(items, few, partial(self.score, nearest=full or step == 0), counts)
        cells: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            cells[row["cell"]].append(row)
        if full:
            self._compare_with_each_other(cells["composed"])
        ids = [t.target_id for t in self.targets]
        scores = {cell: cell_scores(rows, ids, threshold, element_threshold) for cell, rows in cells.items()}
        lengths = None
        if full or step == 0:
            lengths = {str(n): self.at_length(n, base_lengths) for n in self.config.sampling_lengths}
        changes, clean, clean_magnitudes = self.drift(step, drift)
        for row in cells["composed"]:
            row["recovered"] = counts(row)
        magnitudes = [row["magnitude"] for row in cells["composed"]]
        composed = [item for item in items if item.cell == "composed"] if clean else []
        found = Scores(
            **vars(scores["composed"]),
            cells=scores if full or len(scores) > 1 else None,
            quadrants=quadrants(scores) if full else None,
            lengths=lengths,
            drift=changes,
            detection=detection(magnitudes, clean_magnitudes),
            anisotropy=detection(self.alignments(composed), self.alignments(clean)),
        )
        return found, cells["composed"]

    def until_recovered(
        self, items: list[Item], few: int, work: Callable[..., Any], counts: Callable[..., bool]
    ) -> tuple[list[Item], list[Any]]:
        """Each target's `few` first images and their rows; all of them where one of the first counts."""
        first, others = ([item for item in items if (item.image < few) is early] for early in (True, False))
        rows = self.map_over_ranks(first, work)
        if not others or not any(map(counts, rows)):
            return first, rows
        return first + others, rows + self.map_over_ranks(others, work)

    def _compare_with_each_other(self, rows: list[dict[str, Any]]) -> None:
        """Add `between` to the rows of each target: how alike its images are to each other."""
        for j in {row["target"] for row in rows if "pixels" in row}:
            mine = [row for row in rows if row["target"] == j]
            images = torch.stack([torch.tensor(row["pixels"]).permute(2, 0, 1).float() / 255 for row in mine])
            for row, similarities in zip(mine, self.between(images), strict=True):
                row["between"] = similarities

    def at_length(self, steps: int, base: dict[str, dict[str, float]]) -> dict[str, float]:
        """Cosines of the composed prompt's images after so many sampling steps, and the difference to the base's."""
        clip, captions = self.clip, [t.composed_prompt for t in self.targets]

        def one(items: list[Item], images: Tensor, _: Tensor) -> list[dict[str, Any]]:
            sims = self.embedder.similarity(self.embedder.embed(images), torch.cat(self.features)).tolist()
            cosines = [None] * len(items)
            if clip is not None:
                cosines = clip.similarity(clip.embed(images), clip.text(captions)).tolist()
            return [{"target": i.target, "sims": s, "clip": c} for i, s, c in zip(items, sims, cosines, strict=True)]

        with self.sampler.with_other(steps=steps):
            rows = self.map_over_ranks(plan(self.targets, self.config.images_per_target, self.seed), one)
        return length_scores(rows, base.get(str(steps), {}))

    def alignments(self, items: list[Item]) -> list[float]:
        """The alignment of guidance (anisotropy) at each item's prompt and noise."""
        mine = self.share(len(items))
        return self.gather(list(zip(mine, self.sampler.alignments([items[i] for i in mine]), strict=True)))

    def errors(self) -> dict[str, float]:
        """eps-MSE on the records of each role that were held out. Raises UserError where one is not finite."""
        found = {}
        for role, records in self.held_out.items():
            mine = self.sampler.eps_errors(records, self.share(len(records)), f"validation/{role}")
            if errors := gather_object(mine):
                if not np.isfinite(errors).all():
                    raise self.sampler.not_finite(f"the error on held-out {role} records is not finite")
                found[f"{role}_eps_mse"] = float(np.mean(errors))
        return found

    def drift(self, step: int, images: bool) -> tuple[dict[str, Any], list[Item], list[float]]:
        """What clean prompts lost: eps-MSE on held-out records, matched-seed images against the base's; and those
        images with their text-conditional magnitudes."""
        drift: dict[str, Any] = self.errors()
        texts = dict.fromkeys(record["text"] for record in self.held_out.get("clean", []))
        captions = list(texts)[: self.config.drift_images]
        if not images or not captions:
            return drift, [], []
        items = [Item("drift", -1, i, caption, "drift") for i, caption in enumerate(captions)]

        def kept(chunk: list[Item], x: Tensor, magnitudes: Tensor) -> list[tuple[Tensor, float]]:
            return list(zip((x * 255).round().byte().cpu(), magnitudes.tolist(), strict=True))

        rows = self.map_over_ranks(items, kept)
        seen = torch.stack([picture for picture, _ in rows])
        files = [self.folder / "samples" / "drift" / f"base-{i}.png" for i in range(len(items))]
        if step == 0 and self.accelerator.is_main_process:
            for image, file in zip(seen, files, strict=True):
                save(to_pil(image), file)
        self.accelerator.wait_for_everyone()
        if step > 0 and all(file.is_file() for file in files):
            base = torch.stack([to_tensor(open_image(file, "samples/drift")) for file in files])
            drift["ssim"] = ssim(seen.float() / 255, base).mean().item()
            if (distance := lpips(seen.float() / 255, base)) is not None:
                drift["lpips"] = distance
        if self.clip is not None:
            cosine = self.clip.paired(self.clip.embed(seen.float() / 255), self.clip.text(captions))
            drift["clip_score"] = 100 * cosine.clamp(min=0).mean().item()
        return drift, items, [magnitude for _, magnitude in rows]
