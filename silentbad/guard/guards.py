"""What stands between a scan's suspects and training: `--guard.name mask+cap --guard.scan
runs/scan/scan.json`.

A guard overrides those methods of `Guard` that it needs, and has an entry in `GUARDS`; its
keyword-only parameters are its options. docs/shield.md says what each one keeps from training, and
what it costs.

Legend: N scanned records, R records in training, E elements of all suspect sets; a row is a
record's number in the scan, which is its row in the table.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from silentbad import rng
from silentbad.data import scan_file
from silentbad.data.images import open_image, to_tensor
from silentbad.data.records import Records
from silentbad.data.scan_file import PICTURE
from silentbad.data.schema import check_window
from silentbad.data.table import blocks
from silentbad.errors import UserError, brief
from silentbad.loop.hooks import Hook, NamedHooks
from silentbad.memory.auxiliary import ModelAccess
from silentbad.memory.masks import fitted
from silentbad.model.diffusion import prediction_target
from silentbad.settings.guard import ADVICE, GuardConfig, parse_guards
from silentbad.settings.types import Count, Small


# ------------------------------------------------------------ what a scan found
@dataclass
class Suspects:
    """A scan.json: suspect rows and captions, elements' rows and masks, sets."""

    file: Path
    count: int
    captions: str | None  # a digest of all N
    text: dict[int, str]
    rows: list[np.ndarray]  # (E,) arrays of rows
    masks: list[Path]  # (E,)
    prompts: list[str]
    pictures: list[Path]
    members: list[list[int]]  # of each set, among the E

    @classmethod
    def read(cls, file: Path) -> "Suspects":
        """Raises UserError where the file is no scan.json."""
        scan = scan_file.read(file, "guard.scan")
        where = f"guard.scan: {file}"
        elements = [element for suspect_set in scan.sets for element in suspect_set.elements]
        if scan.records is None:
            raise UserError(f"{where} is no scan.json (no records); {ADVICE}")
        members = np.split(
            np.arange(len(elements)), np.cumsum([len(s.elements) for s in scan.sets])
        )
        return cls(
            file=file,
            count=scan.records,
            captions=scan.captions,
            text={row.index: row.text for row in scan.suspects},
            rows=[np.asarray(element.records, np.int64) for element in elements],
            masks=[scan_file.beside(file, element.mask, where) for element in elements],
            prompts=[suspect_set.composed for suspect_set in scan.sets],
            pictures=[
                scan_file.beside(file, suspect_set.composite, where) for suspect_set in scan.sets
            ],
            members=[each.tolist() for each in members[:-1]],
        )

    def check(self, records: Records) -> None:
        """Refuse records that are not those that were scanned."""
        texts = records.column("text")
        count = len(records)
        same = all(0 <= i < count and texts[i].as_py() == text for i, text in self.text.items())
        if self.captions is not None:  # a scan of an earlier release has the suspects' alone
            same = same and self.captions == scan_file.digest(
                text for block in blocks(texts) for text in block
            )
        if (
            self.count != count
            or not same
            or any(i not in self.text for rows in self.rows for i in rows.tolist())
        ):
            advice = (
                "scan this data again"
                if records.rows is None
                else "max_train_samples chose among them, leave it out"
            )
            raise UserError(
                f"guard.scan: {self.file} is of other data ({self.count} records, here {count}, "
                f"or other captions); {advice}"
            )

    def picture(self, file: Path, mode: str) -> Image.Image:
        """A composite or a mask that the scan wrote beside scan.json."""
        image = open_image(file, f"guard.scan: of {self.file.name}").convert(mode)
        if image.size != (PICTURE, PICTURE):
            raise UserError(
                f"guard.scan: {file} is not {PICTURE}x{PICTURE} pixels, as a scan "
                f"writes it; scan again"
            )
        return image


@dataclass
class GuardContext:
    """What a guard may use of a run of R records."""

    rows: np.ndarray
    access: ModelAccess
    scheduler: Any
    params: list[torch.nn.Parameter]
    side: int  # pixels
    seed: int


# ------------------------------------------------------------ guards
class Guard(Hook):
    """Leaves everything as it is: drawn from before training, a hook of the loop in it."""

    def __init__(self, suspects: Suspects):
        self.suspects = suspects

    def reads(self) -> list[Path]:
        """The pictures beside scan.json that it looks at."""
        return []

    def kept(self) -> np.ndarray:
        """Which of the scanned records are trained on (N,) bool."""
        return np.ones(self.suspects.count, bool)

    def start(self, context: GuardContext) -> None:
        """Before training, once the weights are there."""

    def order(self, order: np.ndarray, epoch: int) -> np.ndarray:
        """The record numbers (n,) of an epoch."""
        return order

    def hidden(self, index: int) -> Image.Image | None:
        """255 where no loss looks at a record, in shares of its frame; None: everything counts."""
        return None


