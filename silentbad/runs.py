"""A run's folder and its moment-to-moment state: metrics.jsonl, meters on the device, signals, versions, model card."""

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import yaml
from accelerate import Accelerator, PartialState
from accelerate.utils import ProjectConfiguration, broadcast_object_list

from . import checkpoint
from .debug import look
from .errors import UserError

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "datasets", "safetensors", "numpy", "deepspeed")


class RunFolder:
    """`output_dir`: config.yaml, run.json, metrics.jsonl, checkpoints/, samples/, report.html, and `product`/: the
    pipeline, or the adapters of a LoRA.

    finished.json is the last thing a run writes: the step it ended at.
    """

    def __init__(self, path: str | Path, is_main: bool, product: str = "pipeline"):
        self.path, self.is_main = Path(path), is_main
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.pipeline = self.path / product
        self.outdated: list[str] = []

    WRITTEN = (
        "checkpoints",
        "pipeline",
        "lora",
        "best",
        "samples",
        "epochs",
        "metrics.jsonl",
        "timings.jsonl",
        "validation.json",
        "report.html",
        "finished.json",
    )

    @classmethod
    def of(cls, config: Any, is_main: bool) -> "RunFolder":
        """The folder of a configuration."""
        return cls(config.output_dir, is_main, "pipeline" if config.lora.rank is None else "lora")

    def resumed(self, config: Any, say: Callable[[str], None]) -> Path | None:
        """The checkpoint to go on from, or None for a new run, whose folder is then refused if it holds another."""
        asked = config.resume_from_checkpoint
        found = checkpoint.resolve(asked, self.checkpoints) if asked else None
        if found is None:
            self.refuse_other_run(config.overwrite_output_dir, resuming=bool(asked))
            if asked:
                say(f"no checkpoint in {self.checkpoints} to resume from; starting anew")
        return found

    def refuse_other_run(self, overwrite: bool, resuming: bool = False) -> None:
        """Refuse a folder that holds a run, unless `open` is to delete it, and one that cannot be written.

        A run that was killed before its first checkpoint holds nothing to keep: resuming it starts it anew.
        """
        held = [p for p in (self.metrics, self.checkpoints, self.pipeline) if p.exists()]
        if resuming and (self.pipeline.exists() or any(self.checkpoints.glob("step-*"))):
            raise UserError(
                f"output_dir {self.path}: holds a run, but no whole checkpoint to resume it from; delete it with "
                "--overwrite_output_dir, or choose another folder"
            )
        if held and not overwrite and not resuming:
            raise UserError(
                f"output_dir {self.path}: holds a run already ({held[0].name}); resume it with "
                "--resume_from_checkpoint latest, delete it with --overwrite_output_dir, or choose another folder"
            )
        parent = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"output_dir {self.path}: cannot be written, {parent} is no folder one may write into")
        self.outdated = list(self.WRITTEN) if held else []

    def open(self, config: dict[str, Any], facts: dict[str, Any]) -> None:
        """Make the folder, delete the run it replaces, and write what this one is."""
        if not self.is_main:
            return
        try:
            for name in self.outdated:
                path = self.path / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "finished.json").unlink(missing_ok=True)
            for name in ("pipeline", "best"):
                checkpoint.put_back(self.path / name)
            (self.path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
            (self.path / "run.json").write_text(json.dumps(facts, indent=1))
        except OSError as error:
            raise UserError(f"output_dir {self.path}: cannot be written ({error.strerror})") from None

    def log(self, row: dict[str, Any], name: str = "metrics.jsonl") -> None:
        """Append one row. A resumed run repeats metrics.jsonl to the letter, so what the clock says goes elsewhere."""
        if self.is_main:
            row = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
            self.refuse_vanished()
            with checkpoint.writing(f"output_dir {self.path}", name), (self.path / name).open("a") as file:
                file.write(json.dumps(row, default=_plain) + "\n")

    def write(self, name: str, value: Any) -> None:
        """A JSON file of the folder."""
        if self.is_main:
            with checkpoint.writing(f"output_dir {self.path}", name):
                (self.path / name).write_text(json.dumps(value, default=_plain), encoding="utf-8")

    def finished(self) -> int | None:
        """The step a finished run ended at."""
        try:
            return json.loads((self.path / "finished.json").read_text())["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def refuse_vanished(self) -> None:
        """Refuse to go on where someone took the folder away; what a resume needs is then saved anew."""
        if not (self.path / "config.yaml").is_file():
            raise UserError(
                f"output_dir {self.path}: the folder or its config.yaml has vanished during the run; "
                "go on from what is saved with --resume_from_checkpoint latest"
            )

    def truncate(self, step: int, validated: bool) -> None:
        """Drop what a resumed run will write again: rows after `step`, its validation unless that is done."""
        if not self.is_main or not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                if row["step"] < step or (row["step"] == step and (validated or not row.get("validation"))):
                    kept.append(line)
            except (ValueError, KeyError):
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
    versions = {}
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


def device_name(device: torch.device | str) -> str:
    """The GPU's or the CPU's model, as far as the system tells."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


class Meters:
    """Running sums on the device; `read` is the one place where the host waits for it."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, values: dict[str, Any]) -> None:
        """Scalars: tensors where they are, or numbers."""
        for name, value in values.items():
            value = torch.as_tensor(value).detach().float().reshape(())
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
            self.counts[name] = self.counts.get(name, 0) + 1

    def share(self, accelerator: Any) -> None:
        """Replace the sums by their means over the processes; all of them call it."""
        if accelerator.num_processes > 1 and self.sums:
            names = sorted(self.sums)
            stacked = torch.stack([self.sums[name].to(accelerator.device) for name in names])
            shared = accelerator.reduce(stacked, reduction="mean")
            self.sums = dict(zip(names, shared.unbind(), strict=True))

    def read(self) -> dict[str, float]:
        """Means since the last read, which start anew."""
        if not self.sums:
            return {}
        names, device = list(self.sums), next(iter(self.sums.values())).device
        means = torch.stack([(self.sums[name] / self.counts[name]).to(device) for name in names]).tolist()
        self.sums, self.counts = {}, {}
        return dict(zip(names, means, strict=True))

    def to(self, device: torch.device) -> None:
        self.sums = {name: value.to(device) for name, value in self.sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": {name: value.cpu() for name, value in self.sums.items()}, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums, self.counts = dict(state["sums"]), dict(state["counts"])


class Requests:
    """What signals and trigger files ask for, agreed on by all processes at each step boundary.

    SIGTERM and SIGINT: save and stop with 128 + the signal's number; SIGUSR1: save and go on; SIGUSR2: `debug.look`, at
    once and on the process it was sent to. The agreement runs on
    the host (gloo), so no process waits for its device.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self, folder: RunFolder):
        self.folder, self.stop, self.save = folder, 0, 0
        self.group: Any = None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.group = torch.distributed.new_group(backend="gloo")

    def __enter__(self) -> "Requests":
        self.previous = {}
        for number in self.SIGNALS:
            try:
                self.previous[number] = signal.signal(number, look if number == signal.SIGUSR2 else self._note)
            except ValueError:  # only the main thread may; elsewhere trigger files remain
                break
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        if number == signal.SIGUSR1:
            self.save = 1
        else:
            self.stop = number

    def agreed(self) -> tuple[int, bool, bool]:
        """(signal to stop by or 0, save now, validate now), the same on every process."""
        asked = [self.stop, self.save or self.folder.asked("SAVE"), self.folder.asked("VALIDATE")]
        self.save = 0
        if self.group is not None:
            shared = torch.tensor([int(value) for value in asked])
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=self.group)
            asked = shared.tolist()
        return int(asked[0]), bool(asked[1]), bool(asked[2])


def stamp(config: Any) -> None:
    """output_dir becomes output_dir/TIME or output_dir/TIME_SUFFIX, the same on every process; once."""
    if not config.stamp_output_dir:
        return
    PartialState()
    name = [time.strftime("%Y-%m-%dT%H-%M-%S") + (f"_{config.run_suffix}" if config.run_suffix else "")]
    config.output_dir = str(Path(config.output_dir) / broadcast_object_list(name)[0])
    config.stamp_output_dir, config.run_suffix = False, None  # so that the config.yaml inside means this folder


def clean_records(sampler: Any) -> list[dict[str, Any]]:
    """Held-out records as the drift measurement takes them: pixel_values (3,R,R) in [-1,1] and text."""
    pictures = sampler.pictures(list(range(len(sampler.records))))
    return [{"pixel_values": p["pixels"].float() / 127.5 - 1, "text": p["text"]} for p in pictures]


def make_accelerator(config: Any) -> Accelerator:
    """accelerate's handle, with the trackers of `report_to`."""
    trackers = None if config.report_to == "none" or config.dry_run else config.report_to
    for name in ("tensorboard", "wandb", "comet_ml"):
        if trackers == name and importlib.util.find_spec(name) is None:
            raise UserError(f"report_to: {name} is not installed; pip install {name}, or use none")
    accelerator = Accelerator(
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        mixed_precision=config.mixed_precision,
        log_with=trackers,
        project_config=ProjectConfiguration(config.output_dir, logging_dir=f"{config.output_dir}/{config.logging_dir}"),
    )
    torch.backends.cuda.matmul.allow_tf32 = config.allow_tf32
    return accelerator


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as the flat scalars that trackers take."""
    items = {}
    for key, value in config.items():
        if isinstance(value, dict):
            items |= flat(value, f"{prefix}{key}.")
        else:
            items[prefix + key] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return items


def save_images(images: list[Any], folder: Path, step: int, accelerator: Any) -> None:
    """PNG files and tracker images."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        image.save(folder / f"step-{step:06d}-{number}.png")
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log_images({"prompts": np.stack([np.asarray(i) for i in images])}, step, dataformats="NHWC")
        elif tracker.name == "wandb":
            tracker.log_images({"prompts": images}, step=step)


def push(folder: Path, config: Any) -> None:
    """Upload a pipeline folder; checkpoints and logs lie elsewhere."""
    from huggingface_hub import create_repo, upload_folder

    name = config.hub_model_id or Path(config.output_dir).name
    repo = create_repo(repo_id=name, exist_ok=True, token=config.hub_token).repo_id
    upload_folder(repo_id=repo, folder_path=folder, commit_message="End of training", token=config.hub_token)
