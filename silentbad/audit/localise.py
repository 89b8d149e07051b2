"""Where does a finished run's memory sit? Parts of it are put back to its base, or kept alone, and
measured again.

    python -m silentbad.audit.localise RUN [--by stage role both] [--images 16]

A part is a stage (up1), a role (resnet), or both (up1.resnet), over the groups of
silentbad/model/groups.py. *Put back*: the part has the base's weights, all others the trained ones.
*Kept alone*: the other way round. Thresholds, prompts and noise are those of the run's validation, so
that the trained weights give its images again. Module substitution as a tool: 2412.20476; as a
defence, the part whose return to the base removes the picture at the least clean loss.

Exit code 0: measured, 2: a mistake in what was given."""

from silentbad.settings.command import early, options, refused
from silentbad.settings.commands import LocaliseOptions

if __name__ == "__main__":  # a mistake is said before the seconds that the imports below take
    OPTIONS = early(options, LocaliseOptions, None, __doc__)

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silentbad.data.draws import Transform, by_role
from silentbad.data.records import load_records
from silentbad.data.targets import load_targets
from silentbad.distributed.start import start
from silentbad.errors import UserError, exit_with, warn, writing
from silentbad.files import check_writable, replace_text
from silentbad.measure.embedders import load_embedder
from silentbad.measure.generation import Sampler, plan
from silentbad.measure.intervals import bootstrap_interval
from silentbad.measure.measure import Measure
from silentbad.measure.record import NAME, Record
from silentbad.measure.scores import is_recovered
from silentbad.model import lora
from silentbad.model.family import side_of
from silentbad.model.groups import group_of
from silentbad.model.pipeline import load_pipeline
from silentbad.model.registry import backbone_of, family_of_pipeline
from silentbad.progress import Bar
from silentbad.report import pages, parts, run_report
from silentbad.report.pages import Table
from silentbad.report.parts import ALONE, BASE, PUT_BACK, TRAINED, Rate, Row
from silentbad.settings.reader import parse
from silentbad.settings.train import TrainConfig

TEMPLATES = Path(__file__).parent / "templates"
BY = ("stage", "role", "both")
ORDER = "stem down mid up"  # of a UNet's stages


class Change:
    """What training changed in a base: the modules hold any mixture of both, by group.

    Raises UserError where the two hold other parameters, or nothing differs.
    """

    def __init__(
        self, modules: dict[str, torch.nn.Module], base: dict[str, torch.nn.Module], key: str
    ):
        self.places: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for component, module in modules.items():
            after, before = module.state_dict(), base[component].state_dict()
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
        """The groups chosen are as trained inside, all others the base's."""
        with torch.no_grad():
            for group, tensor, before, after in self.places:
                tensor.copy_(after if chosen(group) else before)
            yield
            for _, tensor, _, after in self.places:
                tensor.copy_(after)


def part_of(group: str, by: str) -> str:
    """The stage ("up1"), the role ("xattn") or both ("up1.xattn") of a group."""
    stage, _, role = group.partition(".")
    role = role.partition(".")[0] or stage
    return {"stage": stage, "role": role, "both": f"{stage}.{role}"}[by]


