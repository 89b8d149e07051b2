"""Our training loop against a plain one, in one process, turn by turn: images a second, memory, share of the peak.

    python -m bench.throughput [--place micro sd15] [--rounds 5] [--steps 6] [--smoke]

The plain loop does what diffusers' examples/text_to_image/train_text_to_image.py does: a DataLoader of transformed and
tokenized records, VAE and text encoder run live on every batch, eager UNet, AdamW, the gradient norm clipped, and two
waits for the device a step (the gathered loss and the loss of the progress bar). Ours is `train_silentbad`'s own step.
Both see the same pictures, batch, precision and learning rate. Arms take turns of `--steps` steps; a round's ratio is
of its own turns, the figure is the median over rounds. Memory is the median over set-ups. Seconds are processor time
on a CPU, which other work disturbs less than wall clock (also given), and wall clock on CUDA.

(a) micro: the bundled pipeline at batch 16, float32. (b) sd15: SD 1.5's shape with random weights, 512x512, bf16, batch
8; needs a CUDA device. What cannot run is said with its reason.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.controller import PeakMemory, clock
from bench.recovery_table import goals, grid
from silentbad.device import device_name

RESULTS = Path(__file__).parent / "results"
MICRO = Path(__file__).parents[1] / "assets" / "micro-sd"
PLACES: dict[str, dict[str, Any]] = {
    "micro": {"batch": 16, "precision": "no", "side": 64, "records": 96, "tokens": 64},
    "sd15": {"batch": 8, "precision": "bf16", "side": 512, "records": 64, "tokens": 4096},
}
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


def sd15_pipeline(folder: Path) -> Path:
    """SD 1.5's classes and sizes with random weights and the bundled tokenizer, on disk."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(MICRO / "tokenizer", model_max_length=77)
    text = CLIPTextConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        projection_dim=768,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
        sample_size=512,
    )
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    scheduler = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1)
    StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- the two loops


