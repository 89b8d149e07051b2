"""Does a model give back a picture that nobody named? `validation.py --phrases FILE`, `--scan` or
`--train_data_dir`.

`silentbad.audit.search` ranks prompts composed of candidate phrases. Images of the best ones from
several seeds are compared with each other. A picture that comes back whatever the seed is memory.
Ordinary prompts give the null.

Legend: S seeds; between: mean similarity of a prompt's images to each other; shares in [0,1]."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from silentbad import owned
from silentbad.audit.returned import LEVEL, SHARE, Drafts, Extrapolated, Null, compared, drafting
from silentbad.audit.search import Probe, fits, probed, ranked, search
from silentbad.data import scan_file
from silentbad.data.formats import text_of
from silentbad.data.images import to_pil
from silentbad.data.phrases import segments
from silentbad.data.records import row_source
from silentbad.data.schema import check_window, text_lines
from silentbad.errors import UserError, brief, is_printable, writing
from silentbad.files import check_writable, remove_earlier, replace_text
from silentbad.measure.embedders import load_embedder
from silentbad.measure.generation import Sampler
from silentbad.model.pipeline import load_pipeline
from silentbad.progress import Bar
from silentbad.report import pages
from silentbad.report.pages import Table
from silentbad.rng import addressed_seed
from silentbad.settings.train import TrainConfig
from silentbad.settings.types import check_values
from silentbad.settings.validation import Audit

TEMPLATES = Path(__file__).parent / "templates"
NAME, PAGE = "audit.json", "audit.html"
PICTURES = r"returned-\d+\.png"
KIND = "search"  # of folder: an audit with targets writes other files
PROBED = 32  # ordinary prompts that the probes are measured against, for each number of phrases
RANKED = 200  # prompts of the search that are written down
MOST = 16  # phrases taken from captions
MOST_GIVEN = 100  # phrases of a file: 4,950 pairs


# -- candidates ------------------------------------------------------------------------------------
def lines_of(path: str, flag: str) -> list[str]:
    """The lines of a text file that hold something. Raises UserError where there is none."""
    if not Path(path).is_file():
        raise UserError(f"--{flag}: no file {path}; give one a line")
    found = list(dict.fromkeys(line.strip() for line in text_lines(Path(path)) if line.strip()))
    if not found:
        raise UserError(f"--{flag}: {path} holds no line")
    if odd := next((line for line in found if not is_printable(line)), None):
        raise UserError(
            f"--{flag}: {path} holds control characters in {brief(odd)}; give it as plain text"
        )
    return found


def candidates(options: Audit) -> tuple[list[str], list[list[str]]]:
    """(phrases to compose, prompts that are tested whatever the search says, as lists of phrases).

    Raises UserError where there are none.
    """
    if len(options.given) > 1:
        raise UserError(f"--{options.given[1]}: give one of --phrases, --scan and --train_data_dir")
    if options.scan is not None:
        sets = scan_file.read(Path(options.scan), "--scan")["sets"]
        if not sets:
            raise UserError(
                f"--scan: {options.scan} names no suspect set; give --phrases or --train_data_dir"
            )
        return [], [[element["phrase"] for element in one["elements"]] for one in sets]
    if options.phrases is not None:
        found = lines_of(options.phrases, "phrases")
    else:
        _, _, rows = row_source(TrainConfig(train_data_dir=str(options.train_data_dir), seed=0))
        found = recurring([text_of(row) for row in rows()])
    if len(found) < 2:
        raise UserError(
            f"--{options.given[0]}: gives {len(found)} phrases; two are needed to compose a prompt"
        )
    if len(found) > MOST_GIVEN:
        raise UserError(
            f"--{options.given[0]}: gives {len(found)} phrases; at most "
            f"{MOST_GIVEN}, all pairs are probed"
        )
    if not any(fits(pair) for pair in itertools.combinations(found, 2)):
        raise UserError(
            f"--{options.given[0]}: each of its phrases names a place; a prompt "
            f"takes one and a thing"
        )
    return found, []


def in_window(tokenizer: Any, prompts: Sequence[str], flag: str) -> Sequence[str]:
    """The prompts; one that the tokenizer's window cuts off is refused."""
    for prompt in prompts:
        check_window(prompt, tokenizer, f"--{flag}: {brief(prompt)}")
    return prompts


def recurring(captions: Sequence[str]) -> list[str]:
    """The segments that stand in most captions, at least three, most frequent first; at most
    MOST."""
    counts = Counter(" ".join(tokens) for caption in captions for tokens in segments(caption))
    return [text for text, count in counts.most_common(MOST) if count >= 3]


