"""The options of the shield's commands and of its guard, each class with what it refuses."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from silentbad.errors import UserError
from silentbad.files import check_file, check_folder, check_writable
from silentbad.settings.data import DataSettings
from silentbad.settings.rules import Facts, check_needs
from silentbad.settings.types import Location, Natural, Small, changed_fields, option
from silentbad.settings.validation import OF_SEARCH, OLDER, Audit, check_embedder

ADVICE = "make it with `silentbad-scan`"


def check_scan(path: str, flag: str) -> None:
    """Refuse a scan that is not there."""
    check_file(flag, os.path.join(path, "scan.json") if os.path.isdir(path) else path, ADVICE)


@dataclass
class ScanOptions(DataSettings):
    """What is scanned, and how"""

    output_dir: Location = option("runs/scan", "where the results go")
    permutations: Natural = option(99, "of the captions, for the false-alarm rate; 0: none")
    skip_unreadable: bool = option(
        False, "leave out records and files that cannot be read, and list them in scan.json"
    )
    engine: Literal["process", "dask"] = option(
        "process", "what runs the steps: this process, or the workers of a Dask cluster"
    )
    workers: Small = option(2, "processes of a local cluster", needs="engine=dask")
    scheduler: Location | None = option(
        None, "address of a running cluster, as tcp://HOST:8786", needs="engine=dask"
    )

    def check(self, sources: dict[str, str]) -> None:
        """Refuse a scan without data, of data that is not there, or that would write into it."""
        data = self.train_data_dir
        if (data is None) == (self.dataset_name is None):
            raise UserError("train_data_dir: give either --train_data_dir or --dataset_name")
        check_needs(self, sources, Facts())
        check_folder("train_data_dir", data)
        out = Path(self.output_dir)
        check_writable(out, "--output_dir", folder=True)
        if data is not None and out.resolve().is_relative_to(Path(data).resolve()):
            right = "which must not change; name a folder outside of it"
            raise UserError(f"--output_dir: {out} lies in the data, {right}")


USED = {  # the settings that a search uses, its own and an audit's
    *OF_SEARCH,
    *("pipeline", "baseline", "lora", "output_dir", "seed", "dtype", "extrapolate", "resolution"),
    *("variant", "max_batch", "embedder", "embedder_path", "embedder_sha256", "images_per_target"),
    *("num_inference_steps", "guidance_scale", "guidance_rescale"),
}


@dataclass
class SearchOptions(Audit):
    """Which pipeline, and where candidate phrases come from"""

    phrases: Location | None = option(None, "text file, one phrase a line")
    scan: Location | None = option(None, "scan.json, whose composed prompts are tested")
    train_data_dir: Location | None = option(None, "the phrases that recur most in these captions")
    ordinary: Location | None = option(
        None, "text file of ordinary prompts, the null; unset: plain things and places"
    )
    extrapolate: Annotated[float, Interval(ge=-10, le=10)] | None = option(
        None, "also draw with predictions led away from --baseline by this factor"
    )
    most_phrases: Annotated[int, Interval(ge=2, le=6)] = option(3, "of a prompt")
    tested: Small = option(10, "prompts that images are generated for")
    nulls: Annotated[int, Interval(ge=8, le=10_000)] = option(
        24, "ordinary prompts that images are generated for"
    )

    @property
    def given(self) -> list[str]:
        """The flags that name candidates."""
        return [
            key for key in ("phrases", "scan", "train_data_dir") if getattr(self, key) is not None
        ]

    RENAMED = {old: f"has another name now: use --{new}" for old, new in OLDER.items()}

    def check(self, sources: dict[str, str]) -> None:
        """Refuse a search without a pipeline or candidates, settings without effect, and missing
        files."""
        if self.pipeline is None:
            raise UserError("--pipeline: is missing; give a diffusers folder or Hub id")
        if len(self.given) != 1:
            flag = self.given[1] if self.given else "phrases"
            right = "give one of --phrases, --scan and --train_data_dir"
            raise UserError(f"--{flag}: {right}")
        if self.extrapolate is not None and self.baseline is None:
            raise UserError(
                "--extrapolate: needs --baseline, from which predictions are extrapolated"
            )
        if self.baseline is not None and self.extrapolate is None:
            raise UserError("--baseline: has no effect without --extrapolate")
        if idle := [name for name in changed_fields(self) if name not in USED]:
            raise UserError(f"--{idle[0]}: has no effect on a search; leave it out")
        if self.images_per_target < 2:
            raise UserError("--images_per_target: must be at least 2, for images to be compared")
        check_file("--phrases", self.phrases, "it holds one phrase a line")
        if self.scan is not None:
            check_scan(self.scan, "--scan")
        check_folder("--train_data_dir", self.train_data_dir)
        check_file("--ordinary", self.ordinary, "it holds one prompt a line")
        check_embedder(self, "--")
        self.check_pipelines()