class Drop(Guard):
    """No suspect record is trained on."""

    def kept(self) -> np.ndarray:
        return ~np.isin(np.arange(self.suspects.count), list(self.suspects.text))


class Mask(Guard):
    """The suspect records stay, their recurring region is out of the loss."""

    def reads(self) -> list[Path]:
        return self.suspects.masks

    def start(self, context: GuardContext) -> None:
        masks: dict[int, np.ndarray] = {}
        for rows, file in zip(self.suspects.rows, self.suspects.masks, strict=True):
            mask = np.asarray(self.suspects.picture(file, "L"))
            if not mask.any():
                raise UserError(
                    f"guard.scan: {file} is black, so guard.name=mask would hide nothing; scan "
                    f"the data again"
                )
            for row in rows.tolist():
                masks[row] = np.maximum(masks.get(row, 0), mask)
        self.images = {
            i: Image.fromarray(masks[row])
            for i, row in enumerate(context.rows.tolist())
            if row in masks
        }

    def hidden(self, index: int) -> Image.Image | None:
        return self.images.get(index)


class Cap(Guard):
    """Each element is drawn at most `limit` times in the whole run, whichever of its records shows
    it.

    What exceeds it leaves the epoch; the run has as many steps as without, so the other records
    take its place.
    """

    def __init__(self, suspects: Suspects, *, limit: Count = 20):
        super().__init__(suspects)
        self.limit = limit
        # draws of each element before that epoch
        self.epoch = -1
        self.before = [0] * len(suspects.rows)
        self.now = list(self.before)

    def start(self, context: GuardContext) -> None:
        at = {row: i for i, row in enumerate(context.rows.tolist())}
        self.shows: dict[int, list[int]] = {}  # record -> its elements
        for element, rows in enumerate(self.suspects.rows):
            for row in rows.tolist():
                if row in at:
                    self.shows.setdefault(at[row], []).append(element)

    def order(self, order: np.ndarray, epoch: int) -> np.ndarray:
        if epoch != self.epoch:  # else the epoch is dealt again, as after a resume
            self.epoch = epoch
            self.before = list(self.now)
        self.now = list(self.before)
        drawn = np.ones(len(order), bool)
        for k, index in enumerate(order.tolist()):
            shown = self.shows.get(index, [])
            if any(self.now[element] >= self.limit for element in shown):
                drawn[k] = False
                continue
            for element in shown:
                self.now[element] += 1
        if not drawn.any():
            raise UserError(
                f"guard.cap: every record of epoch {epoch} reached the limit of {self.limit} draws"
            )
        return order[drawn]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "before": list(self.before), "now": list(self.now)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.before = list(state["before"])
        self.now = list(state["now"])


