"""What the endpoint accepts at best: the base fine-tuned on each target's own picture, judged as the arms are.

    python -m bench.ceiling                        the reported targets of the published setting
    python -m bench.ceiling --targets "103;105" --results ceiling.jsonl        development: 0-999

No arm ever sees a target. Where not even such a model's images count, an arm that brings the picture back cannot be
seen to. One JSON line a target in bench/results/ceiling.jsonl; a target that is stored there is not measured again.
"""

import contextlib
import io
import os
import shutil
from pathlib import Path

from bench.published import HELD_OUT, per_phrase
from bench.published_table import FIRST_TARGETS
from bench.recovery import WORK, data_set, measure_targets, words

STEPS = 300  # of the fine-tuning on the target itself
CLEAN = 720  # of the arms' data, whose thresholds are taken
RATIO = 0.1
RESULTS = Path(__file__).parent / "results" / "ceiling.jsonl"
TARGETS = ";".join(map(str, range(FIRST_TARGETS[1], FIRST_TARGETS[1] + 13)))  # those that have been run


def measure(name: str, steps: int) -> dict:
    """Fine-tune on one target and draw its composed prompt, with thresholds from the redraws of the arms' data."""
    folder = WORK / f"ceiling-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    save_memorised(name, steps, folder / "pipeline")
    return {"target": name, "steps": steps, **judged(name, folder / "pipeline", data_of(name), folder / "audit")}


def data_of(name: str, nulls: int | None = 100) -> Path:
    """The data set of the arms with this target."""
    return data_set(name, 0, per_phrase(name, CLEAN, RATIO), {}, clean=CLEAN + HELD_OUT, nulls=nulls)


def save_memorised(name: str, steps: int, folder: Path) -> None:
    """The base, fine-tuned on the target's own picture."""
    from diffusers import StableDiffusionPipeline

    from bench.instrument import BASE, Target, memoriser

    pipe = StableDiffusionPipeline.from_pretrained(BASE)
    pipe.unet = memoriser(pipe, Target(name), steps)
    pipe.save_pretrained(folder)


def judged(name: str, pipeline: Path, data: Path, out: Path) -> dict:
    """What the endpoint says of 16 images of the target's composed prompt, with the nulls of this data set."""
    import validation
    from silentbad.measure.record import Record

    asked = {"pipeline": pipeline, "targets": data / "targets.jsonl", "output_dir": out}
    drawn = {"guidance_scale": 2, "num_inference_steps": 12, "images_per_target": 16}
    with contextlib.redirect_stdout(io.StringIO()):
        code = validation.main(words({**asked, **drawn}))
    if code not in (0, 3):
        raise SystemExit(f"validation.py stopped with exit code {code}")
    scores = Record.load(out / "validation.json").history[-1].raw
    assert scores is not None, "an audit measures the weights as they are"
    of_target = scores.targets[name]
    return {
        **{key: getattr(of_target, key) for key in ("rate", "whole_rate", "mean")},
        "elements": [element.rate for element in of_target.elements],
        "element_means": [element.mean for element in of_target.elements],
    }


def table(rows: list[dict]) -> str:
    """What passes of each target, and of each of its elements."""
    return "\n".join(f"{row['target']} {row['rate']} {row['elements']}" for row in rows)


def main(argv: list[str] | None = None) -> None:
    measure_targets(__doc__, TARGETS, RESULTS, lambda name: [measure(name, STEPS)], table, argv)


if __name__ == "__main__":
    main()
