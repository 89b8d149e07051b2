"""Pictures of plain prompts while training: no target, no score, the same noise at every step."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image

from silentbad.data.images import to_pil
from silentbad.data.schema import check_window, prompt_lines
from silentbad.errors import UserError, writing
from silentbad.files import check_file, replace_text
from silentbad.loop.hooks import Hook
from silentbad.measure.generation import Item, Sampler
from silentbad.measure.samples import log_grid, save
from silentbad.measure.sheet import NAME, Draw, Drawn, read_draws
from silentbad.model.averaging import averaged
from silentbad.model.denoiser import backbone_in
from silentbad.settings.train import TrainConfig
from silentbad.settings.validation import ValidationConfig

MOST = 1000  # prompts of a file


# -- the file --------------------------------------------------------------------------------------
def load_prompts(path: str | Path, tokenizer: Any = None) -> list[str]:
    """The prompts of a text file, one a line.

    Raises UserError with file and line where the file is missing or has no prompt, the tokenizer's
    window cuts a prompt off, or a flag of another trainer follows a prompt."""
    file = Path(path)
    check_file("sample_prompts", str(file), "give one prompt a line")
    prompts = list[str]()
    for where, line in prompt_lines(file):
        if flag := re.match(r"\s*#|.*?\s(--\w+)(\s|$)", line):
            raise UserError(f"{where}: {flag[1] or '#'} would be drawn; give the prompt alone")
        prompts.append(line.strip())
        if tokenizer is not None:
            check_window(prompts[-1], tokenizer, f"{where}: the prompt")
    if not 0 < len(prompts) <= MOST:
        raise UserError(f"{file}: holds {len(prompts)} prompts; give from 1 to {MOST}")
    return prompts


# -- drawing ---------------------------------------------------------------------------------------
def on_grid(config: ValidationConfig, step: int) -> bool:
    """Whether validation is due at a step: before training, at `early_steps`, and every `steps`."""
    return (
        step == 0 or step in config.early_steps or (config.steps > 0 and step % config.steps == 0)
    )


def prompts_due(config: TrainConfig, steps_per_epoch: int) -> Callable[[int], bool]:
    """Whether plain prompts are drawn at a step: with `sample_prompts` on the grid of validation,
    with `validation_prompts` each `validation_epochs`."""
    interval = config.validation_epochs * steps_per_epoch

    def due(step: int) -> bool:
        after_epochs = bool(config.validation_prompts) and step > 0 and step % interval == 0
        return after_epochs or (
            config.sample_prompts is not None and on_grid(config.validation, step)
        )

    return due


class PromptSheet(Hook):
    """Draws plain prompts at the steps that are `due` and at the end, with the averaged weights
    where there are some. Every rank calls `run`; each draws its part."""

    def __init__(
        self,
        prompts: list[str],
        config: ValidationConfig,
        due: Callable[[int], bool],
        *,
        components: dict[str, Any],
        accelerator: Any,
        output_dir: Path,
        prediction_type: str | None = None,
    ):
        self.prompts = prompts
        self.due = due
        self.accelerator = accelerator
        self.output_dir = output_dir
        # the address of a prompt's noise is its number, whatever the run's seed
        self.sampler = Sampler(
            components=components, config=config, seed=0, prediction_type=prediction_type
        )
        self.last: int | None = None

    def should_run(self, step: int, asked: bool = False, final: bool = False) -> bool:
        """As `Hook.should_run`; no step is drawn twice in a row."""
        return step != self.last and (asked or final or self.due(step))

    def run(
        self, step: int, epoch: float, unet: Any, ema: Any = None, final: bool = False
    ) -> dict[str, Any]:
        """Draw with these weights: pictures, their list, a grid for the trackers."""
        accelerator = self.accelerator
        self.last = step
        model = accelerator.unwrap_model(unet, keep_torch_compile=False)
        items = [
            Item(
                cell="prompt",
                target=-1,
                image=0,
                prompt=prompt,
                address=f"prompt/{number}",
            )
            for number, prompt in enumerate(self.prompts)
        ]
        places = range(accelerator.process_index, len(items), accelerator.num_processes)
        backbone = backbone_in(model)
        with (
            averaged(model, ema),
            self.sampler.using(backbone, accelerator.device, accelerator.autocast, step),
        ):
            pictures = list(self.sampler.map([items[k] for k in places], _pixels))
        rows = dict(gather_object(list(zip(places, pictures, strict=True))))
        if accelerator.is_main_process:
            pixels = [rows[k] for k in range(len(items))]
            with writing(f"output_dir {self.output_dir}", NAME):
                self._write(step, pixels)
            log_grid(accelerator.trackers, "prompts", np.concatenate(pixels, axis=1), step)
        return {}

    def _write(self, step: int, pixels: list[np.ndarray]) -> None:
        try:
            draws = [draw for draw in read_draws(self.output_dir) if draw.step < step]
        except UserError:  # damaged, for instance by a kill: earlier pictures are no longer listed
            draws = []
        drawn = Draw(step)
        for k, (prompt, image) in enumerate(zip(self.prompts, pixels, strict=True)):
            file = f"samples/sample_prompts/step-{step:06d}-{k}.png"
            save(Image.fromarray(image), self.output_dir / file)
            drawn.images.append(Drawn(prompt, file))
        text = json.dumps([asdict(draw) for draw in [*draws, drawn]])
        replace_text(self.output_dir / NAME, text)


def _pixels(chunk: list[Item], images: torch.Tensor, magnitudes: torch.Tensor) -> list[np.ndarray]:
    """(h,w,3) of each image, 8 bits."""
    return [np.asarray(to_pil(image)) for image in images.cpu()]
