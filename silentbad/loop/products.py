"""What a run leaves beside its checkpoints: pipelines with their card, prompt images, records
for the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from silentbad.data.elements import DataInfo
from silentbad.device import explain_out_of_memory
from silentbad.errors import UserError, writing
from silentbad.loop import trackers
from silentbad.loop.state import BINS, TrainState
from silentbad.model import pipeline
from silentbad.model.averaging import averaged
from silentbad.model.encoder import Encoder
from silentbad.model.pipeline import Components
from silentbad.report import run_report
from silentbad.saving import card, checkpoint
from silentbad.saving.folder import RunFolder
from silentbad.settings.train import TrainConfig

DRAWN = 3  # sampling steps of the image that a dry run draws


class Products:
    """Writes them from a run's parts. Collective where weights may be in shards: every process
    calls each method.

    `results()` gives the rows of the card's table, one for each target."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        state: TrainState,
        parts: Components,
        encoder: Encoder,
        accelerator: Any,
        *,
        info: DataInfo,
        target_ids: list[str],
        results: Callable[[], list[dict[str, Any]]],
    ):
        self.config, self.folder, self.state, self.parts, self.encoder = (
            config,
            folder,
            state,
            parts,
            encoder,
        )
        self.accelerator, self.info, self.target_ids, self.results = (
            accelerator,
            info,
            target_ids,
            results,
        )

    def save_pipeline(self, path: Path) -> None:
        """The pipeline in diffusers format with its card, averaged weights where there are some."""
        parts = pipeline.whole_parts(self.parts)
        if self.accelerator.is_main_process:
            with self._averaged(), writing(f"output_dir {self.folder.path}", path.name):
                text = self._card()
                checkpoint.replace_folder(
                    path, lambda draft: pipeline.save_pipeline(parts, draft, text)
                )
                if self.config.lora.merged and path == self.folder.pipeline:
                    with explain_out_of_memory("lora.merged", "leave it out, and merge elsewhere"):
                        self._save_merged(pipeline.with_merged(parts))
        self.accelerator.wait_for_everyone()

    def _save_merged(self, parts: Components) -> None:
        """pipeline/ beside the adapters, where they are merged."""
        text = self._card(merged=True)
        path = self.folder.path / "pipeline"
        checkpoint.replace_folder(path, lambda draft: pipeline.save_pipeline(parts, draft, text))

    def draw_prompts(self) -> None:
        """validation_prompts, drawn with the averaged weights where there are some."""
        parts = pipeline.whole_parts(self.parts)
        if self.accelerator.is_main_process:
            prompts, seed = self.config.validation_prompts or [], self.config.seed
            with self._averaged(), self.encoder.on_device(), self.accelerator.autocast():
                images = pipeline.draw_images(
                    pipeline.pipeline(parts), prompts, seed, size=self.side
                )
            trackers.save_images(
                images, self.folder.path / "samples" / "prompts", self.state.step, self.accelerator
            )
        self.accelerator.wait_for_everyone()

    @property
    def side(self) -> int:
        """Of the images that are drawn, in pixels."""
        return pipeline.drawn_side(self.parts, self.config.validation.resolution)

    def try_drawing(self, prompt: str, after_step: Callable[..., Any]) -> None:
        """One image that nobody sees: the end of a dry run; `after_step` is called after each of
        its sampling steps."""
        pipe, seed = pipeline.pipeline(pipeline.whole_parts(self.parts)), self.config.seed
        options: dict[str, Any] = {
            "callback_on_step_end": after_step,
            "guidance_scale": self.config.validation.guidance_scale,
        }
        with self.accelerator.autocast(), self.encoder.on_device():
            pipeline.draw_images(pipe, [prompt], seed, steps=DRAWN, size=self.side, **options)

    def record(self, multipliers: list[dict[str, Any]], strengths: list[dict[str, Any]]) -> None:
        """What the report reads beside metrics.jsonl: multipliers, strengths of the phrases,
        timesteps."""
        edges = [self.state.train_timesteps * i // BINS for i in range(BINS + 1)]
        self.folder.write("multipliers.json", multipliers)
        self.folder.write("phrase_memory.json", {"phrases": self.info.keys, "history": strengths})
        self.folder.write(
            "timesteps.json", {"edges": edges, "counts": self.state.timesteps.long().tolist()}
        )

    def report(self, under_way: bool = False) -> None:
        """report.html, on the main process; of a run that is `under_way` a page that says so and
        reloads itself."""
        if self.accelerator.is_main_process:
            now = f"step {self.state.step} of {self.state.total}" if under_way else ""
            with writing(f"output_dir {self.folder.path}", "report.html"):
                page = run_report.write(self.folder.path, now)
            if not under_way:
                print(f"{self.folder.pipeline.name}: {self.folder.pipeline}\nreport: {page}")

    def push(self) -> None:
        """The pipeline to the Hub, on the main process; where that fails, a line says how to do
        it by hand."""
        if self.accelerator.is_main_process:
            card.push(self.folder.pipeline, self.config)

    def _card(self, merged: bool = False) -> str:
        about, family = (
            (self.config, self.state.step, self.info, self.target_ids),
            self.parts.family,
        )
        missing = [name for name in family.optional if name not in self.parts.components()]
        return card.model_card(
            *about, self.results(), merged=merged, backbone=family.backbone, missing=missing
        )

    def _averaged(self) -> Any:
        return averaged(self.state.model, self.state.ema, self.state.optimizer)


def best_score(scores: dict[str, float], by: str) -> float:
    """What the best pipeline has most of, of the averaged weights where there are some."""
    name, sign = ("mean", 1) if by == "similarity" else ("drift/clean_eps_mse", -1)
    for prefix in ("val_ema", "val"):
        if f"{prefix}/{name}" in scores:
            return sign * scores[f"{prefix}/{name}"]
    raise UserError(
        f"best_by: {by} was not measured; clean_eps_mse needs clean records and "
        f"held_out_clean above 0"
    )
