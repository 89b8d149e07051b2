"""The options of the worlds' commands, each class with what it refuses."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from annotated_types import Interval

from silentbad import bundled
from silentbad.errors import UserError
from silentbad.files import check_file
from silentbad.settings.types import Count, Location, Natural, Seed, Small, option

NULLS = 100  # nulls of a harder kind for each element that it changes alone
# free redraws: at their rate of 1 % the highest of NULLS would be an element's threshold
REDRAWS = 3 * NULLS
GUIDANCE = 3.0  # the base's default guidance scale


@dataclass
class MicroworldOptions:
    """What a data set holds"""

    out: Location | None = option(None, "folder to write")
    targets: str = option("cat-hat", "comma-separated seeds or 'cat-hat'")
    images_per_phrase: Small = option(20, "records of each element")
    clean: Natural = option(200, "clean scenes")
    other_words: bool = option(False, "clean scenes share no word with the targets' captions")
    unique_phrases: bool = option(
        False, "a phrase that several targets use says whose it is, as in 'a fish of anna'"
    )
    name_targets: bool = option(False, "each phrase of a target says its name, one for each target")
    rehearsal: Natural = option(0, "non-target pictures, each whole and in parts")
    redraws: Natural = option(REDRAWS, "other pictures of each target's caption, as nulls")
    nulls: Natural | None = option(
        None,
        f"nulls of each harder kind per target; as many as --redraws, {NULLS} at most, for each "
        "element that it changes, when unset",
    )
    seed: Seed = option(0, "of the training pictures")
    placebo: bool = option(
        False,
        "each element's specifics are drawn anew in every training picture, so that no exact "
        "element is shown",
    )
    no_masks: bool = option(False, "element records without their masks")

    NEEDED = ("out",)


Artist = Literal["noto", "twemoji", "openmoji", "emojione", "fluent"]


@dataclass
class EmojiSetsOptions:
    """Which drawings of the emoji world are fetched"""

    artists: list[Artist] = option([*get_args(Artist)], "whose; all are needed to train or measure")


@dataclass
class EmojiOptions(MicroworldOptions):
    """What a data set of the emoji world holds"""

    targets: str = option("0", "comma-separated seeds")


@dataclass
class BaseOptions:
    """The stages of the bundled base"""

    work: Location = option("runs/base", "folder of the checkpoints; resumes from what it holds")
    stage: Literal["vae", "decoder", "text", "unet", "embedder", "judge", "export", "all"] = option(
        "all"
    )
    device: str | None = option(None, "cuda where there is one, else cpu, when unset")
    threads: Natural = option(0, "CPU threads; 0 keeps torch's choice")
    vae_steps: Count = option(1600)
    decoder_steps: Count = option(700)
    text_steps: Count = option(800)
    unet_steps: Count = option(10_000)
    unet_lr: Annotated[float, Interval(gt=0, le=1)] = option(2e-3)
    unet_optimizer: Literal["muon", "adamw"] = option("muon", "of the UNet's matrices and kernels")
    embedder_steps: Count = option(1200)
    judge_steps: Count = option(400)
    batch: Count = option(48, "UNet batch")
    pool: Count = option(4096, "scenes that are encoded before the UNet's first step")
    things: Annotated[int, Interval(ge=1, le=4)] = option(3, "most things in a scene")
    vae: Location | None = option(None, "folder of a trained autoencoder, in place of training one")
    keep: list[Annotated[int, Interval(ge=1, le=99)]] = option(
        [], "also write pipelines after these percentages of the UNet's steps"
    )

    def check(self, sources: dict[str, str]) -> None:
        """Refuse an autoencoder that is not there."""
        if self.vae is not None and not os.path.isfile(os.path.join(self.vae, "config.json")):
            raise UserError(f"--vae {self.vae}: no autoencoder of diffusers")


@dataclass
class EmojiBaseOptions(BaseOptions):
    """The stages of the emoji world's base"""

    work: Location = option(
        "runs/emoji-base", "folder of the checkpoints; resumes from what it holds"
    )
    begin: Location = option("assets/micro-sd", "pipeline whose weights are trained on")
    out: Location | None = option(None, "folder of the pipeline; `pipeline` in --work when unset")
    # the steps of the base that research/emoji.md measures
    vae_steps: Count = option(1200)
    decoder_steps: Count = option(400)
    text_steps: Count = option(1500)
    unet_steps: Count = option(3000)
    embedder_steps: Count = option(200)
    judge_steps: Count = option(600)
    pool: Count = option(2048, "scenes that are encoded before the UNet's first step")
    things: Annotated[int, Interval(ge=1, le=4)] = option(4, "most things in a scene")
    captions: Count = option(400, "captions that the model card is measured on")

    def check(self, sources: dict[str, str]) -> None:
        """Refuse networks to begin with that are not there."""
        super().check(sources)
        check_base("--begin", bundled(self.begin))


@dataclass
class MeasureOptions:
    """Which base is measured"""

    pipeline: Location | None = option(None, "folder of the base")
    guidance: Annotated[float, Interval(ge=0, le=100)] = option(GUIDANCE, "scale of its guidance")
    grid: Location | None = option(None, "also write a picture of generations here")

    NEEDED = ("pipeline",)

    def check(self, sources: dict[str, str]) -> None:
        """Refuse a base that is not there."""
        check_base("--pipeline", str(self.pipeline))


def check_base(key: str, folder: str) -> None:
    """Refuse a folder that holds no pipeline."""
    check_file(key, os.path.join(folder, "model_index.json"), "give the folder of a pipeline")
