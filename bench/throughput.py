"""Our training loop against a plain one, in one process, turn by turn: images a second and memory.

    python -m bench.throughput [--rounds 5] [--steps 6] [--smoke]

The plain loop does what diffusers' examples/text_to_image/train_text_to_image.py does: a DataLoader of transformed and
tokenized records, VAE and text encoder run live on every batch, eager UNet, AdamW, the gradient norm clipped, and two
waits for the device a step (the gathered loss and the loss of the progress bar). Ours is `train_silentbad`'s own step.
Both see the same pictures, batch, precision and learning rate. Arms take turns of `--steps` steps; a round's ratio is
of its own turns, the figure is the median over rounds. Memory is the median over set-ups. Seconds are processor time,
which other work disturbs less than wall clock. Both train the bundled pipeline at batch 16 in float32; what a run takes
at the size of Stable Diffusion is bench/size.py's.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.controller import PeakMemory, clock
from bench.recovery_table import goals, grid
from silentbad.device import device_name

RESULTS = Path(__file__).parent / "results" / "throughput.json"
MICRO = Path(__file__).parents[1] / "assets" / "micro-sd"
CPU = torch.device("cpu")
BATCH = 16
SIDE = 64
RECORDS = 96
PEAKS = 5  # set-ups of each arm whose memory is measured: what an allocator keeps moves one by 10 MiB
LOSS_TOLERANCE = 1e-4  # relative, per step, between caches on and off


# ---------------------------------------------------------------- what both loops train


def write_data(root: Path, count: int, side: int) -> Path:
    """Pictures of smooth colour fields with captions, all clean."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    (root / "images").mkdir(parents=True)
    rows = []
    for i in range(count):
        field = F.interpolate(torch.rand(1, 3, 6, 6, generator=generator), size=(side, side), mode="bicubic")[0]
        pixels = (field.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(root / f"images/{i}.png")
        rows.append({"file_name": f"images/{i}.png", "text": f"a field of colours, number {i}", "role": "clean"})
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


# ---------------------------------------------------------------- the two loops


def plain_loop(data: Path) -> Callable[[], float]:
    """A function that trains one step as diffusers' example does and returns its loss."""
    import datasets
    from accelerate import Accelerator
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from diffusers.optimization import get_scheduler
    from torchvision import transforms
    from transformers import CLIPTextModel, CLIPTokenizer

    accelerator = Accelerator(mixed_precision="no")
    scheduler = DDPMScheduler.from_pretrained(MICRO, subfolder="scheduler")
    tokenizer = CLIPTokenizer.from_pretrained(MICRO, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(MICRO, subfolder="text_encoder").requires_grad_(False)
    vae = AutoencoderKL.from_pretrained(MICRO, subfolder="vae").requires_grad_(False)
    unet = UNet2DConditionModel.from_pretrained(MICRO, subfolder="unet").train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, weight_decay=1e-2)
    train = transforms.Compose(
        [
            transforms.Resize(SIDE, interpolation=transforms.InterpolationMode.LANCZOS),
            transforms.RandomCrop(SIDE),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )
    rows = [json.loads(line) for line in (data / "metadata.jsonl").read_text().splitlines()]
    table = datasets.Dataset.from_dict(
        {"image": [str(data / row["file_name"]) for row in rows], "text": [row["text"] for row in rows]}
    ).cast_column("image", datasets.Image())

    def preprocess(examples: dict) -> dict:
        examples["pixel_values"] = [train(image.convert("RGB")) for image in examples["image"]]
        window = tokenizer.model_max_length
        encoded = tokenizer(
            examples["text"], max_length=window, padding="max_length", truncation=True, return_tensors="pt"
        )
        return examples | {"input_ids": encoded.input_ids}

    def collate(examples: list[dict]) -> dict:
        pixels = torch.stack([e["pixel_values"] for e in examples]).to(memory_format=torch.contiguous_format).float()
        return {"pixel_values": pixels, "input_ids": torch.stack([e["input_ids"] for e in examples])}

    loader = torch.utils.data.DataLoader(
        table.with_transform(preprocess), shuffle=True, collate_fn=collate, batch_size=BATCH, drop_last=True
    )
    rates = get_scheduler("constant", optimizer)
    unet, optimizer, loader, rates = accelerator.prepare(unet, optimizer, loader, rates)
    text_encoder.to(accelerator.device)
    vae.to(accelerator.device)

    def batches():
        while True:
            yield from loader

    stream = batches()

    def step() -> float:
        batch = next(stream)
        with accelerator.accumulate(unet):
            latents = vae.encode(batch["pixel_values"]).latent_dist.sample() * vae.config.scaling_factor
            noise = torch.randn_like(latents)
            t = torch.randint(0, scheduler.config.num_train_timesteps, (len(latents),), device=latents.device).long()
            noisy = scheduler.add_noise(latents, noise, t)
            states = text_encoder(batch["input_ids"], return_dict=False)[0]
            kind = scheduler.config.prediction_type
            target = noise if kind == "epsilon" else scheduler.get_velocity(latents, noise, t)
            prediction = unet(noisy, t, states, return_dict=False)[0]
            loss = F.mse_loss(prediction.float(), target.float(), reduction="mean")
            gathered = accelerator.gather(loss.repeat(len(latents))).mean().item()  # the first wait
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        return gathered + 0 * loss.detach().item()  # the second

    return step


def our_loop(data: Path, output: Path, **changes: Any) -> Any:
    """A function that trains one step of `train_silentbad` and returns its loss, still on the device."""
    from silentbad.loop import trackers
    from silentbad.saving import folder
    from silentbad.settings.startup import training
    from train_silentbad import build as build_run
    from train_silentbad import micro_step, update

    values = {
        "pretrained_model_name_or_path": MICRO,
        "train_data_dir": data,
        "output_dir": output,
        "report_to": "none",
        "train_batch_size": BATCH,
        "max_train_steps": 10**6,
        "held_out_clean": 0,
        "cache_dir": output.parent / "cache",
        "learning_rate": 1e-4,
    } | changes
    config, _ = training([f"--{key}={value}" for key, value in values.items()], None)
    run = build_run(config, trackers.make_accelerator(config), folder.RunFolder(config, True))

    def step() -> Any:
        losses = [micro_step(run, batch, micro) for micro, batch in enumerate(run.loader.draw(run.state.draw))]
        update(run)
        return losses[0]

    setattr(step, "run", run)  # noqa: B010
    return step


ARMS = {
    "ours": {},
    "ours, caches off": {"cache_mb": 0, "disk_cache_gb": 0},
    "ours, prior+gsnr": {"gradient_control.name": "prior+gsnr", "gradient_control.warmup": 1},
}


# ---------------------------------------------------------------- measuring


def turn(step: Callable, steps: int) -> float:
    """Processor seconds a step over one turn."""
    start = clock(CPU)
    for _ in range(steps):
        step()
    return (clock(CPU) - start) / steps


def share_of_method(step: Any, steps: int) -> float:
    """The part of our step that is spent inside the controller and the memory, the loss itself counted in."""
    spent, run = [0.0], step.run

    def timed(work: Callable) -> Callable:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            start = clock(CPU)
            result = work(*arguments, **keywords)
            spent[0] += clock(CPU) - start
            return result

        return wrapper

    names = {
        run.control: ("before_backward", "after_backward", "before_step", "after_step"),
        run.memory: ("timesteps", "apply_dream", "record_attention", "loss_per_sample", "extra_loss", "after_step"),
    }
    for part, methods in names.items():
        for name in methods:
            setattr(part, name, timed(getattr(part, name)))
    whole = turn(step, steps) * steps
    for part, methods in names.items():
        for name in methods:
            delattr(part, name)
    return spent[0] / whole


def measure(arguments: argparse.Namespace, scratch: Path) -> dict:
    """All arms."""
    data = write_data(scratch / "data", RECORDS, SIDE)
    makers: dict[str, Callable] = {"plain": lambda: plain_loop(data)}
    for k, (arm, changes) in enumerate(ARMS.items()):
        makers[arm] = lambda k=k, changes=changes: our_loop(data, scratch / f"run{k}", **changes)
    for arm in ("plain", "ours"):  # what libraries load once is no arm's memory
        makers[arm]()()
    steps: dict[str, Callable] = {}
    curves: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {arm: [] for arm in makers}
    for _ in range(1 if arguments.smoke else PEAKS):
        for arm, make in makers.items():  # in turn: each arm's memory is what its set-up and first steps add
            steps.pop(arm, None)
            gc.collect()
            with PeakMemory(CPU) as memory:
                steps[arm] = make()
                curves[arm] = [float(steps[arm]()) for _ in range(5)]
            peaks[arm].append(memory.mib)
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append({arm: turn(step, arguments.steps) for arm, step in steps.items()})
        print("  ms a step:", {arm: round(1e3 * seconds) for arm, seconds in rounds[-1].items()}, flush=True)
    median = {arm: statistics.median(r[arm] for r in rounds) for arm in steps}
    method = {arm: share_of_method(steps[arm], arguments.steps) for arm in ("ours", "ours, prior+gsnr")}
    pairs = zip(curves["ours"], curves["ours, caches off"], strict=True)
    largest_gap = max(abs(a - b) / abs(b) for a, b in pairs)
    rows: dict[str, Any] = {
        arm: {
            "ms": 1e3 * median[arm],
            "images_a_second": BATCH / median[arm],
            "over_plain": statistics.median(r["plain"] / r[arm] for r in rounds),
            "peak_mib": statistics.median(peaks[arm]),
            "peaks_mib": peaks[arm],
        }
        for arm in steps
    }
    reached = {
        "1.5 x the plain loop": rows["ours"]["over_plain"] >= 1.5,
        "peak memory no higher": rows["ours"]["peak_mib"] <= rows["plain"]["peak_mib"],
        f"losses within {LOSS_TOLERANCE:g} with caches on and off": largest_gap <= LOSS_TOLERANCE,
        "controller and memory defaults within 3 % of the step": method["ours"] <= 0.03,
    }
    return {"rows": rows, "rounds": rounds, "goals": reached, "losses_apart": largest_gap, "method_share": method}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--smoke", action="store_true", help="one round of one step, nothing written")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.steps = 1, 1
    with tempfile.TemporaryDirectory() as scratch:
        places = {"micro": measure(arguments, Path(scratch))}
    machine = {
        "cpu": device_name("cpu"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
    }
    measured = {"places": places, "machine": machine}
    print(table(measured))
    if not arguments.smoke:
        RESULTS.write_text(json.dumps(measured, indent=1) + "\n")


def table(measured: dict) -> str:
    """Our training loop against a plain one."""
    place = measured["places"]["micro"]
    lines = []
    for name, row in place["rows"].items():
        memory = f"{row['peak_mib']:.0f} MiB"
        lines.append((name, f"{row['images_a_second']:.1f}", f"{row['over_plain']:.2f}", memory))
    head = ("loop", "images a second", "over the plain loop", "peak memory")
    return grid(head, lines) + "\n" + goals(place["goals"])


if __name__ == "__main__":
    main()
