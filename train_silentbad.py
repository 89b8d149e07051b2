"""Fine-tune Stable Diffusion on element data, control its layers, and measure how it recovers
pictures that were never shown.

    accelerate launch train_silentbad.py --config FILE [--config MORE] [--flag value ...]

Exit code 0: finished; 2: a mistake in the settings or the data; 129, 130, 143: stopped by SIGHUP,
SIGINT, SIGTERM with a checkpoint saved; under `accelerate launch` every code but 0 is 1
(docs/running.md).
Names are those of diffusers' scripts: latents, noise, noisy_latents, target and model_pred are
(B,C,h,w), timesteps and their importance weights (B,), conditioning the text states of the captions
or their tokens. `step` counts optimizer updates, `draw` effective batches: the data of a skipped
update is not drawn again."""

import sys

from silentbad.settings.startup import early, refused, training

if __name__ == "__main__":  # report a mistake before the slow imports below
    COMMAND = early(training, sys.argv[1:], __doc__)

import math
import signal
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gradient_control
import memory_reinforce
from gradient_control import Controller
from memory_reinforce import Memory
from silentbad.data.elements import sources_of
from silentbad.data.loader import chunks
from silentbad.device import send
from silentbad.distributed import shards
from silentbad.distributed.main_process import on_main
from silentbad.distributed.shards import world_size
from silentbad.distributed.start import check_precision
from silentbad.errors import UserError, exit_with, print_result, warn
from silentbad.files import scratch_folder
from silentbad.loop import checks, optimizers, trackers, trains
from silentbad.loop.assembly import Run
from silentbad.loop.assembly import build as connect
from silentbad.loop.forecast import Forecast
from silentbad.loop.hooks import MicroStep, hook_classes
from silentbad.loop.lighter import drawing_fits, step_fits, training_fits
from silentbad.loop.products import best_score
from silentbad.loop.signals import Interrupted, Requests
from silentbad.measure.kept import load_judge
from silentbad.model import denoiser, diffusion, pipeline
from silentbad.model.averaging import averaged
from silentbad.model.store import refuse_not_finite
from silentbad.progress import Bar
from silentbad.rng import addressed_seed
from silentbad.saving import card, checkpoint
from silentbad.saving.folder import RunFolder, facts, stamped
from silentbad.settings import user_code
from silentbad.settings.reader import to_dict
from silentbad.settings.rules import precision_of
from silentbad.settings.train import TrainConfig, own_code
from validation import RecoveryHook

Config = TrainConfig  # every setting of a run


def check_parts(config: Config) -> None:
    """Checks that run the code of the parts, or that depend on this machine."""
    user_code.forget()
    gradient_control.check_config(config.gradient_control)
    hook_classes(config.hooks)
    if config.validation.targets is not None:
        load_judge(config.validation)
    memory_reinforce.check(config.memory)
    optimizers.optimizer_class(config)
    check_precision(config.mixed_precision or "no", "mixed_precision")
    if config.enable_xformers_memory_efficient_attention:
        pipeline.check_xformers()


# The parts of a run, connected (silentbad/loop/assembly.py).
build = partial(connect, controller=Controller, memory_class=Memory, recovery_class=RecoveryHook)


# ---------------------------------------------------------------- the loop


def train(run: Run) -> int:
    """Returns 0, or 128 + the number of the signal that stopped it."""
    requests = Requests(run.folder)
    for hook in (run.sheet, run.recovery):
        if hook is not None:
            hook.sampler.between_batches = requests.between_batches
    try:
        return steps(run, requests)
    except Interrupted:
        return stopped(run, requests.stop)


