"""report.html of a run folder: one file, no network, no script; and a comparison of several runs.

    python -m silentbad.report RUN
    python -m silentbad.report compare RUN RUN ... [--out compare.html]

Reads what the folder holds and says what is not there: validation.json, metrics.jsonl, multipliers.json,
phrase_memory.json, timesteps.json, config.yaml, run.json and the pictures of samples/ (docs/metrics.md).
"""

import base64
import io
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from silentbad.errors import UserError, say
from silentbad.plots import Series, finite, heatmap, histogram, html_table, line_chart, number
from silentbad.similarity import bootstrap_interval, kinds

WEIGHTS = {"raw": "raw weights", "ema": "averaged weights"}
CELLS = {
    "composed": "composed prompt",
    "shuffled": "phrases in another order",
    "others": "phrases of another target",
    "unrelated": "unrelated caption",
}
STYLE = """
:root{--ink:#1b1f24;--soft:#57606a;--line:#d8dee4;--page:#f6f7f9;--card:#fff;--bad:#b3261e;--good:#1a7f37}
@media (prefers-color-scheme:dark){
:root{--ink:#e6e9ed;--soft:#9aa4b0;--line:#3a424c;--page:#15181c;--card:#1f242a;--bad:#ff8a80;
  --good:#6fdd8b}
}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.5rem;margin:.2em 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2em 0 .6em;border-bottom:1px solid var(--line);padding-bottom:.25em}
h3{font-size:1rem;margin:1em 0 .4em}
p{margin:.4em 0;overflow-wrap:anywhere}
.soft,figcaption span{color:var(--soft);font-size:.9em}
.verdict{font-size:1.15rem;padding:.7em 1em;border-left:6px solid var(--good);background:var(--card);
  border-radius:6px}
.verdict.yes{border-color:var(--bad)}
.verdict b{color:var(--good)}
.verdict.yes b{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin:12px 0}
.tile{background:var(--card);border-radius:6px;padding:.6em .8em}
.tile b{display:block;font-size:1.25rem}
.tile span{color:var(--soft);font-size:.85em}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:14px;
  align-items:start}
figure{margin:0}
.cards{display:grid;gap:14px}
.cards>*{min-width:0}
.chart,.card{background:var(--card);border-radius:6px;padding:12px}
.chart>svg{width:100%;max-width:600px;display:block;margin:0 auto}
svg text{font-size:12.5px;fill:var(--soft)}
svg .grid{stroke:var(--line)}
svg .axis{stroke:var(--soft)}
svg .mark{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:5 3}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.85em;margin:.4em 0 0}
.swatch{width:22px;height:8px;margin-right:5px}
.legend i{display:inline-block;width:14px;height:11px;margin-right:4px;border:1px solid var(--line)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9em;min-width:60%}
th,td{padding:.3em .7em;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
td.n,th.n{text-align:right}
td.n{font-variant-numeric:tabular-nums}
thead th{color:var(--soft);font-weight:600}
th[scope=row]{font-weight:500;white-space:normal;min-width:9em}
thead th{vertical-align:bottom}
details{margin:.5em 0}
summary{cursor:pointer;color:var(--soft);font-size:.9em}
pre{overflow-x:auto;font-size:.8em;background:var(--card);padding:10px;border-radius:6px}
.strip{display:flex;gap:8px;overflow-x:auto;padding-bottom:6px}
.strip figure{flex:0 0 auto;width:104px;font-size:.78em}
.strip img{width:104px;height:104px;object-fit:contain;image-rendering:pixelated;background:#8884;
  border-radius:4px;display:block}
.strip .hit img{outline:3px solid var(--bad);outline-offset:-3px}
.strip figcaption{line-height:1.3;margin-top:3px}
.side{display:flex;gap:12px;align-items:flex-start}
.side>.strip{min-width:0}
.rows{min-width:0;flex:1}
.side .first{border-right:1px solid var(--line);padding-right:12px;flex:0 0 auto}
@media (max-width:560px){
.side{display:block}
.side .first{border:0;padding:0 0 8px;width:auto}
body{font-size:14px}
svg text{font-size:14px}
th,td{padding:.3em .45em}
}
@media print{
:root{--ink:#000;--soft:#444;--line:#bbb;--page:#fff;--card:#fff}
body{font-size:10.5pt}
main{max-width:none;padding:0}
.chart,.card,.tile,.verdict{border:1px solid #ccc;break-inside:avoid}
.strip{flex-wrap:wrap;overflow:visible;gap:5px}
.strip figure,.strip img{width:78px}.strip img{height:78px}
.scroll,pre{overflow:visible}
h2{break-after:avoid}
summary{display:none}
details:not([open]){display:none}
pre{white-space:pre-wrap}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""


# -- reading -----------------------------------------------------------------------------------------------
class Run:
    """What a run folder holds; a file that is missing or unreadable leaves its part empty and a note."""

    def __init__(self, folder: str | Path):
        self.folder, self.notes = Path(folder), []
        if not self.folder.is_dir():
            raise UserError(f"report: no folder '{folder}'; give the output_dir of a run")
        self.name = self.folder.resolve().name
        self.validation = self._json("validation.json", dict)
        self.multipliers = self._json("multipliers.json", list)
        self.phrases = self._json("phrase_memory.json", (list, dict))
        self.timesteps = self._json("timesteps.json", dict)
        self.facts = self._json("run.json", dict)
        self.config = self._text("config.yaml")
        self.metrics = self._metrics()
        if not (self.validation or self.metrics):
            raise UserError(
                f"report: '{folder}' holds neither validation.json nor metrics.jsonl; is it a run folder?"
            )
        self.history = (self.validation or {}).get("history", [])

    def _text(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""

    def _json(self, name: str, kind) -> Any:
        text = self._text(name)
        try:
            value = json.loads(text) if text else None
        except ValueError as error:
            self.notes.append(f"{name} could not be read: {error}")
            return None
        if value is not None and not isinstance(value, kind):
            self.notes.append(f"{name} has another form than docs/metrics.md states")
            return None
        return value

    def _metrics(self) -> list[dict]:
        rows, broken = [], 0
        for line in self._text("metrics.jsonl").splitlines():
            try:
                row = json.loads(line)
                rows.append({**row, "step": int(row["step"])})
            except (ValueError, KeyError, TypeError):
                broken += bool(line.strip())
        if broken:
            self.notes.append(f"metrics.jsonl: {broken} unreadable lines left out")
        return rows

    def picture(self, name: Any, alt: str, side: int = 208) -> str:
        """An <img> with the picture inside; empty where the folder has no such file."""
        file = (self.folder / str(name)).resolve()
        if name is None or not file.is_relative_to(self.folder.resolve()) or not file.is_file():
            return ""
        try:
            image = Image.open(file).convert("RGB")
        except OSError:
            return ""
        small = max(image.size) <= 96
        image.thumbnail((side, side))
        stream = io.BytesIO()
        image.save(stream, "PNG", optimize=True) if small else image.save(stream, "JPEG", quality=86)
        data = base64.b64encode(stream.getvalue()).decode()
        return f'<img src="data:image/{"png" if small else "jpeg"};base64,{data}" alt="{escape(alt)}">'

    def curve(self, tag: str, key: str) -> tuple[list, list]:
        """(steps, values) of one score of one kind of weights; the base model's point opens both."""
        points = [(e["step"], e.get(tag) or e.get("raw")) for e in self.history if tag in e or e["step"] == 0]
        points = [(step, scores) for step, scores in points if scores]
        return [step for step, _ in points], [scores.get(key) for _, scores in points]

    def tags(self) -> list[str]:
        return kinds(self.history)

    def last(self, tag: str | None = None) -> dict:
        """The latest scores of these weights, or of the first kind there is."""
        for kind in [tag] if tag else self.tags():
            for entry in reversed(self.history):
                if kind in entry:
                    return entry[kind]
        return {}


