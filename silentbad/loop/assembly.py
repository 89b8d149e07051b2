"""The parts of a run and how they are connected: read `build` from top to bottom."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler

from silentbad.control.decay import DecayToBase
from silentbad.control.relative import RelativeChange, RelativeRate
from silentbad.data import buckets
from silentbad.data.draws import Draws, Reader, Transform, held_out_samples
from silentbad.data.elements import epoch_length
from silentbad.data.loader import Loader, Stream, collate
from silentbad.data.records import Records
from silentbad.distributed import shards
from silentbad.errors import warn
from silentbad.loop import checks, optimizers
from silentbad.loop.hooks import Hook, HookContext, Hooks, OwnHooks
from silentbad.loop.inputs import Inputs, load_inputs, shown, with_masks
from silentbad.loop.log import Log
from silentbad.loop.meters import Meters, Timers
from silentbad.loop.prior import Prior
from silentbad.loop.products import Products
from silentbad.loop.resume import Checkpoints
from silentbad.loop.state import TrainState
from silentbad.measure.embedders import embedder_of_targets
from silentbad.measure.prompts import PromptSheet, prompts_due
from silentbad.measure.weight_change import base_files
from silentbad.memory.auxiliary import ModelAccess
from silentbad.memory.law import hard_elements
from silentbad.model import denoiser, pipeline
from silentbad.model.encoder import Encoder
from silentbad.model.gate import Source
from silentbad.model.store import Cached
from silentbad.saving import identity
from silentbad.saving.folder import RunFolder
from silentbad.settings import memory as roles
from silentbad.settings.check import check_warm_up
from silentbad.settings.train import TrainConfig

if TYPE_CHECKING:  # at run time train_silentbad.py passes these classes to `build`
    from gradient_control import Controller
    from memory_reinforce import Memory
    from validation import RecoveryHook


@dataclass(frozen=True)
class Run:
    """All parts of one training; `state` is the part that changes from step to step."""

    config: TrainConfig
    accelerator: Accelerator
    folder: RunFolder
    records: Records
    prior: Prior | None  # the base's own pictures, which are among the records
    parts: pipeline.Components
    encoder: Encoder
    model: Any  # the trained module, as accelerate prepared it
    forward: Callable[..., Any]  # its forward in a step, compiled where asked
    predict: Callable[..., torch.Tensor]  # `prediction` of the trained module
    state: TrainState
    control: "Controller"
    memory: "Memory"
    hooks: Hooks  # all hooks of a step: control, memory, recovery and the others
    loader: Loader
    recovery: "RecoveryHook | None"
    sheet: PromptSheet | None
    prompts: int  # plain prompts, also in a dry run, which has no sheet
    meters: Meters
    timers: Timers
    checkpoints: Checkpoints
    log: Log
    products: Products


@dataclass(frozen=True)
class Loaded:
    """The data and models loaded before training; `build` makes the parts of a run from them."""

    config: TrainConfig
    accelerator: Accelerator
    folder: RunFolder
    inputs: Inputs
    effective_batch: int
    steps_per_epoch: int
    steps: int  # of the whole run
    parts: pipeline.Components
    encoder: Encoder
    transform: Transform  # of the pictures that are trained on
    reader: Reader


def build(
    config: TrainConfig,
    accelerator: Accelerator,
    folder: RunFolder,
    sharded: bool = False,
    *,
    controller: "type[Controller]",
    memory_class: "type[Memory]",
    recovery_class: "type[RecoveryHook]",
) -> Run:
    """Load, check and connect the parts of a run; only caches are written. `sharded`: FSDP 2."""
    loaded = load(config, accelerator, folder, sharded)
    inputs = loaded.inputs
    parts = loaded.parts
    effective_batch = loaded.effective_batch

    # Gradient control, and the optimizer over its groups; then as accelerate prepares them
    control, optimizer, lr_scheduler = make_optimizer(loaded, controller)
    model = parts.model if sharded else accelerator.prepare(parts.model)
    forward = denoiser.training_forward(model, config, accelerator.mixed_precision)
    optimizer = accelerator.prepare(optimizer)
    predict = partial(prediction, loaded.encoder, model, accelerator)

    # Memory, what a step is shown, what is measured while training
    memory = make_memory(loaded, memory_class, predict)
    loader = make_loader(loaded, memory)
    recovery = make_recovery(loaded, recovery_class)
    sheet = make_sheet(loaded)

    # The hooks of a step: control, memory, the user's own, decay, and those that measure
    own_hooks = make_own_hooks(loaded, control.params, predict)
    hooks: list[Hook] = [control, memory, *own_hooks]
    if config.decay_to_base:
        hooks.append(DecayToBase(optimizer, config.decay_to_base / loaded.steps))
    hooks.append(RelativeChange(parts.model, every=config.log_every, total=loaded.steps))
    hooks += [hook for hook in (sheet, recovery) if hook is not None]

    # State, and the files that are written of it
    meters = Meters()
    timers = Timers()
    stateful = {
        "control": control,
        "memory": memory,
        "own_hooks": own_hooks if config.hooks else None,
        "stream": loader.stream,
        "scaler": accelerator.scaler,
        "meters": meters,
        "recovery": recovery,
    }
    state = make_state(loaded, optimizer, lr_scheduler, stateful)
    log = Log(
        folder, state, accelerator, meters=meters, timers=timers, effective_batch=effective_batch
    )
    return Run(
        config=config,
        accelerator=accelerator,
        folder=folder,
        records=inputs.records,
        prior=inputs.prior,
        parts=parts,
        encoder=loaded.encoder,
        model=model,
        forward=forward,
        predict=predict,
        state=state,
        control=control,
        memory=memory,
        hooks=Hooks(hooks),
        loader=loader,
        recovery=recovery,
        sheet=sheet,
        prompts=len(inputs.prompts),
        meters=meters,
        timers=timers,
        checkpoints=make_checkpoints(loaded, state, meters, timers, recovery),
        log=log,
        products=make_products(loaded, state, recovery),
    )


def load(config: TrainConfig, accelerator: Accelerator, folder: RunFolder, sharded: bool) -> Loaded:
    """Data, the length of the run, and models; the trained module moves to its device."""
    inputs = load_inputs(config, accelerator, sharded)
    per_process = config.train_batch_size * config.gradient_accumulation_steps
    effective_batch = per_process * accelerator.num_processes
    samples_per_epoch = epoch_length(inputs.info, config.memory.sampler.clean_ratio)
    steps_per_epoch = -(-samples_per_epoch // effective_batch)
    steps = config.max_train_steps or config.num_train_epochs * steps_per_epoch
    check_warm_up(config, steps, f"the {steps} steps of num_train_epochs {config.num_train_epochs}")
    draws = steps * effective_batch / samples_per_epoch  # of each record
    rehearsal = config.memory.rehearsal
    all_but_one = rehearsal.options.get("elements", 2) is None
    if rehearsal.name.startswith("pairwise") and all_but_one:  # the law was fitted to these alone
        own_pictures = inputs.prior is not None
        if hard := hard_elements(inputs.info, inputs.targets, draws, own_pictures):
            accelerator.print(hard)
    for step in config.validation.early_steps if config.validation.targets else ():
        if step > steps:
            warn(f"validation.early_steps: {step} lies after the last step, {steps}")

    parts = pipeline.load_parts(
        config, inputs.schedule, inputs.tokenizer, accelerator.mixed_precision
    )
    side = pipeline.resolution(parts, config.resolution)
    drawn = pipeline.drawn_side(parts, config.validation.resolution)
    if drawn != side and (inputs.targets or inputs.prompts):
        warn(
            f"resolution: training uses {side} pixels, images are drawn at {drawn}; "
            "validation.resolution sets the latter"
        )
    for line in amounts(inputs.records, side, effective_batch, samples_per_epoch):
        warn(line)
    cache_bytes = config.cache_mb * 2**20
    encoder = Encoder(parts, accelerator, side=side, cache_bytes=cache_bytes, seed=config.seed)
    denoiser.to_device(parts.model, config, accelerator.device)
    if sharded:
        shards.shard(parts.model, accelerator.device, accelerator.mixed_precision)

    factor = pipeline.side_factor(parts.family, parts.backbone, parts.vae)
    transform = Transform.of(config, side, checks.bucket_step(config, side, factor))
    return Loaded(
        config=config,
        accelerator=accelerator,
        folder=folder,
        inputs=inputs,
        effective_batch=effective_batch,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        parts=parts,
        encoder=encoder,
        transform=transform,
        reader=Reader(inputs.records, transform, config.seed, cache_bytes=cache_bytes),
    )


def make_optimizer(loaded: Loaded, controller: "type[Controller]") -> tuple["Controller", Any, Any]:
    """Gradient control, the optimizer over its groups, and the schedule of its learning rate."""
    config = loaded.config
    parts = loaded.parts
    control = controller(parts.model, config.gradient_control, config.seed)
    groups = control.param_groups(config.adam_weight_decay)
    rate_scale = loaded.effective_batch if config.scale_lr else 1.0
    optimizer: Any = optimizers.make_optimizer(groups, config, rate_scale)
    if config.learning_rate_unit == "relative":
        RelativeRate(parts.model, optimizer)
    # The schedule is not prepared: one step an update, whatever the number of processes.
    lr_scheduler = get_scheduler(
        config.lr_scheduler,
        optimizer,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=loaded.steps,
        power=config.lr_power,
        num_cycles=config.lr_num_cycles,
    )
    control.attach(optimizer, lr_scheduler)
    return control, optimizer, lr_scheduler


def make_memory(
    loaded: Loaded, memory_class: "type[Memory]", predict: Callable[..., torch.Tensor]
) -> "Memory":
    """Memory, with access to the model and the data."""
    reader = loaded.reader
    accelerator = loaded.accelerator
    access = ModelAccess(
        unet=loaded.parts.model,
        predict=predict,
        encode=loaded.encoder.mode,
        pictures=lambda rows: collate(reader.pictures(rows)),
        load=reader.load,
        tokenizer=loaded.inputs.tokenizer,
    )
    return memory_class(
        loaded.config.memory,
        loaded.inputs.info,
        loaded.parts.noise_scheduler,
        access,
        seed=loaded.config.seed,
        effective_batch=loaded.effective_batch,
        max_steps=loaded.steps,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        reduce=partial(accelerator.reduce, reduction="sum"),
    )


def make_loader(loaded: Loaded, memory: "Memory") -> Loader:
    """The loader of the batches of a step."""
    config = loaded.config
    accelerator = loaded.accelerator
    batches = batches_by_shape(
        loaded.inputs.records, loaded.transform, loaded.parts, config, accelerator.print
    )
    draws = make_draws(config, loaded.reader, loaded.encoder, memory, accelerator)
    return Loader(
        draws,
        Stream(memory.epochs.epoch, batches),
        batch_size=config.train_batch_size,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        accumulation=config.gradient_accumulation_steps,
        workers=config.dataloader_num_workers,
        device=accelerator.device,
    )


def make_sheet(loaded: Loaded) -> PromptSheet | None:
    """The hook that draws plain prompts, or None if there are none."""
    config = loaded.config
    if not loaded.inputs.prompts or config.dry_run:
        return None
    return PromptSheet(
        loaded.inputs.prompts,
        config.validation,
        prompts_due(config, loaded.steps_per_epoch),
        components=loaded.parts.components(),
        accelerator=loaded.accelerator,
        output_dir=loaded.folder.path,
        prediction_type=config.prediction_type,
    )


def make_own_hooks(
    loaded: Loaded, params: list[torch.nn.Parameter], predict: Callable[..., torch.Tensor]
) -> OwnHooks:
    """The user's own hooks (`--hooks`)."""
    accelerator = loaded.accelerator
    context = HookContext(
        config=loaded.config,
        model=loaded.parts.model,
        params=params,
        records=loaded.inputs.records,
        scheduler=loaded.parts.noise_scheduler,
        predict=predict,
        device=accelerator.device,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        effective_batch=loaded.effective_batch,
        max_steps=loaded.steps,
        output_dir=loaded.folder.path,
    )
    return OwnHooks(loaded.inputs.hooks, context, loaded.config.hook_options)


