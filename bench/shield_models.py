"""The shield on models: `python -m bench.shield --audit` and `python -m bench.shield --guards`.

Audit. Pipelines are trained on elements (the published setting's `recommended` arm), on placebo data (the same flags),
and on the clean records alone. Each is asked for the composed prompt of its target, and for ordinary prompts that the
null does not hold. Of a pipeline trained on elements, the hidden prompt's rank is measured in a search over the phrases
that recur in its captions.

Guards. An arm trains on elements without and with the shield's guard, and on the clean records alone. The guard needs
the scan of the data. It is measured on targets that the unguarded run recovers. Rows of `mask`, `cap` and `project` are
of guards that are gone (at 24e8dae).

Targets: 3010 to 3029 are reported, 3140 to 3143 of the emoji world; below 1000 are for development. A row is a model; a
stored one is not made again.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.arms import LOWER_NOISE as NOISE
from bench.arms import PUBLISHED, PUBLISHED_AT, SPECTRAL, UNCONDITIONAL, WARM, Flags, guard
from bench.published import HELD_OUT, per_phrase, regime
from bench.recovery import BASE, ROOT, WORK, data_set, facts, kept, own_base, scores
from bench.recovery_table import append, stored
from bench.shield_worlds import WORLDS, Setting
from silentbad.measure.embedders import load_embedder
from silentbad.measure.generation import Sampler
from silentbad.model.pipeline import load_pipeline
from silentbad_shield.options import SearchOptions
from silentbad_shield.search.returned import Drafts, Null, compared, drafting
from silentbad_shield.search.search import Probe, probed, ranked, search
from silentbad_shield.search.unknown import PROBED, ordinary, recurring

RATIO = 0.1  # of the published setting
KINDS = ("elements", "placebo", "clean")
CLEAN_FLAGS: Flags = {**WARM, **NOISE, **UNCONDITIONAL}  # the recommended ones that need no element
LEAK_FREE = "recommended_leak_free_adamw"
RECOVERS = 0.25  # strict rate of the unguarded run at some evaluation, for its target to be guarded
MOST = 4  # phrases of a prompt of the search: hidden prompts have three or four


@dataclass
class Plan:
    """What is measured, and on how much."""

    guards: str = ""  # the arm that is guarded; empty: the audit
    factor: float = 40.0  # learning rate in units of 1e-4
    steps: int = 200
    every: int = 0  # steps between evaluations; 0: before and after training
    clean: int = 720  # clean pictures that are trained on
    images: int = 16  # of an evaluation
    seeds: int = 6  # images of a prompt of the audit
    nulls: int = 24  # ordinary prompts that these are compared with
    ordinary: int = 40  # ordinary prompts that are asked beside the composed one
    world: str = "microworld"
    base: Path | None = None  # pipeline that is trained; None: the world's
    embedder: Path | None = None  # detector that judges the images and compares them; None: the world's

    @property
    def setting(self) -> Setting:
        return WORLDS[self.world]

    def flags(self) -> Flags:
        """The flags of base and detector, where they are not the microworld's."""
        given = {BASE: self.base, "validation.embedder_path": self.embedder}
        return own_base(self.world) | {flag: str(path) for flag, path in given.items() if path}


def guards_of(arm: str) -> dict[str, Flags]:
    """{guard, or what it is compared with: flags}. `drop` leaves no element, so it has the clean records' flags."""
    unguarded = PUBLISHED[arm]
    clean = {**CLEAN_FLAGS, **{flag: value for flag, value in SPECTRAL.items() if flag in unguarded}}
    return {"unguarded": unguarded, "clean records alone": clean, "drop": clean}


