"""Recovery of target images from composed prompts, while training or of any Stable Diffusion
pipeline.

    python validation.py --pipeline DIR_OR_ID --targets targets.jsonl [--baseline DIR_OR_ID]
    python validation.py --pictures DIR --targets targets.jsonl [--pipeline DIR_OR_ID]

Exit code 0: not recovered, or in part; 3: recovered; 4: undecided; 2: a mistake. Numbers:
docs/metrics.md."""

from silentbad.settings import startup
from silentbad.settings.types import check_values
from silentbad.settings.validation import Audit, ValidationConfig, check_files

if __name__ == "__main__":  # report a mistake before the slow imports below
    OPTIONS = startup.early(startup.options, Audit, None, __doc__)

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from PIL import Image

from silentbad import owned
from silentbad.data.images import to_tensor
from silentbad.data.targets import Target, check_prompts, load_targets
from silentbad.device import explain_out_of_memory, larger_device
from silentbad.distributed.start import start
from silentbad.errors import UserError, exit_with, warn
from silentbad.files import check_writable
from silentbad.loop.hooks import Hook
from silentbad.measure.calibrate import calibrate
from silentbad.measure.embedders import CLIP, embedder_of_targets
from silentbad.measure.generation import Sampler
from silentbad.measure.given import GivenPictures, given_pictures
from silentbad.measure.kept import load_judge, unrelated_prompts
from silentbad.measure.limit import Limit
from silentbad.measure.measure import Measure
from silentbad.measure.nearest import TrainingPicture
from silentbad.measure.prompts import on_grid
from silentbad.measure.record import (
    IN_PART,
    NAME,
    NOT_RECOVERED,
    RECOVERED,
    UNDECIDED,
    ElementThreshold,
    Measurement,
    Picture,
    Record,
    Scores,
    SummaryRow,
    TargetEntry,
    TargetRange,
    Threshold,
    Verdict,
    decode,
    encode,
)
from silentbad.measure.redraws import load_redraws, uses_redraws
from silentbad.measure.samples import (
    element_file,
    grid_line,
    image_file,
    log_grid,
    save,
    save_targets,
    slugs,
    stacked,
    target_file,
)
from silentbad.measure.scores import (
    kinds,
    minus_placebo,
    placebo_run,
    scalars,
    settled,
    summarise,
)
from silentbad.measure.verdict import verdict_of
from silentbad.measure.weight_change import Base, base_modules
from silentbad.model.averaging import averaged
from silentbad.model.denoiser import backbone_in
from silentbad.model.gate import Source
from silentbad.model.pipeline import load_autoencoder, load_pipeline, vae_factor
from silentbad.model.registry import backbone_of
from silentbad.report import run_report
from silentbad.report.evidence import answer, kept_sentence, range_lines

EXIT_CODES = {NOT_RECOVERED: 0, IN_PART: 0, RECOVERED: 3, UNDECIDED: 4}

__all__ = ["Audit", "RecoveryHook", "ValidationConfig", "audit", "averaged"]


