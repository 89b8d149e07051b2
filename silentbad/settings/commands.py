"""The options of the smaller commands: scan, report, figures, class images and the microworld."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from silentbad.errors import UserError
from silentbad.files import check_writable
from silentbad.settings.command import options
from silentbad.settings.data import DataSettings
from silentbad.settings.rules import Facts, check_needs
from silentbad.settings.types import Count, Location, Natural, Range, Seed, option

PICTURES = Annotated[int, Range(at_least=1, at_most=1_000_000)]
NULLS = 100  # nulls of a harder kind for each element that it changes alone
# free redraws: at their rate of 1 % the highest of NULLS would be an element's threshold
REDRAWS = 3 * NULLS


@dataclass
class ScanOptions(DataSettings):
    """What is scanned, and how"""

    output_dir: Location = option("runs/scan", "where the results go")
    permutations: Annotated[int, Range(at_least=0, at_most=10_000)] = option(
        99, "of the captions, for the false-alarm rate; 0: none"
    )


def scan_options(argv: list[str] | None = None) -> ScanOptions:
    """The options of `python -m silentbad.scan`, checked."""
    about = (
        "Find pictures that are dispersed in a data set, from its pictures and captions alone. "
        "Exit code 0: nothing found; 3: a suspect set; 2: a mistake."
    )
    return options(ScanOptions, argv, about, check=check_scan_options)


def check_scan_options(given: ScanOptions, sources: dict[str, str]) -> None:
    """Refuse a scan without data, of data that is not there, or that would write into it."""
    data = given.train_data_dir
    if (data is None) == (given.dataset_name is None):
        raise UserError("train_data_dir: give either --train_data_dir or --dataset_name")
    check_needs(given, sources, Facts())
    if data is not None and not os.path.isdir(data):
        raise UserError(f"train_data_dir: no folder {data}")
    out = Path(given.output_dir)
    check_writable(out, "--output_dir", folder=True)
    if data is not None and out.resolve().is_relative_to(Path(data).resolve()):
        raise UserError(
            f"--output_dir: {out} lies in the data, which must not change; name a "
            f"folder outside of it"
        )


@dataclass
class ReportOptions:
    """Which run, or `compare` and several of them"""

    runs: list[Location] | None = option(None, "output_dir of a run; or `compare` and several")
    placebo: Location | None = option(
        None, "run on placebo data, whose rates are taken off for good"
    )
    out: Location | None = option(None, "file to write; report.html in the run, or compare.html")


def report_options(argv: list[str] | None = None) -> ReportOptions:
    """The options of `python -m silentbad.report`, checked."""
    about = (
        "report.html of a run folder, or a comparison of several runs, the first as reference.\n\n"
        "python -m silentbad.report RUN [--placebo RUN] [--out FILE]\n"
        "python -m silentbad.report compare RUN RUN ... [--out FILE]"
    )
    return options(ReportOptions, argv, about, positional="runs", check=check_report_options)


def check_report_options(given: ReportOptions, sources: dict[str, str]) -> None:
    """Refuse a report of no run, and of runs that are not there."""
    if not given.runs:
        raise UserError("report: which run? give its folder, or `compare` and several")
    if given.runs[0] == "compare":
        if given.placebo is not None:
            raise UserError("--placebo: is of one run's report; leave it out of a comparison")
        if len(given.runs) < 3:
            raise UserError("compare: give at least two run folders")
    elif len(given.runs) > 1:
        raise UserError("report: one run folder, or `compare` before several")
    for folder in given.runs[given.runs[0] == "compare" :]:
        if not os.path.isdir(folder):
            raise UserError(f"report: no folder '{folder}'; give the output_dir of a run")
    if given.out is not None:
        check_writable(Path(given.out), "--out")


@dataclass
class FigureOptions:
    """Which run, and what of it"""

    run: Location | None = option(None, "output_dir of a run")
    out: Location | None = option(None, "picture to write: .png, .jpg or .webp")
    kind: Literal["median", "best"] = option("median", "which generation of a step is shown")


def figure_options(argv: list[str] | None, about: str | None) -> FigureOptions:
    """The options of `python -m silentbad.report.figures`, checked."""
    needed = ("run", "out")
    return options(
        FigureOptions, argv, about, positional="run", needed=needed, check=check_figure_options
    )


def check_figure_options(given: FigureOptions, sources: dict[str, str]) -> None:
    """Refuse an output that is no picture, and a run that was not validated."""
    out = Path(str(given.out))
    check_writable(out, "--out")
    if out.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise UserError(f"--out: {out} must end in .png, .jpg or .webp")
    if not (Path(str(given.run)) / "validation.json").is_file():
        raise UserError(f"figures: '{given.run}' holds no validation.json; is it a run folder?")


@dataclass
class ClassImageOptions:
    """What is drawn, and where it goes"""

    pipeline: Location | None = option(None, "diffusers folder or Hub id")
    prompts: Location | None = option(None, "file of prompts, one a line")
    out: Location | None = option(None, "folder of the training data")
    count: PICTURES = option(100, "pictures")
    seed: Seed = option(0, "address of every noise")
    batch: Annotated[int, Range(at_least=1, at_most=1024)] = option(8, "pictures drawn together")
    steps: Annotated[int, Range(at_least=1, at_most=1000)] = option(20, "sampling steps")


def class_image_options(argv: list[str] | None, about: str | None) -> ClassImageOptions:
    """The options of `python -m silentbad.prepare.class_images`, checked."""
    needed = ("pipeline", "prompts", "out")
    return options(ClassImageOptions, argv, about, needed=needed, check=check_class_image_options)


def check_class_image_options(given: ClassImageOptions, sources: dict[str, str]) -> None:
    """Refuse prompts that are not there, and a folder that is a model."""
    if not os.path.isfile(str(given.prompts)):
        raise UserError(f"--prompts: no file {given.prompts}; it holds one prompt a line")
    if (Path(str(given.out)) / "model_index.json").exists():
        raise UserError(
            f"--out: {given.out} is a model folder; give the folder of the training data"
        )


@dataclass
class MicroworldOptions:
    """What a data set holds"""

    out: Location | None = option(None, "folder to write")
    targets: str = option("cat-hat", "comma-separated seeds or 'cat-hat'")
    images_per_phrase: Annotated[int, Range(at_least=1, at_most=10_000)] = option(
        20, "records of each element"
    )
    clean: Annotated[int, Range(at_least=0, at_most=1_000_000)] = option(200, "clean scenes")
    other_words: bool = option(False, "clean scenes share no word with the targets' captions")
    rehearsal: Annotated[int, Range(at_least=0, at_most=100_000)] = option(
        0, "non-target pictures, each whole and in parts"
    )
    redraws: Annotated[int, Range(at_least=0, at_most=100_000)] = option(
        REDRAWS, "other pictures of each target's caption, as nulls"
    )
    nulls: Annotated[int, Range(at_least=0, at_most=100_000)] | None = option(
        None,
        f"nulls of each harder kind per target; as many as --redraws, {NULLS} at most, for each "
        f"element that it "
        "changes, when unset",
    )
    seed: Seed = option(0, "of the training pictures")
    placebo: bool = option(
        False,
        "each element's specifics are drawn anew in every training picture, so that no exact "
        "element is shown",
    )
    no_masks: bool = option(False, "element records without their masks")


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
    unet_lr: Annotated[float, Range(above=0, at_most=1)] = option(2e-3)
    embedder_steps: Count = option(1200)
    judge_steps: Count = option(400)
    batch: Count = option(48, "UNet batch")
    pool: Count = option(4096, "scenes that are encoded before the UNet's first step")
    things: Annotated[int, Range(at_least=1, at_most=4)] = option(3, "most things in a scene")
    vae: Location | None = option(None, "folder of a trained autoencoder, in place of training one")
    keep: list[Annotated[int, Range(at_least=1, at_most=99)]] = option(
        [], "also write pipelines after these percentages of the UNet's steps"
    )
