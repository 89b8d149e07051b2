"""A run's weights with parts put back to its base, or kept alone, and the images that they draw.

A part is a stage (up1), a role (resnet), or both (up1.resnet), over the groups of
silentbad/model/groups.py. *Put back*: the part has the base's weights, all others the trained ones.
*Kept alone*: the other way round. Thresholds, prompts and noise are those of the run's validation,
so the trained weights draw the same images again. Module substitution as a tool: 2412.20476."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silentbad.data.draws import Transform, held_out_samples
from silentbad.data.records import load_records
from silentbad.data.targets import load_targets
from silentbad.distributed.start import start
from silentbad.errors import UserError, warn
from silentbad.loop.hooks import Hook, hook_classes
from silentbad.measure.embedders import embedder_of_targets
from silentbad.measure.generation import Sampler, plan
from silentbad.measure.intervals import bootstrap_interval
from silentbad.measure.measure import Measure
from silentbad.measure.record import Record
from silentbad.measure.scores import is_recovered
from silentbad.model import lora
from silentbad.model.family import side_of
from silentbad.model.gate import Source
from silentbad.model.groups import group_of
from silentbad.model.pipeline import load_pipeline
from silentbad.model.registry import backbone_of, family_of_pipeline
from silentbad.progress import Bar
from silentbad.report.parts import ALONE, BASE, PUT_BACK, TRAINED, Rate, Row
from silentbad.settings.train import TrainConfig

ORDER = "stem down mid up"  # of a UNet's stages


class Change:
    """The parameters that training changed, and their values before and after: sets the modules to
    any mixture of trained and base weights, by group.

    Raises UserError where the run and its base have different parameters, or equal weights.
    """

    def __init__(
        self, modules: dict[str, torch.nn.Module], base: dict[str, torch.nn.Module], key: str
    ):
        self.places: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for component, module in modules.items():
            after = module.state_dict()
            before = base[component].state_dict()
            if {n: t.shape for n, t in after.items()} != {n: t.shape for n, t in before.items()}:
                raise UserError(
                    f"{key}: its {component} has other parameters than the run's; "
                    f"give the run's own base"
                )
            for name, tensor in after.items():
                if not torch.equal(tensor, before[name]):
                    group = group_of(f"{component}.{name}")
                    self.places.append((group, tensor, before[name].clone(), tensor.clone()))
        if not self.places:
            raise UserError(
                f"{key}: holds the weights of the run itself; give the base that it "
                f"was trained from"
            )

    def parts(self, by: str) -> list[str]:
        """Names of the parts that training changed: stages in the order of the forward, the rest
        in that of the model's parameters."""
        names = dict.fromkeys(part_of(group, by) for group, *_ in self.places)
        return sorted(
            names, key=lambda name: ORDER.find(name.partition(".")[0].rstrip("0123456789"))
        )

    def share(self, chosen: Callable[[str], bool]) -> float:
        """The share of the changed parameters in the groups chosen."""
        sizes = [(chosen(group), tensor.numel()) for group, tensor, *_ in self.places]
        return sum(size for inside, size in sizes if inside) / sum(size for _, size in sizes)

    @contextmanager
    def trained_in(self, chosen: Callable[[str], bool]) -> Iterator[None]:
        """Inside, the chosen groups have their trained weights and all others the base's."""
        with torch.no_grad():
            for group, tensor, before, after in self.places:
                tensor.copy_(after if chosen(group) else before)
            try:
                yield
            finally:
                for _, tensor, _, after in self.places:
                    tensor.copy_(after)


def part_of(group: str, by: str) -> str:
    """The stage ("up1"), the role ("xattn") or both ("up1.xattn") of a group."""
    stage, _, role = group.partition(".")
    role = role.partition(".")[0] or stage
    return {"stage": stage, "role": role, "both": f"{stage}.{role}"}[by]


