"""Pictures of plain prompts while training: no target, no score, the same noise at every step.

A prompt is a line of a text file, or an object of a .jsonl file: `prompt`, and optionally `seed`
and `negative`."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image

from silentbad.data.images import to_pil
from silentbad.data.schema import PROMPT, admitted, check_window, json_lines, prompt_lines
from silentbad.errors import UserError, brief, writing
from silentbad.files import check_file, replace_text
from silentbad.measure.generation import Item, Sampler
from silentbad.measure.samples import log_grid, save
from silentbad.measure.sheet import NAME, Draw, Drawn, Prompt, read_draws
from silentbad.model.denoiser import backbone_in
from silentbad.settings.validation import ValidationConfig

MOST = 1000  # prompts of a file


# -- the file --------------------------------------------------------------------------------------
def load_prompts(path: str | Path, tokenizer: Any = None, guided: bool = True) -> list[Prompt]:
    """The prompts of a file, (N,). Where no seed is given, it is the prompt's number, from 0.

    Raises UserError, with file and line: no such file, no prompt in it, one that the tokenizer's
    window cuts off, a key that is not known, a negative prompt where nothing is `guided`."""
    file = Path(path)
    prompts = list[Prompt]()
    check_file("sample_prompts", str(file), "give one prompt a line, or a .jsonl of objects")
    if file.suffix == ".jsonl":
        rows = list(json_lines(file))
    else:
        right = "give one a line, or a .jsonl with prompt, seed, negative"
        rows = [(where, {"prompt": line}) for where, line in prompt_lines(file, right)]
        for where, row in rows:
            if flag := re.match(r"\s*#|.*?\s(--\w+)(\s|$)", row["prompt"]):
                what = flag[1] or "#"
                raise UserError(
                    f"{where}: {what} would be drawn; give a .jsonl with prompt, "
                    f"seed, negative instead"
                )
    for where, row in rows:
        if unknown := [key for key in row if key not in PROMPT]:
            raise UserError(
                f"{where}: unknown key {brief(unknown[0])}; a sample prompt has {', '.join(PROMPT)}"
            )
        fields = admitted(row, PROMPT, where)
        if fields["negative"] and not guided:
            raise UserError(
                f"{where}: negative acts through guidance; set validation.guidance_scale above 1"
            )
        number = len(prompts) if fields["seed"] is None else fields["seed"]
        prompts.append(Prompt(fields["prompt"].strip(), number, fields["negative"] or ""))
        for text in (prompts[-1].prompt, prompts[-1].negative) if tokenizer is not None else ():
            check_window(text, tokenizer, f"{where}: the prompt")
    if not 0 < len(prompts) <= MOST:
        raise UserError(f"{file}: holds {len(prompts)} prompts; give from 1 to {MOST}")
    return prompts


# -- drawing ---------------------------------------------------------------------------------------
def on_grid(config: ValidationConfig, step: int) -> bool:
    """Whether validation is due at a step: before training, at `early_steps`, and every `steps`."""
    return (
        step == 0 or step in config.early_steps or (config.steps > 0 and step % config.steps == 0)
    )


class PromptSheet:
    """Draws the prompts on the grid of validation. Every rank calls `run`; each draws its part.
    Weights, modes and random streams are left as found."""

    def __init__(
        self,
        prompts: list[Prompt],
        config: ValidationConfig,
        *,
        components: dict[str, Any],
        accelerator: Any,
        output_dir: Path,
        prediction_type: str | None = None,
    ):
        self.prompts = prompts
        self.config = config
        self.accelerator = accelerator
        self.output_dir = output_dir
        # a prompt's seed is its whole address
        self.sampler = Sampler(
            components=components, config=config, seed=0, prediction_type=prediction_type
        )
        self.last: int | None = None

    def should_run(self, step: int) -> bool:
        """Whether this step is on the grid and was not just drawn."""
        return on_grid(self.config, step) and step != self.last

    def run(self, step: int, model: Any) -> None:
        """Draw with these weights: pictures, their list, a grid for the trackers."""
        accelerator = self.accelerator
        self.last = step
        model = accelerator.unwrap_model(model, keep_torch_compile=False)
        items = [
            Item(
                cell="prompt",
                target=-1,
                image=0,
                prompt=p.prompt,
                address=f"prompt/{p.seed}",
                negative=p.negative,
            )
            for p in self.prompts
        ]
        places = range(accelerator.process_index, len(items), accelerator.num_processes)
        with self.sampler.using(backbone_in(model), accelerator.device, accelerator.autocast, step):
            pictures = list(self.sampler.map([items[k] for k in places], _pixels))
        rows = dict(gather_object(list(zip(places, pictures, strict=True))))
        if accelerator.is_main_process:
            pixels = [rows[k] for k in range(len(items))]
            with writing(f"output_dir {self.output_dir}", NAME):
                self._write(step, pixels)
            log_grid(accelerator.trackers, "prompts", np.concatenate(pixels, axis=1), step)

    def _write(self, step: int, pixels: list[np.ndarray]) -> None:
        try:
            draws = [draw for draw in read_draws(self.output_dir) if draw.step < step]
        except UserError:  # damaged, as by a kill: the pictures of before are not listed any more
            draws = []
        drawn = Draw(step)
        for k, (prompt, image) in enumerate(zip(self.prompts, pixels, strict=True)):
            file = f"samples/sample_prompts/step-{step:06d}-{k}.png"
            save(Image.fromarray(image), self.output_dir / file)
            drawn.images.append(Drawn(**asdict(prompt), file=file))
        text = json.dumps([asdict(draw) for draw in [*draws, drawn]])
        replace_text(self.output_dir / NAME, text)


def _pixels(chunk: list[Item], images: torch.Tensor, magnitudes: torch.Tensor) -> list[np.ndarray]:
    """(h,w,3) of each image, 8 bits."""
    return [np.asarray(to_pil(image)) for image in images.cpu()]
