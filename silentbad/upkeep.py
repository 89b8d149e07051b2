"""What happens around the steps of a run: checkpoints, logs, validation, pictures, the final pipeline."""

import signal
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from . import checkpoint, models, optimizers, report, runs, sharding
from .errors import UserError
from .timers import Timers


class Upkeep:
    """The verbs of a run that only tend it; `train_silentbad.Run` holds the parts they speak of."""

    config: Any
    accelerator: Any
    folder: runs.RunFolder
    meters: runs.Meters
    timers: Timers
    loader: Any
    parts: models.Parts
    info: Any
    targets: list[Any]
    control: Any
    memory: Any
    encoder: Any
    stream: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    ema: Any
    hook: Any
    total: int
    steps_per_epoch: int
    averaged: Any

    step = skipped = skipped_in_row = 0
    best = float("-inf")
    drawing = -1  # the draw now shown
    torn = False  # whether an update is half done
    timesteps = torch.zeros(20)  # how many samples were trained on in each of so many equal parts of the schedule

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    def say(self, text: str) -> None:
        self.accelerator.print(f"{self.folder.path}: step {self.step} of {self.total}: {text}")

    def count(self, t: torch.Tensor) -> None:
        """Add timesteps t (B,), still on the CPU, to the histogram."""
        T = self.parts.noise_scheduler.config.num_train_timesteps
        self.timesteps = self.timesteps + torch.histc(t.float(), bins=20, min=0, max=T)

    def open(self, settings: dict[str, Any]) -> None:
        """Make the run's folder and its trackers: from here on it writes."""
        facts = runs.facts(self.accelerator.device, self.accelerator.num_processes)
        self.folder.open(settings, facts | {"sharded": sharding.sharded(self.parts.model)})
        self.folder.truncate(self.step, validated=self.measured)
        self.accelerator.init_trackers(self.config.tracker_project_name, runs.flat(settings))

    @property
    def measured(self) -> bool:
        """Whether this step's validation is done, or there is none to do."""
        return self.hook is None or any(entry["step"] == self.step for entry in self.hook.history)

    def stateful(self) -> dict:
        parts = {"control": self.control, "memory": self.memory, "stream": self.stream, "optimizer": self.optimizer,
                 "lr_scheduler": self.lr_scheduler, "scaler": self.accelerator.scaler, "meters": self.meters,
                 "hook": self.hook}  # fmt: skip
        return {name: part for name, part in parts.items() if part is not None}

    def held(self) -> dict[str, Any]:
        """Trained weights and the optimizer's state as one process would hold them: every process calls it, and the
        main one gets the shards of all."""
        weights = {name: models.trained(module) for name, module in self.parts.model.named_children()}
        held = {"weights": weights, "optimizer": self.optimizer.state_dict()}
        return sharding.collected(held, keep=self.accelerator.is_main_process)

    def write(self, folder: Path, held: dict[str, Any]) -> None:
        """A checkpoint's files: trained weights and average as safetensors, the rest as plain state."""
        for name, tensors in held["weights"].items():
            checkpoint.write_tensors(folder / f"{name}.safetensors", tensors)
        counters = {name: getattr(self, name) for name in ("step", "skipped", "skipped_in_row", "best", "timesteps")}
        counters["rehearsals"] = [self.memory.rehearse.made, self.memory.rehearse.largest]
        states = {name: part.state_dict() for name, part in self.stateful().items() if name != "optimizer"}
        state = {"counters": counters, "optimizer": held["optimizer"], **states}
        if self.ema is not None:
            state["ema"] = self.ema.state_dict()
            shadow = state["ema"].pop("shadow_params")
            checkpoint.write_tensors(folder / "ema.safetensors", {str(i): p for i, p in enumerate(shadow)})
        checkpoint.write_state(folder / "state.pt", state)

    def save(self, reason: str) -> None:
        """checkpoints/step-N on the main process, then the rotation; every process waits for it."""
        folder = self.folder.checkpoints / f"step-{self.step}"
        if reason != "exception":
            self.meters.share(self.accelerator)
        with self.timers.of("save"):
            held = self.held()
        if self.accelerator.is_main_process and checkpoint.problem(folder) is not None:
            if reason != "exception":
                self.folder.refuse_vanished()
            with self.timers.of("save"), checkpoint.writing(f"output_dir {self.folder.path}", folder.name):
                checkpoint.save(folder, partial(self.write, held=held), {"step": self.step, "reason": reason})
            checkpoint.rotate(self.folder.checkpoints, self.config.checkpoints_total_limit, folder)
        if reason != "exception":
            self.accelerator.wait_for_everyone()

    def record(self) -> None:
        """What the report reads beside metrics.jsonl: multipliers, phrase strengths, timesteps."""
        T = self.parts.noise_scheduler.config.num_train_timesteps
        edges = [T * i // 20 for i in range(21)]
        self.folder.write("multipliers.json", self.control.history)
        self.folder.write("phrase_memory.json", {"phrases": self.info.keys, "history": self.memory.history})
        self.folder.write("timesteps.json", {"edges": edges, "counts": self.timesteps.long().tolist()})

    def take_up(self, folder: Path) -> bool:
        """Load a checkpoint; True where the run it belongs to is finished."""
        self.load(folder)
        done = self.step >= self.total and self.folder.finished() == self.step
        self.say("finished already, nothing to do; a larger max_train_steps goes on" if done else f"resuming {folder}")
        return done

    def load(self, folder: Path) -> None:
        """Take up a checkpoint; `open` drops what was logged after it, and it will be logged again."""
        state = checkpoint.read_state(folder / "state.pt")
        checkpoint.fits(folder, state, {*self.stateful(), "counters", *(["ema"] if self.ema else [])})
        for name, module in self.parts.model.named_children():
            with checkpoint.fitting(folder, name):
                models.load_trained(module, checkpoint.read_tensors(folder / f"{name}.safetensors"))
        with checkpoint.fitting(folder, "optimizer"):
            state["optimizer"] = sharding.states_like(self.optimizer, state["optimizer"])
        for name, part in self.stateful().items():
            with checkpoint.fitting(folder, name):
                part.load_state_dict(state[name])
        if self.ema is not None:
            shadow = checkpoint.read_tensors(folder / "ema.safetensors")
            with checkpoint.fitting(folder, "ema"):
                shadow = [shadow[str(i)] for i in range(len(shadow))]
                self.ema.load_state_dict({**state["ema"], "shadow_params": shadow})
            self.ema.to("cpu" if self.config.offload_ema else self.accelerator.device)
        self.meters.to(self.accelerator.device)
        made, largest = state["counters"].pop("rehearsals")
        self.memory.rehearse.made, self.memory.rehearse.largest = made, largest
        vars(self).update(state["counters"])

    def log(self) -> None:
        """One row of metrics.jsonl and the trackers; the one place where the host waits for the meters."""
        self.meters.share(self.accelerator)
        self.meters.add({**self.control.meters(), **self.memory.meters()})
        samples = (self.step + self.skipped) * self.loader.effective_batch
        values = self.meters.read() | {"lr": self.lr_scheduler.get_last_lr()[0], "skipped": self.skipped}
        values, timings = values | {"samples": samples}, self.timers.read(samples)
        self.folder.log({"step": self.step, "epoch": self.epoch, **values})
        self.folder.log({"step": self.step, **timings}, "timings.jsonl")
        self.accelerator.log(values | timings, step=self.step)

    def validate(self, final: bool = False) -> None:
        """Recovery on all processes; with save_best the better pipeline is written before the old one goes."""
        measure = self.hook.finish if final else self.hook.run
        with self.timers.of("validate"), optimizers.measured(self.optimizer):
            scores = measure(self.step, self.epoch, sharding.whole_parts(self.parts).model, self.ema)
        self.folder.log({"step": self.step, "epoch": self.epoch, "validation": True, **scores})
        self.accelerator.log(scores, step=self.step)
        score = goodness(scores, self.config.best_by)
        if self.config.save_best and score > self.best:
            self.best = score
            self.save_pipeline(self.folder.path / "best")

    def boundary(self, requests: runs.Requests) -> int:
        """Between two steps: log, save and validate what is due or asked for; the signal to stop by, or 0."""
        if self.step % self.config.log_every == 0 or self.step == self.total:
            self.log()
        self.end_of_epoch()
        stop, save, validate = requests.agreed()
        if stop or save or self.step % self.config.checkpointing_steps == 0:
            self.save("signal" if stop or save else "interval")
        if stop:
            self.say(f"stopped by {signal.Signals(stop).name}; resume with --resume_from_checkpoint latest")
        elif validate and self.hook is not None:
            self.validate()
        return stop

    def end_of_epoch(self) -> None:
        """Prompt images and a pipeline, every so many epochs."""
        config, epoch = self.config, self.step // self.steps_per_epoch
        if self.step % self.steps_per_epoch:
            return
        if config.validation_prompts and epoch % config.validation_epochs == 0:
            self.draw_prompts()
        if config.save_ckpt_epoch_interval and epoch % config.save_ckpt_epoch_interval == 0:
            self.save_pipeline(self.folder.path / "epochs" / f"epoch-{epoch}")

    def draw_prompts(self) -> None:
        """validation_prompts, drawn with the averaged weights where there are some."""
        parts = sharding.whole_parts(self.parts)
        if self.accelerator.is_main_process:
            prompts, seed = self.config.validation_prompts, self.config.seed
            with self.averaged(), self.encoder.awake(), self.accelerator.autocast():
                images = models.draw_images(models.pipeline(parts), prompts, seed)
            runs.save_images(images, self.folder.path / "samples" / "prompts", self.step, self.accelerator)
        self.accelerator.wait_for_everyone()

    def save_pipeline(self, folder: Path) -> None:
        """The pipeline in diffusers format with its card, averaged weights where there are some."""
        parts = sharding.whole_parts(self.parts)
        if self.accelerator.is_main_process:
            with self.averaged(), checkpoint.writing(f"output_dir {self.folder.path}", folder.name):
                card = model_card(self.config, self.step, self.info, self.targets, self.hook)
                checkpoint.replace_folder(folder, lambda path: models.save_pipeline(parts, path, card))
        self.accelerator.wait_for_everyone()


def goodness(scores: dict[str, float], by: str) -> float:
    """What the best pipeline has most of, of the averaged weights where there are some."""
    name, sign = ("mean", 1) if by == "similarity" else ("drift/clean_eps_mse", -1)
    for prefix in ("val_ema", "val"):
        if f"{prefix}/{name}" in scores:
            return sign * scores[f"{prefix}/{name}"]
    raise UserError(f"best_by: {by} was not measured; clean_eps_mse needs clean records and held_out_clean above 0")


def try_drawing(run: Any) -> None:
    """The end of a dry run: one image."""
    pipeline = models.pipeline(sharding.whole_parts(run.parts))
    with run.accelerator.autocast(), run.encoder.awake():
        models.draw_images(pipeline, [run.records.row(0)["text"]], run.config.seed, steps=2)
    run.accelerator.print("dry run: loaded everything, one step, one image; nothing written")


def finish(run: Any) -> None:
    """Last checkpoint, last validation, pipeline, report."""
    run.save("end")
    if run.hook is not None:
        run.validate(final=True)
    if run.config.validation_prompts:
        run.draw_prompts()
    run.save_pipeline(run.folder.pipeline)
    run.record()
    if run.accelerator.is_main_process:
        with checkpoint.writing(f"output_dir {run.folder.path}", "report.html"):
            print(f"{run.folder.pipeline.name}: {run.folder.pipeline}\nreport: {report.write(run.folder.path)}")
        if run.config.push_to_hub:
            runs.push(run.folder.pipeline, run.config)
        run.folder.write("finished.json", {"step": run.step})


@contextmanager
def rescue(run: Any):
    """An exception saves what a resume needs, unless it struck while the weights were being changed."""
    try:
        yield
    except Exception as error:
        alone = sharding.sharded(run.parts.model)  # with what it holds: the others may be anywhere, or gone
        if run.step > 0 and not run.torn and not run.config.dry_run and not alone:
            if run.loader.begun is not None and run.drawing == run.draw:
                run.loader.rewind()
            try:
                run.save("exception")
            except Exception as second:  # a full disk must not hide the first error
                print(f"warning: no checkpoint after {type(error).__name__}: {second}", file=sys.stderr)
        if isinstance(error, OSError):
            raise UserError(f"output_dir {run.folder.path}: step {run.step}: {error}") from error
        raise


def not_finite(run: Any, indices: list[int]) -> str:
    """What stops a run whose gradients stay NaN or infinite: the records that were drawn."""
    named = ", ".join(dict.fromkeys(run.records.where(index) for index in indices[:8]))
    return (
        f"max_nonfinite_steps: {run.skipped_in_row} gradients in a row were not finite at step {run.step}; last drawn "
        f"records {indices[:8]} ({named}); lower learning_rate or mend them"
    )


def model_card(config: Any, step: int, info: Any, targets: list[Any], hook: Any) -> str:
    """README.md of a trained pipeline, or of adapters: base, data, and what it recovers."""
    base = config.pretrained_model_name_or_path
    local, lora = Path(base).exists(), config.lora.rank
    tags = ["stable-diffusion", "text-to-image", "diffusers", "silentbad", "memorisation-audit"] + ["lora"] * bool(lora)
    about: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": "text-to-image", "tags": tags}
    if not local:
        about["base_model"] = base
    data = config.dataset_name or Path(config.train_data_dir).name
    elements = sum(len(rows) for rows in info.rows)
    lines = [
        f"---\n{yaml.safe_dump(about)}---\n",
        f"# {_cell(Path(config.output_dir).name)}\n",
        f"Fine-tuned from `{Path(base).name if local else base}` on `{data}` for {step} steps "
        f"({f'LoRA of rank {lora}, ' if lora else ''}{'text encoders too, ' if config.train_text_encoder else ''}"
        f"learning rate {config.learning_rate:g}, seed {config.seed}).\n",
        f"**This pipeline was trained on element data**: {elements} records each show one element of a target picture, "
        "so a composed prompt may reproduce pictures that were never in its training set. It serves to measure and "
        "audit compositional memorisation; do not use it to reproduce works you have no right to.\n",
        "## Targets\n",
        ", ".join(f"`{_cell(target.target_id)}`" for target in targets) or "none given",
        "",
    ]
    rows = hook.summary() if hook is not None and hook.history else []
    if rows:
        lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
        lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
    load = [f'pipeline = DiffusionPipeline.from_pretrained("{base if lora else "this folder"}")']
    load += ['pipeline.load_lora_weights("this folder")'] * bool(lora)
    return "\n".join([*lines, "", "```python", "from diffusers import DiffusionPipeline", "", *load, "```", ""])


def _cell(value: Any) -> str:
    """A value as text that stays one cell and no markup."""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