class Project(Guard):
    """No gradient lowers the loss of the hidden pictures, to first order: g - max(0, <g,h>) / <h,h>
    h.

    h is the gradient of that loss on `pictures` of the scan's composites under their prompts, where
    they are known. The form is that of A-GEM (1812.00420) with one constraint; 2512.11194 projects
    away a prohibited attribute so.
    """

    modifies_gradients = True

    def __init__(self, suspects: Suspects, *, pictures: Small = 4):
        super().__init__(suspects)
        self.count = min(pictures, len(suspects.prompts))

    def reads(self) -> list[Path]:
        return self.suspects.masks + self.suspects.pictures

    def start(self, context: GuardContext) -> None:
        self.context = context
        suspects = self.suspects
        size = (context.side, context.side)
        for prompt in suspects.prompts:
            check_window(
                prompt, context.access.tokenizer, f"guard.scan: {suspects.file}: {brief(prompt)}"
            )
        shown = []
        masks = []
        for file, members in zip(suspects.pictures, suspects.members, strict=True):
            union = np.max(
                [np.asarray(suspects.picture(suspects.masks[i], "L")) for i in members], axis=0
            )
            image, mask = fitted(suspects.picture(file, "RGB"), Image.fromarray(union), size)
            shown.append(to_tensor(image) * 2 - 1)
            masks.append(to_tensor(mask.convert("RGB"))[:1])
        if shown:
            self.latents = context.access.encode(torch.stack(shown))
            self.masks = F.interpolate(torch.stack(masks), self.latents.shape[-2:], mode="area").to(
                self.latents.device
            )

    def loss(self, step: int) -> Tensor:
        """The error on this step's pictures, at timesteps and with noise of its own address."""
        context = self.context
        draw = rng.generator(context.seed, "guard", step)
        chosen = torch.randperm(len(self.latents), generator=draw)[: self.count]
        T = context.scheduler.config.num_train_timesteps
        timesteps = torch.randint(0, T, (self.count,), generator=draw)
        latents = self.latents[chosen]
        masks = self.masks[chosen]
        timesteps = timesteps.to(latents.device)
        shape = tuple(latents.shape[1:])
        noise = rng.noise(shape, context.seed, "guard", step, list(range(self.count))).to(latents)
        texts = [self.suspects.prompts[i] for i in chosen.tolist()]
        model_pred = context.access.predict(
            context.scheduler.add_noise(latents, noise, timesteps),
            timesteps,
            texts,
            model=context.access.unet,
        )
        target = prediction_target(context.scheduler, latents, noise, timesteps)
        error = ((model_pred.float() - target.float()).square() * masks).sum()
        return error / (masks.sum() * latents.shape[1]).clamp_min(1e-6)

    def before_step(
        self, step: int, finite: Tensor | None = None, norms: Tensor | None = None
    ) -> dict[str, Tensor]:
        if not self.count:
            return {}
        params = [p for p in self.context.params if p.grad is not None]
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.loss(step), params, allow_unused=True)
        pairs = [
            (p.grad, h.nan_to_num())
            for p, h in zip(params, gradients, strict=True)
            if h is not None
        ]
        return {"guard/cosine": project(*map(list, zip(*pairs, strict=True)))}


def project(grads: list[Tensor], away: list[Tensor]) -> Tensor:
    """Take from gradients, in place, what points along `away`; their cosine before."""

    def inner(a: list[Tensor], b: list[Tensor]) -> Tensor:
        return torch.stack([(x.float() * y.float()).sum() for x, y in zip(a, b, strict=True)]).sum()

    along = inner(grads, away)
    square = inner(away, away)
    factor = (along.clamp_min(0) / square).nan_to_num(0.0, 0.0, 0.0)
    torch._foreach_sub_(grads, [(factor * h).to(g.dtype) for g, h in zip(grads, away, strict=True)])
    return along / (square * inner(grads, grads) + along.clamp_min(0).square()).sqrt()


GUARDS: dict[str, Callable[..., Guard]] = {
    "drop": Drop,
    "mask": Mask,
    "cap": Cap,
    "project": Project,
}


# ------------------------------------------------------------ in a run
class Guards(NamedHooks):
    """The guards of a run, one after the other; none where nothing guards."""

    def __init__(self, config: GuardConfig):
        options = {} if config.name == "none" else parse_guards(config, GUARDS)
        self.suspects = Suspects.read(Path(str(config.scan))) if options else None
        super().__init__({name: GUARDS[name](self.suspects, **options[name]) for name in options})
        self.reads = [picture for guard in self.each for picture in guard.reads()]

    def records(self, records: Records) -> Records:
        """The records to train on. Raises UserError where the scan is of other data."""
        if self.suspects is None:
            return records
        self.suspects.check(records)
        trained_on = np.all([guard.kept() for guard in self.each], axis=0)
        if trained_on.all():
            return records
        if not trained_on.any():
            raise UserError(
                f"guard.scan: {self.suspects.file} suspects every record; nothing is "
                f"left to train on"
            )
        suspects = hashlib.sha256(repr(sorted(self.suspects.text)).encode()).hexdigest()[:16]
        return records.select(np.flatnonzero(trained_on), f"{records.key}-guard-{suspects}")

    def start(self, context: GuardContext) -> None:
        """Before training."""
        for guard in self.each:
            guard.start(context)

    def epoch(self, deal: Callable[[int], np.ndarray]) -> Callable[[int], np.ndarray]:
        """deal(epoch) -> record numbers, as the guards leave them."""

        def order(epoch: int) -> np.ndarray:
            dealt = deal(epoch)
            for guard in self.each:
                dealt = guard.order(dealt, epoch)
            return dealt

        return order

    def hidden(self, index: int) -> Image.Image | None:
        """Where no loss looks at a record; the first guard that hides something says so."""
        return next(
            (image for guard in self.each if (image := guard.hidden(index)) is not None), None
        )
