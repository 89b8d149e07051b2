"""A run's folder: its files, and the versions, commit and hardware it records."""

import importlib.metadata
import importlib.util
import json
import math
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from silentbad import owned
from silentbad.device import device_name
from silentbad.errors import UserError, first_line, writing
from silentbad.files import from_json, read_json
from silentbad.saving import checkpoint
from silentbad.settings import dumped
from silentbad.settings.train import REPLACED, WRITTEN, TrainConfig

KIND = "training"  # of folder, beside audits and what else this program makes
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "datasets", "safetensors", "numpy")


SAVED = "saved"  # in a row of timings.jsonl: why a checkpoint was written
# folders in samples/
SAMPLES = re.compile(r"step-\d{6}(-.+)?|targets|drift|prompts|sample_prompts")


def remove_samples(folder: Path) -> None:
    """Remove the pictures of a run, and nothing else that lies among them."""
    for path in folder.iterdir():
        if SAMPLES.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    with suppress(OSError):
        folder.rmdir()


class RunFolder:
    """`output_dir`: config.yaml, run.json, metrics.jsonl, checkpoints/, samples/, report.html, and
    `product`/: the pipeline, or the adapters of a LoRA.

    finished.json is the last thing a run writes: the step it ended at."""

    def __init__(
        self, path: str | Path, is_main: bool, product: str = "pipeline", logs: str | None = None
    ):
        self.path, self.is_main, self.logs = Path(path), is_main, logs
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.pipeline = self.path / product
        self.outdated: list[str] = []

    WRITTEN, REPLACED = WRITTEN, REPLACED

    @classmethod
    def of(cls, config: TrainConfig, is_main: bool) -> "RunFolder":
        """The folder of a configuration."""
        logs = (
            None
            if config.report_to == "none"
            else f"{config.logging_dir}/{config.tracker_project_name}"
        )
        return cls(
            config.output_dir, is_main, "pipeline" if config.lora.rank is None else "lora", logs
        )

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """No other run writes into the folder inside. Collective: the main process asks, and all
        hear its answer."""
        with ExitStack() as held:
            self.on_main(lambda: held.enter_context(owned.claimed(self.path, KIND)))
            yield

    def on_main(self, work: Callable[[], Any]) -> None:
        """Do work on the main process; where it refuses, every process raises that. Collective."""
        refusal: list[str | None] = [None]
        if self.is_main:
            try:
                work()
            except UserError as error:
                refusal = [str(error)]
        if answer := broadcast_object_list(refusal)[0]:
            raise UserError(answer)

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """A disk that is full, gone or read-only while `what` is written is one line."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"output_dir {self.path}: cannot write {what} ({first_line(error)})"
            ) from error

    def resumed(self, config: TrainConfig, say: Callable[[str], None]) -> Path | None:
        """The checkpoint to go on from, or None for a new run, whose folder is then refused if
        it holds another."""
        owned.refuse_foreign(self.path, KIND, ())
        asked = config.resume_from_checkpoint
        found = checkpoint.resolve(asked, self.checkpoints) if asked else None
        if found is not None:
            self.refuse_later(found)
        if self.metrics.exists() and not self.metrics.is_file():  # a pipe would block
            raise UserError(f"output_dir {self.path}: metrics.jsonl is no file; remove it")
        logs = self.path / (self.logs or "")
        if files := [p for p in (logs, *logs.parents) if p.exists() and not p.is_dir()]:
            raise UserError(
                f"output_dir {self.path}: {files[0].name}, for the logs of "
                f"report_to, is a file; remove it"
            )
        if found is None:
            self.refuse_other_run(config.overwrite_output_dir, resuming=bool(asked))
            if asked:
                say(f"no checkpoint in {self.checkpoints} to resume from; starting anew")
        for name in ("pipeline", "lora", "best", "epochs"):
            if added := checkpoint.foreign_files(self.path / name):
                raise UserError(
                    f"output_dir {self.path}: no run wrote {added[0]}, which would "
                    f"be replaced; move it"
                )
        return found

    def refuse_later(self, found: Path) -> None:
        """Refuse to go back behind whole checkpoints of the folder: those of two branches would
        stand side by side."""
        start = checkpoint.step_of(found)
        later = [p for p in checkpoint.steps(self.checkpoints) if checkpoint.step_of(p) > start]
        if whole := [p.name for p in later if checkpoint.problem(p) is None]:
            raise UserError(
                f"resume_from_checkpoint {found}: {self.checkpoints} holds later ones "
                f"({', '.join(whole)}), which "
                "would mix with what follows; give another output_dir, or remove them"
            )

    def refuse_other_run(self, overwrite: bool, resuming: bool = False) -> None:
        """Refuse a folder that holds a run, unless `open` is to delete it, and one that holds what
        no run wrote.

        A run that was killed before its first checkpoint holds nothing to keep: resuming it starts
        it anew."""
        logs = Path(self.logs).parts[:1] if self.logs else ()
        owned.refuse_foreign(self.path, KIND, (*self.WRITTEN, *self.REPLACED, *logs))
        held = [
            p
            for p in (self.metrics, self.checkpoints, self.pipeline, self.path / "validation.json")
            if p.exists()
        ]
        if resuming and (
            self.pipeline.exists() or any(self.checkpoints.glob("step-*")) or self.has_saved()
        ):
            raise UserError(
                f"output_dir {self.path}: holds a run, but no whole checkpoint to resume it "
                f"from; bring back "
                f"{self.checkpoints}, delete the run with --overwrite_output_dir, or choose "
                f"another folder"
            )
        if held and not overwrite and not resuming:
            raise UserError(
                f"output_dir {self.path}: holds a run already ({held[0].name}); resume it with "
                "--resume_from_checkpoint latest, delete it with --overwrite_output_dir, or "
                "choose another folder"
            )
        self.outdated = list(self.WRITTEN) if held else []

    def has_saved(self) -> bool:
        """Whether the run wrote a checkpoint once, wherever it is now."""
        timings = self.path / "timings.jsonl"
        return timings.is_file() and f'"{SAVED}"' in timings.read_text(
            encoding="utf-8", errors="replace"
        )

    def open(self, config: dict[str, Any], facts: dict[str, Any]) -> None:
        """Make the folder, delete the run it replaces, and write what this one is."""
        if not self.is_main:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            owned.mark(self.path, KIND)
            for name in self.outdated:
                path = self.path / name
                if path.is_symlink() or not path.is_dir():
                    path.unlink(missing_ok=True)
                elif name == "samples":
                    remove_samples(path)
                else:
                    shutil.rmtree(path)
            (self.path / "finished.json").unlink(missing_ok=True)
            for name in ("pipeline", "best"):
                checkpoint.put_back(self.path / name)
            (self.path / "config.yaml").write_text(dumped(config))
            (self.path / "run.json").write_text(json.dumps(facts, indent=1))
        except OSError as error:
            raise UserError(
                f"output_dir {self.path}: cannot be written ({error.strerror})"
            ) from None

    def log(self, row: dict[str, Any], name: str = "metrics.jsonl") -> None:
        """Append one row. A resumed run repeats metrics.jsonl to the letter, so what the clock
        says goes elsewhere."""
        if self.is_main:
            row = {
                key: None if isinstance(v, float) and not math.isfinite(v) else v
                for key, v in row.items()
            }
            self.refuse_vanished()
            with writing(f"output_dir {self.path}", name), (self.path / name).open("a") as file:
                file.write(json.dumps(row, default=_plain) + "\n")

    def write(self, name: str, value: Any) -> None:
        """A JSON file of the folder."""
        if self.is_main:
            with writing(f"output_dir {self.path}", name):
                (self.path / name).write_text(json.dumps(value, default=_plain), encoding="utf-8")

    def finished(self) -> int | None:
        """The step a finished run ended at."""
        try:
            return read_json(self.path / "finished.json")["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def refuse_vanished(self) -> None:
        """Refuse to go on where someone took the folder away; what a resume needs is then saved
        anew."""
        if not (self.path / "config.yaml").is_file():
            raise UserError(
                f"output_dir {self.path}: the folder or its config.yaml has vanished "
                f"during the run; "
                "go on from what is saved with --resume_from_checkpoint latest"
            )

    def truncate(self, step: int, validated: bool) -> None:
        """Drop what a resumed run will write again: rows after `step`, its validation unless
        that is done."""
        if not self.is_main or not self.metrics.exists():
            return
        kept = []
        with self.writing("metrics.jsonl"):
            written = self.metrics.read_text(encoding="utf-8", errors="replace")
        for line in written.splitlines():
            try:
                row = from_json(line)
                goes_on = row["step"] < step or (
                    row["step"] == step and (validated or not row.get("validation"))
                )
                if goes_on and isinstance(row.get("loss", 0.0), float):
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # a line cut off by a kill
        temporary = self.metrics.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self.metrics)

    def asked(self, name: str) -> bool:
        """Whether the trigger file SAVE or VALIDATE was put into the folder; it is taken away."""
        trigger = self.path / name
        if not self.is_main or not trigger.exists():
            return False
        trigger.unlink(missing_ok=True)
        return True


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return str(value)


def facts(device: torch.device, world: int) -> dict[str, Any]:
    """Versions, commit and hardware."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    where: dict[str, Any] = {"cwd": Path(__file__).parent, "capture_output": True, "text": True}
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **where).stdout.strip() or None
        dirty = bool(subprocess.run(["git", "status", "--porcelain"], **where).stdout.strip())
    except OSError:
        commit, dirty = None, None
    return {
        "versions": versions | {"python": platform.python_version()},
        "commit": commit,
        "uncommitted_changes": dirty,
        "device": f"{device.type}: {device_name(device)}",
        "processes": world,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def stamped(config: TrainConfig) -> Any:
    """With stamp_output_dir the configuration of output_dir/TIME or output_dir/TIME_SUFFIX, the
    same on every process: its config.yaml means that folder."""
    if not config.stamp_output_dir:
        return config
    PartialState()
    name = [
        time.strftime("%Y-%m-%dT%H-%M-%S") + (f"_{config.run_suffix}" if config.run_suffix else "")
    ]
    place = str(Path(config.output_dir) / broadcast_object_list(name)[0])
    return replace(config, output_dir=place, stamp_output_dir=False, run_suffix=None)
