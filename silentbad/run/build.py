"""What a run is made of, and how its parts are connected."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler

from silentbad.data import buckets
from silentbad.data.buckets import Batches
from silentbad.data.draws import Draws, Hidden, Reader, Rehearse, Transform
from silentbad.data.elements import DataInfo, Epochs, epoch_length
from silentbad.data.loader import Loader, Stream, collate
from silentbad.data.records import Records
from silentbad.distributed import shards
from silentbad.distributed.zero import Zero
from silentbad.errors import warn
from silentbad.memory import roles
from silentbad.memory.auxiliary import Access
from silentbad.model import denoiser, pipeline
from silentbad.model.encoder import Encoder
from silentbad.model.store import Cached
from silentbad.recovery.prompts import Prompt, PromptSheet
from silentbad.run import checks, identity, inputs, optimizers
from silentbad.run.config import TrainConfig
from silentbad.run.folder import RunFolder
from silentbad.run.inputs import Inputs
from silentbad.run.log import Log
from silentbad.run.meters import Meters, Timers
from silentbad.run.products import Products
from silentbad.run.saving import Checkpoints
from silentbad.run.state import Stateful, TrainState
from silentbad.shield.guard import Guards, Setting


class Control(Stateful, Protocol):
    """`gradient_control.Controller`, as a run calls it."""

    params: list[torch.nn.Parameter]
    edits: bool
    apart: bool
    history: list[dict[str, Any]]

    def param_groups(self, weight_decay: float | None = None) -> list[dict[str, Any]]: ...

    def attach(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None: ...

    def weighed(self, losses: torch.Tensor, sources: list[str]) -> torch.Tensor: ...

    def before_backward(self, losses: torch.Tensor, sources: list[str], scale: float = 1.0) -> str: ...

    def after_backward(self, sync: bool = True, source: str | None = None) -> None: ...

    def before_step(self, step: int, finite: torch.Tensor | None = None, norms: torch.Tensor | None = None) -> None: ...

    def after_step(self, skipped: bool = False) -> None: ...

    def meters(self) -> dict[str, torch.Tensor]: ...


class Memory(Stateful, Protocol):
    """`memory_reinforce.Memory`, as a run calls it."""

    epochs: Epochs
    rehearse: Rehearse

    @property
    def history(self) -> list[dict[str, Any]]: ...

    def timesteps(
        self, draw: int, positions: list[int], n: int, of: list[str] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rectify(
        self,
        model: Callable[..., Any],
        x0: torch.Tensor,
        eps: torch.Tensor,
        t: torch.Tensor,
        x_t: torch.Tensor,
        target: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def watch(self, unet: torch.nn.Module, step: int) -> AbstractContextManager[Any]: ...

    def loss_per_sample(
        self, pred: torch.Tensor, target: torch.Tensor, t: torch.Tensor, w: torch.Tensor, batch: dict[str, Any]
    ) -> torch.Tensor: ...

    def auxiliary(self, loss: torch.Tensor, **now: Any) -> torch.Tensor | None: ...

    def took(self, united: list[tuple[int, int] | None]) -> None: ...

    def after_step(self, step: int, predict: Callable[..., Any]) -> None: ...

    def meters(self) -> dict[str, Any]: ...


class Hook(Stateful, Protocol):
    """`validation.RecoveryHook`, as a run calls it."""

    history: list[Any]
    embedder: Any

    def should_run(self, step: int) -> bool: ...

    def measured(self, step: int) -> bool: ...

    def run(self, step: int, epoch: float, unet: Any, ema: Any = None) -> dict[str, Any]: ...

    def finish(self, step: int, epoch: float, unet: Any, ema: Any = None) -> dict[str, Any]: ...

    def summary(self) -> list[Any]: ...

    def table(self) -> str: ...


@dataclass(frozen=True)
class Run:
    """Everything one training holds. Nothing here is replaced: what changes from step to step is in `state`."""

    config: TrainConfig
    accelerator: Accelerator
    folder: RunFolder
    records: Records
    info: DataInfo
    parts: pipeline.Parts
    encoder: Encoder
    model: Any  # what trains, as accelerate prepared it
    forward: Callable[..., Any]  # its forward in a step: compiled, or through ZeRO's engine
    predict: Callable[..., torch.Tensor]  # (x_t, t, captions, model=None, time_ids=None) -> (B,C,h,w)
    zero: Zero | None
    state: TrainState
    control: Control
    memory: Memory
    guards: Guards
    draws: Draws
    loader: Loader
    hook: Hook | None
    sheet: PromptSheet | None
    prompts: int  # how many the sheet draws, also where a dry run makes none
    meters: Meters
    timers: Timers
    checkpoints: Checkpoints
    log: Log
    products: Products


def build(
    config: TrainConfig,
    accelerator: Accelerator,
    folder: RunFolder,
    sharded: str = "",
    *,
    controller: Callable[..., Control],
    memory_of: Callable[..., Memory],
    hook_of: Callable[..., Hook],
) -> Run:
    """Load, check and connect the parts of a run; nothing is written to output_dir yet, caches are filled.

    The three constructors are those of the root modules (`Controller`, `Memory`, `RecoveryHook`), which this package
    does not import. `sharded` is FSDP, DEEPSPEED or nothing.
    """
    given = inputs.gathered(config, accelerator, sharded)
    parts, encoder, side = models(config, given, accelerator, sharded)
    length = Length.of(config, given.info, accelerator.num_processes)
    if line := checks.beyond(config, length.total):
        warn(line)
    control = controller(parts.model, config.gradient_control, config.seed)
    optimizer, lr_scheduler = optimizing(control, config, length)
    model, forward, optimizer, zero = prepared(parts.model, optimizer, config, accelerator, sharded)
    factor = pipeline.side_factor(parts.family, parts.backbone, parts.vae)
    transform = Transform.of(config, side, checks.bucket_step(config, side, factor))
    reader = Reader(given.records, transform, config.seed, config.cache_mb * 2**20)
    access = access_of(parts, encoder, model, reader, given, accelerator)
    memory = remembering(memory_of, config, given, parts, access, length, accelerator)
    given.guards.start(
        Setting(given.records.numbers, access, parts.noise_scheduler, control.params, side, config.seed), sharded
    )
    loader = loader_of(config, reader, encoder, memory, given, parts, accelerator)
    hook = make_hook(hook_of, config, accelerator, folder, parts, given, replace(transform, step=0))
    meters, timers = Meters(), Timers()
    state = state_of(
        *(config, parts, optimizer, lr_scheduler, length, accelerator),
        control=control,
        memory=memory,
        guards=given.guards if given.guards.names else None,
        stream=loader.stream,
        scaler=accelerator.scaler,
        meters=meters,
        hook=hook,
    )
    embedder = None if hook is None else hook.embedder.describe()
    facts = identity.facts(
        *(config, given.records, given.held_out, given.targets, embedder, length.effective_batch, given.guards.reads)
    )
    return Run(
        config=config,
        accelerator=accelerator,
        folder=folder,
        records=given.records,
        info=given.info,
        parts=parts,
        encoder=encoder,
        model=model,
        forward=forward,
        predict=access.predict,
        zero=zero,
        state=state,
        control=control,
        memory=memory,
        guards=given.guards,
        draws=loader.draws,
        loader=loader,
        hook=hook,
        sheet=make_sheet(given.prompts, config, accelerator, folder, parts),
        prompts=len(given.prompts),
        meters=meters,
        timers=timers,
        checkpoints=Checkpoints(folder, state, accelerator, meters, timers, config.checkpoints_total_limit, facts),
        log=Log(folder, state, accelerator, meters, timers, length.effective_batch),
        products=Products(
            config,
            folder,
            state,
            parts,
            encoder,
            accelerator,
            info=given.info,
            target_ids=[target.target_id for target in given.targets],
            results=lambda: [asdict(row) for row in hook.summary()] if hook is not None and hook.history else [],
        ),
    )


def models(
    config: TrainConfig, given: Inputs, accelerator: Accelerator, sharded: str
) -> tuple[pipeline.Parts, Encoder, int]:
    """(parts of the pipeline, what encodes, side of the pictures in pixels); what trains is on its device."""
    parts = pipeline.load_parts(config, given.schedule, given.tokenizer, accelerator.mixed_precision)
    side = pipeline.resolution(parts, config)
    encoder = Encoder(parts, accelerator, side=side, cache_bytes=config.cache_mb * 2**20, seed=config.seed)
    denoiser.placed(parts.model, config, accelerator.device)
    if sharded == "FSDP":
        shards.shard(parts.model, accelerator.device, accelerator.mixed_precision)
    return parts, encoder, side


class Length(NamedTuple):
    """How long a run is, in samples a step and in optimizer steps."""

    effective_batch: int  # samples a step, over all processes and micro-batches
    steps_per_epoch: int
    total: int

    @classmethod
    def of(cls, config: TrainConfig, info: DataInfo, world: int) -> "Length":
        effective_batch = config.train_batch_size * config.gradient_accumulation_steps * world
        steps_per_epoch = -(-epoch_length(info, config.memory.sampler.clean_ratio) // effective_batch)
        return cls(
            effective_batch, steps_per_epoch, config.max_train_steps or config.num_train_epochs * steps_per_epoch
        )


def optimizing(control: Control, config: TrainConfig, length: Length) -> tuple[Any, Any]:
    """(optimizer, schedule of its rates) over the controller's groups."""
    groups = control.param_groups(config.adam_weight_decay)
    optimizer = optimizers.make_optimizer(groups, config, length.effective_batch if config.scale_lr else 1.0)
    shape = {"power": config.lr_power, "num_cycles": config.lr_num_cycles}
    steps = {"num_warmup_steps": config.lr_warmup_steps, "num_training_steps": length.total}
    # Not prepared: one step an update, whatever the number of processes.
    lr_scheduler = get_scheduler(config.lr_scheduler, optimizer, **steps, **shape)
    control.attach(optimizer, lr_scheduler)
    return optimizer, lr_scheduler