# -- parts of the page -------------------------------------------------------------------------------------
def verdict_line(run: Run) -> str:
    found = run.validation["verdict"]
    kind = "yes" if found["recovers"] else "no"
    word = "Recovers" if found["recovers"] else "No recovery"
    rest = (
        f"{found['images_above']} of {found['images']} composed images at the last measurement stand above "
        f"the threshold of {number(run.validation['threshold']['value'])}"
    )
    if "expected_by_chance" in found:
        rest += (
            f"; the threshold's false-positive rate alone would give {number(found['expected_by_chance'])} "
            f"(p {'< 0.0001' if found['p_value'] < 1e-4 else '= ' + number(found['p_value'])})"
        )
    return f'<p class="verdict {kind}"><b>{word}.</b> {escape(rest)}.</p>'


def tiles(run: Run) -> str:
    threshold, last = run.validation["threshold"], run.last()
    total = next((r for r in run.validation["summary"] if r["target"] == "all targets"), {})
    low, high = last["interval"]
    tag = (run.tags() or ["raw"])[0]
    own = [r for r in run.validation["summary"] if r["weights"] == tag and r["target"] != "all targets"]
    a, b = bootstrap_interval([r["aurc"] for r in own])
    spread = f", {number(a)} to {number(b)} at 95 % over targets" if b > a else ""
    items = [
        (number(last["cir"]), f"recovered images (CIR), {number(low)} to {number(high)} at 95 %"),
        (f"{number(last['recovered'])}", "share of targets with a recovered image"),
        (number(last["max"]), f"best similarity, mean {number(last['mean'])}"),
        (number(total.get("aurc")), "area under the recovery curve (AURC)" + spread),
        (number(total.get("first_step")), "mean first step of recovery, over the targets that have one"),
        (number(last.get("element_rate")), "elements recovered in the composed images"),
    ]
    made = "".join(f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in items)
    how = [
        f"Similarity: {run.validation['embedder']}.",
        f"Threshold {number(threshold['value'])}, {threshold['source']}",
    ]
    if threshold.get("n"):
        how.append(
            f"({threshold['n']} null images, false-positive rate asked "
            f"{number(threshold['false_positive_rate'])}, "
            f"attained {number(threshold['attained'])}; 95 % interval of the threshold "
            f"{bound(threshold['low'], 'below')} to {bound(threshold['high'], 'above')}"
            + (
                f"; rate on targets held out of the calibration {number(threshold['held_out'])}"
                if threshold.get("held_out") is not None
                else ""
            )
            + ")"
        )
    return f'<div class="tiles">{made}</div><p class="soft">{escape(" ".join(how))}.</p>'


