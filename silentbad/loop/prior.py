"""The base's own pictures: drawn before training and shown as clean records (prior preservation,
DreamBooth, 2208.12242).

Picture i takes the next prompt in turn, or none, and the noise of (seed, i). Pictures lie in the
cache in a folder named by a hash over everything they depend on. BLOCK of them are drawn together,
always the same ones, so neither a kill nor the number of processes changes a picture."""

import hashlib
import math
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from PIL import Image

from silentbad.data.images import to_pil
from silentbad.data.phrases import phrases_in
from silentbad.data.records import Records
from silentbad.data.schema import Caption, admit, check_window, prompt_lines, row
from silentbad.data.table import build_table, vocabulary
from silentbad.device import explain_out_of_memory
from silentbad.errors import UserError, brief, user_errors
from silentbad.measure.generation import Item, Sampler
from silentbad.measure.sheet import PRIOR, Drawn
from silentbad.model import pipeline
from silentbad.model.store import digest
from silentbad.progress import Bar
from silentbad.saving.folder import RunFolder
from silentbad.settings.train import TrainConfig
from silentbad.settings.validation import ValidationConfig

BESIDE = "prior.txt"  # in a base's folder: prompts of what it knows
BUNDLED = Path(__file__).with_name("prior_prompts.txt")
BLOCK = 8  # pictures that are drawn together
SHOWN = 12  # pictures that the report shows
KEY = "prior_preservation"


@dataclass(frozen=True)
class Prior:
    """The base's own pictures."""

    records: Records
    examples: list[tuple[str, Path]]  # (prompt, file) of the first SHOWN pictures
    missing: int  # pictures that a dry run did not draw
    seconds: float  # for a picture, where some were drawn

    def show(self, folder: RunFolder) -> None:
        """Copy the examples into a run's folder, with their prompts, for its report."""
        if not folder.is_main:
            return
        place = Path(PRIOR).parent
        drawn = [Drawn(prompt, f"{place}/{file.name}") for prompt, file in self.examples]
        with folder.writing(PRIOR):
            (folder.path / PRIOR).parent.mkdir(parents=True, exist_ok=True)
            for (_, file), copy in zip(self.examples, drawn, strict=True):
                shutil.copyfile(file, folder.path / copy.file)
        folder.write(PRIOR, [asdict(each) for each in drawn])


