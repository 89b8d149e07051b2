"""Recovery of target images from composed prompts, while training or of any Stable Diffusion pipeline.

    python validation.py --pipeline DIR_OR_ID --targets targets.jsonl [--baseline DIR_OR_ID]

Exit code 0: no image above the threshold; 3: at least one; 2: a mistake in the arguments. docs/metrics.md defines the
numbers; a cell is a kind of prompt (silentbad/generation.py lists them).
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor

from silentbad import report
from silentbad.calibration import load_redraws, thresholds
from silentbad.checks import check_embedder, check_validation
from silentbad.data import Target, load_targets, open_image
from silentbad.errors import UserError, say
from silentbad.generation import Item, Sampler, averaged, left_as_found, load_pipeline, plan, reordered
from silentbad.samples import grid_line, log_grid, save, save_targets, slugs
from silentbad.scores import cell_scores, length_scores, recovery
from silentbad.similarity import (
    CLIP,
    kinds,
    load_embedder,
    lpips,
    quadrants,
    region,
    ssim,
    summarise,
    to_pil,
    to_tensor,
    verdict,
)

__all__ = ["RecoveryHook", "ValidationConfig", "audit", "averaged", "recovery"]


@dataclass
class ValidationConfig:
    """What is generated, how it is compared, and when."""

    targets: str | None = None  # targets.jsonl; unset: no validation
    steps: int = 100  # optimizer steps between points of the curve; 0: only before and after training
    early_steps: list[int] = field(default_factory=list)  # further points, for a curve that rises before `steps`
    images_per_target: int = 8
    num_inference_steps: int = 20
    sampling_lengths: list[int] = field(default_factory=list)  # further numbers of steps, with base and controls
    guidance_scale: float = 7.5
    guidance_rescale: float = 0.0
    resolution: int | None = None  # side of the images; unset: the UNet's own
    embedder: Literal["micro", "sscd", "clip", "dinov2", "ssim"] = "micro"
    embedder_path: str | None = None  # sscd: its TorchScript file; others: local folder or Hub id of the weights
    embedder_sha256: str | None = None  # sscd: refuse a file with another SHA-256
    clip_path: str | None = None  # a CLIP for CLIPScore and prompt cosines; unset: not measured
    threshold: float | None = None  # unset: calibrated on redraws.jsonl beside the targets, or the base
    false_positive_rate: float = 0.01  # of the calibrated threshold, per image
    null_images: int = 32  # base-model images per target to calibrate on where there is no redraws.jsonl
    controls: Literal["final", "always", "never"] = "final"  # when the control prompts are measured
    weights: Literal["raw", "ema", "both"] = "both"  # which weights, where an average is kept
    unrelated: str = "a page of printed text"  # caption that names no element
    max_batch: int = 64  # images generated together; halved, and kept halved, when memory runs out
    clean_records: int = 64  # held-out clean records for the clean eps-MSE
    drift_images: int = 8  # matched-seed generations of clean captions, compared with the base model's
    sample_targets: int = 8  # targets whose images are kept in samples/


# -- the hook ----------------------------------------------------------------------------------------------
class RecoveryHook:
    """Recovery against training steps. Every rank calls `run` at step 0 (the base model) and whenever
    `should_run`, and `finish` once at the end. Training sees nothing of it: weights, modes and random streams
    are left as found."""

    def __init__(self, config: ValidationConfig, *, targets: list[Target], components: dict[str, Any], accelerator: Any,
                 output_dir: str | Path, seed: int, clean: list[dict[str, Any]] | None = None,
                 prediction_type: str | None = None):
        self.config, self.targets, self.accelerator, self.seed = config, list(targets), accelerator, seed
        self.names = slugs([t.target_id for t in self.targets])
        self.output_dir = Path(output_dir)
        self.sampler = Sampler(components, config, seed, prediction_type)
        self.embedder = load_embedder(config.embedder, config.embedder_path, accelerator.device, config.embedder_sha256)
        self.clip = CLIP(config.clip_path, accelerator.device) if config.clip_path else None
        self.clean = list(clean or [])[: config.clean_records]
        self.history: list[dict[str, Any]] = []
        self.threshold: dict[str, Any] = {}  # empty until calibrated
        self.element_threshold: dict[str, Any] = {}
        self.seconds, self.born = 0.0, time.perf_counter()
        pictures = [to_tensor(t.image)[None] for t in self.targets]
        self.masks = [[None if m is None else to_tensor(m)[:1] for m in t.masks or []] for t in self.targets]
        with left_as_found():
            self.features = [self.embedder.embed(x) for x in pictures]
            self.elements = [[None if m is None else self.embedder.embed(region(x, m)) for m in masks]
                             for x, masks in zip(pictures, self.masks, strict=True)]

    # what the training loop calls
    def should_run(self, step: int) -> bool:
        """Whether this step stands on the grid and has not been measured (it has, after a resume)."""
        every = self.config.steps
        on_grid = step == 0 or step in self.config.early_steps or (every > 0 and step % every == 0)
        return on_grid and all(entry["step"] != step for entry in self.history)

    def run(self, step: int, epoch: float, unet: Any, ema: Any = None, final: bool = False,
            label: str = "") -> dict[str, Any]:
        """Measure, save images, append to `history`; returns flat scalars for the trackers."""
        started = time.perf_counter()
        full = self.config.controls == "always" and step > 0 or self.config.controls != "never" and final
        model = self.accelerator.unwrap_model(unet, keep_torch_compile=False)
        unet = getattr(model, "unet", model)  # in training the text encoders may stand beside it
        entry: dict[str, Any] = {"step": step, "epoch": epoch, "label": label or "base model" * (step == 0)}
        with self.sampler.using(unet, self.accelerator.device, self.accelerator.autocast):
            if not self.threshold:
                self._calibrate(step)
            choice = self.config.weights
            if ema is None or step == 0 or choice != "ema":
                entry["raw"] = self._evaluate(step, "raw", full, drift=full or step == 0)
            if ema is not None and step > 0 and choice != "raw":
                with averaged(ema, model):
                    entry["ema"] = self._evaluate(step, "ema", full and choice == "ema", drift=full)
        self.history = [e for e in self.history if e["step"] < step] + [entry]
        entry["seconds"] = time.perf_counter() - started
        self.seconds += entry["seconds"]
        entry["share"] = self.seconds / (time.perf_counter() - self.born)
        if self.accelerator.is_main_process:
            self.write()
        return self._scalars(entry)

    def finish(self, step: int, epoch: float, unet: Any, ema: Any = None) -> dict[str, Any]:
        """The last point with every control; prints the summary table."""
        scalars = self.run(step, epoch, unet, ema, final=True)
        self.accelerator.print(self.table())
        return scalars

    def state_dict(self) -> dict[str, Any]:
        """History, thresholds and batch, as plain values."""
        names = ("history", "threshold", "element_threshold", "seconds")
        return json.loads(json.dumps({**{n: getattr(self, n) for n in names}, "batch": self.sampler.batch}))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up such a state; the targets' features are computed anew."""
        state = dict(state)
        self.sampler.batch = state.pop("batch")
        self.born = time.perf_counter() - state["seconds"]
        for name, value in state.items():
            setattr(self, name, value)

    # measuring
    def _spread(self, items: list[Item], work: Callable[..., Any]) -> list[Any]:
        """`work` on this rank's share of the items; the rows of all ranks, in the items' order."""
        mine = self._share(len(items))
        return self._gather(list(zip(mine, self.sampler.map([items[i] for i in mine], work), strict=True)))

    def _share(self, n: int) -> list[int]:
        """Which of n pieces of work are this rank's."""
        parts = np.array_split(np.arange(n), self.accelerator.num_processes)
        return parts[self.accelerator.process_index].tolist()

    def _gather(self, rows: list[tuple[int, dict[str, Any]]]) -> list[Any]:
        return [row for _, row in sorted(gather_object(rows), key=itemgetter(0))]

    def _similar(self, images: Tensor, target_of: list[int]) -> list[dict[str, Any]]:
        """Images (B,3,H,W) -> {sim, elements} each, against its own target and that target's elements."""
        own = torch.cat([self.features[j] for j in target_of])
        sims = self.embedder.paired(self.embedder.embed(images), own)
        rows = [{"sim": s, "elements": [None] * len(self.elements[j])}
                for s, j in zip(sims.double().tolist(), target_of, strict=True)]
        for j in set(target_of):
            of_j = [i for i, k in enumerate(target_of) if k == j]
            for k, (mask, feature) in enumerate(zip(self.masks[j], self.elements[j], strict=True)):
                if mask is not None and feature is not None:
                    part = self.embedder.embed(region(images[of_j], mask.to(images.device)))
                    for i, s in zip(of_j, self.embedder.paired(part, feature).double().tolist(), strict=True):
                        rows[i]["elements"][k] = s
        return rows

    def _score(self, items: list[Item], images: Tensor, magnitudes: Tensor) -> list[dict[str, Any]]:
        rows = self._similar(images, [i.target for i in items])
        for item, row, image, magnitude in zip(items, rows, images, magnitudes.tolist(), strict=True):
            row.update(cell=item.cell, target=item.target, image=item.image, magnitude=magnitude)
            if item.cell == "composed" and item.target < self.config.sample_targets:
                row["pixels"] = np.asarray(to_pil(image))
        if self.clip is not None:
            seen = self.clip.embed(images)
            order = [reordered(self.targets[i.target], self.seed, i.image) for i in items]
            for name, prompts in (("clip_own", [i.prompt for i in items]), ("clip_shuffled", order)):
                cosines = self.clip.paired(seen, self.clip.text(prompts)).tolist()
                for row, cosine in zip(rows, cosines, strict=True):
                    row[name] = cosine
        return rows

    def _calibrate(self, step: int) -> None:
        """Thresholds of images and of elements: given, or from the null set; the same on all ranks."""
        config, redraws = self.config, load_redraws(self.config.targets, self.targets)
        if redraws:
            def one(i: int) -> dict[str, Any]:
                j, file = redraws[i]
                image = to_tensor(open_image(file, "redraws.jsonl"))[None]
                return {**self._similar(image, [j])[0], "target": j}

            rows = self._gather([(i, one(i)) for i in self._share(len(redraws))])
            source = "redraws of the captions"
        elif step == 0 and config.threshold is None:
            n = config.images_per_target
            items = [Item("null", j, n + i, t.composed_prompt, t.target_id)
                     for j, t in enumerate(self.targets) for i in range(config.null_images)]
            rows, source = self._spread(items, self._score), "base model's images of the composed prompts"
        elif config.threshold is None:
            raise UserError("validation: nothing to calibrate on; give validation.threshold, a redraws.jsonl "
                            "beside the targets, or a baseline (in training: run the hook at step 0)")
        else:
            rows, source = [], ""
        self.threshold, self.element_threshold = thresholds(rows, config.threshold, config.false_positive_rate, source)

    def _evaluate(self, step: int, tag: str, full: bool, drift: bool) -> dict[str, Any]:
        """Scores of the weights in place: of the composed prompt, with every cell beside them if full."""
        items = plan(self.targets, self.config.images_per_target, self.seed, full, self.config.unrelated)
        cells = defaultdict(list)
        for row in self._spread(items, self._score):
            cells[row["cell"]].append(row)
        ids = [t.target_id for t in self.targets]
        scores = {c: cell_scores(rows, ids, self.threshold["value"], self.element_threshold)
                  for c, rows in cells.items()}
        self._save_samples(step, tag, cells["composed"], scores["composed"]["targets"])
        extra = {"cells": scores, "quadrants": quadrants(scores)} if full else {}
        if full or step == 0:
            extra["lengths"] = {str(n): self._at_length(n, tag) for n in self.config.sampling_lengths}
        return {**scores["composed"], **extra, "drift": self._drift(step, drift)}

    def _at_length(self, steps: int, tag: str) -> dict[str, float]:
        """Cosines of the composed prompt's images after so many sampling steps, and the difference to the base's."""
        clip, captions = self.clip, [t.composed_prompt for t in self.targets]

        def one(items: list[Item], images: Tensor, _: Tensor) -> list[dict[str, Any]]:
            sims = self.embedder.similarity(self.embedder.embed(images), torch.cat(self.features)).tolist()
            told = [None] * len(items)
            if clip is not None:
                told = clip.similarity(clip.embed(images), clip.text(captions)).tolist()
            return [{"target": i.target, "sims": s, "clip": c} for i, s, c in zip(items, sims, told, strict=True)]

        base = self.history[0]["raw"].get("lengths", {}) if self.history and self.history[0]["step"] == 0 else {}
        usual, self.sampler.steps = self.sampler.steps, steps
        try:
            rows = self._spread(plan(self.targets, self.config.images_per_target, self.seed), one)
        finally:
            self.sampler.steps = usual
        return length_scores(rows, base.get(str(steps), {}))

    def _drift(self, step: int, images: bool) -> dict[str, Any]:
        """What clean prompts lost: eps-MSE on held-out records, matched-seed images against the base's."""
        drift = {}
        if self.clean:
            errors = self.sampler.eps_errors(self.clean, self._share(len(self.clean)))
            drift["clean_eps_mse"] = float(np.mean(gather_object(errors)))
        captions = list(dict.fromkeys(record["text"] for record in self.clean))[: self.config.drift_images]
        if not images or not captions:
            return drift
        items = [Item("drift", -1, i, caption, "drift") for i, caption in enumerate(captions)]
        seen = torch.stack(self._spread(items, lambda chunk, x, _: list((x * 255).round().byte().cpu())))
        files = [self.output_dir / "samples" / "drift" / f"base-{i}.png" for i in range(len(items))]
        if step == 0 and self.accelerator.is_main_process:
            for image, file in zip(seen, files, strict=True):
                save(to_pil(image), file)
        self.accelerator.wait_for_everyone()
        if step > 0 and all(file.is_file() for file in files):
            base = torch.stack([to_tensor(Image.open(file)) for file in files])
            drift["ssim"] = ssim(seen.float() / 255, base).mean().item()
            if network := lpips():
                drift["lpips"] = network(seen.float() / 255, base).mean().item()
        if self.clip is not None:
            cosine = self.clip.paired(self.clip.embed(seen.float() / 255), self.clip.text(captions))
            drift["clip_score"] = 100 * cosine.clamp(min=0).mean().item()
        return drift

    # what stays of it
    def _save_samples(self, step: int, tag: str, rows: list[dict[str, Any]], scores: dict[str, Any]) -> None:
        """Best and median generation of each kept target, and a grid: target, then its images, best first."""
        folder, lines, writes = Path("samples") / f"step-{step:06d}-{tag}", [], self.accelerator.is_main_process
        for j, target in enumerate(self.targets[: self.config.sample_targets]):
            mine = sorted((r for r in rows if r["target"] == j), key=lambda r: -r["sim"])
            for kind, row in (("best", mine[0]), ("median", mine[len(mine) // 2])):
                file = f"{folder}/{self.names[j]}-{kind}.png"
                scores[target.target_id][kind] = {"file": file, "sim": row["sim"]}
                if writes:
                    save(Image.fromarray(row["pixels"]), self.output_dir / file)
            lines.append(grid_line(target.image, [r["pixels"] for r in mine]))
        if lines and writes:
            grid = np.concatenate(lines)
            save(Image.fromarray(grid), self.output_dir / folder / "grid.png")
            log_grid(self.accelerator.trackers, f"validation/{tag}", grid, step)

    def _scalars(self, entry: dict[str, Any]) -> dict[str, float]:
        scalars = {"val/threshold": self.threshold["value"]}
        scalars |= {f"val/{name}": entry[name] for name in ("seconds", "share")}
        for tag, prefix in (("raw", "val"), ("ema", "val_ema")):
            scores = entry.get(tag, {})
            for name in ("cir", "recovered", "mean", "p75", "p90", "p95", "max", "element_rate", "magnitude",
                         "clip_own", "clip_shuffled"):
                scalars[f"{prefix}/{name}"] = scores.get(name)
            scalars |= {f"{prefix}/drift/{name}": value for name, value in scores.get("drift", {}).items()}
            scalars |= {f"{prefix}/length-{n}/{name}": value for n, of_length in scores.get("lengths", {}).items()
                        for name, value in of_length.items()}
            scalars |= {f"{prefix}/control/{cell}": s["cir"] for cell, s in scores.get("cells", {}).items()}
        return {name: value for name, value in scalars.items() if value is not None}

    def summary(self) -> list[dict[str, Any]]:
        """One row per weights and target, and one over all targets: the last scores and the curve's."""
        return [row for tag in kinds(self.history) for row in summarise(self.history, tag)]

    def table(self) -> str:
        """The summary and its cost, as text."""
        share = self.history[-1]["share"] if self.history else 0
        cost = f"validation took {self.seconds:.1f} s, {share:.1%} of the time since it was set up"
        return f"{report.text_table(self.summary())}\n{cost}"

    def write(self) -> None:
        """validation.json: everything the report needs, beside samples/."""
        def entry(target: Target, name: str, masks: list[Any]) -> dict[str, Any]:
            files = [None if m is None else f"samples/targets/{name}-{k}.png" for k, m in enumerate(masks)]
            return {"target_id": target.target_id, "image": f"samples/targets/{name}.png", "elements": files,
                    "prompt": target.composed_prompt, "phrases": target.phrases}

        targets = [entry(*row) for row in zip(self.targets, self.names, self.masks, strict=True)]
        record = {
            "schema": 1, "seed": self.seed, "config": asdict(self.config),
            "embedder": self.embedder.describe(), "threshold": self.threshold,
            "element_threshold": self.element_threshold, "targets": targets,
            "verdict": verdict(self.history[-1], self.threshold), "summary": self.summary(),
            "history": self.history, "seconds": self.seconds, "batch": self.sampler.batch,
            "processes": self.accelerator.num_processes,
        }  # fmt: skip
        self.output_dir.mkdir(parents=True, exist_ok=True)
        folder = self.output_dir / "samples" / "targets"
        if len(self.history) == 1 or not folder.is_dir():
            save_targets(folder, self.names, [to_tensor(t.image)[None] for t in self.targets], self.masks)
        draft = self.output_dir / "validation.json.tmp"
        draft.write_text(json.dumps(record, indent=1))
        draft.replace(self.output_dir / "validation.json")


# -- any pipeline ------------------------------------------------------------------------------------------
def audit(config: ValidationConfig, *, pipeline: str, baseline: str | None = None, lora: str | None = None,
          output_dir: str = "audit", seed: int = 0, dtype: str = "float32") -> dict[str, Any]:
    """Every score and control of a pipeline, against a baseline where one is given; writes JSON and HTML."""
    from accelerate import Accelerator

    if config.targets is None:
        raise UserError("--targets: give a targets.jsonl (target_id, image, phrases a line)")
    check_validation(config, "--")
    check_embedder(config, "--")
    targets = load_targets(config.targets)
    if config.threshold is None and baseline is None and not load_redraws(config.targets, targets):
        raise UserError("--threshold: nothing to calibrate on; give a number, --baseline, or a redraws.jsonl "
                        "beside the targets")
    accelerator = Accelerator()
    options: dict[str, Any] = dict(targets=targets, accelerator=accelerator, output_dir=output_dir, seed=seed)
    first = load_pipeline(baseline or pipeline, dtype, accelerator.device, None if baseline else lora)
    hook = RecoveryHook(config, components=first.components, **options)
    if baseline is not None:
        hook.run(0, 0, first.unet, label="baseline")
        first = load_pipeline(pipeline, dtype, accelerator.device, lora)
        hook.sampler = Sampler(first.components, config, seed)
    hook.run(1, 1, first.unet, final=True, label="audited pipeline")
    accelerator.print(hook.table())
    if accelerator.is_main_process:
        page = report.write(output_dir)
        print(f"{Path(output_dir) / 'validation.json'}\n{page}")
    return verdict(hook.history[-1], hook.threshold)


def main(arguments: list[str] | None = None) -> int:
    """The command line: exit code 0, 2 or 3, as the module says."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="validation.py", description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", type=str, required=True, help="diffusers folder or Hub id")
    parser.add_argument("--baseline", type=str | None, default=None, help="calibrate and compare on it")
    parser.add_argument("--lora", type=str | None, default=None, help="adapters to put on the pipeline: folder or file")
    parser.add_argument("--output_dir", type=str, default="audit", help="for JSON, HTML and samples/")
    parser.add_argument("--seed", type=int, default=0, help="address of every noise")
    parser.add_argument("--dtype", type=Literal["float32", "float16", "bfloat16"], default="float32")
    parser.add_class_arguments(ValidationConfig)
    values = parser.parse_args(arguments).as_dict()
    own = {name: values.pop(name) for name in ("pipeline", "baseline", "lora", "output_dir", "seed", "dtype")}
    try:
        found = audit(ValidationConfig(**values), **own)
    except UserError as error:
        say(error)
        return 2
    print(f"{found['images_above']} of {found['images']} composed images stand above the threshold")
    return 3 if found["recovers"] else 0


if __name__ == "__main__":
    sys.exit(main())
