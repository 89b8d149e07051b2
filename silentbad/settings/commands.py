"""The options of the smaller commands, each class with its checks."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from silentbad.errors import UserError
from silentbad.files import check_file, check_folder, check_local, check_path, check_writable
from silentbad.settings.reader import parse
from silentbad.settings.train import TrainConfig
from silentbad.settings.types import Location, Natural, Seed, Small, option
from silentbad.settings.validation import check_run, target_file

Pixels = Annotated[int, Interval(ge=8, le=4096)]


@dataclass
class ReportOptions:
    """Which run, or `compare` and several of them"""

    runs: list[Location] | None = option(None, "output_dir of a run; or `compare` and several")
    placebo: Location | None = option(
        None, "run on placebo data; its rates are subtracted, in validation.json too"
    )
    withheld: Location | None = option(
        None, "run with an element withheld; its rates are subtracted, in validation.json too"
    )
    out: Location | None = option(None, "file to write; report.html in the run, or compare.html")

    POSITIONAL = "runs"

    def check(self, sources: dict[str, str]) -> None:
        """Refuse a report of no run, and of runs that are not there."""
        if not self.runs:
            raise UserError("report: which run? give its folder, or `compare` and several")
        controls = {"--placebo": self.placebo, "--withheld": self.withheld}
        given = {flag: run for flag, run in controls.items() if run is not None}
        if self.runs[0] == "compare":
            if given:
                raise UserError(
                    f"{next(iter(given))}: is of one run's report; leave it out of a comparison"
                )
            if len(self.runs) < 3:
                raise UserError("compare: give at least two run folders")
        elif len(self.runs) > 1:
            raise UserError("report: one run folder, or `compare` before several")
        for folder in self.runs[self.runs[0] == "compare" :]:
            check_folder("report", folder, "give the output_dir of a run")
        for flag, run in given.items():
            check_run(flag, run)
        if self.out is not None:
            check_writable(Path(self.out), "--out")


@dataclass
class PrepareOptions:
    """Pictures of your own, and what becomes of them"""

    target: Location | None = option(None, "the picture to look for")
    masks: list[Location] = option([], "of the target's size")
    phrases: list[str] | None = option(None, "one for each element")
    backgrounds: Location | None = option(
        None, "folder of other pictures; NAME.txt beside one is its caption"
    )
    out: Location | None = option(None, "the folder to write")
    base: Location = option(
        "assets/micro-sd", "pipeline to train, whose tokenizer must take the phrases whole"
    )
    name: str | None = option(None, "target_id; the target's file name when unset")
    prompt: str | None = option(None, "the composed prompt; the phrases in a row when unset")
    placebo: Location | None = option(
        None,
        "folder that holds, for each element, a folder 0, 1, ... or with its phrase for a name: "
        "pictures of other things which the phrase names",
    )
    captioner: str | None = option(None, "mine.py:caption, caption(picture) -> text")
    segmenter: str | None = option(
        None, "mine.py:segment, segment(picture, phrase) -> mask, or None for the backdrop"
    )
    per_phrase: Small = option(16, "pictures of each element")
    clean: Natural = option(60, "clean pictures; none where --out has some")
    side: Pixels | None = option(None, "pixels; the target's shorter side, at most 512, when unset")
    resolution: Pixels = option(64, "pixels at which training will see it, for preview.html")
    seed: Seed = option(0, "other numbers give other pictures")

    NEEDED = ("target", "phrases", "backgrounds", "out")


@dataclass
class PreviewOptions:
    """Which data, and how large"""

    data: Location | None = option(None, "folder with metadata.jsonl and targets.jsonl")
    resolution: Pixels = option(64, "pixels that training sees")

    POSITIONAL = "data"
    NEEDED = ("data",)


@dataclass
class LocaliseOptions:
    """Which run, and which parts of it"""

    run: Location | None = option(None, "output_dir of a finished run with targets")
    by: list[Literal["stage", "role", "both"]] = option(
        ["stage", "role"], "parts; both: each role of each stage"
    )
    images: Small | None = option(None, "images of each target; as many as the run's when unset")
    base: Location | None = option(None, "the run's base, where it has moved")
    targets: Location | None = option(None, "the run's targets.jsonl, where it has moved")
    train_data_dir: Location | None = option(None, "the run's data, where it has moved")

    POSITIONAL = "run"
    NEEDED = ("run",)

    def check(self, sources: dict[str, str]) -> None:
        """Refuse a run that is not there, has no targets or cannot be written to."""
        self.trained  # noqa: B018 (read here, so that a mistake in it is reported)
        check_run("RUN", str(self.run))
        check_writable(Path(str(self.run)) / "report.html", "RUN")

    @property
    def base_key(self) -> str:
        """The setting that names the base."""
        return "pretrained_model_name_or_path" if self.base is None else "--base"

    @cached_property
    def trained(self) -> TrainConfig:
        """The run's configuration, with the new places of moved files. Raises UserError."""
        file = Path(str(self.run)) / "config.yaml"
        check_file("RUN", file, "give the output_dir of a run")
        moved = {
            "pretrained_model_name_or_path": self.base,
            "validation.targets": self.targets,
            "train_data_dir": self.train_data_dir,
        }
        flags = [f"--{key}={value}" for key, value in moved.items() if value is not None]
        config, _ = parse(TrainConfig, ["--config", str(file), *flags])
        targets = target_file(config.validation.targets)
        if targets is None:
            raise UserError(
                "RUN: has no targets (validation.targets), so there is no picture to look for"
            )
        for flag, place in (("--targets", targets), ("--train_data_dir", config.train_data_dir)):
            check_path(flag, place)
        check_local(self.base_key, config.pretrained_model_name_or_path)
        return config