class BaseSampler(Sampler):
    """Draws with the base; messages name its settings."""

    def _check(self) -> None:
        self.prefix = f"{KEY}."
        super()._check()

    def check_finite(self, images: torch.Tensor, drawn: Sequence[tuple[str, str, str]]) -> None:
        """Refuse pictures (B,...) that are not finite: the base is to blame, or the precision."""
        lost = (~images.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist()
        if lost:
            half = self.precision not in (None, "float32")
            advice = f"leave {self.precision} (mixed_precision no)" if half else "take another base"
            prompt = brief(drawn[lost[0]][0])
            raise UserError(f"{KEY}.num_images: the picture of {prompt} is not finite; {advice}")


def read_prompts(file: str | None, tokenizer: Any, base: str | None = None) -> list[str]:
    """The prompts of a file, one a line; without a file those of prior.txt in the base's folder,
    else the bundled ones.

    Raises UserError, with file and line, for a prompt that is no caption or that the tokenizer's
    window cuts off."""
    of_base = Path(base or "") / BESIDE
    path = Path(file) if file else of_base if base and of_base.is_file() else BUNDLED
    prompts = []
    for where, line in prompt_lines(path):
        prompt = admit(line, Caption, "a prompt", where).strip()
        check_window(prompt, tokenizer, f"{where}: the prompt")
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{KEY}.prompts: {path} holds no prompt; give one a line")
    return prompts


def without_phrases(prompts: list[str], phrases: Sequence[str]) -> list[str]:
    """The prompts that say no phrase of an element. Raises UserError where none is left."""
    kept = [prompt for prompt in prompts if not any(says(prompt, phrase) for phrase in phrases)]
    if not kept:
        wrong = f"every prompt says {' or '.join(map(brief, phrases[:3]))}"
        raise UserError(f"{KEY}.leave_out: {wrong}; add others, or leave out nothing")
    return kept


def says(prompt: str, phrase: str) -> bool:
    """Whether a prompt says a phrase, with words between or without: "a big red cat" says "a red
    cat", "a red hat, a cat" does not."""
    words = content_words(phrase)
    return bool(phrases_in([phrase], prompt)) or any(
        words <= content_words(part) for part in prompt.split(",")
    )


def content_words(text: str) -> set[str]:
    """The words of a text but its articles."""
    return set(re.findall(r"\w+", text.lower())) - {"a", "an", "the"}


def prompt_of(prompts: Sequence[str], number: int, unconditional: float = 0.0) -> str:
    """The prompt of picture `number`: the prompts in turn, but "" for a share `unconditional` of
    the pictures, evenly spread."""
    before, after = (math.floor(count * unconditional + 1e-9) for count in (number, number + 1))
    return "" if after > before else prompts[(number - before) % len(prompts)]


def draw_prior(
    config: TrainConfig,
    prompts: list[str],
    schedule: dict[str, Any],
    tokenizer: Any,
    accelerator: Accelerator,
) -> Prior:
    """Load the base, draw the pictures that the cache does not have, and return their records.

    A dry run draws one block at most; its records repeat the pictures that are there."""
    advice = "take a smaller base or a larger device"
    if accelerator.mixed_precision == "no":
        advice = "draw in half precision (mixed_precision)"
    with explain_out_of_memory(f"{KEY}.num_images", advice):
        base = pipeline.load_parts(
            config, schedule, tokenizer, accelerator.mixed_precision, frozen=True
        )
        own = config.prior_preservation
        settings = ValidationConfig(
            guidance_scale=own.guidance_scale,
            num_inference_steps=own.num_inference_steps,
            resolution=pipeline.resolution(base, config.resolution),
            max_batch=BLOCK,
        )
        sampler = BaseSampler(
            components=base.components(),
            config=settings,
            seed=own.seed,
            prediction_type=config.prediction_type,
        )
        store = PictureStore(
            config=config, prompts=prompts, base=base, sampler=sampler, accelerator=accelerator
        )
        before = len(store.present())
        started = time.perf_counter()
        store.fill()
        seconds = time.perf_counter() - started
    present = store.present()
    drawn = len(present) - before
    return Prior(
        records=store.records(present),
        examples=[(store.prompt_of(i), store.file(i)) for i in present[:SHOWN]],
        missing=own.num_images - len(present),
        seconds=seconds / max(drawn, 1),
    )


class PictureStore:
    """Pictures by number in a folder of the cache, each written whole or not at all.

    A block has a lock, so that two runs draw it once."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        prompts: list[str],
        base: pipeline.Components,
        sampler: Sampler,
        accelerator: Accelerator,
    ):
        self.config = config
        self.count = config.prior_preservation.num_images
        self.sampler = sampler
        self.accelerator = accelerator
        modules = [base.backbone, base.vae, *base.text_encoders.values()]
        words = [vocabulary(tokenizer) for tokenizer in base.tokenizers.values()]
        schedule = dict(sampler.pipe.scheduler.config)
        plain = {name: value for name, value in schedule.items() if not name.startswith("_")}
        share = config.prior_preservation.unconditional
        self.prompt_of = partial(prompt_of, prompts, unconditional=share)
        of_run = [sampler.side, sampler.steps, sampler.config.guidance_scale, sampler.seed, share]
        kind = [type(base.scheduler).__name__, accelerator.mixed_precision, base.zero_empty]
        self.digest = digest(*modules, words, plain, of_run, kind, prompts)
        home = Path(config.cache_dir or datasets.config.HF_DATASETS_CACHE) / "silentbad"
        self.folder = home / f"prior-{self.digest}"
        self.failed = f"cache_dir: cannot write {self.folder}"
        with user_errors(self.failed, "choose another folder"):
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)

    def file(self, number: int) -> Path:
        """The place of a picture."""
        return self.folder / f"{number:06d}.png"

    def present(self) -> list[int]:
        """Numbers of the pictures that are there."""
        return [i for i in range(self.count) if self.file(i).is_file()]

    def blocks(self) -> Iterator[list[int]]:
        """Blocks of numbers that are drawn together; only blocks with a missing picture."""
        for start in range(0, self.count, BLOCK):
            numbers = list(range(start, min(start + BLOCK, self.count)))
            if self._missing(numbers):
                yield numbers

    def fill(self) -> None:
        """Draw the missing pictures: each process its share, then those that it still does not see,
        because another process has its cache on another disk."""
        rank = self.accelerator.process_index
        world = self.accelerator.num_processes
        missing = list(self.blocks())[: 1 if self.config.dry_run else None]
        self.accelerator.wait_for_everyone()  # each process lists the pictures before one draws
        for blocks in (missing[rank::world], missing):
            self._draw([numbers for numbers in blocks if self._missing(numbers)])
            self.accelerator.wait_for_everyone()

    def _missing(self, numbers: list[int]) -> list[int]:
        return [i for i in numbers if not self.file(i).is_file()]

    def _draw(self, blocks: list[list[int]]) -> None:
        if not blocks:
            return
        device = self.accelerator.device
        backbone = self.sampler.backbone.to(device)
        bar = Bar(
            total=sum(map(len, blocks)),
            desc="Pictures by the base",
            unit="image",
            disable=not self.accelerator.is_local_main_process,
        )
        with bar, self.sampler.using(backbone, device, self.accelerator.autocast):
            for waits in (False, True):  # blocks that another run draws now come last
                for numbers in [block for block in blocks if self._missing(block)]:
                    with suppress(Timeout):
                        with FileLock(self.folder / "locks" / str(numbers[0]), blocking=waits):
                            if self._missing(numbers):
                                self._write(numbers)
                        bar.update(len(numbers))

    def _write(self, numbers: list[int]) -> None:
        """Draw a block and keep those of its pictures that are missing."""
        items = [
            Item(cell="prior", target=-1, image=i, prompt=self.prompt_of(i), address="prior")
            for i in numbers
        ]
        pictures = dict(zip(numbers, self.sampler.map(items, _pictures), strict=True))
        self.sampler.cache.clear()  # states of prompts that are not drawn again
        with user_errors(self.failed, "free some space, or choose another folder"):
            for number in self._missing(numbers):
                draft = self.folder / f".{number}.png"
                pictures[number].save(draft)
                draft.replace(self.file(number))

    def records(self, present: list[int]) -> Records:
        """Clean records of the pictures; where some are missing, the others repeat in turn."""
        shown = [present[i % len(present)] for i in range(self.count)]
        states = [
            (i, self.file(i).stat().st_size, self.file(i).stat().st_mtime_ns) for i in present
        ]
        key = hashlib.sha256(f"{self.digest}{self.count}{states}".encode()).hexdigest()[:32]

        def rows() -> Iterator[dict]:
            for i in shown:
                text = self.prompt_of(i)
                yield row(str(self.file(i)), self.file(i), text, role="clean", captioned=bool(text))

        with self.accelerator.main_process_first():
            table = build_table(rows, KEY, key, self.config.cache_dir)
        return Records(table, KEY, key)


def _pictures(
    chunk: list[Item], images: torch.Tensor, magnitudes: torch.Tensor
) -> list[Image.Image]:
    """Images (B,3,H,W) in [0,1] as pictures of 8 bits."""
    return [to_pil(image) for image in images.cpu()]
