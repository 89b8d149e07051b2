"""A run's folder: its files, and the versions, commit and hardware it records."""

import importlib.metadata
import json
import math
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from silentbad import ROOT, __version__, owned
from silentbad.device import device_name
from silentbad.distributed.main_process import on_main
from silentbad.errors import UserError, writing
from silentbad.files import from_json, read_json, replace_text
from silentbad.saving import checkpoint
from silentbad.settings.check import check_output, runs_files
from silentbad.settings.reader import dumped
from silentbad.settings.train import KIND, WRITTEN, TrainConfig

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "datasets", "safetensors", "numpy")


SAVED = "saved"  # key in a row of timings.jsonl: why a checkpoint was written


class RunFolder:
    """`output_dir`: config.yaml, run.json, metrics.jsonl, checkpoints/, samples/, report.html, and
    pipeline/, or lora/ with the adapters.

    finished.json is the last thing a run writes: the step it ended at."""

    def __init__(self, config: TrainConfig, is_main: bool):
        self.config = config
        self.is_main = is_main
        self.path = Path(config.output_dir)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.pipeline = self.path / ("pipeline" if config.lora.rank is None else "lora")
        self.outdated: tuple[str, ...] = ()  # what `open` deletes

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Inside this context no other run writes into the folder. Collective."""
        with ExitStack() as held:

            def claim() -> None:
                held.enter_context(owned.claimed(self.path, KIND))

            on_main(self.is_main, claim)
            yield

    def writing(self, what: str) -> AbstractContextManager[None]:
        """Report a disk that is full, gone or read-only while `what` is written, in one line."""
        return writing(f"output_dir {self.path}", what)

    def resumed(self, say: Callable[[str], None]) -> Path | None:
        """The checkpoint to go on from, or None for a new run."""
        owned.refuse_foreign(self.path, KIND, ())
        asked = self.config.resume_from_checkpoint
        start = checkpoint.resolve(asked, self.checkpoints) if asked else None
        if start is None:
            self._refuse_other_run(resuming=bool(asked))
            if asked:
                say(f"no checkpoint in {self.checkpoints} to resume from; starting anew")
            return None
        step = read_json(start / checkpoint.MANIFEST)["step"]
        later = [p for p in checkpoint.steps(self.checkpoints) if checkpoint.number(p) > step]
        if whole := [p.name for p in later if checkpoint.problem(p) is None]:
            raise UserError(  # checkpoints of two branches would lie in one folder
                f"resume_from_checkpoint {start}: {self.checkpoints} holds later ones "
                f"({', '.join(whole)}), which would mix with what follows; give another "
                f"output_dir, or remove them"
            )
        places = (start.parent.resolve(), start.resolve().parent)  # a checkpoint may be a link
        elsewhere = self.checkpoints.resolve() not in places
        if elsewhere and (self.pipeline.exists() or checkpoint.steps(self.checkpoints)):
            raise UserError(
                f"resume_from_checkpoint {start}: {self.path} holds another run; give another "
                "output_dir"
            )
        return start

    def _refuse_other_run(self, resuming: bool) -> None:
        """Refuse a folder that holds a run, unless it is to be overwritten, and a folder with
        files that no run wrote.

        A run that was killed before its first checkpoint holds nothing to keep: resuming it starts
        it anew."""
        check_output(self.config)
        timings = self.path / "timings.jsonl"
        has_saved = timings.is_file() and f'"{SAVED}"' in timings.read_text(errors="replace")
        if resuming and (self.pipeline.exists() or checkpoint.steps(self.checkpoints) or has_saved):
            raise UserError(
                f"output_dir {self.path}: holds a run, but no whole checkpoint to resume it from; "
                f"bring back {self.checkpoints}, delete the run with --overwrite_output_dir, or "
                f"choose another folder"
            )
        self.outdated = WRITTEN if runs_files(self.config) else ()

    def open(self, config: dict[str, Any], facts: dict[str, Any]) -> None:
        """Make the folder, delete the run it replaces, and write this run's config and facts."""
        if not self.is_main:
            return
        with self.writing("its config.yaml"):
            self.path.mkdir(parents=True, exist_ok=True)
            owned.mark(self.path, KIND)
            for name in self.outdated:
                path = self.path / name
                if path.is_symlink() or not path.is_dir():
                    path.unlink(missing_ok=True)
                elif path == self.checkpoints:
                    checkpoint.rotate(path, 1, keep=path)
                else:
                    shutil.rmtree(path)
            (self.path / "finished.json").unlink(missing_ok=True)
            (self.path / "config.yaml").write_text(dumped(config))
            (self.path / "run.json").write_text(json.dumps(facts, indent=1))

    def log(self, row: dict[str, Any], name: str = "metrics.jsonl") -> None:
        """Append one row. Wall times go to another file: a resume must repeat metrics.jsonl."""
        if self.is_main:
            lost = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
            row = row | dict.fromkeys(lost)
            with self.writing(name), (self.path / name).open("a") as file:
                file.write(json.dumps(row, default=_plain) + "\n")

    def write(self, name: str, value: Any) -> None:
        """A JSON file of the folder."""
        if self.is_main:
            with self.writing(name):
                (self.path / name).write_text(json.dumps(value, default=_plain), encoding="utf-8")

    def finished(self) -> int | None:
        """The step a finished run ended at."""
        try:
            return read_json(self.path / "finished.json")["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def truncate(self, step: int, validated: bool) -> None:
        """Drop the rows that a resumed run writes again: those after `step`, and the validation at
        `step` unless it is `validated`."""
        if not self.is_main or not self.metrics.exists():
            return

        def goes_on(line: str) -> bool:
            try:
                row = from_json(line)
                done = validated or not row.get("validation")
                return row["step"] < step or (row["step"] == step and done)
            except (ValueError, KeyError, TypeError):
                return False  # cut off by a kill

        with self.writing("metrics.jsonl"):
            written = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
            replace_text(self.metrics, "".join(f"{line}\n" for line in filter(goes_on, written)))

    def asked(self, name: str) -> bool:
        """Whether the trigger file SAVE or VALIDATE is in the folder; it is then removed."""
        trigger = self.path / name
        if not self.is_main or not trigger.exists():
            return False
        trigger.unlink(missing_ok=True)
        return True


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def facts(device: torch.device, world: int) -> dict[str, Any]:
    """Versions, commit and hardware."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    where: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True}
    commit = None
    dirty = None
    # an installed package may lie in someone else's repository
    with suppress(OSError):
        if (ROOT / ".git").exists():
            commit = subprocess.run(["git", "rev-parse", "HEAD"], **where).stdout.strip() or None
            status = subprocess.run(["git", "status", "--porcelain"], **where)
            dirty = bool(status.stdout.strip()) if status.returncode == 0 else None
    return {
        "versions": versions | {"python": platform.python_version(), "silentbad": __version__},
        "commit": commit,
        "uncommitted_changes": dirty,
        "device": f"{device.type}: {device_name(device)}",
        "processes": world,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def stamped(config: TrainConfig) -> TrainConfig:
    """The configuration; with stamp_output_dir its output_dir becomes output_dir/TIME_SUFFIX, the
    same on every process."""
    if not config.stamp_output_dir:
        return config
    PartialState()
    suffix = f"_{config.run_suffix}" if config.run_suffix else ""
    (name,) = broadcast_object_list([time.strftime("%Y-%m-%dT%H-%M-%S") + suffix])
    place = str(Path(config.output_dir) / name)
    return replace(config, output_dir=place, stamp_output_dir=False, run_suffix=None)