# -- the hook --------------------------------------------------------------------------------------
class RecoveryHook(Hook):
    """Measures recovery during training. Every rank calls `run` at step 0 (the base model),
    whenever `should_run` is true, and at the end. Training is not affected: weights, modes and
    random streams are restored."""

    def __init__(
        self,
        config: ValidationConfig,
        *,
        targets: list[Target],
        components: dict[str, Any],
        accelerator: Any,
        output_dir: str | Path,
        seed: int,
        # records that are not trained on, by role
        held_out: dict[str, list[dict[str, Any]]] | None = None,
        training: Iterable[TrainingPicture] = (),  # some pictures that are trained on
        estimated: Sequence[str] = (),  # targets whose masks were estimated from the data
        prediction_type: str | None = None,
        # the pipeline's name in an audit, for the error where images are not finite
        refuses: str | None = None,
        # for similarities of null pictures; the Hugging Face cache when unset
        cache_dir: str | None = None,
        base: Base | None = None,  # the weights before training, where they can be read
        pictures: GivenPictures | None = None,  # measured in place of a model's images
    ):
        self.config = config
        self.targets = list(targets)
        self.accelerator = accelerator
        self.seed = seed
        self.names = slugs([t.target_id for t in self.targets])
        self.output_dir = Path(output_dir)
        self.embedder = embedder_of_targets(config, self.targets, accelerator.device)
        sampler: Any = pictures or Sampler(
            components=components,
            config=config,
            seed=seed,
            prediction_type=prediction_type,
            refuses=refuses,
        )
        clip = None
        if config.clip_path:
            try:
                clip = CLIP(config.clip_path, accelerator.device)
            except UserError as error:
                raise UserError(f"{sampler.prefix}clip_path: {error}") from None
        measured = {
            role: records[: config.clean_records] for role, records in (held_out or {}).items()
        }
        self.measure = Measure(
            config=config,
            targets=self.targets,
            sampler=sampler,
            embedder=self.embedder,
            clip=clip,
            accelerator=accelerator,
            held_out=measured,
            training=training,
            folder=self.output_dir,
            cache_dir=cache_dir,
            unrelated=unrelated_prompts(
                config,
                self.targets,
                [record["text"] for record in measured.get("clean", [])],
                sampler.tokenizer,
            ),
            judge=load_judge(config, sampler.prefix),
            base=base,
        )
        self.limit = Limit.of(config)
        self.placebo = None
        if config.placebo is not None:
            ids = [t.target_id for t in targets]
            key = f"{sampler.prefix}placebo"
            self.placebo = placebo_run(config.placebo, ids, self.embedder.describe(), key)
        self.history: list[Measurement] = []
        self.threshold: Threshold | None = None  # until calibrated
        self.element_threshold: ElementThreshold | None = None
        self.ranges: list[TargetRange] = []
        self.estimated = estimated
        self.seconds = 0.0  # of measuring
        self.born = time.perf_counter()  # minus the time before a resume

    # what the training loop calls
    def should_run(self, step: int, asked: bool = False, final: bool = False) -> bool:
        """Whether to measure: on the grid or if `asked`, unless measured; always if final."""
        return final or (asked or on_grid(self.config, step)) and not self.measured(step)

    def measured(self, step: int) -> bool:
        """Whether this step was measured."""
        return any(entry.step == step for entry in self.history)

    def stops(self) -> str | None:
        """The reason to end training after the last measurement; None where it goes on."""
        points = self.config.settled_after
        if settled(self.history, points):
            return f"recovery has lasted for {points} points of the curve"
        return self.limit.broken(self.history[-1]) if self.limit and self.history else None

    def keeps(self) -> bool:
        """Whether the last measurement is within the limit; True where there is no limit."""
        return self.limit is None or self.limit.holds(self.history[-1])

    def run(
        self,
        step: int,
        epoch: float,
        unet: Any,
        ema: Any = None,
        final: bool = False,
        label: str = "",
    ) -> dict[str, Any]:
        """Measure, save images, append to `history`; returns flat scalars for the trackers.

        `unet` is None where pictures are given."""
        started = time.perf_counter()
        controls = self.config.controls
        full = (controls == "always" and step > 0) or (controls != "never" and final)
        model: Any = None
        if unet is not None:  # in training the model may also hold the text encoders
            model = self.accelerator.unwrap_model(unet, keep_torch_compile=False)
            unet = backbone_in(model)
        entry = Measurement(step, epoch, label or "base model" * (step == 0))
        with self.sampler.using(unet, self.accelerator.device, self.accelerator.autocast, step):
            if self.threshold is None:
                self.threshold, self.element_threshold, self.ranges = calibrate(self.measure)
                for line in range_lines(self.ranges):
                    self.accelerator.print(line)
            choice = self.config.weights
            if ema is None or step == 0 or choice != "ema":
                entry.raw = self._evaluate(step, "raw", full, final)
            if ema is not None and step > 0 and choice != "raw":
                with averaged(model, ema):
                    entry.ema = self._evaluate(step, "ema", full and choice == "ema", final)
        self.history = [e for e in self.history if e.step < step] + [entry]
        if final and self.placebo is not None and not label:  # an audit has no steps
            if (end := self.placebo.history[-1].step) != step:
                warn(f"validation.placebo: ends at step {end}, this run at step {step}")
        entry.seconds = time.perf_counter() - started
        self.seconds += entry.seconds
        entry.share = self.seconds / self.elapsed()
        outdated = self._forget_pictures()
        if self.accelerator.is_main_process:
            self.write()
            for file in outdated:
                (self.output_dir / file).unlink(missing_ok=True)
        return scalars(entry, self.threshold)

    def elapsed(self) -> float:
        """Seconds since the hook was set up, those before a resume included."""
        return time.perf_counter() - self.born

    @property
    def sampler(self) -> Sampler:
        """The sampler in use."""
        return self.measure.sampler

    def state_dict(self) -> dict[str, Any]:
        """History, thresholds and batch, as plain values."""
        names = ("history", "threshold", "element_threshold", "ranges", "seconds")
        state = {name: encode(getattr(self, name)) for name in names}
        state |= {
            "elapsed": self.elapsed(),
            "batch": self.sampler.batch,
            "unrelated": self.measure.unrelated,
        }
        return json.loads(json.dumps(state))  # no numbers of numpy

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore such a state; the targets' features are computed anew."""
        self.sampler.limit(min(state["batch"], self.config.max_batch))
        # the prompts of the base's saved pictures
        self.measure.unrelated = state.get("unrelated", self.measure.unrelated)
        self.seconds = state["seconds"]
        self.born = time.perf_counter() - state["elapsed"]
        self.history = decode(list[Measurement], state["history"])
        self.threshold = decode(Threshold | None, state["threshold"])
        self.element_threshold = decode(ElementThreshold | None, state["element_threshold"])
        self.ranges = decode(list[TargetRange], state["ranges"])

    def _evaluate(self, step: int, tag: str, full: bool, final: bool) -> Scores:
        """Scores of the current weights; their pictures are saved."""
        assert self.threshold is not None and self.element_threshold is not None, (
            "calibrated by run"
        )
        over_base = (full or final or self.config.keep is not None) and self.measured(0)
        scores, rows = self.measure.evaluate(
            step,
            tag,
            self.threshold,
            self.element_threshold,
            full=full,
            unrelated=step == 0 or over_base,
            final=final,
        )
        self._save_samples(step, tag, rows, scores)
        return scores

    # what is saved and returned
    def _save_samples(
        self, step: int, tag: str, rows: dict[str, list[dict[str, Any]]], scores: Scores
    ) -> None:
        """Save every image of each kept target, its best and its median image, and a grid, best
        first. Also save every image of the phrases in another order, where these were measured."""
        folder = Path("samples") / f"step-{step:06d}-{tag}"
        lines = []
        writes = self.accelerator.is_main_process
        for j, target in enumerate(self.targets[: self.config.sample_targets]):
            name = self.names[j]
            target_scores = scores.targets[target.target_id]
            of_target = {
                cell: [row for row in of_cell if row["target"] == j]
                for cell, of_cell in rows.items()
            }
            images = sorted(of_target["composed"], key=lambda row: -row["sim"])
            best = next((row for row in images if row["recovered"]), images[0])
            median = images[len(images) // 2]
            target_scores.best = Picture(f"{folder}/{name}-best.png", best["sim"])
            target_scores.median = Picture(f"{folder}/{name}-median.png", median["sim"])
            kept = [(target_scores.best.file, best), (target_scores.median.file, median)]
            for cell, drawn in of_target.items():
                files = [image_file(folder, name, i, cell) for i in range(len(drawn))]
                kept += zip(files, drawn, strict=True)
                if drawn:  # a target of one phrase has no other order
                    scores.orders[cell].targets[target.target_id].pictures = files
            for file, row in kept if writes else ():
                save(Image.fromarray(row["pixels"]), self.output_dir / file)
            lines.append(grid_line(target.image, [row["pixels"] for row in images]))
        if lines and writes:
            grid = stacked(lines)
            save(Image.fromarray(grid), self.output_dir / folder / "grid.png")
            log_grid(self.accelerator.trackers, f"validation/{tag}", grid, step)

    def _forget_pictures(self) -> list[str]:
        """Remove the image files of all but the last measurement from the history; returns their
        names."""
        files = list[str]()
        for entry in self.history[:-1]:
            measured = [scores for scores in (entry.raw, entry.ema) if scores]
            cells = [cell for scores in measured for cell in (scores.cells or {}).values()]
            for target in (t for cell in (*measured, *cells) for t in cell.targets.values()):
                files += target.pictures or []
                target.pictures = None
        return files

    def summary(self) -> list[SummaryRow]:
        """A row per weights and target, and one over all targets."""
        return [row for kind in kinds(self.history) for row in summarise(self.history, kind)]

    def results(self) -> list[dict[str, Any]]:
        """The summary's rows for a model card, those of the judged weights with the verdict on each
        target."""
        verdict = self.verdict()
        judged = kinds(self.history)[0]
        states = verdict.states or {}
        return [
            asdict(row)
            | {"verdict": states.get(row.target, verdict.state) if row.weights == judged else "-"}
            for row in self.summary()
        ]

    def table(self, cost: bool = False) -> str:
        """The summary, the time that measuring took (if `cost`), and the verdict, as text."""
        record = self.record()
        share = f"{self.history[-1].share:.0%} of the time since the start"
        lines = (
            run_report.text_table(record),
            f"measuring took {self.seconds:.0f} s, {share}" if cost else "",
            str(answer(record)),
            kept_sentence(record),
        )
        return "\n".join(filter(None, lines))

    def kept_line(self) -> str:
        """What the last measurement kept of the base, for a model card; empty where it was not
        measured."""
        return kept_sentence(self.record()) if self.history else ""

    def verdict(self) -> Verdict:
        """The verdict on the last measurement."""
        return self.record().verdict

    def record(self) -> Record:
        """Everything that the report needs, except the pictures in samples/."""
        assert self.threshold is not None and self.element_threshold is not None, (
            "calibrated by run"
        )
        targets = [
            TargetEntry(
                target_id=target.target_id,
                image=target_file(name),
                elements=[
                    None if m is None else element_file(name, k) for k, m in enumerate(masks)
                ],
                prompt=target.composed_prompt,
                phrases=target.phrases,
                estimated=True if target.target_id in self.estimated else None,
            )
            for target, name, masks in zip(
                self.targets, self.names, self.measure.masks, strict=True
            )
        ]
        record = Record(
            seed=self.seed,
            config=asdict(self.config),
            embedder=self.embedder.describe(),
            threshold=self.threshold,
            element_threshold=self.element_threshold,
            targets=targets,
            # replaced below, since the verdict needs all other fields
            verdict=Verdict(
                recovers=False,
                step=self.history[-1].step,
                images_above=0,
                images=0,
                state=NOT_RECOVERED,
            ),
            summary=self.summary(),
            history=self.history,
            seconds=self.seconds,
            batch=self.sampler.batch,
            processes=self.accelerator.num_processes,
            precision=self.sampler.precision,
            ranges=self.ranges or None,
            reference=self.measure.reference,
            unrelated=self.measure.unrelated or None,
        )
        if self.placebo is not None:
            record.placebo = minus_placebo(record, self.placebo, str(self.config.placebo))
        record.verdict = verdict_of(record)
        return record

    def write(self) -> None:
        """Write validation.json, and the targets' pictures where they are missing."""
        record = self.record()
        files = [file for t in record.targets for file in (t.image, *t.elements) if file]
        self.output_dir.mkdir(parents=True, exist_ok=True)
        if len(self.history) == 1 or not all((self.output_dir / file).is_file() for file in files):
            pictures = [to_tensor(t.image)[None] for t in self.targets]
            save_targets(self.output_dir, self.names, pictures, self.measure.masks)
        record.save(self.output_dir / NAME)


# -- any pipeline ----------------------------------------------------------------------------------
def audit(
    config: ValidationConfig,
    *,
    pipeline: str,
    baseline: str | None = None,
    lora: str | None = None,
    variant: str | None = None,
    output_dir: str = "audit",
    seed: int = 0,
    dtype: str = "float32",
) -> Verdict:
    """Measure every score and control of a pipeline, and of its `baseline` where one is given.
    Writes JSON and HTML."""
    targets = checked_targets(config, output_dir)
    load_judge(config, "--")
    accelerator = start()
    read = {
        "--targets": config.targets,
        "--pipeline": pipeline,
        "--baseline": baseline,
        "--lora": lora,
    }
    with claimed(output_dir, accelerator, read):
        device = accelerator.device
        model = Source(pipeline, "--pipeline", variant=variant)
        origin = Source(baseline or pipeline, "--baseline", variant=variant)
        base = None if baseline is None else load_pipeline(origin, dtype, device, of=pipeline)
        first = base or load_pipeline(model, dtype, device, lora)
        check_prompts(targets, first.tokenizer, config.unrelated)
        hook = RecoveryHook(
            config,
            targets=targets,
            components=first.components,
            accelerator=accelerator,
            output_dir=output_dir,
            seed=seed,
            refuses=str(model if baseline is None else origin),
            base=None if base is None else base_modules(base.components),
        )
        if accelerator.is_main_process:
            owned.mark(Path(output_dir), "audit")
        if base is not None:
            hook.run(0, 0, backbone_of(base), label="baseline")
            first = load_pipeline(model, dtype, device, lora)
            hook.measure.sampler = Sampler(first.components, config, seed, refuses=str(model))
        hook.run(1, 1, backbone_of(first), final=True, label="audited pipeline")
        print_audit(hook)
        if base is None:
            accelerator.print("Kept: not measured; --baseline names the model before training")
        return hook.verdict()


def audit_pictures(
    config: ValidationConfig,
    *,
    pictures: str,
    pipeline: str | None = None,
    variant: str | None = None,
    output_dir: str = "audit",
    dtype: str = "float32",
) -> Verdict:
    """Measure every score of pictures that were drawn elsewhere, at the thresholds of an audit;
    writes JSON and HTML. Targets go through the autoencoder of `pipeline`; without one they are
    compared as they are."""
    targets = checked_targets(config, output_dir)
    given = given_pictures(Path(pictures), targets)
    most = max(picture.item.image for picture in given) + 1
    config = replace(config, images_per_target=most, unrelated_images=0)
    accelerator = start()
    vae = None
    if pipeline is not None:
        model = Source(pipeline, "--pipeline", variant=variant)
        vae = load_autoencoder(model, dtype, accelerator.device)
        if (config.resolution or 0) % vae_factor(vae):
            right = f"is not a multiple of {vae_factor(vae)}, which the pipeline needs"
            raise UserError(f"--resolution: {config.resolution} {right}")
    else:
        accelerator.print("no --pipeline is given, so targets are compared as they are")
    sampler = GivenPictures(
        pictures=given, targets=targets, batch=config.max_batch, side=config.resolution, vae=vae
    )
    read = {"--targets": config.targets, "--pictures": pictures, "--pipeline": pipeline}
    with claimed(output_dir, accelerator, read):
        hook = RecoveryHook(
            config,
            targets=targets,
            components={},
            accelerator=accelerator,
            output_dir=output_dir,
            seed=0,
            pictures=sampler,
        )
        if accelerator.is_main_process:
            owned.mark(Path(output_dir), "audit")
        hook.run(1, 1, None, final=True, label="given pictures")
        print_audit(hook)
        return hook.verdict()


def checked_targets(config: ValidationConfig, output_dir: str) -> list[Target]:
    """The targets of an audit, after the checks that need no model."""
    check_values(config, "--")
    check_files(config, "--")
    check_writable(Path(output_dir), "--output_dir", folder=True)
    targets = load_targets(str(config.targets))
    redraws = load_redraws(config.targets, targets, decode=True)
    uses_redraws(config, targets, bool(redraws), "--")
    return targets


def claimed(
    output_dir: str, accelerator: Any, read: dict[str, str | None]
) -> AbstractContextManager[Any]:
    """A context in which no other process writes into the folder."""
    if not accelerator.is_main_process:
        return nullcontext()
    writes = (NAME, "report.html", "samples")
    return owned.claimed(output_dir, "audit", key="--output_dir", writes=writes, read=read)


def print_audit(hook: RecoveryHook) -> None:
    """Write the report and print the table."""
    if hook.accelerator.is_main_process:
        print(f"{hook.output_dir / NAME}\n{run_report.write(hook.output_dir)}")
    hook.accelerator.print(hook.table())


def fits(options: Audit) -> AbstractContextManager[None]:
    """A context around an audit that says which setting to lower where memory runs out."""
    if options.dtype == "float32":
        return explain_out_of_memory("--dtype", "take bfloat16, or a lower --resolution")
    return explain_out_of_memory("--resolution", f"lower it, or take {larger_device()}")


def main(arguments: list[str] | None = None, options: Audit | None = None) -> int:
    """The command line."""
    try:
        audit_options = options or startup.options(Audit, arguments, __doc__)
        config = ValidationConfig(
            **{f.name: getattr(audit_options, f.name) for f in fields(ValidationConfig)}
        )
        with fits(audit_options):
            if audit_options.pictures is not None:
                verdict = audit_pictures(
                    config,
                    pictures=audit_options.pictures,
                    pipeline=audit_options.pipeline,
                    variant=audit_options.variant,
                    output_dir=audit_options.output_dir,
                    dtype=audit_options.dtype,
                )
            else:
                verdict = audit(
                    config,
                    pipeline=str(audit_options.pipeline),
                    baseline=audit_options.baseline,
                    lora=audit_options.lora,
                    variant=audit_options.variant,
                    output_dir=audit_options.output_dir,
                    seed=audit_options.seed,
                    dtype=audit_options.dtype,
                )
    except UserError as error:
        return startup.refused(error)
    print(f"{verdict.images_above} of {verdict.images} composed images reach every threshold")
    return EXIT_CODES[verdict.state]


if __name__ == "__main__":
    exit_with(lambda: main(options=OPTIONS))