def plain_loop(pipeline: Path, data: Path, place: dict) -> Callable[[], float]:
    """A function that trains one step as diffusers' example does and returns its loss."""
    import datasets
    from accelerate import Accelerator
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from diffusers.optimization import get_scheduler
    from torchvision import transforms
    from transformers import CLIPTextModel, CLIPTokenizer

    accelerator = Accelerator(mixed_precision=place["precision"])
    scheduler = DDPMScheduler.from_pretrained(pipeline, subfolder="scheduler")
    tokenizer = CLIPTokenizer.from_pretrained(pipeline, subfolder="tokenizer")
    dtype = {"no": torch.float32, "bf16": torch.bfloat16}[place["precision"]]
    text_encoder = CLIPTextModel.from_pretrained(pipeline, subfolder="text_encoder").requires_grad_(False)
    vae = AutoencoderKL.from_pretrained(pipeline, subfolder="vae").requires_grad_(False)
    unet = UNet2DConditionModel.from_pretrained(pipeline, subfolder="unet").train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, weight_decay=1e-2)
    train = transforms.Compose(
        [
            transforms.Resize(place["side"], interpolation=transforms.InterpolationMode.LANCZOS),
            transforms.RandomCrop(place["side"]),
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
        table.with_transform(preprocess), shuffle=True, collate_fn=collate, batch_size=place["batch"], drop_last=True
    )
    rates = get_scheduler("constant", optimizer)
    unet, optimizer, loader, rates = accelerator.prepare(unet, optimizer, loader, rates)
    text_encoder.to(accelerator.device, dtype=dtype)
    vae.to(accelerator.device, dtype=dtype)

    def batches():
        while True:
            yield from loader

    stream = batches()

    def step() -> float:
        batch = next(stream)
        with accelerator.accumulate(unet):
            latents = vae.encode(batch["pixel_values"].to(dtype)).latent_dist.sample() * vae.config.scaling_factor
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


def our_loop(pipeline: Path, data: Path, place: dict, output: Path, **changes: Any) -> Any:
    """A function that trains one step of `train_silentbad` and returns its loss, still on the device."""
    from silentbad.loop import trackers
    from silentbad.saving import folder
    from silentbad.settings.startup import training
    from train_silentbad import build as build_run
    from train_silentbad import micro_step, update

    values = {
        "pretrained_model_name_or_path": pipeline,
        "train_data_dir": data,
        "output_dir": output,
        "report_to": "none",
        "train_batch_size": place["batch"],
        "max_train_steps": 10**6,
        "mixed_precision": place["precision"],
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


def peak_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product here, the best of five."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    a @ b
    best = float("inf")
    for _ in range(5):
        start = clock(device)
        for _ in range(4):
            a @ b
        best = min(best, (clock(device) - start) / 4)
    return 2 * n**3 / best


def counted(pipeline: Path, place: dict) -> float:
    """FLOP of one UNet forward and backward at the batch, counted operation by operation."""
    from diffusers import UNet2DConditionModel
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(pipeline, subfolder="unet"))
        size, channels = unet.config.sample_size, unet.config.in_channels
        x = torch.randn(place["batch"], channels, size, size)
        states = torch.randn(place["batch"], 77, unet.config.cross_attention_dim)
        t = torch.zeros(place["batch"], dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        unet(x, t, states, return_dict=False)[0].sum().backward()
    return float(counter.get_total_flops())


def turn(step: Callable, steps: int, device: torch.device) -> dict[str, float]:
    """Seconds a step over one turn, processor (CPU) or device time, and wall clock."""
    wall, start = time.perf_counter(), clock(device)
    for _ in range(steps):
        step()
    return {"seconds": (clock(device) - start) / steps, "wall": (time.perf_counter() - wall) / steps}


def share_of_method(step: Any, steps: int, device: torch.device) -> float:
    """The part of our step that is spent inside the controller and the memory, the loss itself counted in."""
    spent, run = [0.0], step.run

    def timed(work: Callable) -> Callable:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            start = clock(device)
            made = work(*arguments, **keywords)
            spent[0] += clock(device) - start
            return made

        return wrapper

    names = {
        run.control: ("before_backward", "after_backward", "before_step", "after_step"),
        run.memory: ("timesteps", "apply_dream", "record_attention", "loss_per_sample", "extra_loss", "after_step"),
    }
    for part, methods in names.items():
        for name in methods:
            setattr(part, name, timed(getattr(part, name)))
    whole = turn(step, steps, device)["seconds"] * steps
    for part, methods in names.items():
        for name in methods:
            delattr(part, name)
    return spent[0] / whole


def measure(name: str, pipeline: Path, arguments: argparse.Namespace, scratch: Path) -> dict:
    """All arms of one place."""
    place = PLACES[name]
    device = torch.device("cuda" if name == "sd15" else "cpu")
    data = write_data(scratch / "data", place["records"], place["side"])
    makers: dict[str, Callable] = {"plain": lambda: plain_loop(pipeline, data, place)}
    for k, (arm, changes) in enumerate(ARMS.items()):
        makers[arm] = lambda k=k, changes=changes: our_loop(pipeline, data, place, scratch / f"run{k}", **changes)
    for arm in ("plain", "ours"):  # what libraries load once is no arm's memory
        makers[arm]()()
    steps: dict[str, Callable] = {}
    curves: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {arm: [] for arm in makers}
    for _ in range(1 if arguments.smoke else PEAKS):
        for arm, make in makers.items():  # in turn: each arm's memory is what its set-up and first steps add
            steps.pop(arm, None)
            gc.collect()
            with PeakMemory(device) as memory:
                steps[arm] = make()
                curves[arm] = [float(steps[arm]()) for _ in range(5)]
            peaks[arm].append(memory.mib)
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append({arm: turn(step, arguments.steps, device) for arm, step in steps.items()})
        row = {arm: f"{1e3 * t['seconds']:.0f}" for arm, t in rounds[-1].items()}
        print(f"  ms a step: {row}", flush=True)
    median = {arm: statistics.median(r[arm]["seconds"] for r in rounds) for arm in steps}
    ratio = {arm: statistics.median(r["plain"]["seconds"] / r[arm]["seconds"] for r in rounds) for arm in steps}
    method = {arm: share_of_method(steps[arm], arguments.steps, device) for arm in ("ours", "ours, prior+gsnr")}
    flop, rate = counted(pipeline, place), peak_rate(device, torch.bfloat16 if name == "sd15" else torch.float32)
    pairs = zip(curves["ours"], curves["ours, caches off"], strict=True)
    apart = max(abs(a - b) / abs(b) for a, b in pairs)
    rows = {
        arm: {
            "ms": 1e3 * median[arm],
            "wall_ms": 1e3 * statistics.median(r[arm]["wall"] for r in rounds),
            "images_a_second": place["batch"] / median[arm],
            "over_plain": ratio[arm],
            "peak_mib": statistics.median(peaks[arm]),
            "peaks_mib": peaks[arm],
            "of_peak_rate": flop / median[arm] / rate,
        }
        for arm in steps
    }
    bar = 1.6 if name == "sd15" else 1.5
    goals = {
        f"{bar} x the plain loop": ratio["ours"] >= bar,
        "peak memory no higher": rows["ours"]["peak_mib"] <= rows["plain"]["peak_mib"],
        f"losses within {LOSS_TOLERANCE:g} with caches on and off": apart <= LOSS_TOLERANCE,
        "controller and memory defaults within 3 % of the step": method["ours"] <= 0.03,
    }
    if name == "sd15":
        goals["45 % of the measured bf16 rate"] = rows["ours"]["of_peak_rate"] >= 0.45
    return {
        "rows": rows,
        "rounds": rounds,
        "goals": goals,
        "losses_apart": apart,
        "method_share": method,
        "gflop_a_step": flop / 1e9,
        "peak_gflops": rate / 1e9,
    }


def report(name: str, result: dict) -> None:
    print(f"{name}: {result['gflop_a_step']:.1f} GFLOP of the UNet a step, peak {result['peak_gflops']:.0f} GFLOP/s")
    print(f"{'':<38}{'ms/step':>9}{'wall':>8}{'img/s':>8}{'x plain':>9}{'of peak':>9}{'MiB':>8}")
    for arm, row in result["rows"].items():
        print(
            f"{arm:<38}{row['ms']:>9.0f}{row['wall_ms']:>8.0f}{row['images_a_second']:>8.1f}"
            f"{row['over_plain']:>9.2f}{row['of_peak_rate']:>9.1%}{row['peak_mib']:>8.0f}"
        )
    shares = ", ".join(f"{share:.1%} ({arm})" for arm, share in result["method_share"].items())
    print(f"losses with caches on and off differ by {result['losses_apart']:.1e}; controller and memory take {shares}")
    for goal, reached in result["goals"].items():
        print(f"{'reached' if reached else 'MISSED ':<8} {goal}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", nargs="+", choices=PLACES, default=[*PLACES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--smoke", action="store_true", help="one round of one step at micro, nothing written")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.place, arguments.rounds, arguments.steps = ["micro"], 1, 1
    results = {}
    for name in arguments.place:
        if name == "sd15" and not torch.cuda.is_available():
            print("sd15: not run: no CUDA device here; 512x512 at batch 8 in bf16 is not a CPU's work")
            results[name] = {"not_run": "no CUDA device"}
            continue
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pipeline = MICRO if name == "micro" else sd15_pipeline(scratch / "pipeline")
            results[name] = measure(name, pipeline, arguments, scratch)
        report(name, results[name])
    machine = {
        "cpu": device_name("cpu"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    if not arguments.smoke:
        (RESULTS / "throughput.json").write_text(json.dumps({"places": results, "machine": machine}, indent=1) + "\n")


def table(measured: dict) -> str:
    """Our training loop against a plain one."""
    places = measured["places"].values()
    lines = []
    for place in places:
        for name, row in place.get("rows", {}).items():
            memory = f"{row['peak_mib']:.0f} MiB"
            lines.append((name, f"{row['images_a_second']:.1f}", f"{row['over_plain']:.2f}", memory))
    head = ("loop", "images a second", "over the plain loop", "peak memory")
    return grid(head, lines) + "\n" + "\n".join(goals(place["goals"]) for place in places if "goals" in place)


if __name__ == "__main__":
    main()