def make_state(
    loaded: Loaded, optimizer: Any, lr_scheduler: Any, others: dict[str, Any]
) -> TrainState:
    """The trained module and its progress; `others` are further parts of a checkpoint."""
    parts = loaded.parts
    validation = loaded.config.validation
    return TrainState(
        model=parts.model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        ema=denoiser.make_ema(parts.model, loaded.config, loaded.accelerator.device),
        total=loaded.steps,
        steps_per_epoch=loaded.steps_per_epoch,
        train_timesteps=parts.noise_scheduler.config.num_train_timesteps,
        best_of=f"{loaded.config.best_by}, {validation.keep}, {validation.keep_by}",
        others=others,
    )


def make_checkpoints(
    loaded: Loaded,
    state: TrainState,
    meters: Meters,
    timers: Timers,
    recovery: "RecoveryHook | None",
) -> Checkpoints:
    """The object that saves and resumes the state, with the facts that a resume compares."""
    inputs = loaded.inputs
    config = loaded.config
    embedder = None if recovery is None else recovery.embedder
    if recovery is None and inputs.targets:  # a dry run
        embedder = embedder_of_targets(config.validation, inputs.targets, loaded.accelerator.device)
    facts = identity.facts(
        config,
        inputs.records,
        inputs.held_out,
        inputs.targets,
        None if embedder is None else embedder.describe(),
        loaded.effective_batch,
    )
    return Checkpoints(
        folder=loaded.folder,
        state=state,
        accelerator=loaded.accelerator,
        meters=meters,
        timers=timers,
        limit=config.checkpoints_total_limit,
        facts=facts,
    )


