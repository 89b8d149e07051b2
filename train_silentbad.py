"""Fine-tune Stable Diffusion on element data, control its layers, and watch it recover what was never shown.

    accelerate launch train_silentbad.py --config configs/quickstart.yaml [--config more.yaml] [--flag value ...]

Exit code 0: finished; 2: a mistake in what was given; 130, 143: stopped by SIGINT, SIGTERM with a checkpoint saved.
Legend: x0 (B,C,h,w) latents, eps noise, t (B,), w (B,) importance weights, c what the captions say to the model. `step`
counts optimizer updates, `draw` effective batches: a skipped update never meets its data again.
"""

import os
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from tqdm.auto import tqdm

import gradient_control
import memory_reinforce
from gradient_control import Controller, GradientControlConfig
from memory_reinforce import Memory, MemoryConfig
from silentbad import adapters, caches, checks, models, optimizers, runs, sharding
from silentbad.config import TrainConfig, check, flag, parse, to_dict
from silentbad.data import Loader, Sampler, Stream, Transform, chunks, collate, interpolation_mode, prepare
from silentbad.epochs import DataInfo, epoch_length, sources_of
from silentbad.errors import UserError, say
from silentbad.gradients import world_size
from silentbad.rng import addressed_seed
from silentbad.timers import Timers
from silentbad.upkeep import Upkeep, finish, not_finite, rescue, try_drawing
from silentbad.zero import Zero
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
    checks.join(config)
    gradient_control.check_config(config.gradient_control)
    memory_reinforce.check(config.memory)
    interpolation_mode(config.image_interpolation_mode)
    adapters.check(config)
    models.check_machine(config)
    sharding.check(config)


# ---------------------------------------------------------------- what a run is made of