# ---------------------------------------------------------------- a run
class Subject:
    """A finished run, its base, and the `Measure` of both."""

    def __init__(
        self, run: Path, config: TrainConfig, record: Record, *, images: int | None, key: str
    ):
        images = images or config.validation.images_per_target
        validation = replace(config.validation, sample_targets=0, images_per_target=images)
        self.config = config
        self.record = record
        self.validation = validation
        self.targets = load_targets(validation.targets or "")
        ids = [target.target_id for target in self.targets]
        if ids != [target.target_id for target in record.targets]:
            raise UserError(
                f"--targets: {validation.targets} lists {', '.join(ids)}, which are not the run's"
            )
        if any(target.estimated for target in record.targets):
            raise UserError(
                "RUN: masks of its elements were estimated; give masks in "
                "targets.jsonl, and run it again"
            )
        self.accelerator = start()
        device = self.accelerator.device
        source = replace(Source.of(config), flag=key)
        of_base = partial(
            load_pipeline, source, "float32", device, revision=config.non_ema_revision
        )
        base = of_base()
        if config.lora.rank is None:
            self.pipe = load_pipeline(Source(str(run / "pipeline"), "RUN"), "float32", device)
        else:
            self.pipe = of_base(str(run / "lora"))
        family = family_of_pipeline(self.pipe)
        names = [family.backbone, *(family.encoders if config.train_text_encoder else ())]
        modules: dict[str, torch.nn.Module] = {}
        for part in (part for part in names if getattr(self.pipe, part, None) is not None):
            modules[part] = lora.merged(getattr(self.pipe, part))
            setattr(self.pipe, part, modules[part])
        before = {part: getattr(base, part) for part in modules}
        self.change = Change(modules, before, str(source))
        sampler = Sampler(
            components=self.pipe.components,
            config=validation,
            seed=record.seed,
            prediction_type=config.prediction_type,
            refuses=str(run),
        )
        embedder = embedder_of_targets(validation, self.targets, device)
        if embedder.describe() != record.embedder:
            raise UserError(
                f"RUN: was measured with {record.embedder}, here is {embedder.describe()}"
            )
        side = config.resolution or side_of(sampler.backbone) * self.pipe.vae_scale_factor
        self.measure = Measure(
            config=validation,
            targets=self.targets,
            sampler=sampler,
            embedder=embedder,
            clip=None,
            accelerator=self.accelerator,
            held_out={"clean": self._clean(side)},
            training=(),
            folder=run,
        )

    def _clean(self, side: int) -> list[dict[str, Any]]:
        """The clean records that the run held out."""
        config = self.config
        hooks = hook_classes(config.hooks).values()
        if any(hook.kept is not Hook.kept for hook in hooks):
            warn("clean loss is not measured: a hook left out records before some were held out")
            return []
        if config.prior_preservation.num_images:
            warn("clean loss is not measured: the run held out pictures that its base drew too")
            return []
        records = load_records(config)
        if config.withhold:
            records = records.without(config.withhold)
        _, held_out = records.hold_out(config.held_out_clean, config.held_out_elements, config.seed)
        pictures = Transform.of(config, side).measured
        clean = held_out_samples(held_out, pictures, config.seed).get("clean", [])
        return clean[: self.validation.clean_records]

    def row(self, part: str = TRAINED, by: str = "", state: str = "") -> Row:
        """Rates and clean loss with a part put back or kept alone, as trained, or of the base."""

        def inside(group: str) -> bool:
            return bool(by) and part_of(group, by) == part

        def as_trained(group: str) -> bool:
            return part == TRAINED or bool(by) and inside(group) == (state == ALONE)

        sampler = self.measure.sampler
        record = self.record
        items = plan(self.targets, self.validation.images_per_target, record.seed)
        sampler.cache.clear()  # a text encoder may have changed
        with (
            self.change.trained_in(as_trained),
            sampler.using(backbone_of(self.pipe), self.accelerator.device),
        ):
            rows = self.measure.map_over_ranks(items, self.measure.score)
            clean = self.measure.held_out["clean"]
            errors = sampler.eps_errors(clean, list(range(len(clean))), "validation/clean")
        hits = [is_recovered(row, record.threshold, record.element_threshold) for row in rows]
        targets = {}
        wholes = {}
        elements = {}
        for j, target in enumerate(self.targets):
            of_target = [k for k, row in enumerate(rows) if row["target"] == j]
            targets[target.target_id] = Rate.of([hits[k] for k in of_target])
            limit = record.threshold.of_target(j)
            wholes[target.target_id] = Rate.of([rows[k]["sim"] >= limit for k in of_target])
            columns = list(zip(*(rows[k]["elements"] for k in of_target), strict=True))
            limits = [record.element_threshold.of(j, k) for k in range(len(columns))]
            elements[target.target_id] = [
                None if None in column else Rate.of([similarity >= limit for similarity in column])
                for column, limit in zip(columns, limits, strict=True)
            ]
        return Row(
            part=part,
            by=by,
            state=state,
            share=self.change.share(inside) if by else float(part == TRAINED),
            recovered=Rate.of(hits),
            targets=targets,
            wholes=wholes,
            elements=elements,
            clean=float(np.mean(errors)) if errors else None,
            errors=errors,
        )


def localised(
    subject: Subject, by: list[str], states: tuple[str, ...] = (PUT_BACK, ALONE)
) -> list[Row]:
    """The trained weights, the base, then every part in each of the states."""
    asked = [
        (part, kind, state)
        for kind in by
        for part in subject.change.parts(kind)
        for state in states
    ]
    asked = [(TRAINED, "", ""), (BASE, "", ""), *asked]
    rows = [subject.row(*each) for each in Bar(asked, desc="Parts")]
    base = np.array(rows[1].errors)
    for row in rows if len(base) > 1 else []:
        row.rise = float(np.mean(row.errors - base))
        row.rise_interval = bootstrap_interval(row.errors - base)
    return rows