def prepared(
    model: Any, optimizer: Any, config: TrainConfig, accelerator: Accelerator, sharded: str
) -> tuple[Any, Callable[..., Any], Any, Zero | None]:
    """(model, its forward in training, optimizer, ZeRO's engine or None), as this number of processes needs them."""
    if sharded == "DEEPSPEED":
        zero = Zero(model, optimizer)
        return accelerator.prepare_model(model, evaluation_mode=True), zero.engine, zero, zero  # its autocast, no DDP
    model = model if sharded else accelerator.prepare(model)
    forward = denoiser.training_forward(model, config, accelerator.mixed_precision)
    return model, forward, accelerator.prepare(optimizer), None


def access_of(
    parts: pipeline.Parts, encoder: Encoder, model: Any, reader: Reader, given: Inputs, accelerator: Accelerator
) -> Access:
    """What memory and guards may ask the model and the data for."""
    return Access(
        parts.model,
        partial(prediction, encoder, model, accelerator),
        encoder.mode,
        lambda rows: collate(reader.pictures(rows)),
        reader.load,
        given.tokenizer,
    )


def remembering(
    memory_of: Callable[..., Memory],
    config: TrainConfig,
    given: Inputs,
    parts: pipeline.Parts,
    access: Access,
    length: Length,
    accelerator: Accelerator,
) -> Memory:
    """Memory reinforcement over all processes."""
    return memory_of(
        config.memory,
        given.info,
        parts.noise_scheduler,
        access,
        seed=config.seed,
        effective_batch=length.effective_batch,
        max_steps=length.total,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        reduce=partial(accelerator.reduce, reduction="sum"),
    )


