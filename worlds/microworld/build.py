"""Train the bundled base from scratch.

    python -m worlds.microworld.build --work DIR [--stage vae|text|unet|...]

Stages, each resumable at any moment from its last checkpoint in `--work`: the autoencoder and then
its decoder alone, the text encoder, the UNet, the copy detector (the `micro` embedder) and the
judge (a classifier that measures what the base draws); then `export` writes the pipeline in
diffusers' format with its measured model card. Every picture is rendered on the fly from an
addressed seed outside the ranges that experiments use."""

import sys

from silentbad.settings import startup
from worlds.options import BaseOptions

if __name__ == "__main__":  # report a mistake before the slow imports below
    OPTIONS = startup.early(startup.options, BaseOptions, None, __doc__)

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.training_utils import EMAModel, compute_snr
from PIL import Image
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer

from silentbad import ROOT
from silentbad.errors import UserError, exit_with, user_errors
from silentbad.measure.micro import MicroEmbedder
from silentbad.progress import Bar
from silentbad.rng import generator
from worlds.interface import World
from worlds.microworld.copies import (
    CopyPool,
    Slope,
    batch_of,
    copy_loss,
    pictures,
    to_tensor,
)
from worlds.microworld.export import assemble, export
from worlds.microworld.networks import (
    LATENT_CHANNELS,
    CaptionReader,
    load_tokenizer,
    new_scheduler,
    new_text_encoder,
    new_unet,
    new_vae,
)
from worlds.microworld.optim import MuonWithAdamW
from worlds.microworld.oracle import Judge, judge_loss, round_trip_psnr
from worlds.microworld.world import MICROWORLD

ASSETS = ROOT / "assets" / "micro-sd"


@dataclass
class Stage:
    """One network's training: its length, batch, peak learning rate, and the loss of a batch at
    a step."""

    name: str
    modules: nn.ModuleDict
    steps: int
    lr: float
    loss: Callable[[int], torch.Tensor]
    ema_decay: float = 0.999
    muon: bool = True  # updates of matrices and kernels; else AdamW's
    state: Callable[[], dict] = dict  # extra state to save
    restore: Callable[[dict], None] = lambda _: None


def pictures_of(world: World, rng: np.random.Generator, n: int, **more: Any) -> torch.Tensor:
    """Pictures of `n` scenes (N,3,64,64) in [-1,1]; `more` are options of `sample_scene`."""
    return pictures([world.sample_scene(rng, **more) for _ in range(n)], world)


def schedule(step: int, steps: int) -> float:
    """Warm-up over 2 %, constant, linear to zero over the last 30 %: the length can be raised
    until then."""
    return min(1.0, (step + 1) / (0.02 * steps), max(0.0, (steps - step) / (0.3 * steps)))