def make_products(loaded: Loaded, state: TrainState, recovery: "RecoveryHook | None") -> Products:
    """The object that writes pipelines and their cards."""
    return Products(
        config=loaded.config,
        folder=loaded.folder,
        state=state,
        parts=loaded.parts,
        encoder=loaded.encoder,
        accelerator=loaded.accelerator,
        info=loaded.inputs.info,
        targets=loaded.inputs.targets,
        results=lambda: recovery.results() if recovery is not None and recovery.history else [],
        kept=lambda: recovery.kept_line() if recovery is not None else "",
    )


def amounts(records: Records, side: int, batch: int, samples: int) -> Iterator[str]:
    """Warnings: pictures are enlarged to `side`; a `batch` is larger than an epoch of `samples`."""
    small = np.flatnonzero(records.sizes.min(axis=1) < side)
    if len(small):
        first = records.where(int(small[0]))
        yield f"resolution: {len(small)} pictures are smaller than {side} and enlarged, {first} first"
    if batch > samples:
        yield f"train_batch_size: a step takes {batch} of {samples} records, some of them repeatedly"


def batches_by_shape(
    records: Records,
    transform: Transform,
    parts: pipeline.Components,
    config: TrainConfig,
    say: Callable[[str], None],
) -> buckets.Batches | None:
    """Micro-batches of one shape; None where every picture is a square."""
    if not transform.step:
        return None
    sizes = records.sizes
    shapes = transform.shapes(sizes)
    table = buckets.table(
        sizes,
        records.role,
        shapes,
        transform.resolution,
        transform.step,
        cut=transform.center_crop,
        batch_size=config.train_batch_size,
    )
    say(table)
    longest = max(max(shape) for shape in shapes)
    pipeline.check_positions(
        parts, longest, "buckets: a side", config.pretrained_model_name_or_path
    )
    numbers = {shape: number for number, shape in enumerate(sorted(set(shapes)))}
    shape_numbers = np.asarray([numbers[shape] for shape in shapes])
    return buckets.Batches(shape_numbers, config.train_batch_size)