def state_of(
    config: TrainConfig,
    parts: pipeline.Parts,
    optimizer: Any,
    lr_scheduler: Any,
    length: Length,
    accelerator: Accelerator,
    **others: Any,
) -> TrainState:
    """What changes from step to step, and with it what a checkpoint holds; `others` are the parts with a state."""
    return TrainState(
        parts.model,
        optimizer,
        lr_scheduler,
        denoiser.make_ema(parts.model, config, accelerator.device),
        total=length.total,
        steps_per_epoch=length.steps_per_epoch,
        train_timesteps=parts.noise_scheduler.config.num_train_timesteps,
        others=others,
    )


def loader_of(
    config: TrainConfig,
    reader: Reader,
    encoder: Encoder,
    memory: Memory,
    given: Inputs,
    parts: pipeline.Parts,
    accelerator: Accelerator,
) -> Loader:
    """What deals the micro-batches of this process."""
    rehearse = None if config.memory.rehearsal.name == "none" else memory.rehearse
    batches = arranged(given.records, reader.transform, parts, config, accelerator.print)
    return Loader(
        draws_of(config, reader, encoder, rehearse, given.guards, parts, accelerator),
        Stream(given.guards.epoch(memory.epochs.epoch), batches),
        batch_size=config.train_batch_size,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        accumulation=config.gradient_accumulation_steps,
        workers=config.dataloader_num_workers,
        device=accelerator.device,
    )