def plan_of(arm: str) -> Plan:
    """The guards' plan at the arm's own rate and length."""
    rate, steps, _ = PUBLISHED_AT[arm]
    return Plan(guards=arm, factor=rate, steps=steps, every=steps // 4)


# -- data and training -------------------------------------------------------------------------------------
def data_of(kind: str, target: str, plan: Plan) -> Path:
    """The folder of a kind of data. The clean records alone are those of the data with elements."""
    own = ("--placebo",) if kind == "placebo" else ()
    images, nulls = per_phrase(target, plan.clean, RATIO, plan.world), plan.setting.nulls
    data = data_set(target, int(target), images, {}, plan.clean + HELD_OUT, own, nulls, plan.world)
    if kind != "clean":
        return data
    out = data.with_name(f"{data.name}-clean")
    rows = stored(data / "metadata.jsonl")
    rows = [row for row in rows if row["role"] == "clean"]
    for row in rows:
        file = out / row["file_name"]
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.hardlink_to(data / row["file_name"])
    (out / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def trained(name: str, data: Path, target: str, plan: Plan, own: Flags) -> tuple[dict, Path]:
    """(what its evaluations say, its folder, which the caller removes) of one training."""
    out = WORK / f"shield-{os.getpid()}"
    flags = {
        **regime(data, out, plan.factor, int(target), plan.steps),
        "validation.targets": data_of("elements", target, plan) / "targets.jsonl",
        "validation.steps": plan.every,
        "validation.images_per_target": plan.images,
        "validation.guidance_scale": 2.0,
        **plan.flags(),
        **own,
    }
    report, seconds = kept(name, flags)
    curve = {entry["step"]: next(iter(scores(entry)["targets"].values()))["rate"] for entry in report["history"]}
    loss = {entry["step"]: scores(entry)["drift"].get("clean_eps_mse") for entry in report["history"]}
    return {"strict": curve, "clean_loss": loss, "seconds": seconds[str(plan.steps)]}, out


# -- audit -------------------------------------------------------------------------------------------------
def asked(pipeline: Path, phrases: list[str], captions: list[str] | None, plan: Plan) -> dict[str, Any]:
    """What the audit says of a pipeline's composed prompt and of `plan.ordinary` ordinary prompts. With captions, also
    the rank of the composed prompt in a search over what recurs in them."""
    options = SearchOptions(images_per_target=plan.seeds, num_inference_steps=12, guidance_scale=2.0, nulls=plan.nulls)
    device, size = torch.device("cuda" if torch.cuda.is_available() else "cpu"), len(phrases)
    pipe = load_pipeline(str(pipeline), "float32", device)
    detector = str(plan.embedder) if plan.embedder else None
    sampler, embedder = Sampler(pipe.components, options, 0), load_embedder("micro", detector, device)
    said = {"avoid": phrases, "things": plan.setting.things, "places": plan.setting.places}
    null = ordinary(options, max(PROBED, plan.nulls), size, **said)
    fresh = ordinary(replace(options, seed=1), 2 * plan.ordinary + len(null), size, **said)
    tested = [", ".join(phrases), *[one for one in dict.fromkeys(fresh) if one not in null][: plan.ordinary]]
    usual: dict[int, Any] = {}

    def measure(prompts: list[str]) -> Any:
        return probed(sampler, prompts)

    def null_of(count: int) -> Any:
        if count not in usual:
            usual[count] = measure(ordinary(options, PROBED, count, **said))
        return usual[count]

    rough = Sampler(pipe.components, drafting(options), 0)
    drafts = Drafts(rough, embedder)
    with rough.using(pipe.unet, device), sampler.using(pipe.unet, device):
        probes = ranked(measure, null_of, [prompt.split(", ") for prompt in tested])
        ordinarily = compared(sampler, embedder, null[: plan.nulls], plan.seeds)
        against = Null.of([similarity for similarity, _ in ordinarily])
        rows = []
        images = compared(sampler, embedder, tested, plan.seeds)
        for probe, (similarity, _) in zip(probes, images, strict=True):
            seen, p, hit = against.judge(similarity)
            rows.append({"probe": probe.score, "between": seen.between, "p": p, "share": seen.share, "found": hit})
        found = {"phrases": phrases, "own": rows[0], "ordinary": rows[1:]}
        if captions is not None:
            phrases_given = recurring(captions)
            found |= {"given": phrases_given, **rank_of(search(measure, null_of, drafts, phrases_given, MOST), phrases)}
    return found


def rank_of(found: list[Probe], phrases: list[str]) -> dict[str, Any]:
    """The hidden prompt's place among the searched ones, and that of the first prompt of hidden phrases alone; None
    where there is none."""
    hidden, sets = {phrase.lower() for phrase in phrases}, [set(probe.phrases) for probe in found]
    whole = next((k + 1 for k, one in enumerate(sets) if one == hidden), None)
    part = next((k + 1 for k, one in enumerate(sets) if one <= hidden), None)
    return {"searched": len(sets), "rank": whole, "part": part, "best": [sorted(one) for one in sets[:10]]}


def audit_row(kind: str, target: str, plan: Plan) -> dict[str, Any]:
    """A pipeline and its audit."""
    data = data_of(kind, target, plan)
    own = {**CLEAN_FLAGS, **SPECTRAL} if kind == "clean" else PUBLISHED["recommended"]
    history, out = trained(kind, data, target, plan, own)
    (truth,) = stored(data_of("elements", target, plan) / "targets.jsonl")
    captions = [row["text"] for row in stored(data / "metadata.jsonl")]
    start = time.process_time()
    row = asked(out / "pipeline", truth["phrases"], captions if kind == "elements" else None, plan)
    shutil.rmtree(out)
    return {**history, **row, "audit_seconds": time.process_time() - start}


# -- guards ------------------------------------------------------------------------------------------------
def scan_of(data: Path) -> tuple[Path, dict[str, Any]]:
    """(scan.json, its contents) of a data set."""
    out = WORK / "scans" / data.name
    command = [sys.executable, "-m", "silentbad_shield.scan", "--train_data_dir", data, "--output_dir", out]
    code = subprocess.run(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL).returncode
    if code not in (0, 3):
        raise SystemExit(f"error: silentbad_shield.scan ended with exit code {code}")
    return out / "scan.json", json.loads((out / "scan.json").read_text())


def guard_row(kind: str, target: str, plan: Plan) -> dict[str, Any]:
    """A training under a guard, or under what it is compared with, and what the scan had found."""
    data, own = data_of("elements", target, plan), guards_of(plan.guards)[kind]
    row: dict[str, Any] = {"arm": plan.guards, "nulls": "element"}
    if kind == "clean records alone":
        data = data_of("clean", target, plan)
    elif kind != "unguarded":
        file, scan = scan_of(data)
        roles = [row["role"] for row in stored(data / "metadata.jsonl")]
        flagged = [roles[one["index"]] for one in scan["suspects"]]
        row |= {"flagged": len(flagged), "right": flagged.count("element"), "elements": roles.count("element")}
        own = {**own, **guard(file)}
    history, out = trained(kind, data, target, plan, own)
    shutil.rmtree(out)
    return {**row, **history}


def recovers(rows: list[dict], target: str) -> bool:
    """Whether the unguarded run of a target is among these rows and recovers."""
    unguarded = [row for row in rows if (row["kind"], row["target"]) == ("unguarded", target)]
    return any(max(row["strict"].values()) >= RECOVERS for row in unguarded)


# -- running -----------------------------------------------------------------------------------------------
def run(plan: Plan, targets: list[str], file: Path, minutes: float = 1e9) -> list[dict]:
    """Every row that the plan asks for and `file` has not; returns all that it has then."""
    row_of, kinds = (guard_row, tuple(guards_of(plan.guards))) if plan.guards else (audit_row, KINDS)
    started, here = time.monotonic(), facts()
    for target in targets:
        for kind in kinds:
            rows = [row for row in stored(file) if row["steps"] == plan.steps]
            if any((row["kind"], row["target"]) == (kind, target) for row in rows):
                continue
            if plan.guards and kind != "unguarded" and not recovers(rows, target):
                continue
            if time.monotonic() - started > 60 * minutes:
                return stored(file)
            row = {"kind": kind, "target": target, "steps": plan.steps, **plan.flags(), **row_of(kind, target, plan)}
            append(file, [{**row, **here}])
    return stored(file)