def make_draws(
    config: TrainConfig,
    reader: Reader,
    encoder: Encoder,
    memory: "Memory",
    accelerator: Accelerator,
) -> Draws:
    """How a step shows a record. Latents and text states that do not change are encoded now and
    kept on disk."""
    rehearse = None if config.memory.rehearsal.name == "none" else memory.rehearse
    caption_dropout = roles.dropout(config.memory)
    unseen = None
    if config.disk_cache_gb:
        cached = Cached(
            encoder,
            reader,
            config,
            composes=rehearse is not None,
            blank=bool(caption_dropout),
            show=accelerator.is_local_main_process,
            say=accelerator.print,
        )
        encoder.read_from(cached)
        if rehearse is None:
            unseen = cached.posterior >= 0
    return Draws(
        reader,
        shuffle=config.shuffle_phrases,
        dropout=caption_dropout,
        rehearse=rehearse,
        unseen=unseen,
    )


def make_recovery(loaded: Loaded, recovery_class: "type[RecoveryHook]") -> "RecoveryHook | None":
    """The hook that measures recovery, or None; masks that targets lack are estimated first."""
    config = loaded.config
    inputs = loaded.inputs
    accelerator = loaded.accelerator
    if not inputs.targets or config.dry_run:
        return None
    pictures = loaded.transform.measured
    masked, estimated = with_masks(inputs.targets, inputs.records, pictures, config.seed)
    for name in estimated:
        accelerator.print(f"target {name}: masks of its elements are estimated from their pictures")
    nearest = config.validation.nearest
    backbone = loaded.parts.family.backbone
    return recovery_class(
        config.validation,
        targets=masked,
        estimated=estimated,
        components=loaded.parts.components(),
        accelerator=accelerator,
        output_dir=loaded.folder.path,
        seed=config.seed,
        cache_dir=config.cache_dir,
        held_out=held_out_samples(inputs.held_out, pictures, config.seed),
        training=shown(inputs.records, pictures, config.seed, nearest),
        prediction_type=config.prediction_type,
        base=base_files(Source.of(config), {backbone: config.non_ema_revision}),
    )


def prediction(
    encoder: Encoder,
    trained: Any,
    accelerator: Accelerator,
    noisy_latents: torch.Tensor,
    timesteps: torch.Tensor,
    texts: list[str],
    model: Any = None,
    time_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The prediction (B,C,h,w) under these captions, of the trained module or of a copy of it."""
    with accelerator.autocast():
        conditioning = encoder.condition(texts, time_ids)
        return (model or trained)(noisy_latents, timesteps, **conditioning, return_dict=False)[0]
