"""The published setting at its own size: Stable Diffusion 1.5, the published folders, five targets, SSCD.

    python -m bench.reproduce --data DIR --clean DIR --embedder FILE [--dry_run | --run] [-- FLAGS]

Prints what four runs fetch, take and cost. With --dry_run each arm's dry run says its time, memory and disk on this
machine; with --run they train one after the other, and a comparison of their reports is written. A finished run is not
trained again. FLAGS are added to every run. The folders are those of github.com/haonan3/SilentBadDiffusion
(docs/data.md), the embedder's file is that of docs/models.md.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from silentbad.errors import UserError
from silentbad.settings.reader import parse
from silentbad.settings.train import TrainConfig

BASE = ["configs/sd15_full.yaml", "configs/sd15_published.yaml"]
# the published records have no masks
RECOMMENDED = ["--config=configs/recommended.yaml", "--memory.region.name=estimated", "--memory.region.options={}"]
ARMS: dict[str, list[str]] = {
    "plain": [],
    "replay": ["--memory.sampler.clean_ratio=0.5"],
    "recommended": RECOMMENDED,
    "decoder": [*RECOMMENDED, "--train_layers=up*"],
}


def flags(arm: str, given: argparse.Namespace) -> list[str]:
    """The words after train_silentbad.py."""
    return [
        *(f"--config={file}" for file in BASE),
        f"--train_data_dir={given.data}",
        f"--clean_data_dir={given.clean}",
        f"--validation.targets={given.data}@100-104",
        f"--validation.embedder_path={given.embedder}",
        f"--output_dir={given.out / arm}",
        *ARMS[arm],
        *given.flags,
    ]


def plan(given: argparse.Namespace) -> str:
    """What the runs fetch, take and cost, from their configuration."""
    config, _ = parse(TrainConfig, flags("plain", given), __doc__)
    validation = config.validation
    steps = config.max_train_steps or 0
    images = (steps // (validation.steps or steps) + 1) * config.target_num * validation.images_per_target
    samples = config.train_batch_size * config.gradient_accumulation_steps
    return "\n".join(
        [
            f"fetch  {config.pretrained_model_name_or_path}, about 5 GB, where it is not cached",
            f"take   {len(ARMS)} runs ({', '.join(ARMS)}) of {steps} steps of {samples} samples; each draws {images} "
            f"images of {validation.num_inference_steps} steps, and controls",
            "cost   15.9 GB before activations (docs/models.md); time on CUDA: not measured; --dry_run says it here",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("datasets/Midjourney"))
    parser.add_argument("--clean", type=Path, default=Path("datasets/COYO"))
    parser.add_argument("--embedder", type=Path, default=Path("sscd_disc_mixup.torchscript.pt"))
    parser.add_argument("--out", type=Path, default=Path("runs/sd15"))
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry_run", action="store_true")
    how.add_argument("--run", action="store_true")
    parser.add_argument("flags", nargs="*", help="of every run, after --")
    given = parser.parse_args(arguments)
    try:
        print(plan(given), flush=True)
    except UserError as error:
        parser.error(str(error))
    if not given.dry_run and not given.run:
        return 0
    for arm in ARMS:
        if (given.out / arm / "finished.json").is_file():
            continue
        print(f"{arm}:", flush=True)
        how_far = ["--dry_run"] if given.dry_run else ["--resume_from_checkpoint=latest"]
        command = [sys.executable, "-m", "train_silentbad", *flags(arm, given), *how_far]
        if code := subprocess.run(command).returncode:
            return code
    if given.run:
        reports = [str(given.out / arm) for arm in ARMS]
        compare = ["compare", *reports, "--out", str(given.out / "compare.html")]
        return subprocess.run([sys.executable, "-m", "silentbad.report", *compare]).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