def draws_of(
    config: TrainConfig,
    reader: Reader,
    encoder: Encoder,
    rehearse: Rehearse | None,
    guards: Guards,
    parts: Any,
    accelerator: Accelerator,
) -> Draws:
    """What a step is shown; latents and text states that a run can know beforehand are encoded now, and kept."""
    dropout, unseen = roles.dropout(config.memory), None
    if config.disk_cache_gb:
        show, composes = accelerator.is_local_main_process, rehearse is not None
        blank = bool(dropout) or config.token_warmup_step > 0
        cached = Cached(encoder, reader, config, composes=composes, blank=blank, show=show, say=accelerator.print)
        encoder.read_from(cached)
        unseen = None if composes else cached.posterior >= 0
    return Draws(
        reader,
        shuffle=config.shuffle_phrases,
        dropout=dropout,
        warmup=(config.token_warmup_min, config.token_warmup_step),
        rehearse=rehearse,
        hidden=Hidden(guards.hidden, 2 ** (len(parts.vae.config.block_out_channels) - 1)),
        unseen=unseen,
    )


def arranged(
    records: Records, transform: Transform, parts: pipeline.Parts, config: TrainConfig, say: Callable[[str], None]
) -> Batches | None:
    """Micro-batches of one shape, and a table of what went where; None where every picture is a square."""
    if not transform.step:
        return None
    sizes, batch_size = records.sizes, config.train_batch_size
    shapes = transform.shapes(sizes)
    cut, side = transform.center_crop, transform.resolution
    say(buckets.table(sizes, records.role, shapes, side, transform.step, cut=cut, batch_size=batch_size))
    longest = max(max(shape) for shape in shapes)
    pipeline.check_positions(parts, longest, "buckets: a side", config.pretrained_model_name_or_path)
    numbers = {shape: number for number, shape in enumerate(sorted(set(shapes)))}
    return Batches(np.asarray([numbers[shape] for shape in shapes]), batch_size)


def make_hook(
    hook_of: Callable[..., Hook],
    config: TrainConfig,
    accelerator: Accelerator,
    folder: RunFolder,
    parts: pipeline.Parts,
    given: Inputs,
    transform: Transform,
) -> Hook | None:
    """The recovery hook, where there are targets."""
    if not given.targets or config.dry_run:
        return None
    return hook_of(
        config.validation,
        targets=given.targets,
        components=parts.components(),
        accelerator=accelerator,
        output_dir=folder.path,
        seed=config.seed,
        held_out=inputs.by_role(given.held_out, transform, config.seed),
        training=inputs.shown(given.records, transform, config.seed, config.validation.nearest),
        prediction_type=config.prediction_type,
    )


def make_sheet(
    prompts: list[Prompt], config: TrainConfig, accelerator: Accelerator, folder: RunFolder, parts: pipeline.Parts
) -> PromptSheet | None:
    """What draws the sample prompts, where there are some."""
    if not prompts or config.dry_run:
        return None
    return PromptSheet(
        prompts,
        config.validation,
        components=parts.components(),
        accelerator=accelerator,
        output_dir=folder.path,
        prediction_type=config.prediction_type,
    )


def prediction(
    encoder: Encoder,
    trains: Any,
    accelerator: Accelerator,
    x_t: torch.Tensor,
    t: torch.Tensor,
    texts: list[str],
    model: Any = None,
    time_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The prediction (B,C,h,w) under these captions, of what trains or of a copy of it."""
    with accelerator.autocast():
        c = encoder.condition(texts, time_ids)
        return (model or trains)(x_t, t, **c, return_dict=False)[0]