def bound(value: float | None, side: str) -> str:
    return number(value) if value is not None else f"unbounded {side}"


def strips(run: Run) -> str:
    """Each kept target beside its best and median generations by step, and its elements."""
    threshold, parts = run.validation["threshold"]["value"], []
    tag = (run.tags() or ["raw"])[0]
    entries = [e for e in run.history if tag in e]
    if len(entries) > 10:
        entries = [entries[round(i * (len(entries) - 1) / 9)] for i in range(10)]
    for target in run.validation["targets"]:
        ident, rows = target["target_id"], []
        for kind in ("best", "median"):
            made = []
            for entry in entries:
                shown = entry[tag]["targets"].get(ident, {}).get(kind)
                image = shown and run.picture(shown["file"], f"{kind} generation at step {entry['step']}")
                if image:
                    hit = ' class="hit"' if shown["sim"] >= threshold else ""
                    caption = (
                        f"{entry['label'] or 'step ' + str(entry['step'])}, {kind} {number(shown['sim'])}"
                    )
                    made.append(f"<figure{hit}>{image}<figcaption>{escape(caption)}</figcaption></figure>")
            rows += [f'<div class="strip">{"".join(made)}</div>'] if made else []
        if not rows:
            continue
        picture = run.picture(target["image"], f"target {ident}")
        first = (
            f'<div class="strip first"><figure>{picture}<figcaption><b>target</b></figcaption></figure></div>'
        )
        parts.append(
            f'<div class="card"><h3>{escape(ident)}</h3><p class="soft">{escape(target["prompt"])}</p>'
            f'<div class="side">{first}<div class="rows">{"".join(rows)}</div></div>'
            f"{elements(run, target, tag)}</div>"
        )
    if not parts:
        return ""
    return section(
        "Targets and generations",
        '<p class="soft">Framed: at or above the threshold. '
        f'Same noise at every step; {WEIGHTS[tag]}.</p><div class="cards">{"".join(parts)}</div>',
    )