class Run(Upkeep):
    """Everything one training holds, built in order; `train` below is its loop."""

    def __init__(self, config: Config, accelerator: Accelerator, folder: runs.RunFolder, sharded: str = ""):
        self.config, self.accelerator, self.folder = config, accelerator, folder
        self.meters, self.timers = runs.Meters(), Timers()
        world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
        # -- data, checked before weights load
        settings, tokenizer = models.scheduler_settings(config), models.load_tokenizer(config)
        self.records, held_out, self.targets = prepare(
            config, tokenizer, accelerator.main_process_first, accelerator.print
        )
        self.info = DataInfo(*(getattr(self.records, n) for n in ("role", "target_id", "element_id", "phrases")))
        checks.check_records(config, self.info, self.records.phrases)
        # -- models
        self.parts = parts = models.load_parts(config, settings, tokenizer, accelerator.mixed_precision)
        side, cache = models.resolution(parts, config), config.cache_mb * 2**20
        self.encoder = models.Encoder(parts, accelerator, side=side, cache_bytes=cache, seed=config.seed)
        models.placed(parts.model, config, device)
        if sharded == "FSDP":
            sharding.shard(parts.model, device, accelerator.mixed_precision)
        # -- length and optimizer
        effective_batch = config.train_batch_size * config.gradient_accumulation_steps * world
        self.steps_per_epoch = -(-epoch_length(self.info, config.memory.sampler.clean_ratio) // effective_batch)
        self.total = config.max_train_steps or config.num_train_epochs * self.steps_per_epoch
        self.control = Controller(parts.model, config.gradient_control, config.seed)
        groups = self.control.param_groups(config.adam_weight_decay)
        optimizer = optimizers.make_optimizer(groups, config, effective_batch if config.scale_lr else 1.0)
        self.lr_scheduler = get_scheduler(
            config.lr_scheduler, optimizer, num_warmup_steps=config.lr_warmup_steps, num_training_steps=self.total
        )  # not prepared: one step an update, whatever the number of processes
        self.control.attach(optimizer, self.lr_scheduler)
        self.zero = None
        if sharded == "DEEPSPEED":
            self.model = accelerator.prepare_model(parts.model, evaluation_mode=True)  # its autocast, not its DDP
            self.optimizer = self.zero = Zero(parts.model, optimizer)
            self.forward = self.zero.engine
        else:
            self.model = parts.model if sharded else accelerator.prepare(parts.model)
            self.optimizer = accelerator.prepare(optimizer)
            self.forward = models.training_forward(self.model, config)
        self.ema = models.make_ema(parts.model, config, device)
        # -- what is shown, and how it is weighed
        transform = Transform.of(config, side)
        self.sampler = Sampler(
            self.records, transform, config.seed, config.shuffle_phrases, cache, config.memory.retention.unconditional
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
            self.sampler, self.stream, batch_size=config.train_batch_size, rank=rank, world=world,
            accumulation=config.gradient_accumulation_steps, workers=config.dataloader_num_workers, device=device,
        )  # fmt: skip
        self.memory.prepare(
            parts.model, self.predict, self.encoder.mode,
            lambda rows: collate(self.sampler.pictures(rows)), tokenizer,
        )  # fmt: skip
        caches.use(self, accelerator)
        # -- how it is measured; nothing is written before `open`
        self.hook = None
        if self.targets and not config.dry_run:
            clean = runs.clean_records(Sampler(held_out, transform, config.seed)) if held_out else []
            self.hook = RecoveryHook(
                config.validation, targets=self.targets, components=parts.components(), accelerator=accelerator,
                output_dir=folder.path, seed=config.seed, clean=clean, prediction_type=config.prediction_type,
            )  # fmt: skip

    @property
    def draw(self) -> int:
        """Effective batches begun, skipped ones included."""
        return self.step + self.skipped

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add a loss's gradients to the accumulated ones; `last` of an update or not."""
        if self.zero is None:
            self.accelerator.backward(loss)
        else:
            self.zero.backward(loss * models.backward_scale(self.accelerator), last)

    def averaged(self) -> AbstractContextManager[None]:
        """A context with the averaged weights in place, where there are some."""
        return averaged(self.ema, self.parts.model) if self.ema is not None else optimizers.measured(self.optimizer)

    def predict(
        self, x_t: torch.Tensor, t: torch.Tensor, texts: list[str], model: Any = None, time_ids: Any = None
    ) -> torch.Tensor:
        """The prediction (B,C,h,w) under these captions, of what trains or of a copy of it."""
        with self.accelerator.autocast():
            c = self.encoder.condition(texts, time_ids)
            return (model or self.model)(x_t, t, **c, return_dict=False)[0]


# ---------------------------------------------------------------- one step


def micro_step(run: Run, batch: dict[str, Any], micro: int) -> torch.Tensor:
    """Forward and backward of one micro-batch, in the parts that fit; returns its loss."""
    *parts, (share, part) = chunks(batch, run.config.max_batch_size)
    with run.accelerator.no_sync(run.model):
        losses = [part_step(run, *each, micro, last=False) for each in parts]
    return torch.stack([*losses, part_step(run, share, part, micro, last=True)]).sum()


def part_step(run: Run, share: float, batch: dict[str, Any], micro: int, *, last: bool) -> torch.Tensor:
    """Forward and backward of a `share` of a micro-batch; returns its part of the loss. Nothing here waits for the
    device."""
    config, memory, scheduler, device = run.config, run.memory, run.parts.noise_scheduler, run.accelerator.device
    positions, draw, model = batch["position"].tolist(), run.draw, run.parts.model
    torch.manual_seed(addressed_seed(config.seed, "torch", draw, positions[0]))  # dropout, where a UNet has it
    x0, c = run.encoder.latents(batch, draw), run.encoder.condition(batch["text"], batch["time_ids"])
    t, w = memory.timesteps(draw, positions, run.loader.effective_batch)
    run.count(t)
    t, w = caches.send(t, device), caches.send(w, device)
    eps, x_t = models.noised(scheduler, x0, t, config, draw, positions)
    target = models.prediction_target(scheduler, x0, eps, t)
    x_t, target = memory.rectify(lambda x, t: run.forward(x, t, **c, return_dict=False)[0], x0, eps, t, x_t, target)
    known = [key for key in ("mask", "has_mask", "counted", "time_ids") if key in batch]
    batch = batch | {key: caches.send(batch[key], device) for key in known}
    with memory.watch(model, run.step) as maps:
        pred = run.forward(x_t, t, **c, return_dict=False)[0]
    losses = memory.loss_per_sample(pred, target, t, w, batch)
    loss = losses.mean()
    extra = memory.auxiliary(
        loss, step=run.step, micro=micro, batch=batch, x_t=x_t, t=t, pred=pred, maps=maps, unet=model,
        predict=run.predict,
    )  # fmt: skip
    sources, scale = sources_of(batch, config.gradient_control.sources), share * models.backward_scale(run.accelerator)
    source = run.control.before_backward(losses, sources, scale)
    last = last and run.accelerator.sync_gradients
    run.backward(share * (loss if extra is None else loss + extra), last)
    run.control.after_backward(last, source)
    return share * loss.detach()


def update(run: Run) -> bool:
    """One optimizer update from the accumulated gradients; False where they are not finite and it is skipped."""
    run.accelerator.unscale_gradients(run.optimizer)
    norms = optimizers.gradient_norms(run.control.params)
    norm = torch.linalg.vector_norm(norms)
    run.control.before_step(run.step, finite=torch.isfinite(norm), norms=norms)
    if run.config.max_grad_norm:
        optimizers.clip(run.control.params, run.config.max_grad_norm, None if run.control.edits else norm)
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
        run.ema.step(p for p in run.parts.model.parameters() if p.requires_grad)
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
            for micro, batch in enumerate(run.timers.waiting("data", run.loader.draw(run.draw))):
                drawn += batch["index"].tolist()
                with accelerator.accumulate(run.model), run.timers.of("forward"):
                    losses.append(micro_step(run, batch, micro))
            if not update(run):
                if run.skipped_in_row >= config.max_nonfinite_steps:
                    raise UserError(not_finite(run, drawn))
                continue
            run.meters.add({"loss": torch.stack(losses).mean()})
            bar.update()
            if stop := run.boundary(requests):
                return 128 + stop
    return 0


# ---------------------------------------------------------------- the command


def start(config: Config) -> int:
    """Build the run, or take it up where it stood, and train; returns the exit code."""
    sharded = sharding.take_over()
    runs.stamp(config)
    accelerator = runs.make_accelerator(config)
    folder = runs.RunFolder.of(config, accelerator.is_main_process)
    resumed = folder.resumed(config, accelerator.print)
    run = Run(config, accelerator, folder, sharded)
    if config.dry_run:
        run.total = 1
    if resumed is not None and run.take_up(resumed):
        return 0
    run.open(to_dict(config))
    code = train(run)
    if config.dry_run:
        try_drawing(run)
    elif code == 0:
        finish(run)
    accelerator.end_training()
    return code


def main(argv: list[str] | None = None) -> int:
    """The command line; a UserError is one line on stderr and exit code 2.

    Before the processes know of each other they make the same mistakes, and the first of each node says them; then
    each says its own.
    """
    try:
        config, sources = parse(Config, argv, __doc__)
        check_all(config, sources)
        if config.print_groups:
            parts = models.load_parts(config, models.scheduler_settings(config), None)
            print(Controller(parts.model, config.gradient_control, config.seed).groups.table())
            return 0
        with tempfile.TemporaryDirectory() if config.dry_run else nullcontext() as scratch:
            if scratch is not None:
                config.output_dir, config.cache_dir = f"{scratch}/run", f"{scratch}/cache"
            return start(config)
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        if os.environ.get("LOCAL_RANK", "0") == "0" or world_size() > 1:
            say(error if rank == "0" else f"rank {rank}: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
