"""The search command: candidates, images, what is found, and what it writes.

`silentbad_shield.search.search` ranks prompts composed of candidate phrases. Images of the best ones from
several seeds are compared with each other. A picture that comes back whatever the seed is memory.
Ordinary prompts give the null.

Legend: S seeds; between: mean similarity of a prompt's images to each other; shares in [0,1]."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from silentbad import owned
from silentbad.data.formats import row_source
from silentbad.data.images import to_pil
from silentbad.data.schema import check_window, prompt_lines
from silentbad.errors import UserError, brief, writing
from silentbad.files import check_writable, replace_text
from silentbad.measure.embedders import embedder_of
from silentbad.measure.generation import Sampler
from silentbad.model.gate import Source
from silentbad.model.pipeline import load_pipeline
from silentbad.report import pages
from silentbad.report.pages import Table
from silentbad.rng import addressed_seed
from silentbad.settings import startup
from silentbad.settings.train import TrainConfig
from silentbad_shield import scan_file
from silentbad_shield.options import SearchOptions
from silentbad_shield.scan.words import segments, text_of
from silentbad_shield.search.returned import (
    LEVEL,
    SHARE,
    Drafts,
    Extrapolated,
    Null,
    compared,
    drafting,
)
from silentbad_shield.search.search import Probe, fits, probed, ranked, search
from validation import fits as fits_memory

TEMPLATES = Path(__file__).parent / "templates"
NAME = "audit.json"
PAGE = "audit.html"
PICTURES = r"returned-\d+\.png"
KIND = "search"  # of folder: an audit with targets writes other files
PROBED = 32  # ordinary prompts that the probes are measured against, for each number of phrases
RANKED = 200  # prompts of the search that are saved
MOST = 16  # phrases taken from captions
MOST_GIVEN = 100  # phrases of a file: 4,950 pairs


# -- candidates ------------------------------------------------------------------------------------
def lines_of(path: str, flag: str) -> list[str]:
    """The lines of a text file that are not empty. Raises UserError where there is none."""
    lines = list(dict.fromkeys(line.strip() for _, line in prompt_lines(Path(path))))
    if not lines:
        raise UserError(f"--{flag}: {path} holds no line")
    return lines


def candidates(options: SearchOptions) -> tuple[list[str], list[list[str]]]:
    """(phrases to compose, prompts that are tested whatever the search says, as lists of phrases).

    Raises UserError where there are none.
    """
    flag = f"--{options.given[0]}"
    if options.scan is not None:
        sets = scan_file.read(Path(options.scan), "--scan").sets
        if not sets:
            raise UserError(
                f"--scan: {options.scan} names no suspect set; give --phrases or --train_data_dir"
            )
        return [], [[element.phrase for element in suspect_set.elements] for suspect_set in sets]
    if options.phrases is not None:
        phrases = lines_of(options.phrases, "phrases")
    else:
        _, _, rows = row_source(TrainConfig(train_data_dir=str(options.train_data_dir), seed=0))
        phrases = recurring([text_of(row) for row in rows()])
    if not 2 <= len(phrases) <= MOST_GIVEN:
        raise UserError(
            f"{flag}: gives {len(phrases)} phrases; give from 2 to {MOST_GIVEN}, since all "
            f"their pairs are probed"
        )
    if not any(fits(pair) for pair in itertools.combinations(phrases, 2)):
        raise UserError(
            f"{flag}: each of its phrases names a place; add phrases of things to compose"
        )
    return phrases, []


def check_windows(tokenizer: Any, prompts: Sequence[str], flag: str) -> None:
    """Refuse a prompt that the tokenizer's window cuts off."""
    for prompt in prompts:
        check_window(prompt, tokenizer, f"--{flag}: {brief(prompt)}")


def recurring(captions: Sequence[str]) -> list[str]:
    """The most frequent segments of captions, each at least three times; at most MOST."""
    counts = Counter(" ".join(tokens) for caption in captions for tokens in segments(caption))
    return [text for text, count in counts.most_common(MOST) if count >= 3]


LOOKS = "red orange yellow green blue purple pink white small big striped dotted".split()
NOUNS = "cat hat fish house tree boat umbrella cup star moon heart ball".split()
THINGS = [f"a {look} {noun}" for look in LOOKS for noun in NOUNS]
PLACES = [
    *("on a sandy beach", "on a green meadow", "in a snowy field"),
    *("under a night sky", "in a quiet room", "before a sunset"),
]


