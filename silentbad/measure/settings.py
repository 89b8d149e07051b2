"""What this package reads of a validation's settings, which it does not import: the fields are those of
`ValidationConfig` in validation.py."""

from typing import Literal, Protocol


class SamplingSettings(Protocol):
    """How images are generated, and at which steps."""

    steps: int
    early_steps: list[int]
    resolution: int | None
    num_inference_steps: int
    sampling_lengths: list[int]
    guidance_scale: float
    guidance_rescale: float
    max_batch: int


class MeasureSettings(SamplingSettings, Protocol):
    """What is compared with what."""

    targets: str | None
    images_per_target: int
    first_images: int
    sample_targets: int
    threshold: float | None
    false_positive_rate: float
    calibration: Literal["auto", "redraws", "counterfactuals", "base"]
    null_images: int
    unrelated: str
    drift_images: int
