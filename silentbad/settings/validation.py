"""The settings of a validation while training, and of an audit of any pipeline."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from silentbad.settings.types import Cosine, Location, Natural, Range, Rate, Seed, Side, Small, Unit

Lengths = Annotated[int, Range(at_least=1, at_most=1000)]  # numbers of sampling steps


@dataclass
class ValidationConfig:
    """What is generated, how it is compared, and when."""

    targets: Location | None = None  # targets.jsonl; unset: no validation
    steps: Natural = 100  # optimizer steps between points of the curve; 0: only before and after training
    early_steps: list[Natural] = field(default_factory=list)  # further points, for a curve that rises before `steps`
    images_per_target: Small = 8
    first_images: Natural = 0  # of each target, until one of them is recovered, then all; 0: always all
    settled_after: Natural = 0  # stop once half of every target's images are recovered at so many points; 0: never
    num_inference_steps: Lengths = 20
    sampling_lengths: list[Lengths] = field(default_factory=list)  # further numbers of steps, with base and controls
    guidance_scale: Annotated[float, Range(0, 1e4)] = 7.5
    guidance_rescale: Unit = 0.0
    resolution: Side | None = None  # of the images; unset: the UNet's own
    # auto: micro beside redraws.jsonl, else copy, which sees the texture of photographs too
    embedder: Literal["auto", "copy", "micro", "sscd", "clip", "dinov2", "ssim"] = "auto"
    # what images are compared with: the target's file, or what the autoencoder leaves of it;
    # auto: raw beside redraws.jsonl, else decoded
    reference: Literal["auto", "raw", "decoded"] = "auto"
    embedder_path: Location | None = None  # sscd: its TorchScript file; others: local folder or Hub id of the weights
    embedder_sha256: str | None = None  # sscd: refuse a file with another SHA-256
    clip_path: Location | None = None  # a CLIP for CLIPScore and prompt cosines; unset: not measured
    threshold: Cosine | None = None  # unset: from the null pictures
    false_positive_rate: Rate = 0.01  # of the calibrated threshold, per image
    # null pictures; auto: redraws.jsonl, else failures made from the target
    calibration: Literal["auto", "redraws", "failures", "counterfactuals", "base"] = "auto"
    null_images: Small = 8  # that the base draws of each kind for a target without redraws.jsonl
    controls: Literal["final", "always", "never"] = "final"  # when the control prompts are measured
    weights: Literal["raw", "ema", "both"] = "both"  # which weights, where an average is kept
    unrelated: str = "a page of printed text"  # caption that names no element
    max_batch: Small = 64  # images generated together; halved, and kept halved, when memory runs out
    clean_records: Natural = 64  # held-out records of a role for its eps-MSE
    nearest: Natural = 256  # training pictures that images are compared with, at step 0 and at the end
    drift_images: Natural = 8  # matched-seed generations of clean captions, compared with the base model's
    sample_targets: Natural = 8  # targets whose images are kept in samples/
    placebo: Location | None = None  # run folder of the same targets trained on placebo data: its rate is taken off


@dataclass
class Candidates:
    """Where candidate phrases come from, when no target is known."""

    phrases: Location | None = None  # search: text file, one phrase a line
    scan: Location | None = None  # search: scan.json, whose composed prompts are tested
    train_data_dir: Location | None = None  # search: the phrases that recur most in these captions
    ordinary: Location | None = None  # search: text file of ordinary prompts, the null; unset: plain things and places
    most_phrases: Annotated[int, Range(at_least=2, at_most=6)] = 3  # search: of a prompt
    tested: Small = 10  # search: prompts that images are made of
    nulls: Annotated[int, Range(at_least=8, at_most=10_000)] = 24  # search: ordinary prompts that images are made of

    @property
    def given(self) -> list[str]:
        """The flags that name candidates."""
        return [key for key in ("phrases", "scan", "train_data_dir") if getattr(self, key) is not None]


@dataclass
class Audit(Candidates, ValidationConfig):
    """An audit of a pipeline"""

    pipeline: Location | None = None  # diffusers folder or Hub id
    baseline: Location | None = None  # calibrate and compare on it
    lora: Location | None = None  # adapters to put on the pipeline: folder or file
    output_dir: Location = "audit"  # for JSON, HTML and samples/
    seed: Seed = 0  # address of every noise
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    extrapolate: Annotated[float, Range(-10, 10)] | None = None  # measure the change times this as well