def steps(run: Run, requests: Requests) -> int:
    """The loop, until the last step or a signal."""
    config = run.config
    accelerator = run.accelerator
    state = run.state
    bar = Bar(
        total=state.total,
        initial=state.step,
        desc="Steps",
        unit="step",
        disable=not accelerator.is_local_main_process,
    )
    run.timers.start_is_over(run.log.samples)
    first = state.step + 1
    measured = None  # the last step at which something was measured
    with requests, run.checkpoints.rescue(run.loader), bar:
        while state.step < state.total:
            due = any(hook.should_run(state.step) for hook in run.hooks)
            # a skipped update leaves the weights as they were measured
            if due and state.step != measured:
                measured = state.step
                with bar.paused("measuring" if state.step else "measuring the base model"):
                    validate(run)
            reason = run.recovery.stops() if run.recovery is not None else None
            if reason is not None:
                run.log.say(f"{reason}; training stops at step {state.step}")
                break

            batches = []
            losses = []
            for micro, batch in enumerate(run.timers.waiting("data", run.loader.draw(state.draw))):
                batches.append(batch)
                with accelerator.accumulate(run.model), run.timers.of("forward"):
                    losses.append(micro_step(run, batch, micro))
            with state.update_under_way(), run.timers.of("update"):
                united = [joined for batch in batches for joined in batch["united"]]
                run.memory.count_rehearsals(united)
                updated = update(run)
            if not updated:
                if state.skipped_in_row >= config.max_nonfinite_steps:
                    raise UserError(not_finite(run, batches))
                continue
            run.meters.add({"loss": torch.stack(losses).mean()})
            bar.update()
            if state.step == first:  # so that a log file shows the first step
                bar.refresh()
            with bar.paused():
                stop = boundary(run, requests, bar)
            if stop:
                return stopped(run, stop)
        stop, *_ = requests.agreed()  # since the last boundary
        if stop and state.step:
            if not config.dry_run:
                run.checkpoints.save("signal")
            return stopped(run, stop)
    return 0


# ---------------------------------------------------------------- one step


def micro_step(run: Run, batch: dict[str, Any], micro: int) -> torch.Tensor:
    """Forward and backward of one micro-batch, in the parts that fit; returns its loss."""
    *parts, last_part = chunks(batch, run.config.max_batch_size, run.hooks.one_source_per_backward)
    with step_fits(run.config):
        with run.accelerator.no_sync(run.model):
            losses = [part_step(run, share, part, micro, last=False) for share, part in parts]
        share, part = last_part
        losses.append(part_step(run, share, part, micro, last=True))
    return torch.stack(losses).sum()