def elements(run: Run, target: dict, tag: str) -> str:
    scores = run.last(tag).get("targets", {}).get(target["target_id"], {}).get("elements", [])
    made = []
    for k, (phrase, file) in enumerate(zip(target["phrases"], target["elements"] or [], strict=False)):
        image, score = run.picture(file, f"element {phrase}"), scores[k] if k < len(scores) else {}
        if image:
            text = f"{phrase}: rate {number(score.get('rate'))}, mean {number(score.get('mean'))}"
            made.append(f"<figure>{image}<figcaption>{escape(text)}</figcaption></figure>")
    return (
        f'<p class="soft">elements, similarity inside their masks</p><div class="strip">{"".join(made)}</div>'
        if made
        else ""
    )


def curves(run: Run) -> str:
    threshold = run.validation["threshold"]["value"]
    rate, sims, parts = [], [], []
    for tag in run.tags():
        steps, values = run.curve(tag, "cir")
        intervals = [i or (None, None) for i in run.curve(tag, "interval")[1]]
        rate.append(Series(WEIGHTS[tag], steps, values, [i[0] for i in intervals], [i[1] for i in intervals]))
        for key, name in (("mean", "mean"), ("p95", "95th percentile"), ("max", "best")):
            sims.append(Series(f"{name}, {WEIGHTS[tag]}", *run.curve(tag, key)))
        parts.append(Series(WEIGHTS[tag], *run.curve(tag, "element_rate")))
    tag = (run.tags() or ["raw"])[0]
    points = [e for e in run.history if tag in e]
    own = [
        Series(
            t["target_id"],
            [e["step"] for e in points],
            [e[tag]["targets"].get(t["target_id"], {}).get("rate") for e in points],
        )
        for t in run.validation["targets"][:8]
    ]
    charts = [
        line_chart(
            rate,
            "Recovery rate (CIR)",
            y_range=(0, 1),
            note="share of composed images above the threshold; "
            "band: 95 % over targets (binomial where all agree), or over the images of a single target",
        ),
        line_chart(sims, "Similarity to the target", marks=[("threshold", threshold)]),
        line_chart(own, "Recovery rate by target", y_range=(0, 1)) if len(own) > 1 else "",
        line_chart(parts, "Elements recovered", y_range=(0, 1), note="mean rate over elements with a mask"),
    ]
    return section("Recovery curves", grid(charts))


def controls(run: Run) -> str:
    """Every kind of prompt, and the base model, under the same noise."""
    rows = []
    for entry in run.history:
        if entry["step"] == 0 and "raw" in entry:
            rows.append([entry["label"] or "base model", *cell_row(entry["raw"])])
    for tag in run.tags():
        cells = next((e[tag]["cells"] for e in reversed(run.history) if "cells" in e.get(tag, {})), {})
        for name, scores in cells.items():
            rows.append([f"{cell_name(name)}, {WEIGHTS[tag]}", *cell_row(scores)])
    if not rows:
        return ""
    head = ["prompt", "rate", "95 % from", "to", "mean", "best", "elements", "text magnitude"]
    quadrants = run.last().get("quadrants") or {}
    text = ""
    if any(quadrants.values()):
        text = (
            "Elements by whether they come in at least half of the images: "
            f"{quadrants['both']} alone and composed, {quadrants['alone_only']} alone only "
            f"(composition fails), {quadrants['composed_only']} composed only, "
            f"{quadrants['neither']} neither."
        )
    return section("Controls", html_table(head, rows) + f'<p class="soft">{escape(text)}</p>')


def cell_name(name: str) -> str:
    return CELLS.get(name) or (f"phrase {int(name[7:]) + 1} alone" if name.startswith("phrase-") else name)


def cell_row(scores: dict) -> list:
    low, high = scores.get("interval") or (None, None)
    return [
        scores.get("cir"),
        low,
        high,
        *(scores.get(k) for k in ("mean", "max", "element_rate", "magnitude")),
    ]