def ordinary(
    options: SearchOptions,
    count: int,
    size: int,
    avoid: Sequence[str],
    things: Sequence[str] = THINGS,
    places: Sequence[str] = PLACES,
) -> list[str]:
    """`count` prompts of `size` phrases without a candidate phrase: `things` before one of
    `places`, or those of `--ordinary`."""
    rng = np.random.default_rng(addressed_seed(options.seed, "ordinary", size))
    if options.ordinary is not None:
        lines = lines_of(options.ordinary, "ordinary")
        if len(lines) < options.nulls:
            raise UserError(
                f"--ordinary: {options.ordinary} holds {len(lines)} prompts, --nulls asks for "
                f"{options.nulls}"
            )
        return [lines[i] for i in rng.permutation(len(lines))[:count]]
    things = [thing for thing in things if thing not in avoid]
    places = [place for place in places if place not in avoid] or places
    prompts = []
    for _ in range(count):
        chosen = [*rng.choice(things, size - 1, replace=False), rng.choice(places)]
        prompts.append(", ".join(map(str, chosen)))
    return prompts


# -- what is found ---------------------------------------------------------------------------------
@dataclass
class Result:
    """A tested prompt: its probes, its images, and whether a picture comes back."""

    prompt: str
    guidance: str
    probe: Probe
    between: float
    share: float
    p: float
    found: bool
    image: str = ""  # of the cluster's centre, where one is found