def run_stage(
    stage: Stage, work: Path, device: torch.device, keep: Sequence[int] = ()
) -> nn.ModuleDict:
    """Train a stage to its end, saving every minute; returns its modules with averaged weights.

    After `keep` percent of the steps the averaged weights are written to `kept_at(work, stage.name,
    percent)`."""
    path = work / f"{stage.name}.pt"
    parameters = list(stage.modules.parameters())
    optimizer = MuonWithAdamW(stage.modules, stage.lr, stage.muon)
    ema = EMAModel(parameters, decay=stage.ema_decay, use_ema_warmup=True, power=0.75, foreach=True)
    start = 0
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        stage.modules.load_state_dict(saved["modules"])
        if saved["step"] < stage.steps:
            optimizer.load_state_dict(saved["optimizer"])
        ema.load_state_dict(saved["ema"])
        stage.restore(saved["state"])
        start = saved["step"]

    def save(step: int) -> None:
        state = {
            "modules": stage.modules.state_dict(),
            "optimizer": optimizer.state_dict(),
            "ema": ema.state_dict(),
            "state": stage.state(),
            "step": step,
        }
        write(state, path)

    percent_at_step = {stage.steps * percent // 100: percent for percent in keep}
    ema.to(device)
    bar = Bar(range(start, stage.steps), initial=start, total=stage.steps, desc=stage.name)
    saved_at = time.monotonic()
    average = 0.0
    for step in bar:
        optimizer.set_fraction(schedule(step, stage.steps))
        loss = stage.loss(step)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        ema.step(parameters)
        if step % 50 == 0:
            average = loss.item() if step == start else 0.8 * average + 0.2 * loss.item()
            bar.set_postfix(loss=f"{average:.4f}", refresh=False)
        if step + 1 in percent_at_step:
            ema.store(parameters)
            ema.copy_to(parameters)
            write(stage.modules.state_dict(), kept_at(work, stage.name, percent_at_step[step + 1]))
            ema.restore(parameters)
        if time.monotonic() - saved_at > 60:
            save(step + 1)
            saved_at = time.monotonic()
    if start < stage.steps:
        save(stage.steps)
    ema.copy_to(parameters)
    return stage.modules.eval().requires_grad_(False)


def kept_at(work: Path, name: str, percent: int) -> Path:
    """The file of a stage's averaged weights after `percent` of its steps."""
    return work / f"{name}-{percent}.pt"


def write(state: dict, path: Path) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


# ---------------------------------------------------------------- autoencoder


def vae_stage(
    steps: int, batch: int, device: torch.device, world: World, begin: AutoencoderKL | None = None
) -> Stage:
    """Crops of 32x32 about a thing for most of the steps, then whole pictures: steps count, and
    crops are cheap. `begin` is an autoencoder whose weights are trained on."""
    vae = (begin or new_vae()).to(device).to(memory_format=torch.channels_last)

    def crops(step: int) -> torch.Tensor:
        rng = world.rng("vae", step)
        cropping = step < 0.85 * steps
        images = []
        for _ in range(batch // 2 if cropping else batch // 4):
            scene = world.sample_scene(rng, max_count=4)
            picture = world.render(scene)[0]
            if not cropping:
                images.append(picture)
                continue
            for thing in rng.choice(len(scene.things), 2):
                x, y = (
                    int(np.clip(c - 16 + rng.integers(-10, 11), 0, 32))
                    for c in scene.things[thing].centre
                )
                images.append(picture.crop((x, y, x + 32, y + 32)))
        return to_tensor(images).to(device)

    def loss(step: int) -> torch.Tensor:
        x = crops(step)
        posterior = vae.encode(x).latent_dist
        error = vae.decode(posterior.sample()).sample - x
        # squared error serves PSNR, absolute error outlines; a light KL keeps latents near a
        # Gaussian
        return error.square().mean() + 0.1 * error.abs().mean() + 2e-7 * posterior.kl().mean()

    return Stage(
        name="vae",
        modules=nn.ModuleDict({"vae": vae}),
        steps=steps,
        lr=3e-3,
        loss=loss,
        ema_decay=0.995,
    )


def decoder_stage(steps: int, batch: int, vae, device: torch.device, world: World) -> Stage:
    """Train the decoder alone, on unchanged latents, so that a UNet can be trained meanwhile."""

    def loss(step: int) -> torch.Tensor:
        x = pictures_of(world, world.rng("decoder", step), batch, max_count=4).to(device)
        with torch.no_grad():
            latents = vae.encode(x).latent_dist.sample()
        error = vae.decode(latents).sample - x
        return error.square().mean() + 0.1 * error.abs().mean()

    trained = nn.ModuleDict(
        {"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv}
    ).requires_grad_(True)
    return Stage(name="decoder", modules=trained, steps=steps, lr=1e-3, loss=loss, ema_decay=0.995)


# ---------------------------------------------------------------- text encoder


def caption_questions(
    scene: Any, tokenizer, world: World
) -> tuple[list[int], list[tuple[int, dict]], dict[str, dict]]:
    """Token ids, (last token, answers) for each phrase, and the answers at each place a phrase
    names."""
    unsaid = len(world.backdrops)
    backdrop = world.backdrops.index(scene.backdrop.kind) if scene.backdrop.named else unsaid
    encoded = tokenizer(
        scene.caption, padding="max_length", truncation=True, return_offsets_mapping=True
    )
    at_phrase = []
    at_place = {place: {**world.nothing, "backdrop": backdrop} for place in world.places}
    cursor = 0
    answers = {thing.phrase: world.answers(thing) for thing in scene.things}
    answers[scene.backdrop.phrase] = {**world.nothing, "backdrop": backdrop}
    for phrase in scene.phrases:
        begin = scene.caption.index(phrase, cursor)
        cursor = end = begin + len(phrase)
        last = max(
            (i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < b <= end), default=1
        )
        at_phrase.append((last, answers[phrase]))
    for thing in scene.things:
        if "place" in thing.named:
            at_place[thing.place] = {**world.answers(thing), "backdrop": backdrop}
    return encoded["input_ids"], at_phrase, at_place


def text_stage(
    steps: int,
    batch: int,
    tokenizer,
    device: torch.device,
    things: int,
    world: World,
    begin: CLIPTextModel | None = None,
) -> Stage:
    encoder = (begin or new_text_encoder(tokenizer)).to(device)
    reader = CaptionReader(world).to(device)
    fields = world.fields

    def loss(step: int) -> torch.Tensor:
        rng = world.rng("text", step)
        scenes = [world.sample_scene(rng, max_count=things) for _ in range(batch)]
        asked = [caption_questions(scene, tokenizer, world) for scene in scenes]
        ids = torch.tensor([a[0] for a in asked], device=device)
        # the encoder is causal: padding is idle
        ids = ids[:, : int((ids != tokenizer.pad_token_id).sum(1).max()) + 1]
        width = max(len(a[1]) for a in asked)
        last = torch.zeros(batch, width, dtype=torch.long)
        wanted = {
            name: (torch.full((batch, width), -100), torch.zeros(batch, len(world.places)).long())
            for name in fields
        }
        for b, (_, at_phrase, at_place) in enumerate(asked):
            for p, (token, answers) in enumerate(at_phrase):
                last[b, p] = token
                for name in fields:
                    wanted[name][0][b, p] = answers[name]
            for k, place in enumerate(world.places):
                for name in fields:
                    wanted[name][1][b, k] = at_place[place][name]
        phrase_logits, place_logits = reader(encoder(ids).last_hidden_state, last.to(device))
        total = torch.zeros((), device=device)
        for which, logits in enumerate((phrase_logits, place_logits)):
            for name, part in zip(fields, logits.split(list(fields.values()), dim=-1), strict=True):
                total = total + F.cross_entropy(
                    part.flatten(0, 1), wanted[name][which].to(device).flatten()
                )
        return total

    return Stage(
        name="text",
        modules=nn.ModuleDict({"encoder": encoder, "reader": reader}),
        steps=steps,
        lr=2e-3,
        loss=loss,
        ema_decay=0.99,
    )


# ---------------------------------------------------------------- UNet


class LatentPool:
    """Scenes rendered and encoded once and drawn many times; it grows as training goes on, up to
    `capacity`.

    Columns, in half precision: posterior means (N,C,8,8), text states (N,L,D), and the share of
    each latent cell that things cover (N,1,8,8). Scene i is addressed by i; the first have at most
    two things, the others up to `things`."""

    def __init__(
        self, vae, encoder, tokenizer, device, things: int, world: World, capacity: int = 60_000
    ):
        self.vae = vae
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.device = device
        self.things = things
        self.world = world
        window = tokenizer.model_max_length
        width = encoder.config.hidden_size
        shapes = {"latents": (LATENT_CHANNELS, 8, 8), "states": (window, width), "cover": (1, 8, 8)}
        self.columns = {
            name: torch.empty(capacity, *shape, dtype=torch.float16)
            for name, shape in shapes.items()
        }
        self.size = 0
        self.capacity = capacity

    @torch.no_grad()
    def grow(self, n: int) -> None:
        first = self.size
        last = min(self.size + n, self.capacity)
        if first == last:
            return
        most = [2 if i < 8192 else self.things for i in range(first, last)]
        scenes = [
            self.world.sample_scene(self.world.rng("unet", first + i), max_count=n)
            for i, n in enumerate(most)
        ]
        drawn = [self.world.render(scene) for scene in scenes]
        for i, (_, masks) in enumerate(drawn):
            cells = [
                np.asarray(mask.resize((8, 8), Image.Resampling.BOX), np.float32) / 255
                for mask in masks
            ]
            self.columns["cover"][first + i, 0] = torch.from_numpy(np.max(cells, axis=0))
        ids = self.tokenizer(
            [s.caption for s in scenes], padding="max_length", truncation=True, return_tensors="pt"
        )
        pictures = to_tensor([picture for picture, _ in drawn])
        for k in range(0, last - first, 64):
            here = slice(first + k, min(first + k + 64, last))
            part = slice(k, k + 64)
            posterior = self.vae.encode(pictures[part].to(self.device)).latent_dist
            self.columns["latents"][here] = posterior.mean.cpu().half()
            states = self.encoder(ids.input_ids[part].to(self.device)).last_hidden_state
            self.columns["states"][here] = states.cpu().half()
        self.size = last

    def draw(self, rng: np.random.Generator, n: int) -> dict[str, torch.Tensor]:
        pick = torch.from_numpy(rng.integers(0, self.size, n))
        return {name: column[pick].float().to(self.device) for name, column in self.columns.items()}

    def state(self) -> dict:
        return {name: column[: self.size].clone() for name, column in self.columns.items()}

    def restore(self, state: dict) -> None:
        self.size = len(state["latents"])
        for name, column in state.items():
            self.columns[name][: self.size] = column


def unet_stage(
    steps: int,
    batch: int,
    lr: float,
    vae,
    encoder,
    tokenizer,
    device,
    things: int,
    first: int,
    world: World,
    begin: UNet2DConditionModel | None = None,
    *,
    muon: bool = True,
) -> Stage:
    """`first` scenes are encoded before the first step, and others beside each step."""
    unet = (begin or new_unet()).to(device).to(memory_format=torch.channels_last)
    scheduler = new_scheduler()
    pool = LatentPool(
        vae=vae, encoder=encoder, tokenizer=tokenizer, device=device, things=things, world=world
    )
    scale = vae.config.scaling_factor
    with torch.no_grad():
        blank = encoder(
            tokenizer("", padding="max_length", return_tensors="pt").input_ids.to(device)
        ).last_hidden_state

    def loss(step: int) -> torch.Tensor:
        pool.grow(batch // 4 if pool.size else first)
        batch_of = pool.draw(world.rng("unet-batch", step), batch)
        draw = generator(world.name, "unet-noise", step)
        x0 = batch_of["latents"] * scale
        eps = torch.randn(x0.shape, generator=draw).to(device)
        u = (torch.randperm(batch, generator=draw) + torch.rand(batch, generator=draw)) / batch
        t = (u * scheduler.config.num_train_timesteps).long().clamp_(max=999).to(device)
        unconditional = (torch.rand(batch, generator=draw) < 0.1).to(device)
        c = torch.where(unconditional[:, None, None], blank, batch_of["states"])
        pred = unet(scheduler.add_noise(x0, eps, t), t, c).sample
        snr = compute_snr(scheduler, t)
        # min-SNR-5 for v (2303.09556), floored
        weight = (snr.clamp(max=5.0) / (snr + 1.0)).clamp(min=0.05)
        # things are small beside the backdrop; the optimum stays the same
        where = 1.0 + 2.0 * batch_of["cover"]
        error = ((pred - scheduler.get_velocity(x0, eps, t)).square() * where).sum((1, 2, 3))
        return (weight * error / where.sum((1, 2, 3)) / LATENT_CHANNELS).mean()

    return Stage(
        name="unet",
        modules=nn.ModuleDict({"unet": unet}),
        steps=steps,
        lr=lr,
        loss=loss,
        ema_decay=0.9985,
        muon=muon,
        state=pool.state,
        restore=pool.restore,
    )


# ---------------------------------------------------------------- copy detector and judge


def embedder_stage(
    steps: int,
    batch: int,
    vae,
    device: torch.device,
    world: World,
    begin: MicroEmbedder | None = None,
) -> Stage:
    """True copies must score above hard nulls of every kind, whole pictures and single elements.
    `begin` is a detector whose weights are trained on; it meets fewer scenes."""
    net = (begin or MicroEmbedder()).to(device).to(memory_format=torch.channels_last)
    slope = Slope().to(device)
    pool = CopyPool(vae, device, world, capacity=2400)
    first = 400 if begin is None else steps // 2

    def loss(step: int) -> torch.Tensor:
        pool.grow(first + step)
        rng = world.rng("embedder-batch", step)
        x, there = batch_of(
            pool.draw(rng, batch), rng, generator(world.name, "embedder-batch", step)
        )
        return copy_loss(net, x.to(device), there.to(device), slope)

    return Stage(
        name="embedder",
        modules=nn.ModuleDict({"net": net, "slope": slope}),
        steps=steps,
        lr=2e-3,
        loss=loss,
        ema_decay=0.995,
    )


def judge_stage(steps: int, batch: int, vae, device: torch.device, world: World) -> Stage:
    judge = Judge(world).to(device).to(memory_format=torch.channels_last)

    def loss(step: int) -> torch.Tensor:
        rng = world.rng("judge", step)
        scenes = [world.sample_scene(rng) for _ in range(batch)]
        x = pictures(scenes, world).to(device)
        return judge_loss(judge, x, scenes, vae, rng, world)

    return Stage(
        name="judge",
        modules=nn.ModuleDict({"judge": judge}),
        steps=steps,
        lr=2e-3,
        loss=loss,
        ema_decay=0.995,
    )


# ---------------------------------------------------------------- command


@torch.no_grad()
def latent_scale(vae, device, world: World) -> float:
    """1 / std of the posterior means over 512 scenes: the factor that gives latents unit
    variance."""
    x = pictures_of(world, world.rng("scale"), 512).to(device)
    return 1.0 / torch.cat([vae.encode(part).latent_dist.mean for part in x.split(64)]).std().item()


def print_round_trip(name: str, vae, world: World) -> None:
    psnr = round_trip_psnr(vae, pictures_of(world, world.rng("held-out"), 256))
    print(f"{name}: round trip {psnr:.2f} dB")


STAGES = ("vae", "decoder", "text", "unet", "embedder", "judge")


def run(
    args: BaseOptions,
    wanted: tuple[str, ...],
    world: World = MICROWORLD,
    begin: Mapping[str, Any] | None = None,
) -> dict[str, nn.Module]:
    """Run the wanted stages in order (each needs the finished ones before it); returns the
    trained networks. `begin` are networks by the names of their stages whose weights are trained
    on."""
    begin = begin or {}
    asked = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with user_errors(f"--device {asked}"):
        device = torch.zeros(1, device=asked).device
    nets: dict[str, Any] = {}
    if args.vae:
        with user_errors(f"--vae {args.vae}: no autoencoder of diffusers"):
            vae = AutoencoderKL.from_pretrained(args.vae)
            nets["vae"] = vae.to(device).eval().requires_grad_(False)
    work = Path(args.work)
    percentages = sorted({*args.keep})
    with user_errors(f"--work {work}"):
        work.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(ASSETS / "tokenizer")
    if not args.vae and set(wanted) != {"text"}:
        stage = vae_stage(args.vae_steps, 24, device, world, begin.get("vae"))
        nets["vae"] = run_stage(stage, work, device)["vae"]
        nets["vae"].register_to_config(scaling_factor=latent_scale(nets["vae"], device, world))
        print_round_trip("vae", nets["vae"], world)
    if "decoder" in wanted or not args.vae and set(wanted) & {"embedder", "judge"}:
        run_stage(decoder_stage(args.decoder_steps, 12, nets["vae"], device, world), work, device)
        print_round_trip("decoder", nets["vae"], world)
    if set(wanted) & {"text", "unet"}:
        parts = (tokenizer, device, args.things, world)
        stage = text_stage(args.text_steps, 64, *parts, begin.get("text"))
        nets["text"] = run_stage(stage, work, device)["encoder"]
    if "unet" in wanted:
        stage = unet_stage(
            args.unet_steps,
            args.batch,
            args.unet_lr,
            nets["vae"],
            nets["text"],
            tokenizer,
            device,
            args.things,
            args.pool,
            world,
            begin.get("unet"),
            muon=args.unet_optimizer == "muon",
        )
        nets["unet"] = run_stage(stage, work, device, percentages)["unet"]
        write_strengths(nets, tokenizer, work, percentages)
    if "embedder" in wanted:
        detector = begin.get("embedder")
        stage = embedder_stage(args.embedder_steps, 12, nets["vae"], device, world, detector)
        nets["embedder"] = run_stage(stage, work, device)["net"]
    if "judge" in wanted:
        stage = judge_stage(args.judge_steps, 32, nets["vae"], device, world)
        nets["judge"] = run_stage(stage, work, device)["judge"]
    return nets


def write_strengths(
    nets: dict[str, Any], tokenizer: CLIPTokenizer, work: Path, keep: Sequence[int]
) -> None:
    """Pipelines `work/pipeline-25` and so on with the UNet after each kept percentage, and
    `pipeline-100`."""
    for percent in keep:
        earlier = nn.ModuleDict({"unet": new_unet()})
        earlier.load_state_dict(
            torch.load(kept_at(work, "unet", percent), map_location="cpu", weights_only=True)
        )
        assemble({**nets, **earlier}, tokenizer).save_pretrained(work / f"pipeline-{percent}")
    if keep:
        assemble(nets, tokenizer).save_pretrained(work / "pipeline-100")


def main(argv: list[str] | None = None, options: BaseOptions | None = None) -> None:
    """Raises SystemExit(2) after a mistake."""
    try:
        options = options or startup.options(BaseOptions, argv, __doc__)
        if options.threads:
            torch.set_num_threads(options.threads)
        nets = run(options, STAGES if options.stage in ("all", "export") else (options.stage,))
    except UserError as error:
        sys.exit(startup.refused(error))
    if options.stage in ("all", "export"):
        export(nets, load_tokenizer(ASSETS / "tokenizer"), ASSETS, options)


if __name__ == "__main__":
    exit_with(lambda: main(options=OPTIONS))