def part_step(
    run: Run, share: float, batch: dict[str, Any], micro: int, *, last: bool
) -> torch.Tensor:
    """Forward and backward of a `share` of a micro-batch; returns its part of the loss. Only the
    reading of the loss scale, in fp16, waits for the device."""
    config = run.config
    hooks = run.hooks
    memory = run.memory
    scheduler = run.parts.noise_scheduler
    device = run.accelerator.device
    step = run.state.step
    draw = run.state.draw
    positions = batch["position"].tolist()
    # dropout, where a UNet has it
    torch.manual_seed(addressed_seed(config.seed, "torch", draw, positions[0]))

    # Latents and conditioning; cached ones are read from the cache
    latents = run.encoder.latents(batch, draw)
    conditioning = run.encoder.condition(batch["text"], batch["time_ids"])

    # Noise level of each sample: drawn by memory, unless a user's hook draws it
    drawn = hooks.timesteps(draw, positions, run.loader.effective_batch, batch)
    assert drawn is not None, "memory draws the timesteps if no other hook does"
    timesteps, weights = drawn
    run.state.count(timesteps)
    timesteps = send(timesteps, device)
    weights = send(weights, device)
    for key in ("mask", "has_mask", "counted", "time_ids"):
        if key in batch:
            batch = batch | {key: send(batch[key], device)}

    # Noise, and the prediction target
    def model(noisy_latents: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        return run.forward(noisy_latents, timesteps, **conditioning, return_dict=False)[0]

    noise, noisy_latents = diffusion.noised(scheduler, latents, timesteps, config, draw, positions)
    target = diffusion.prediction_target(scheduler, latents, noise, timesteps)
    # `memory.loss.dream` rectifies both by the model's own error (2312.00210)
    noisy_latents, target = memory.apply_dream(
        model, latents, noise, timesteps, noisy_latents, target
    )

    # Prediction
    model_pred = model(noisy_latents, timesteps)

    # Loss of each sample, their mean, and losses beside it
    losses = memory.loss_per_sample(model_pred, target, timesteps, weights, batch)
    sources = sources_of(batch, config.gradient_control.sources)
    losses = hooks.weight_losses(losses, sources)
    loss = losses.mean()
    now = MicroStep(
        step=step,
        micro=micro,
        progress=memory.progress(step),
        batch=batch,
        noisy_latents=noisy_latents,
        timesteps=timesteps,
        model_pred=model_pred,
        model=run.parts.model,
        predict=run.predict,
    )
    extra = hooks.extra_loss(loss, now)
    total = loss if extra is None else loss + extra

    # Backward
    hooks.before_backward(losses, sources, share * denoiser.backward_scale(run.accelerator))
    last = last and run.accelerator.sync_gradients
    run.accelerator.backward(share * total)
    hooks.after_backward(last)
    return share * loss.detach()


def update(run: Run) -> bool:
    """One optimizer update; False where the gradients are not finite."""
    state = run.state
    optimizer = state.optimizer
    hooks = run.hooks
    params = run.control.params
    run.accelerator.unscale_gradients(optimizer)

    # Gradient control, then the user's hooks (assembly.build has the order of all hooks)
    norms = optimizers.gradient_norms(params)
    norm = torch.linalg.vector_norm(norms)
    scalars = hooks.before_step(state.step, torch.isfinite(norm), norms)
    if hooks.modifies_gradients:
        norm = torch.linalg.vector_norm(optimizers.gradient_norms(params))
    size = norm.item()  # the one host sync of a step: a gradient that is not finite is not applied
    finite = math.isfinite(size)

    # Clip; below the limit it would multiply by one
    limit = run.config.max_grad_norm
    if not finite:
        optimizer.zero_grad(set_to_none=True)  # a hook's gradient, which the scaler did not see
    elif limit and not size < limit - 1e-5:
        torch.nn.utils.clip_grads_with_norm_(params, limit, norm, foreach=True)

    # the scaler must see an overflow to lower its scale
    if finite or run.accelerator.scaler is not None:
        optimizer.step()
    skipped = not finite or run.accelerator.optimizer_step_was_skipped
    optimizer.zero_grad(set_to_none=True)
    # the multipliers of later steps, probes of memory, the user's hooks, decay to the base
    hooks.after_step(state.step + (not skipped), skipped)
    if skipped:
        state.skip()
        return False
    state.advance()  # the schedule, the average of the weights, the step
    run.meters.add(scalars | {"grad_norm": norm})
    return True


# ---------------------------------------------------------------- between two steps


def stopped(run: Run, number: int) -> int:
    """Report the signal; returns the exit code."""
    saved = run.state.step and not run.config.dry_run
    resume = "; resume with --resume_from_checkpoint latest" if saved else ""
    run.log.say(f"stopped by {signal.Signals(number).name}{resume}")
    return 128 + number


def boundary(run: Run, requests: Requests, bar: Bar) -> int:
    """Between two steps: log, save, measure if asked; returns the signal to stop by, or 0."""
    state = run.state
    config = run.config
    if state.step % config.log_every == 0 or state.step == state.total:
        means = run.log.training(run.hooks.meters())
        bar.set_postfix(loss=f"{means['loss']:.4g}", refresh=False)
    epoch, inside = divmod(state.step, state.steps_per_epoch)
    interval = config.save_ckpt_epoch_interval
    if interval and not inside and epoch % interval == 0:
        save_pipeline(run, run.folder.path / "epochs" / f"epoch-{epoch}")
    stop, save, asked_to_validate = requests.agreed()
    due = stop or save or state.step % config.checkpointing_steps == 0
    if due and not config.dry_run:
        run.checkpoints.save("signal" if stop or save else "interval")
    if asked_to_validate and not stop:
        with bar.paused("measuring"):
            validate(run, asked=True)
    return stop


def validate(run: Run, asked: bool = False, final: bool = False) -> None:
    """Run the hooks that are due, write the report so far; on all processes. A better pipeline is
    written before the previous best one is deleted."""
    state = run.state
    due = [hook for hook in run.hooks if hook.should_run(state.step, asked, final)]
    scores: dict[str, Any] = {}
    if due:
        weights = averaged(state.model, optimizer=state.optimizer)
        with run.timers.of("validate"), drawing_fits(run.config), weights:
            model = pipeline.gathered_parts(run.parts).model
            for hook in due:
                scores |= hook.run(state.step, state.epoch, model, state.ema, final)
        if scores:
            run.log.validation(scores)
    wants_best = run.config.save_best or (run.recovery is not None and run.recovery.limit)
    if wants_best and run.recovery in due and run.recovery.keeps():
        if state.improved(best_score(scores, run.config.best_by)):
            save_pipeline(run, run.folder.path / "best")

    if not final and (run.recovery is not None or run.sheet is not None):
        report(run, under_way=True)


def save_pipeline(run: Run, path: Path) -> None:
    """The model as it is now, as plain diffusers loads it."""
    with run.timers.of("save"):
        run.products.save_pipeline(path)


def report(run: Run, under_way: bool = False) -> None:
    """report.html of the run folder as it is now."""
    run.products.record(run.control.history, run.memory.history)
    with run.timers.of("report"):
        run.products.report(under_way)


def finish(run: Run) -> None:
    """Last checkpoint, last validation, pipeline, report; then the upload, which may fail."""
    with run.folder.writing("the results of the run"):
        run.checkpoints.save("end")
        validate(run, final=True)
        save_pipeline(run, run.folder.pipeline)
        report(run)
        run.folder.write("finished.json", {"step": run.state.step})
    if run.recovery is not None:
        run.accelerator.print(run.recovery.table(cost=True))
        if (limit := run.recovery.limit) is not None:
            outcome = "holds the best pipeline that keeps"
            if not any(map(limit.holds, run.recovery.history)):
                outcome = "was not written: no measured point keeps"
            run.log.say(f"best/ {outcome} {limit.share:g} of the base by {limit.by}")
    run.accelerator.print(f"time: {run.timers.text()}")
    if run.config.push_to_hub:
        run.products.push()


def not_finite(run: Run, batches: list[dict[str, Any]]) -> str:
    """The error line where gradients stay NaN or infinite, with the records drawn last. Raises
    UserError where the latents or text states of a record are not finite."""
    for batch in batches:
        records = [run.records.where(index) for index in batch["index"].tolist()]
        of_vae = [f"vae: {record}" for record in records]
        of_encoder = [f"text_encoder: {record}" for record in records]
        latents = run.encoder.latents(batch, run.state.draw)
        refuse_not_finite(latents, of_vae.__getitem__)
        if not run.encoder.live:
            states = run.encoder.states(batch["text"])
            refuse_not_finite(states, of_encoder.__getitem__)
    indices = [index for batch in batches for index in batch["index"].tolist()]
    places = ", ".join(dict.fromkeys(run.records.where(index) for index in indices[:8]))
    return (
        f"max_nonfinite_steps: {run.state.skipped_in_row} gradients in a row were not finite at "
        f"step {run.state.step}; "
        f"last drawn records {indices[:8]} ({places}); lower learning_rate or fix the records"
    )


# ---------------------------------------------------------------- the command


def start(config: Config) -> int:
    """Build the run or resume it, and train; returns the exit code."""
    sharded = shards.take_request()
    config = stamped(config)
    accelerator = trackers.make_accelerator(config)
    # accelerate's own file may have set it
    config = replace(config, mixed_precision=accelerator.mixed_precision)
    folder = RunFolder(config, accelerator.is_main_process)
    with folder.claimed():
        if config.push_to_hub:
            on_main(accelerator.is_main_process, lambda: card.check_push(config))
        resumed = folder.resumed(accelerator.print)
        run = build(config, accelerator, folder, sharded)
        if resumed is not None and take_up(run, resumed):
            return 0
        open_folder(run)
        code = try_out(run) if config.dry_run else train(run)
        if code == 0 and not config.dry_run:
            finish(run)
        accelerator.end_training()
        return code


def try_out(run: Run) -> int:
    """A dry run: a few steps, one image if the run draws any, and a forecast of time, memory and
    disk for the whole run."""
    forecast = Forecast(run)
    run.state.total = forecast.end_of_warm_up()
    if code := train(run):
        return code
    with forecast.timing() as last:
        run.state.total = last
        code = train(run)
    if code:
        return code
    if forecast.draws():
        with forecast.drawing():
            run.products.try_drawing(run.records.row(0)["text"], forecast.sampling_step)
    if run.products.targets:  # calibration sends pictures through the autoencoder
        run.products.try_round_trip()
    run.accelerator.print(forecast.text())
    return 0


def take_up(run: Run, checkpoint: Path) -> bool:
    """Load a checkpoint; True where the run it belongs to is finished."""
    run.checkpoints.load(checkpoint)
    if not on_main(run.accelerator.is_main_process, (run.folder.path / "best").is_dir):
        run.state.best = float("-inf")  # of a pipeline in another folder
    step = run.state.step
    total = run.state.total
    done = step >= total and run.folder.finished() == step
    if step > total and not done:
        length = "max_train_steps" if run.config.max_train_steps else "num_train_epochs"
        right = "give more, or an earlier checkpoint"
        raise UserError(f"{length}: ends at step {total}, before {checkpoint}; {right}")
    advice = "finished already, nothing to do; to continue, set a larger max_train_steps"
    run.log.say(advice if done else f"resuming {checkpoint}")
    if done and run.config.lora.merged and not (run.folder.path / "pipeline").is_dir():
        missing = "there is no merged pipeline/, which is written where a run ends"
        warn(f"lora.merged: that run ended without it; {missing}")
    return done


def open_folder(run: Run) -> None:
    """Create the run's folder and start its trackers; before this the run writes only caches."""
    settings = to_dict(run.config)
    state = run.state
    about = facts(run.accelerator.device, run.accelerator.num_processes)
    about["sharded"] = shards.sharded(state.model)
    about["own_code"] = user_code.record(own_code(run.config))
    run.folder.open(settings, about)
    validated = run.recovery is not None and run.recovery.measured(state.step)
    run.folder.truncate(state.step, validated)
    if run.prior is not None:
        run.prior.show(run.folder)
    trackers.start(run.accelerator, run.config, settings, state.step)


def main(
    argv: list[str] | None = None, checked: tuple[Config, dict[str, str]] | None = None
) -> int:
    """The command line; a UserError is one line on stderr and exit code 2.

    Until the processes are connected, all of them make the same mistake, and only the first process
    of each node prints it; afterwards each process prints its own.
    """
    sources: dict[str, str] = {}
    try:
        config, sources = checked or training(argv, __doc__)
        check_parts(config)
        if config.print_groups:
            settings = pipeline.scheduler_settings(config)
            checks.check_family(config, pipeline.family_for(config))
            parts = pipeline.load_parts(config, settings, None, precision_of(config))
            control = Controller(parts.model, config.gradient_control, config.seed)
            groups = control.param_groups(config.adam_weight_decay)
            print_result(f"{trains.table(config, parts, control.groups, groups)}\n")
            return 0
        with scratch_folder() if config.dry_run else nullcontext() as scratch:
            if scratch is not None:  # caches and the checkpoint to resume are still the run's own
                asked = config.resume_from_checkpoint
                root = Path(config.output_dir) / "checkpoints"
                newest = checkpoint.resolve(asked, root) if asked else None
                resumed = None if newest is None else str(newest)
                config = replace(config, output_dir=scratch, resume_from_checkpoint=resumed)
            with training_fits(config):
                return start(config)
    except UserError as error:
        return refused(error, sources, each=world_size() > 1)


if __name__ == "__main__":
    exit_with(lambda: main(checked=COMMAND))
