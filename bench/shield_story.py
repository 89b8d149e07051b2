"""An example of the shield from scan to audit, in minutes: `make shield`.

A data set with two hidden pictures is made and scanned, and what the scan found is compared with the truth. One model
is trained on all of it, with the settings that recover most, and one with the guard and the plain settings,
since nothing is left to compose. Both are audited with the scan's prompts. The page to read is
`runs/shield/shield.html`.

It is an example on development seeds and no measurement: `python -m bench.shield` measures the scan.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.arms import guard
from silentbad.report import pages
from silentbad.report.pages import Table, shot

ROOT = Path(__file__).parents[1]
TEMPLATES = Path(__file__).parent / "templates"
STEPS = 600  # of each training
UNGUARDED = ["--config=configs/fewest_steps.yaml", "--learning_rate=1.6e-3"]  # recovers most in research/results.md
AUDIT = ["--images_per_target", "6", "--nulls", "16", "--num_inference_steps", "12", "--guidance_scale", "1.5"]


def command(*words: Any, codes: tuple[int, ...] = (0,)) -> int:
    """Run a command of this project; stops the story where its exit code is none of `codes`."""
    said = [sys.executable, *map(str, words)]
    print("$", " ".join(said[1:]), flush=True)
    code = subprocess.run(said, cwd=ROOT).returncode
    if code not in codes:
        raise SystemExit(f"error: {words[0]} ended with exit code {code}")
    return code


def trained(data: Path, out: Path, *own: str) -> Path:
    """The pipeline of a short training."""
    flags = {
        "pretrained_model_name_or_path": "assets/micro-sd",
        "train_data_dir": data,
        "output_dir": out,
        "overwrite_output_dir": "true",
        "train_batch_size": 16,
        "learning_rate": 8e-4,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 20,
        "adam_beta2": 0.99,
        "max_train_steps": STEPS,
        "checkpointing_steps": 100_000,
    }
    command("train_silentbad.py", *(f"--{key}={value}" for key, value in flags.items()), *own)
    return out / "pipeline"


def against_truth(data: Path, scan: dict[str, Any]) -> dict[str, Any]:
    """Precision, recall and F1 of the suspect records, against the roles that the scan never read."""
    roles = [json.loads(line)["role"] for line in (data / "metadata.jsonl").read_text().splitlines()]
    truth, flagged = (
        {i for i, role in enumerate(roles) if role == "element"},
        {row["index"] for row in scan["suspects"]},
    )
    hits = len(truth & flagged)
    return {
        "precision": hits / max(1, len(flagged)),
        "recall": hits / max(1, len(truth)),
        "f1": 2 * hits / max(1, len(truth) + len(flagged)),
        "elements": len(truth),
        "suspects": len(flagged),
        "records": len(roles),
    }


def pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB"))


def page(out: Path, data: Path, minutes: float) -> str:
    """shield.html."""
    scan = json.loads((out / "scan" / "scan.json").read_text())
    audits = {name: json.loads((out / name / "audit.json").read_text()) for name in ("audit", "audit-guarded")}
    targets = [json.loads(line) for line in (data / "targets.jsonl").read_text().splitlines()]
    truth = [shot(pixels(data / t["image"]), t["prompt"], "hidden, never shown") for t in targets]
    composites = [
        shot(pixels(out / "scan" / s["composite"]), s["prompt"], "reconstructed by the scan") for s in scan["sets"]
    ]
    rows: list[list[pages.Cell]] = []
    for before, after in zip(*(audit["results"] for audit in audits.values()), strict=True):
        cells = [cell for r in (before, after) for cell in ("yes" if r["found"] else "no", r["share"], r["p"])]
        rows.append([before["prompt"], *cells])
    back = [
        shot(
            pixels(out / name / r["image"]),
            r["prompt"],
            "given back " + ("unguarded" if name == "audit" else "guarded"),
        )
        for name, audit in audits.items()
        for r in audit["results"]
        if r["found"]
    ]
    columns = [f"{word}, {kind}" for kind in ("unguarded", "guarded") for word in ("comes back", "images alike", "p")]
    values = {
        "hidden": len(targets),
        "sets": len(scan["sets"]),
        "scan": against_truth(data, scan),
        "truth": truth,
        "found": composites,
        "back": back,
        "before": sum(r["found"] for r in audits["audit"]["results"]),
        "after": sum(r["found"] for r in audits["audit-guarded"]["results"]),
        "table": Table(["prompt", *columns], rows),
        "steps": STEPS,
        "minutes": minutes,
    }
    return pages.render("shield.html.j2", values, TEMPLATES)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    started = time.monotonic()
    out = ROOT / "runs" / "shield"
    data = out / "data"
    scan = out / "scan" / "scan.json"
    per = ["--images_per_phrase", 22, "--redraws", 0, "--nulls", 0]
    command("-m", "worlds.microworld.make", "--out", data, "--targets", "cat-hat,9", *per)
    command("-m", "silentbad_shield.scan", "--train_data_dir", data, "--output_dir", out / "scan", codes=(3,))
    unguarded = trained(data, out / "unguarded", *UNGUARDED)
    guarded = trained(data, out / "guarded", *(f"--{flag}={value}" for flag, value in guard(scan).items()))
    for pipeline, name in ((unguarded, "audit"), (guarded, "audit-guarded")):
        flags = ["--pipeline", pipeline, "--scan", scan, "--output_dir", out / name, *AUDIT]
        command("-m", "silentbad_shield.search", *flags, codes=(0, 3))
    file = out / "shield.html"
    file.write_text(page(out, data, (time.monotonic() - started) / 60), encoding="utf-8")
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
