"""Fine-tune Stable Diffusion on element data, control its layers, and watch it recover what was never shown.

    accelerate launch train_silentbad.py --config configs/quickstart.yaml [--config more.yaml] [--flag value ...]

Exit code 0: finished; 2: a mistake in what was given; 130, 143: stopped by SIGINT, SIGTERM with a checkpoint saved.
Legend: x0 (B,C,h,w) latents, eps noise, t (B,), w (B,) importance weights, c (B,L,D) text states. `step` counts
optimizer updates, `draw` effective batches: a skipped update never meets its data again.
"""

import os
import signal
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from tqdm.auto import tqdm

import gradient_control
import memory_reinforce
from gradient_control import Controller, GradientControlConfig
from memory_reinforce import Memory, MemoryConfig
from silentbad import checkpoint, models, runs
from silentbad.config import TrainConfig, check, flag, parse, to_dict
from silentbad.data import Loader, Sampler, Stream, Transform, collate, interpolation_mode, prepare
from silentbad.epochs import DataInfo, epoch_order
from silentbad.errors import UserError
from silentbad.rng import addressed_seed
from silentbad.upkeep import Upkeep, finish, not_finite, rescue
from validation import RecoveryHook, ValidationConfig, averaged


@dataclass
class Config(TrainConfig):
    """Every setting of a run"""

    gradient_control: GradientControlConfig = field(default_factory=GradientControlConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    print_groups: bool = flag(False, "print the parameter groups and stop", "here")


def check_all(config: Config, sources: dict[str, str]) -> None:
    """Refuse what cannot run, before any weights load; flat loss flags become the parts of `memory` they name."""
    check(config, sources)
    loss = config.memory.loss
    if config.snr_gamma is not None:
        if loss.name not in ("none", "min_snr"):
            raise UserError(f"snr_gamma: means memory.loss.name=min_snr, which is set to {loss.name}; set one of them")
        loss.name, loss.options = "min_snr", {**loss.options, "gamma": config.snr_gamma}
    if config.dream_training:
        loss.dream = config.dream_detail_preservation
    gradient_control.check_config(config.gradient_control)
    memory_reinforce.check(config.memory)
    interpolation_mode(config.image_interpolation_mode)
    models.check_machine(config)


def epoch_length(info: DataInfo, clean_ratio: float | None) -> int:
    """Records of an epoch, whatever the sampler's shares."""
    length = len(epoch_order(info, np.ones(len(info.keys)), 0, 0, clean_ratio))
    if length == 0:
        raise UserError(f"memory.sampler.clean_ratio: {clean_ratio} leaves no record to train on")
    return length


# ---------------------------------------------------------------- what a run is made of


class Run(Upkeep):
    """Everything one training holds, built in order; `train` below is its loop."""

    def __init__(self, config: Config, accelerator: Accelerator, folder: runs.RunFolder):
        self.config, self.accelerator, self.folder = config, accelerator, folder
        self.meters = runs.Meters()
        world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
        # -- data, checked before weights load
        settings, tokenizer = models.scheduler_settings(config), models.load_tokenizer(config)
        self.records, held_out, self.targets = prepare(
            config, tokenizer, accelerator.main_process_first, accelerator.print
        )
        self.info = DataInfo(*(getattr(self.records, n) for n in ("role", "target_id", "element_id", "phrases")))
        # -- models
        self.parts = parts = models.load_parts(config, settings, tokenizer, accelerator.mixed_precision)
        self.encoder = models.Encoder(parts, accelerator, cache_bytes=config.cache_mb * 2**20, seed=config.seed)
        parts.unet.to(device)
        # -- length and optimizer
        effective_batch = config.train_batch_size * config.gradient_accumulation_steps * world
        self.steps_per_epoch = -(-epoch_length(self.info, config.memory.sampler.clean_ratio) // effective_batch)
        self.total = config.max_train_steps or config.num_train_epochs * self.steps_per_epoch
        self.control = Controller(parts.unet, config.gradient_control, config.seed)
        groups = self.control.param_groups(config.adam_weight_decay)
        optimizer = models.make_optimizer(groups, config, effective_batch if config.scale_lr else 1.0)
        self.lr_scheduler = get_scheduler(
            config.lr_scheduler, optimizer, num_warmup_steps=config.lr_warmup_steps, num_training_steps=self.total
        )  # not prepared: one step an update, whatever the number of processes
        self.control.attach(optimizer, self.lr_scheduler)
        self.unet, self.optimizer = accelerator.prepare(parts.unet, optimizer)
        self.ema = models.make_ema(parts.unet, config, device)
        # -- what is shown, and how it is weighed
        transform = Transform.of(config, models.resolution(parts, config))
        self.sampler = Sampler(
            self.records, transform, config.seed, config.shuffle_phrases, cache_bytes=config.cache_mb * 2**20
        )
        self.memory = Memory(
            config.memory, self.info, parts.noise_scheduler, seed=config.seed,
            effective_batch=effective_batch, max_steps=self.total, rank=rank, world=world,
            reduce=partial(accelerator.reduce, reduction="sum"),
        )  # fmt: skip
        self.memory.rehearse.load = self.sampler.load
        if config.memory.rehearsal.name != "none":
            self.sampler.rehearse = self.memory.rehearse
        self.stream = Stream(self.memory.sampler.epoch)
        self.loader = Loader(
            self.sampler, self.stream, tokenizer, batch_size=config.train_batch_size, rank=rank, world=world,
            accumulation=config.gradient_accumulation_steps, workers=config.dataloader_num_workers,
        )  # fmt: skip
        self.memory.prepare(
            parts.unet, self.predict, self.encoder.mode,
            lambda rows: collate(self.sampler.pictures(rows), tokenizer), tokenizer,
        )  # fmt: skip
        # -- what is written, and how it is measured
        folder.open(to_dict(config), runs.facts(device, world))
        accelerator.init_trackers(config.tracker_project_name, runs.flat(to_dict(config)))
        self.hook = None
        if self.targets and not config.dry_run:
            clean = Sampler(held_out, transform, config.seed) if held_out else None
            self.hook = RecoveryHook(
                config.validation, targets=self.targets, components=parts.components(), accelerator=accelerator,
                output_dir=folder.path, seed=config.seed, clean=runs.clean_records(held_out, clean) if clean else [],
                prediction_type=config.prediction_type,
            )  # fmt: skip

    @property
    def draw(self) -> int:
        return self.step + self.skipped

    def averaged(self):
        """A context with the averaged weights in the UNet, where there are some."""
        return averaged(self.ema, self.parts.unet) if self.ema is not None else nullcontext()

    def predict(self, x_t: torch.Tensor, t: torch.Tensor, texts: list[str], model=None) -> torch.Tensor:
        """The UNet's (or `model`'s) prediction (B,C,h,w) under these captions."""
        with self.accelerator.autocast():
            return (model or self.parts.unet)(x_t, t, self.encoder.captions(texts), return_dict=False)[0]


# ---------------------------------------------------------------- one step


def micro_step(run: Run, batch: dict, micro: int) -> torch.Tensor:
    """Forward and backward of one micro-batch; returns its loss. Nothing here waits for the device."""
    config, memory, scheduler, device = run.config, run.memory, run.parts.noise_scheduler, run.accelerator.device
    positions, draw, unet = batch["position"].tolist(), run.draw, run.parts.unet
    torch.manual_seed(addressed_seed(config.seed, "torch", draw, positions[0]))  # dropout, where a UNet has it
    x0, c = run.encoder.latents(batch, draw), run.encoder.captions(batch["text"])
    t, w = memory.timesteps(draw, positions, run.loader.effective_batch)
    run.count(t)
    t, w = t.to(device), w.to(device)
    eps, x_t = models.noised(scheduler, x0, t, config, draw, positions)
    target = models.prediction_target(scheduler, x0, eps, t)
    x_t, target = memory.rectify(lambda x, t: run.unet(x, t, c, return_dict=False)[0], x0, eps, t, x_t, target)
    batch = {k: v.to(device) if k in ("mask", "has_mask") else v for k, v in batch.items()}
    with memory.watch(unet, run.step) as maps:
        pred = run.unet(x_t, t, c, return_dict=False)[0]
    loss = memory.loss_per_sample(pred, target, t, w, batch).mean()
    extra = memory.auxiliary(
        loss, step=run.step, micro=micro, batch=batch, x_t=x_t, t=t, pred=pred, maps=maps, unet=unet,
        predict=run.predict,
    )  # fmt: skip
    run.accelerator.backward(loss if extra is None else loss + extra)
    run.control.after_backward(run.accelerator.sync_gradients, source_of(batch))
    return loss.detach()


def source_of(batch: dict) -> str | None:
    """Whose gradient a micro-batch brings: its records' role, where they share one."""
    return batch["role"][0] if len(set(batch["role"])) == 1 else None


def update(run: Run) -> bool:
    """One optimizer update from the accumulated gradients; False where they are not finite and it is skipped."""
    parameters = [p for p in run.parts.unet.parameters() if p.requires_grad]
    run.accelerator.unscale_gradients(run.optimizer)
    norm = models.gradient_norm(parameters)
    run.control.before_step(run.step, finite=torch.isfinite(norm))
    if run.config.max_grad_norm:
        torch.nn.utils.clip_grad_norm_(parameters, run.config.max_grad_norm)
    finite = bool(torch.isfinite(norm))  # the one host sync of a step: what is not finite must not be applied
    run.torn = True
    if finite or run.accelerator.scaler is not None:  # the scaler must see an overflow to lower its scale
        run.optimizer.step()
    skipped = not finite or run.accelerator.optimizer_step_was_skipped
    run.control.after_step(skipped=skipped)
    run.optimizer.zero_grad(set_to_none=True)
    if skipped:
        run.skipped, run.skipped_in_row, run.torn = run.skipped + 1, run.skipped_in_row + 1, False
        return False
    run.lr_scheduler.step()
    if run.ema is not None:
        run.ema.step(p for p in run.parts.unet.parameters() if p.requires_grad)
    run.step, run.skipped_in_row = run.step + 1, 0
    run.memory.after_step(run.step, run.predict)
    run.meters.add({"grad_norm": norm})
    run.torn = False
    return True


def train(run: Run) -> int:
    """The loop. Returns 0, or 128 + the number of the signal that stopped it at a step boundary."""
    config, accelerator = run.config, run.accelerator
    bar = tqdm(total=run.total, initial=run.step, desc="Steps", disable=not accelerator.is_local_main_process)
    with runs.Requests(run.folder) as requests, rescue(run), bar:
        while run.step < run.total:
            if run.hook is not None and run.hook.should_run(run.step):
                run.validate()
            run.drawing, drawn, losses = run.draw, [], []
            for micro, batch in enumerate(run.loader.draw(run.draw)):
                drawn += batch["index"].tolist()
                with accelerator.accumulate(run.unet):
                    losses.append(micro_step(run, batch, micro))
            if not update(run):
                if run.skipped_in_row >= config.max_nonfinite_steps:
                    raise UserError(not_finite(run, drawn))
                continue
            run.meters.add({"loss": torch.stack(losses).mean()})
            # -- the step boundary: everything below sees a whole step
            bar.update()
            if run.step % config.log_every == 0 or run.step == run.total:
                run.log()
            run.end_of_epoch()
            stop, save, validate = requests.agreed()
            if stop or save or run.step % config.checkpointing_steps == 0:
                run.save("signal" if stop or save else "interval")
            if stop:
                run.say(f"stopped by {signal.Signals(stop).name}; resume with --resume_from_checkpoint latest")
                return 128 + stop
            if validate and run.hook is not None:
                run.validate()
    return 0


# ---------------------------------------------------------------- the command


def start(config: Config) -> int:
    accelerator = runs.make_accelerator(config)
    folder = runs.RunFolder(config.output_dir, accelerator.is_main_process)
    asked = config.resume_from_checkpoint
    resumed = checkpoint.resolve(asked, folder.checkpoints) if asked else None
    if resumed is None:
        folder.refuse_other_run(config.overwrite_output_dir)
        if asked:
            accelerator.print(f"no checkpoint in {folder.checkpoints} to resume from; starting anew")
    run = Run(config, accelerator, folder)
    if config.dry_run:
        run.total = 1
    if resumed is not None and run.take_up(resumed):
        return 0
    code = train(run)
    if config.dry_run:
        models.draw_images(models.pipeline(run.parts), [run.records.row(0)["text"]], config.seed, steps=2)
        accelerator.print("dry run: loaded everything, one step, one image; nothing written")
    elif code == 0:
        finish(run)
    accelerator.end_training()
    return code


def main(argv: list[str] | None = None) -> int:
    try:
        config, sources = parse(Config, argv, __doc__)
        check_all(config, sources)
        if config.print_groups:
            settings = models.scheduler_settings(config)
            unet = models.load_parts(config, settings, None).unet
            print(Controller(unet, config.gradient_control, config.seed).groups.table())
            return 0
        with tempfile.TemporaryDirectory() if config.dry_run else nullcontext() as scratch:
            if scratch is not None:
                config.output_dir, config.cache_dir = f"{scratch}/run", f"{scratch}/cache"
            return start(config)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