def summary(run: Run) -> str:
    names = {
        "weights": "weights",
        "target": "target",
        "rate": "rate",
        "mean": "mean",
        "max": "best",
        "aurc": "AURC",
        "first_step": "first step",
        "first_epoch": "epoch",
        "half_step": "half step",
        "restricted": "restricted",
    }
    rows = [
        [
            ("never" if r.get(k) is None and k in ("first_step", "first_epoch", "half_step") else r.get(k))
            for k in names
        ]
        for r in run.validation["summary"]
    ]
    last = run.history[-1] if run.history else {}
    share = number(100 * last.get("share", 0))
    cost = f"Validation took {number(run.validation['seconds'])} s, {share} % of the run's time."
    return section(
        "Targets in numbers", html_table(list(names.values()), rows) + f'<p class="soft">{cost}</p>'
    )


def drift(run: Run) -> str:
    charts = []
    for key, title, note in (
        (
            "clean_eps_mse",
            "Held-out clean error",
            "eps-MSE at fixed noise and timesteps; up: clean prompts suffer",
        ),
        ("ssim", "Clean generations against the base model's (SSIM)", "same noise; 1: unchanged"),
        ("lpips", "Clean generations against the base model's (LPIPS)", "same noise; 0: unchanged"),
        ("clip_score", "CLIPScore of clean generations", ""),
    ):
        series = []
        for tag in run.tags():
            steps, values = run.curve(tag, "drift")
            series.append(Series(WEIGHTS[tag], steps, [(v or {}).get(key) for v in values]))
        charts.append(line_chart(series, title, note=note))
    return section("Drift on clean prompts", grid(charts))


def training(run: Run) -> str:
    """Losses first, then every other meter of metrics.jsonl."""
    rows = [row for row in run.metrics if not row.get("validation")]
    keys = [
        k
        for k in dict.fromkeys(k for row in rows for k in row)
        if k not in ("step", "epoch", "time")
        and not k.startswith(("val/", "val_ema/"))
        and any(finite(row.get(k)) for row in rows)
    ]
    losses = [k for k in keys if "loss" in k.rsplit("/", 1)[-1]]
    series = [Series(k, *thinned(rows, k)) for k in losses]
    main = [line_chart(series, "Training loss")]
    main += [
        line_chart([Series(k, *thinned(rows, k))], k) for k in keys if k in ("lr", "grad_norm", "train/lr")
    ]
    rest = [k for k in keys if k not in losses and k not in ("lr", "grad_norm", "train/lr")]
    moving = [k for k in rest if len({row.get(k) for row in rows if finite(row.get(k))}) > 1][:24]
    more = grid([line_chart([Series(k, *thinned(rows, k))], k) for k in moving])
    more = f"<details><summary>{len(moving)} other meters</summary>{more}</details>" if more else ""
    return section("Training", grid(main) + more)