THINGS = "cat hat fish house tree boat umbrella cup star moon heart ball".split()
LOOKS = "red orange yellow green blue purple pink white small big striped dotted".split()
PLACES = [
    *("on a sandy beach", "on a green meadow", "in a snowy field"),
    *("under a night sky", "in a quiet room", "before a sunset"),
]


def ordinary(options: Audit, count: int, size: int, avoid: Sequence[str]) -> list[str]:
    """`count` prompts of `size` phrases: of the file, or plain things before a place that say no
    candidate phrase."""
    rng = np.random.default_rng(addressed_seed(options.seed, "ordinary", size))
    if options.ordinary is not None:
        given = lines_of(options.ordinary, "ordinary")
        if len(given) < options.nulls:
            raise UserError(
                f"--ordinary: {options.ordinary} holds {len(given)} prompts, --nulls asks for "
                f"{options.nulls}"
            )
        return [given[i] for i in rng.permutation(len(given))[:count]]
    things = [f"a {a} {b}" for a in LOOKS for b in THINGS]
    things, places = ([p for p in each if p not in avoid] for each in (things, PLACES))
    chosen = (
        [*rng.choice(things, size - 1, replace=False), rng.choice(places or PLACES)]
        for _ in range(count)
    )
    return [", ".join(map(str, one)) for one in chosen]


# -- what is found ---------------------------------------------------------------------------------
@dataclass
class Result:
    """A tested prompt: its probes, what its images have in common, and whether a picture comes
    back."""

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
        return [one for one in self.results if one.found]


# -- the command -----------------------------------------------------------------------------------
def audited(options: Audit) -> Report:
    """Search, generate, compare and write; `options` is validation.py's `Audit`. Raises
    UserError as it does."""
    check_values(options, "--")
    if options.extrapolate is not None and options.baseline is None:
        raise UserError("--extrapolate: needs --baseline, from which guidance is extrapolated")
    if options.images_per_target < 2:
        raise UserError("--images_per_target: must be at least 2, for images to be compared")
    phrases, fixed = candidates(options)
    out = Path(options.output_dir)
    check_writable(out, "--output_dir", folder=True)
    read = {
        f"--{key}": getattr(options, key)
        for key in ("pipeline", "baseline", "lora", "train_data_dir", "scan")
    }
    pictures = [file.name for file in out.glob("*.png") if re.fullmatch(PICTURES, file.name)]
    with owned.claimed(out, KIND, key="--output_dir", writes=(NAME, PAGE, *pictures), read=read):
        return _audited(options, phrases, fixed, out)


