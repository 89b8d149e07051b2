"""The settings of a validation while training, and of an audit of any pipeline."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from silentbad.errors import UserError, brief
from silentbad.files import check_file, check_folder, check_local, check_path
from silentbad.settings import user_code
from silentbad.settings.registries import Offered, from_source
from silentbad.settings.rules import Facts, check_measurement
from silentbad.settings.types import (
    Cosine,
    Location,
    Natural,
    Prompt,
    Rate,
    Seed,
    Share,
    Side,
    Small,
    Unit,
    changed_fields,
    check_name,
    option,
)

EMBEDDERS = "silentbad.measure.embedders:EMBEDDERS"
KeptBy = Literal["words", "pixels", "embedder", "structure", "bleeding", "size"]
Lengths = Annotated[int, Interval(ge=1, le=1000)]  # numbers of sampling steps


# Options that need targets; a grid of validations; targets or prompts to draw; images of unrelated
# prompts. A file may set them for a run without these.
measured = partial(option, needs="validation.targets", idle="kept")
on_grid = partial(option, needs="validation.targets or sample_prompts", idle="kept")
drawn = partial(
    option, needs="validation.targets or sample_prompts or validation_prompts", idle="kept"
)
of_unrelated = partial(option, needs="validation.unrelated_images!=0", idle="warned")


@dataclass
class ValidationConfig:
    """What is generated, how it is compared, and when."""

    targets: Location | None = option(None, "targets.jsonl; unset: no validation")
    steps: Natural = on_grid(
        100, "optimizer steps between points of the curve; 0: only before and after training"
    )
    early_steps: list[Natural] = on_grid(
        [], "further points, for a curve that rises before `steps`"
    )
    images_per_target: Small = measured(8)
    first_images: Natural = measured(
        0, "images of each target drawn first; all, once one of them is recovered; 0: always all"
    )
    settled_after: Natural = measured(
        0, "stop once half of every target's images are recovered at so many points; 0: never"
    )
    num_inference_steps: Lengths = drawn(20)
    guidance_scale: Annotated[float, Interval(ge=0, le=1e4)] = drawn(7.5)
    guidance_rescale: Unit = drawn(0.0)
    resolution: Side | None = drawn(None, "of the images; unset: the UNet's own")
    embedder: str = measured(
        "auto",
        "copy, micro, sscd, clip, dinov2, ssim or PATH.py:CLASS; auto: micro beside redraws.jsonl, "
        "else copy, which sees the texture of photographs too",
    )
    embedder_path: Location | None = measured(
        None, "sscd: its TorchScript or .onnx file; others: local folder or Hub id of the weights"
    )
    embedder_sha256: str | None = measured(None, "sscd: refuse a file with another SHA-256")
    clip_path: Location | None = measured(None, "a CLIP for CLIPScore; unset: not measured")
    threshold: Cosine | None = measured(None, "unset: calibrated for each target")
    false_positive_rate: Rate = measured(0.01, "of the calibrated threshold, per image")
    calibration: Literal["auto", "redraws", "failures"] = measured(
        "auto", "null pictures; auto: redraws.jsonl, else failures made from the target"
    )
    controls: Literal["final", "always", "never"] = measured(
        "final", "when the control prompts are measured"
    )
    weights: Literal["raw", "ema", "both"] = option(
        "both", "which weights, where an average is kept", needs="AVERAGE", idle="warned"
    )
    unrelated: Prompt = option(
        "a page of printed text",
        "caption that names no element",
        needs="validation.controls!=never",
        idle="warned",
    )
    max_batch: Small = drawn(
        64, "images generated together; halved, and kept halved, when memory runs out"
    )
    clean_records: Natural = measured(64, "held-out records of a role for its eps-MSE")
    nearest: Natural = measured(
        256, "training pictures that images are compared with, at step 0 and at the end"
    )
    unrelated_images: Natural = measured(
        24,
        "images of unrelated prompts, before and after training, that show what it cost; 0: none",
    )
    prompts: Location | None = of_unrelated(
        None,
        "text file of unrelated prompts, one a line; unset: captions of held-out clean records, else a bundled list",
    )
    judge: Location | None = of_unrelated(
        None, "PATH.py:NAME of a function (captions, images) that counts the things right in them"
    )
    keep: Share | None = of_unrelated(
        None, "training stops once less than this share is kept; the best that keeps it is in best/"
    )
    keep_by: KeptBy | None = option(
        None,
        "measure that keep limits; unset: words if a judge or CLIP is given, else pixels",
        needs="validation.keep",
    )
    sample_targets: Natural = measured(8, "targets whose images are kept in samples/")
    placebo: Location | None = measured(
        None, "run folder of the same targets trained on placebo data: its rate is subtracted"
    )


OLDER = {"drift_images": "unrelated_images"}  # names of these settings before their present ones
GONE = {  # settings that were here: what to do instead
    "sampling_lengths": "is gone: audit the pipeline again with another num_inference_steps",
    "null_images": "is gone, since the base draws no null pictures: leave it out",
    "reference": "is gone: beside redraws.jsonl images are compared with the target's file, else "
    "with what the autoencoder leaves of it; leave it out",
}
TRAINING = (  # settings that an audit refuses
    *("steps", "early_steps", "first_images", "settled_after"),
    *("weights", "clean_records", "nearest", "keep", "keep_by"),
)
COMPARED = ("unrelated_images", "prompts", "judge")  # with the pictures of a baseline
ON_PICTURES = {  # of use where pictures are given
    *("pictures", "pipeline", "targets", "output_dir", "dtype", "resolution", "max_batch"),
    "variant",
    *("embedder", "embedder_path", "embedder_sha256", "clip_path", "sample_targets"),
    *("threshold", "false_positive_rate", "calibration"),
}
# options of `silentbad-search`, which were here
OF_SEARCH = ("phrases", "scan", "train_data_dir", "ordinary", "most_phrases", "tested", "nulls")


@dataclass
class Audit(ValidationConfig):
    """An audit of a pipeline"""

    pipeline: Location | None = option(None, "diffusers folder or Hub id")
    pictures: Location | None = option(
        None, "judge the pictures of this folder, which somebody else drew, in place of drawing any"
    )
    baseline: Location | None = option(None, "calibrate and compare on it")
    lora: Location | None = option(None, "adapters to put on the pipeline: folder or file")
    variant: Location | None = option(None, "variant of the weight files, such as fp16")
    output_dir: Location = option("audit", "for JSON, HTML and samples/")
    seed: Seed = option(0, "address of every noise")
    dtype: Literal["float32", "float16", "bfloat16"] = option("float32")

    RENAMED = {
        **{old: f"has another name now: use --{new}" for old, new in OLDER.items()},
        **GONE,
        "extrapolate": "is gone from audits; silentbad-search has it",
        **dict.fromkeys(OF_SEARCH, "is of the search for unknown pictures: use silentbad-search"),
    }

    def check(self, sources: dict[str, str]) -> None:
        """Refuse an audit without a pipeline or targets, or with files that are missing."""
        if self.pictures is not None:
            self._check_pictures()
            return
        if self.pipeline is None:
            raise UserError("--pipeline: is missing; give a diffusers folder or Hub id")
        if idle := [name for name in changed_fields(self) if name in TRAINING]:
            raise UserError(f"--{idle[0]}: acts in training alone; leave it out")
        if self.baseline is None and (alone := {*COMPARED} & {*changed_fields(self)}):
            raise UserError(
                f"--{min(alone)}: needs --baseline, whose images of the same prompts are compared"
            )
        if self.targets is None:
            raise UserError(
                "--targets: give a targets.jsonl (target_id, image, phrases a line); "
                "silentbad-search looks for pictures that are not known"
            )
        check_files(self, "--")
        self.check_pipelines()

    def check_pipelines(self) -> None:
        """Refuse a pipeline, a baseline and adapters that are not there."""
        check_local("--pipeline", str(self.pipeline))
        check_local("--baseline", self.baseline)
        check_local("--lora", self.lora, "file or folder")

    def _check_pictures(self) -> None:
        """Refuse settings that do not act on given pictures, and files that are missing."""
        if idle := [name for name in changed_fields(self) if name not in ON_PICTURES]:
            raise UserError(f"--{idle[0]}: does not act on pictures that are given; leave it out")
        if self.targets is None:
            raise UserError(
                "--targets: is missing; give the targets.jsonl that the pictures are compared with"
            )
        check_folder("--pictures", str(self.pictures))
        check_files(self, "--")
        check_local("--pipeline", self.pipeline)


# ---------------------------------------------------------------- checks
def target_file(targets: str | None) -> str | None:
    """The path in `validation.targets`, without the choice of numbers (@100-109)."""
    if targets is None or os.path.exists(targets):
        return targets
    return targets.rpartition("@")[0] or targets


def check_run(key: str, folder: str) -> None:
    """Refuse a run that is not there, or was not validated."""
    check_file(key, os.path.join(folder, "validation.json"), "give the output_dir of a run")


def check_files(config: ValidationConfig, prefix: str = "validation.") -> None:
    """Refuse missing files of the targets and of the models that measure; loads nothing."""
    check_path(f"{prefix}targets", target_file(config.targets))
    check_embedder(config, prefix)
    check_local(f"{prefix}clip_path", config.clip_path)
    if config.placebo is not None:
        check_run(f"{prefix}placebo", config.placebo)
    check_kept(config, prefix)


def check_kept(config: ValidationConfig, prefix: str = "validation.") -> None:
    """Refuse prompts and a judge that are not there, and a limit that nothing measures."""
    if config.unrelated_images == 1:
        raise UserError(
            f"{prefix}unrelated_images: is 1; give 2 or more, or 0: "
            "the change is measured against the base's image of another prompt"
        )
    check_file(f"{prefix}prompts", config.prompts, "it holds one prompt a line")
    if config.judge is not None:
        if not user_code.is_place(config.judge):
            raise UserError(f"{prefix}judge: {brief(config.judge)} is not of the form PATH.py:NAME")
        user_code.check_place(f"{prefix}judge", config.judge)
    if config.keep is not None and config.unrelated_images == 0:
        raise UserError(f"{prefix}keep: needs {prefix}unrelated_images above 0")
    judged = config.judge is not None or config.clip_path is not None
    if config.keep is not None and config.keep_by == "words" and not judged:
        raise UserError(
            f"{prefix}keep_by: nothing reads the words; "
            f"give {prefix}judge or {prefix}clip_path, or keep by pixels"
        )


def check_embedder(config: ValidationConfig, prefix: str = "validation.") -> None:
    """Refuse an embedder whose local files are not there; loads nothing."""
    path = config.embedder_path
    key = f"{prefix}embedder"
    embedders = Offered({"auto": {}, **from_source(EMBEDDERS)}, key)
    check_name(key, embedders, config.embedder)
    embedders[config.embedder]  # noqa: B018 (whose file must be there)
    if config.embedder == "sscd":
        advice = "sscd needs its TorchScript or .onnx file, see docs/models.md"
        if not path:
            raise UserError(f"{key}_path: is missing; {advice}")
        check_file(f"{key}_path", path, advice)
    check_measurement(config, Facts(), prefix)
    if config.embedder in ("auto", "copy", "micro") and path:
        advice = "leave it out for the bundled embedder"
        check_folder(f"{key}_path", path, advice)
        check_file(f"{key}_path", Path(path, "config.json"), advice)
    if config.embedder in ("clip", "dinov2"):
        check_local(f"{key}_path", path)