def thinned(rows: list[dict], key: str, most: int = 240) -> tuple[list, list]:
    """(steps, values): means of neighbouring rows where there are too many to draw."""
    points = [(row["step"], row[key]) for row in rows if finite(row.get(key))]
    width = -(-len(points) // most)
    blocks = [points[i : i + width] for i in range(0, len(points), max(width, 1))]
    return [b[-1][0] for b in blocks], [sum(y for _, y in b) / len(b) for b in blocks]


def control(run: Run) -> str:
    entries = [
        e for e in run.multipliers or [] if isinstance(e, dict) and isinstance(e.get("multipliers"), dict)
    ]
    names = list(dict.fromkeys(name for e in entries for name in e["multipliers"]))
    values = [[e["multipliers"].get(name) for e in entries] for name in names]
    chart = heatmap(
        names,
        [e["step"] for e in entries],
        values,
        "Learning-rate multiplier by group and step",
        "blue: slower than the base rate, orange: faster",
    )
    return section("Gradient control", chart)


def memory(run: Run) -> str:
    """Phrase strengths and the timesteps drawn."""
    entries = run.phrases if isinstance(run.phrases, list) else (run.phrases or {}).get("history", [])
    labels = run.phrases.get("phrases") if isinstance(run.phrases, dict) else None
    entries = [e for e in entries if isinstance(e, dict) and isinstance(e.get("rho"), (list, dict))]

    def named(rho) -> dict:
        if isinstance(rho, dict):
            return rho
        return {
            str(labels[i]) if labels and i < len(labels) else f"element {i + 1}": v for i, v in enumerate(rho)
        }

    tables = [named(e["rho"]) for e in entries]
    names = list(dict.fromkeys(name for table in tables for name in table))
    steps = [e["step"] for e in entries]
    series = [Series(n, steps, [table.get(n) for table in tables]) for n in names]
    if len(series) > 8:  # the weakest set the speed: show them and the mean
        weakest = sorted(series, key=lambda s: s.ys[-1] if finite(s.ys[-1]) else 1.0)[:6]
        mean = [
            sum(v for v in t.values() if finite(v)) / max(1, sum(map(finite, t.values()))) for t in tables
        ]
        series = [Series(f"mean of {len(names)}", steps, mean), *weakest]
    drawn = run.timesteps or {}
    charts = [
        line_chart(
            series, "Strength of phrases (rho)", note="1 - error / error before training, on fixed probes"
        ),
        histogram(drawn.get("edges", []), drawn.get("counts", []), "Timesteps trained on", "timestep"),
    ]
    return section("Memory", grid(charts))


def provenance(run: Run) -> str:
    facts = [
        [k, json.dumps(v) if isinstance(v, (dict, list)) else "" if v is None else str(v)]
        for k, v in (run.facts or {}).items()
    ]
    parts = [html_table(["fact", "value"], facts)] if facts else []
    validation = (run.validation or {}).get("config")
    for title, text in (
        ("configuration", run.config),
        ("validation", json.dumps(validation, indent=1) if validation else ""),
    ):
        if text:
            parts.append(f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>")
    notes = "".join(f"<p>{escape(note)}</p>" for note in run.notes)
    return section("Configuration and provenance", "".join(parts) + notes)


def section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def grid(charts: Iterable[str]) -> str:
    charts = [chart for chart in charts if chart]
    return f'<div class="grid">{"".join(charts)}</div>' if charts else ""


def page(title: str, body: str) -> str:
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


# -- pages -------------------------------------------------------------------------------------------------
def render(folder: str | Path) -> str:
    """The report of a run folder as HTML."""
    run = Run(folder)
    parts = [f"<h1>{escape(run.name)}</h1>"]
    if run.validation:
        parts += [verdict_line(run), tiles(run), strips(run), curves(run), controls(run), summary(run)]
    else:
        parts.append('<p class="verdict">No validation in this folder: recovery was not measured.</p>')
    parts += [memory(run), control(run), drift(run) if run.validation else "", training(run), provenance(run)]
    return page(f"{run.name} – recovery report", "".join(parts))


def write(folder: str | Path) -> Path:
    """report.html into the run folder."""
    file = Path(folder) / "report.html"
    file.write_text(render(folder), encoding="utf-8")
    return file


def text_table(rows: list[dict]) -> str:
    """The summary rows of a validation as lines for a terminal."""
    lines = [
        f"{'weights':8}{'target':24}{'rate':>8}{'mean':>8}{'max':>8}{'AURC':>8}{'first step':>12}{'epoch':>8}"
    ]
    for r in rows:
        values = "".join(f"{r[k]:8.3f}" for k in ("rate", "mean", "max", "aurc"))
        first, epoch = (number(r[k]) if r[k] is not None else "never" for k in ("first_step", "first_epoch"))
        lines.append(f"{r['weights']:8}{r['target'][:23]:24}{values}{first:>12}{epoch:>8}")
    return "\n".join(lines)


def paired(a: Run, b: Run, key: str, tag: str) -> tuple[float | None, float | None, float | None, int]:
    """Mean over shared targets of b minus a in a summary column, its 95 % interval, number of targets."""

    def column(run: Run) -> dict:
        rows = (run.validation or {}).get("summary", [])
        return {r["target"]: r[key] for r in rows if r["weights"] == tag and r["target"] != "all targets"}

    first, second = column(a), column(b)
    gaps = [second[t] - first[t] for t in first if t in second and finite(first[t]) and finite(second[t])]
    if not gaps:
        return None, None, None, 0
    low, high = bootstrap_interval(gaps)
    return sum(gaps) / len(gaps), low if finite(low) else None, high if finite(high) else None, len(gaps)


def compare(folders: list[str | Path]) -> tuple[str, list[list]]:
    """Runs side by side, the first as reference: HTML, and its table of paired differences."""
    runs = [Run(folder) for folder in folders]
    names = [run.name if [r.name for r in runs].count(run.name) == 1 else str(run.folder) for run in runs]
    table, gaps, charts = [], [], Curves([], [], [])
    for name, run in zip(names, runs, strict=True):
        for tag in run.tags():
            label = f"{name}, {WEIGHTS[tag]}"
            table.append([label, *_last_scores(run, tag)])
            charts.add(label, run, tag)
            for key in ("rate", "aurc", "restricted", "mean") if run is not runs[0] else ():
                gaps.append([f"{label} - {names[0]}", key, *paired(runs[0], run, key, tag)])
    head = ["run", "rate", "95 % from", "to", "AURC", "restricted", "mean", "best", "elements", "clean eps-MSE"]
    gap_head = ["difference", "score", "mean", "95 % from", "to", "targets"]
    soft = '<p class="soft">Over shared targets, percentile bootstrap; an interval needs two targets at least.</p>'
    body = [
        f"<h1>{len(runs)} runs</h1>",
        _unlike(runs),
        section("Scores", html_table(head, table)),
        section("Paired differences", html_table(gap_head, gaps) + soft) if gaps else "",
        section("Curves", charts.html()),
    ]
    return page("comparison", "".join(body)), gaps


def _last_scores(run: Run, tag: str) -> list:
    """A run's row of the comparison, after its name."""
    rows = run.validation["summary"]
    total = next(row for row in rows if row["target"] == "all targets" and row["weights"] == tag)
    last = run.last(tag)
    scores = [last["cir"], *last["interval"], total["aurc"], total["restricted"], last["mean"], last["max"]]
    return [*scores, last.get("element_rate"), (last.get("drift") or {}).get("clean_eps_mse")]


@dataclass
class Curves:
    """Curves of several runs: recovery rate, mean similarity, held-out clean error."""

    rates: list[Series]
    sims: list[Series]
    costs: list[Series]

    def add(self, label: str, run: Run, tag: str) -> None:
        steps, values = run.curve(tag, "cir")
        low, high = zip(*(i or (None, None) for i in run.curve(tag, "interval")[1]), strict=True)
        self.rates.append(Series(label, steps, values, low, high))
        self.sims.append(Series(label, *run.curve(tag, "mean")))
        steps, values = run.curve(tag, "drift")
        self.costs.append(Series(label, steps, [(v or {}).get("clean_eps_mse") for v in values]))

    def html(self) -> str:
        return grid([
            line_chart(self.rates, "Recovery rate (CIR)", y_range=(0, 1)),
            line_chart(self.sims, "Mean similarity"),
            line_chart(self.costs, "Held-out clean error"),
        ])  # fmt: skip


def _unlike(runs: list[Run]) -> str:
    """A warning where the runs' rates cannot be compared."""
    measured = [run.validation for run in runs if run.validation]
    notes = {f"{v['embedder']} at {number(v['threshold']['value'])}" for v in measured}
    if len(notes) < 2:
        return ""
    told = "; ".join(sorted(notes))
    warning = f"The runs used different embedders or thresholds, so rates are not comparable: {told}"
    return f'<p class="verdict yes">{escape(warning)}.</p>'


def main(arguments: list[str] | None = None) -> int:
    import argparse

    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m silentbad.report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="[compare] RUN", help="output_dir of a run")
    parser.add_argument(
        "--out", type=Path, default=None, help="file to write; report.html in RUN, or compare.html"
    )
    given = parser.parse_args(arguments)
    try:
        if given.runs[0] == "compare":
            if len(given.runs) < 3:
                raise UserError("compare: give at least two run folders")
            text, gaps = compare(given.runs[1:])
            file = given.out or Path("compare.html")
            for row in gaps:
                print("  ".join(number(v) if not isinstance(v, str) else v for v in row))
        else:
            if len(given.runs) > 1:
                raise UserError("report: one run folder, or `compare` before several")
            text, file = render(given.runs[0]), given.out or Path(given.runs[0]) / "report.html"
        file.write_text(text, encoding="utf-8")
    except UserError as error:
        say(error)
        return 2
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