@dataclass
class Report:
    """audit.json."""

    pipeline: str
    baseline: str | None
    candidates: str
    phrases: list[str]
    searched: int
    seeds: int
    embedder: str
    # by guidance: similarity within a cluster, at least
    alike: dict[str, float] = field(default_factory=dict)
    # by guidance: `between` of the ordinary prompts
    ordinary: dict[str, list[float]] = field(default_factory=dict)
    # best prompts: sum of probes, how alike drafts are, effects of the phrases
    ranking: list[tuple[str, float, float | None, float | None]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def found(self) -> list[Result]:
        """The prompts under which a picture comes back, the surest first."""
        return [result for result in self.results if result.found]


# -- the command -----------------------------------------------------------------------------------
def audited(options: SearchOptions) -> Report:
    """Search, generate, compare and write. Raises UserError."""
    phrases, fixed = candidates(options)
    out = Path(options.output_dir)
    check_writable(out, "--output_dir", folder=True)
    keys = ("pipeline", "baseline", "lora", "train_data_dir", "scan")
    read = {f"--{key}": getattr(options, key) for key in keys}
    pictures = [file.name for file in out.glob("*.png") if re.fullmatch(PICTURES, file.name)]
    with owned.claimed(out, KIND, key="--output_dir", writes=(NAME, PAGE, *pictures), read=read):
        report, shown = tested(options, phrases, fixed)
        write(report, shown, out)
    return report


def tested(
    options: SearchOptions, phrases: list[str], fixed: list[list[str]]
) -> tuple[Report, list[list[np.ndarray]]]:
    """(what is found, the images (h,w,3) of each result, its cluster's centre first)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # ALIKE and PRICE were chosen with micro
    embedder = embedder_of(options, device, redraws=True)
    model = Source(str(options.pipeline), "--pipeline", variant=options.variant)
    pipe = load_pipeline(model, options.dtype, device, options.lora)
    named = f"--pipeline {options.pipeline}"
    sampler = Sampler(pipe.components, options, options.seed, refuses=named)
    if sampler.family.flow:
        raise UserError(
            f"{named}: the search without a target reads UNets; give Stable Diffusion 1, 2 or XL"
        )
    unets: dict[str, nn.Module] = {"own guidance": pipe.unet}
    if options.extrapolate is not None:
        origin = Source(str(options.baseline), "--baseline", variant=options.variant)
        base = load_pipeline(origin, options.dtype, device, of=options.pipeline)
        extrapolated = Extrapolated(pipe.unet, base.unet, options.extrapolate)
        unets[f"guidance extrapolated by {options.extrapolate:g}"] = extrapolated

    rough = Sampler(pipe.components, drafting(options), options.seed, refuses=named)
    with rough.using(pipe.unet, device), sampler.using(pipe.unet, device):
        all_probes = ranking(options, sampler, Drafts(rough, embedder), phrases, fixed)
    probes = all_probes[: options.tested] if phrases else all_probes
    candidate_phrases = known_phrases(phrases, fixed)
    report = Report(
        pipeline=str(options.pipeline),
        baseline=options.baseline,
        candidates=options.given[0],
        phrases=candidate_phrases,
        searched=len(all_probes),
        seeds=options.images_per_target,
        embedder=embedder.describe(),
    )
    for best in all_probes[:RANKED] if phrases else []:
        report.ranking.append((", ".join(best.phrases), best.score, best.draft, best.effect))
    sizes = sorted({len(probe.phrases) for probe in probes}) or [2]
    each = {size: ordinary(options, options.nulls, size, candidate_phrases) for size in sizes}
    nulls = [each[sizes[k % len(sizes)]][k] for k in range(options.nulls)]
    check_windows(pipe.tokenizer, nulls, "ordinary")
    prompts = [", ".join(probe.phrases) for probe in probes]
    # Those that are tested were chosen from all, by what the test measures
    tests = len(all_probes) * len(unets)
    pictures = []
    for name, unet in unets.items():
        with sampler.using(unet, device):
            usual = compared(sampler, embedder, nulls, report.seeds)
            null = Null.of([similarity for similarity, _ in usual])
            report.alike[name] = null.alike
            report.ordinary[name] = null.between
            shown = compared(sampler, embedder, prompts, report.seeds)
            for prompt, probe, (similarity, images) in zip(prompts, probes, shown, strict=True):
                common, p, hit = null.judge(similarity, tests)
                result = Result(
                    prompt=prompt,
                    guidance=name,
                    probe=probe,
                    between=common.between,
                    share=common.share,
                    p=p,
                    found=hit,
                )
                report.results.append(result)
                order = np.argsort(-similarity[common.centre], kind="stable")
                pictures.append([np.asarray(to_pil(images[k])) for k in order])
    return report, pictures


def ranking(
    options: SearchOptions,
    sampler: Sampler,
    drafts: Drafts,
    phrases: list[str],
    fixed: list[list[str]],
) -> list[Probe]:
    """The prompts that are `fixed` with their probes, or those of a search among the phrases."""

    def measured(prompts: Sequence[str], flag: str = options.given[0]) -> np.ndarray:
        check_windows(sampler.pipe.tokenizer, prompts, flag)
        probes = probed(sampler, prompts)
        if not np.isfinite(probes).all():
            raise UserError(
                f"--pipeline {options.pipeline}: its predictions are not finite; nothing could be "
                f"concluded from them"
            )
        return probes

    @cache
    def usual(size: int) -> np.ndarray:
        prompts = ordinary(options, PROBED, size, known_phrases(phrases, fixed))
        return measured(prompts, "ordinary")

    if fixed:
        return ranked(measured, usual, fixed)
    return search(measured, usual, drafts, phrases, options.most_phrases)


def known_phrases(phrases: list[str], fixed: list[list[str]]) -> list[str]:
    """All candidate phrases."""
    return [*phrases, *(phrase for prompt in fixed for phrase in prompt)]


# -- files -----------------------------------------------------------------------------------------
def write(report: Report, pictures: list[list[np.ndarray]], out: Path) -> None:
    """audit.json, audit.html, and the picture of each prompt under which one comes back."""
    with writing("--output_dir", str(out)):
        owned.mark(out, KIND)
        scan_file.remove_earlier(out / NAME, PICTURES)
        for k, (result, shown) in enumerate(zip(report.results, pictures, strict=True)):
            if result.found:
                result.image = f"returned-{k + 1}.png"
                (out / result.image).write_bytes(pages.png(shown[0]))
        (out / PAGE).write_text(page(report, pictures), encoding="utf-8")
        replace_text(out / NAME, json.dumps(asdict(report), indent=1, ensure_ascii=False) + "\n")


def page(report: Report, pictures: list[list[np.ndarray]]) -> str:
    """audit.html."""
    shown = list(zip(report.results, pictures, strict=True))
    shown.sort(key=lambda pair: (not pair[0].found, pair[0].p))
    head = ["prompt", "guidance", "comes back", "p", "images alike", "similarity"]
    head += ["magnitude", "anisotropy", "agreement"]
    rows = list[list[pages.Cell]]()
    cards = []
    for result, images in shown:
        comes_back = "yes" if result.found else "no"
        row: list[pages.Cell] = [
            result.prompt,
            result.guidance,
            comes_back,
            result.p,
            result.share,
            result.between,
        ]
        rows.append([*row, result.probe.magnitude, result.probe.anisotropy, result.probe.agreement])
        names = ["centre", *(str(k + 1) for k in range(1, len(images)))]
        cards.append({"result": result, "shots": list(map(pages.shot, images, names))})
    values = {
        "name": Path(report.pipeline).name or report.pipeline,
        "report": report,
        "prompts": len({result.prompt for result in report.found}),
        "cards": cards,
        "table": Table(head, rows),
        "level": LEVEL,
        "least": SHARE,
    }
    return pages.render("audit.html.j2", values, TEMPLATES)


def main(arguments: list[str] | None = None, options: SearchOptions | None = None) -> int:
    """Exit code 3 where a picture comes back, 0 where none does, 2 after a mistake."""
    try:
        options = options or startup.options(SearchOptions, arguments)
        with fits_memory(options):
            report = audited(options)
    except UserError as error:
        return startup.refused(error)
    for result in report.found:
        print(
            f"comes back: {result.prompt} ({result.share:.0%} of {report.seeds} seeds, p "
            f"{result.p:.2g}, {result.guidance})"
        )
    count = len(report.found)
    print(
        f"{count} of {len(report.results)} tested prompts give a picture back; "
        f"{options.output_dir}/{PAGE}"
    )
    return 3 if report.found else 0
