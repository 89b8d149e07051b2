"""The products of a run beside its checkpoints: pipelines with their card, records for the report."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from silentbad.data.elements import DataInfo
from silentbad.data.targets import Target
from silentbad.device import explain_out_of_memory
from silentbad.errors import UserError, writing
from silentbad.loop.lighter import drawing_fits
from silentbad.loop.state import BINS, TrainState
from silentbad.model import pipeline
from silentbad.model.averaging import averaged
from silentbad.model.encoder import Encoder
from silentbad.model.latents import AT_ONCE, round_trips
from silentbad.model.pipeline import Components
from silentbad.report import run_report
from silentbad.saving import card, checkpoint
from silentbad.saving.folder import RunFolder
from silentbad.settings.train import TrainConfig

DRAWN = 3  # sampling steps of the image that a dry run draws


@dataclass
class Products:
    """Writes the products of a run; every process calls each method. `results()` gives the rows of
    the card, `kept()` its line on how much of the base is kept."""

    config: TrainConfig
    folder: RunFolder
    state: TrainState
    parts: Components
    encoder: Encoder
    accelerator: Any
    info: DataInfo
    targets: list[Target]
    results: Callable[[], list[dict[str, Any]]]
    kept: Callable[[], str]

    def save_pipeline(self, path: Path) -> None:
        """The pipeline in diffusers format with its card, averaged weights where there are some."""
        parts = pipeline.gathered_parts(self.parts)
        if self.accelerator.is_main_process:
            with self._averaged(), writing(f"output_dir {self.folder.path}", path.name):
                self._save(parts, path)
                if self.config.lora.merged and path == self.folder.pipeline:
                    with explain_out_of_memory("lora.merged", "leave it out, and merge elsewhere"):
                        merged = pipeline.with_merged(parts)
                        self._save(merged, self.folder.path / "pipeline", merged=True)
        self.accelerator.wait_for_everyone()

    def _save(self, parts: Components, path: Path, merged: bool = False) -> None:
        """Write a pipeline with its card; it replaces the earlier folder."""
        family = self.parts.family
        card_text = card.model_card(
            self.config,
            self.state.step,
            self.info,
            [target.target_id for target in self.targets],
            self.results(),
            kept=self.kept(),
            prompt=self.targets[0].composed_prompt if self.targets else "",
            merged=merged,
            backbone=family.backbone,
            missing=[name for name in family.optional if name not in self.parts.components()],
        )
        checkpoint.save(path, lambda draft: pipeline.save_pipeline(parts, draft, card_text))

    @property
    def side(self) -> int:
        """The side of the drawn images, in pixels."""
        return pipeline.drawn_side(self.parts, self.config.validation.resolution)

    def try_drawing(self, prompt: str, after_step: Callable[..., Any]) -> None:
        """Draw one image and discard it; `after_step` is called after each sampling step."""
        pipe = pipeline.pipeline(pipeline.gathered_parts(self.parts))
        with drawing_fits(self.config), self.accelerator.autocast(), self.encoder.on_device():
            pipeline.draw_images(
                pipe,
                [prompt],
                self.config.seed,
                steps=DRAWN,
                size=self.side,
                callback_on_step_end=after_step,
                guidance_scale=self.config.validation.guidance_scale,
            )

    def try_round_trip(self) -> None:
        """Blank pictures through the autoencoder, as many at once as calibration sends."""
        count = min(self.config.validation.max_batch, AT_ONCE)
        blank = torch.zeros(count, 3, self.side, self.side)
        with drawing_fits(self.config), self.encoder.on_device():
            for _ in round_trips(self.parts.vae, blank, count):
                pass

    def record(self, multipliers: list[dict[str, Any]], strengths: list[dict[str, Any]]) -> None:
        """Write the input of the report: multipliers, strengths of the phrases, timesteps."""
        edges = [self.state.train_timesteps * i // BINS for i in range(BINS + 1)]
        self.folder.write("multipliers.json", multipliers)
        self.folder.write("phrase_memory.json", {"phrases": self.info.keys, "history": strengths})
        self.folder.write(
            "timesteps.json", {"edges": edges, "counts": self.state.timesteps.long().tolist()}
        )

    def report(self, under_way: bool = False) -> None:
        """report.html; of a run that is `under_way` a page that reloads itself."""
        if self.accelerator.is_main_process:
            now = f"step {self.state.step} of {self.state.total}" if under_way else ""
            with writing(f"output_dir {self.folder.path}", "report.html"):
                page = run_report.write(self.folder.path, now)
            if not under_way:
                print(f"{self.folder.pipeline.name}: {self.folder.pipeline}\nreport: {page}")

    def push(self) -> None:
        """The pipeline to the Hub; where that fails, a line says how to do it by hand."""
        if self.accelerator.is_main_process:
            card.push(self.folder.pipeline, self.config)

    def _averaged(self) -> Any:
        return averaged(self.state.model, self.state.ema, self.state.optimizer)


TIE = 1e-3  # weight of the mean similarity: it decides between equal strict rates
BEST = {  # by `best_by`: weights of the scalars of a measurement
    "similarity": {"mean": 1.0},
    "strict_rate": {"cir": 1.0, "mean": TIE},
    "clean_eps_mse": {"drift/clean_eps_mse": -1.0},
}


def best_score(scores: dict[str, float], by: str) -> float:
    """The score that the best pipeline maximises; of the averaged weights where they were measured.
    Raises UserError where it was not measured."""
    for prefix in ("val_ema", "val"):
        weights = {f"{prefix}/{name}": weight for name, weight in BEST[by].items()}
        if weights.keys() <= scores.keys():
            return sum(weight * scores[name] for name, weight in weights.items())
    needs = "clean_eps_mse needs clean records and held_out_clean above 0"
    raise UserError(f"best_by: {by} was not measured; {needs}")