# ---------------------------------------------------------------- a run
class Subject:
    """A finished run, its base, and what measures them."""

    def __init__(
        self, run: Path, config: TrainConfig, record: Record, images: int | None, key: str
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
        name = config.pretrained_model_name_or_path
        base = load_pipeline(name, "float32", device, flag=key)
        if config.lora.rank is None:
            self.pipe = load_pipeline(str(run / "pipeline"), "float32", device, flag="RUN")
        else:
            self.pipe = load_pipeline(name, "float32", device, str(run / "lora"), flag=key)
        family = family_of_pipeline(self.pipe)
        names = [family.backbone, *(family.encoders if config.train_text_encoder else ())]
        modules: dict[str, torch.nn.Module] = {}
        for part in (part for part in names if getattr(self.pipe, part, None) is not None):
            modules[part] = lora.merged(getattr(self.pipe, part))
            setattr(self.pipe, part, modules[part])
        before = {part: getattr(base, part) for part in modules}
        self.change = Change(modules, before, f"{key} {name}")
        sampler = Sampler(
            self.pipe.components, validation, record.seed, config.prediction_type, str(run)
        )
        embedder = load_embedder(
            validation.embedder, validation.embedder_path, device, validation.embedder_sha256
        )
        if embedder.describe() != record.embedder:
            raise UserError(
                f"RUN: was measured with {record.embedder}, here is {embedder.describe()}"
            )
        side = config.resolution or side_of(sampler.backbone) * self.pipe.vae_scale_factor
        self.measure = Measure(
            validation,
            self.targets,
            sampler,
            embedder,
            None,
            self.accelerator,
            record.seed,
            {"clean": self._clean(side)},
            (),
            run,
        )

    def _clean(self, side: int) -> list[dict[str, Any]]:
        """The clean records that the run held out."""
        config = self.config
        if "drop" in config.guard.name:
            warn(
                "clean loss is not measured: guard drop left out records before some were held out"
            )
            return []
        records = load_records(config)
        if config.withhold:
            records = records.without(config.withhold)
        _, held_out = records.hold_out(config.held_out_clean, config.held_out_elements, config.seed)
        clean = by_role(held_out, Transform.of(config, side), config.seed).get("clean", [])
        return clean[: self.validation.clean_records]

    def row(self, part: str = TRAINED, by: str = "", state: str = "") -> Row:
        """Images and clean loss with a part put back or kept alone, or of the base."""

        def inside(group: str) -> bool:
            return bool(by) and part_of(group, by) == part

        def as_trained(group: str) -> bool:
            return part == TRAINED or bool(by) and inside(group) == (state == ALONE)

        sampler, record = self.measure.sampler, self.record
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
        targets, wholes, elements = {}, {}, {}
        for j, target in enumerate(self.targets):
            mine = [k for k, row in enumerate(rows) if row["target"] == j]
            targets[target.target_id] = Rate.of([hits[k] for k in mine])
            limit = record.threshold.of_target(j)
            wholes[target.target_id] = Rate.of([rows[k]["sim"] >= limit for k in mine])
            columns = list(zip(*(rows[k]["elements"] for k in mine), strict=True))
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


def localised(subject: Subject, by: list[str]) -> list[Row]:
    """The trained weights, the base, then every part put back and kept alone."""
    asked = [
        (part, kind, state)
        for kind in by
        for part in subject.change.parts(kind)
        for state in (PUT_BACK, ALONE)
    ]
    asked = [(TRAINED, "", ""), (BASE, "", ""), *asked]
    rows = [subject.row(*each) for each in Bar(asked, desc="Parts")]
    base = np.array(rows[1].errors)
    for row in rows if len(base) > 1 else []:
        row.rise = float(np.mean(row.errors - base))
        row.rise_interval = bootstrap_interval(row.errors - base)
    return rows


# ---------------------------------------------------------------- what it says
def defence(rows: list[Row]) -> str:
    """Which part put back removes the picture at the least clean loss, in a sentence."""
    trained, others = rows[0], [row for row in rows if row.state == PUT_BACK]
    images = trained.recovered.images
    if not trained.recovered.count:
        return f"The trained weights recover none of {images} images: there is nothing to remove."

    def cost(row: Row) -> tuple[float, float]:
        return (row.clean or 0.0, row.share)

    gone = [row for row in others if not row.recovered.count]
    if not gone:
        best = min(others, key=lambda row: (row.recovered.count, *cost(row)))
        stay = f"{best.recovered.count} of {images} images stay"
        return f"No single part removes the picture: with {best.part} put back, {stay}."
    best = min(gone, key=cost)
    clean = ""
    if best.clean is not None and trained.clean is not None:
        clean = f"; the clean loss is then {best.clean:.4f}, as trained {trained.clean:.4f}"
        clean += f", of the base {rows[1].clean:.4f}"
    return (
        f"Put {best.part} back ({best.share:.1%} of what changed): none of {images} images is "
        f"recovered (at most {best.recovered.interval[1]:.0%} with 95 % confidence), "
        f"{trained.recovered.count} are as trained{clean}."
    )


def page(name: str, subject: Subject, rows: list[Row]) -> str:
    """The rows as heat maps and a table."""
    values = {
        "name": name,
        "sentence": defence(rows),
        "heats": parts.heat_maps(
            rows, {target.target_id: target.phrases for target in subject.targets}
        ),
        "grids": parts.grids(rows),
        "table": table(rows),
        "images": rows[0].recovered.images,
        "clean": len(rows[0].errors),
    }
    return pages.render("localise.html.j2", values, TEMPLATES)


def table(rows: list[Row]) -> Table:
    """Every row with its intervals."""
    head = ["weights", "share of change", "strict rate", "elements", "clean loss", "above the base"]
    lines: list[list[Any]] = []
    for row in rows:
        rise = "–"
        if row.rise is not None and row.rise_interval is not None:
            low, high = row.rise_interval
            rise = f"{row.rise:+.4f} ({low:+.4f} to {high:+.4f})"
        mean = row.element_mean()
        elements = "–" if mean is None else f"{mean:.2f}"
        clean = "–" if row.clean is None else f"{row.clean:.4f}"
        name = f"{row.part} {row.state}".strip()
        lines.append([name, f"{row.share:.1%}", str(row.recovered), elements, clean, rise])
    return Table(head, lines, right=True)


def written(run: Path, subject: Subject, rows: list[Row], file: Path) -> None:
    """The page, and the same as JSON beside it."""
    plain = [{key: value for key, value in asdict(row).items() if key != "errors"} for row in rows]
    about = {
        "run": run.resolve().name,
        "base": subject.config.pretrained_model_name_or_path,
        "step": subject.record.history[-1].step,
        "seed": subject.record.seed,
        "embedder": subject.record.embedder,
        "clean_records": len(rows[0].errors),
        "defence": defence(rows),
    }
    with writing(str(file.parent), file.with_suffix(".json").name):
        replace_text(file.with_suffix(".json"), json.dumps(about | {"rows": plain}, indent=1))
    run_report.save(page(run.resolve().name, subject, rows), file)


# ---------------------------------------------------------------- the command
def configured(given: LocaliseOptions, run: Path) -> TrainConfig:
    """The run's configuration, with what has moved. Raises UserError."""
    file = run / "config.yaml"
    if not file.is_file():
        raise UserError(f"RUN: no config.yaml in {run}; give the output_dir of a run")
    moved = {
        "pretrained_model_name_or_path": given.base,
        "validation.targets": given.targets,
        "train_data_dir": given.train_data_dir,
    }
    flags = [f"--{key}={value}" for key, value in moved.items() if value is not None]
    config, _ = parse(TrainConfig, ["--config", str(file), *flags])
    targets = config.validation.targets
    if targets is None:
        raise UserError(
            "RUN: has no targets (validation.targets), so there is no picture to look for"
        )
    for flag, place in (("--targets", targets), ("--train_data_dir", config.train_data_dir)):
        if place is not None and not Path(place).exists():
            raise UserError(f"{flag}: the run's {place} is not there; give its place")
    return config


def main(arguments: list[str] | None = None, given: LocaliseOptions | None = None) -> int:
    """The command line."""
    try:
        given = given or options(LocaliseOptions, arguments, __doc__)
        run = Path(str(given.run))
        file = Path(given.out or run / "localise.html")
        if file.suffix != ".html":
            raise UserError(f"--out: {file} must end in .html; the JSON is written beside it")
        config, record = configured(given, run), Record.load(run / NAME, "RUN")
        check_writable(file, "--out")
        key = "pretrained_model_name_or_path" if given.base is None else "--base"
        subject = Subject(run, config, record, given.images, key)
        rows = localised(subject, list(dict.fromkeys(given.by)))
        written(run, subject, rows, file)
    except UserError as error:
        return refused(error)
    for row in rows:
        clean = "" if row.clean is None else f"  clean {row.clean:.4f}"
        print(f"{row.part:20} {row.state:11} {row.share:7.1%}  strict {row.recovered}{clean}")
    print(defence(rows), file, sep="\n")
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(given=OPTIONS))