def _audited(options: Audit, phrases: list[str], fixed: list[list[str]], out: Path) -> Report:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    embedder = load_embedder(
        options.embedder, options.embedder_path, device, options.embedder_sha256
    )
    pipe = load_pipeline(str(options.pipeline), options.dtype, device, options.lora)
    named = f"--pipeline {options.pipeline}"
    sampler = Sampler(pipe.components, options, options.seed, refuses=named)
    if sampler.family.flow:
        raise UserError(
            f"{named}: the search without a target reads UNets; give Stable Diffusion 1, 2 or XL"
        )
    unets: dict[str, nn.Module] = {"own guidance": pipe.unet}
    if options.extrapolate is not None:
        base = load_pipeline(
            str(options.baseline), options.dtype, device, flag="--baseline", of=options.pipeline
        )
        unets[f"guidance extrapolated by {options.extrapolate:g}"] = Extrapolated(
            pipe.unet, base.unet, options.extrapolate
        )

    def bar(items: Sequence, what: str) -> Any:
        return Bar(items, desc=what)

    known = [*phrases, *(phrase for prompt in fixed for phrase in prompt)]
    usual: dict[int, np.ndarray] = {}

    def usually(size: int) -> np.ndarray:
        if size not in usual:
            usual[size] = measured(ordinary(options, PROBED, size, known), "ordinary")
        return usual[size]

    def measured(prompts: Sequence[str], flag: str = options.given[0]) -> np.ndarray:
        found = probed(sampler, in_window(pipe.tokenizer, prompts, flag), bar)
        if not np.isfinite(found).all():
            raise UserError(
                f"{named}: its predictions are not finite; nothing could be concluded from them"
            )
        return found

    rough = Sampler(pipe.components, drafting(options), options.seed, refuses=named)
    drafts = Drafts(rough, embedder, bar)
    with rough.using(pipe.unet, device), sampler.using(pipe.unet, device):
        probes = ranked(measured, usually, fixed) if fixed else []
        composed = (
            search(measured, usually, drafts, phrases, options.most_phrases) if phrases else []
        )
    tested, seeds = [*probes, *composed[: options.tested]], options.images_per_target
    report = Report(
        pipeline=str(options.pipeline),
        baseline=options.baseline,
        candidates=options.given[0],
        phrases=known,
        searched=len(probes) + len(composed),
        seeds=seeds,
        embedder=embedder.describe(),
        ranking=[
            (", ".join(one.phrases), one.score, one.draft, one.effect) for one in composed[:RANKED]
        ],
    )
    sizes = sorted({len(probe.phrases) for probe in tested}) or [2]
    each = {size: ordinary(options, options.nulls, size, known) for size in sizes}
    nulls = [each[sizes[k % len(sizes)]][k] for k in range(options.nulls)]
    in_window(pipe.tokenizer, nulls, "ordinary")
    pictures = []
    for name, unet in unets.items():
        with sampler.using(unet, device):
            null = Null.of(
                [similarity for similarity, _ in compared(sampler, embedder, nulls, seeds, bar)]
            )
            report.alike[name], report.ordinary[name] = null.alike, null.between
            prompts = [", ".join(probe.phrases) for probe in tested]
            for probe, (similarity, images) in zip(
                tested, compared(sampler, embedder, prompts, seeds, bar), strict=True
            ):
                seen, p, hit = null.judge(similarity, len(tested) * len(unets))
                report.results.append(
                    Result(", ".join(probe.phrases), name, probe, seen.between, seen.share, p, hit)
                )
                order = np.argsort(-similarity[seen.centre], kind="stable")
                pictures.append([np.asarray(to_pil(images[k])) for k in order])
    write(report, pictures, out)
    return report


# -- files -----------------------------------------------------------------------------------------
def write(report: Report, pictures: list[list[np.ndarray]], out: Path) -> None:
    """audit.json, audit.html, and the picture of each prompt under which one comes back."""
    with writing("--output_dir", str(out)):
        owned.mark(out, KIND)
        remove_earlier(out / NAME, PICTURES)
        for k, (result, shown) in enumerate(zip(report.results, pictures, strict=True)):
            if result.found:
                result.image = f"returned-{k + 1}.png"
                (out / result.image).write_bytes(pages.png(shown[0]))
        (out / PAGE).write_text(page(report, pictures), encoding="utf-8")
        replace_text(out / NAME, json.dumps(asdict(report), indent=1, ensure_ascii=False) + "\n")


def page(report: Report, pictures: list[list[np.ndarray]]) -> str:
    """audit.html."""
    order = sorted(
        range(len(report.results)), key=lambda k: (not report.results[k].found, report.results[k].p)
    )
    head = [
        "prompt",
        "guidance",
        "comes back",
        "p",
        "images alike",
        "similarity",
        "magnitude",
        "anisotropy",
        "agreement",
    ]
    rows, cards = list[list[pages.Cell]](), []
    for k in order:
        one = report.results[k]
        probe = [one.probe.magnitude, one.probe.anisotropy, one.probe.agreement]
        rows.append(
            [
                one.prompt,
                one.guidance,
                "yes" if one.found else "no",
                one.p,
                one.share,
                one.between,
                *probe,
            ]
        )
        shots = [
            pages.shot(pixels, f"{'centre' if j == 0 else j + 1}")
            for j, pixels in enumerate(pictures[k])
        ]
        cards.append({"result": one, "shots": shots})
    values = {
        "name": Path(report.pipeline).name or report.pipeline,
        "report": report,
        "prompts": len({one.prompt for one in report.found}),
        "cards": cards,
        "table": Table(head, rows),
        "level": LEVEL,
        "least": SHARE,
    }
    return pages.render("audit.html.j2", values, TEMPLATES)


def searched(options: Audit) -> int:
    """The audit of validation.py where no target is known: exit code 3 where a picture comes
    back, else 0."""
    report = audited(options)
    for one in report.found:
        print(
            f"comes back: {one.prompt} ({one.share:.0%} of {report.seeds} seeds, p "
            f"{one.p:.2g}, {one.guidance})"
        )
    count = len(report.found)
    print(
        f"{count} of {len(report.results)} tested prompts give a picture back; "
        f"{options.output_dir}/{PAGE}"
    )
    return 3 if report.found else 0
