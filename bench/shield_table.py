"""The tables of bench/results/shield*.json and shield-*.jsonl, for research/shield.md and research/emoji.md."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from bench.published_table import interval, markdown, mean_rate
from bench.recovery_table import grid
from silentbad.measure.intervals import binomial_interval, detection, rate_interval


def mean(values: list[float]) -> str:
    return f"{np.mean(values):.3f}" if values else "-"


def rate(k: int, n: int) -> str:
    """k of n with its interval."""
    low, high = binomial_interval(k, n)
    return f"{k} of {n} [{low:.2f}, {high:.2f}]"


def rate_over_sets(counts: list[tuple[int, int]]) -> str:
    """k of n from the (k, n) of data sets. What lies in one set is not independent, so the interval covers that over
    the sets' rates, and that of independent ones too, since resampling sees few failures as fewer; of one set none."""
    k, n = sum(k for k, _ in counts), sum(n for _, n in counts)
    rates = [k / n for k, n in counts if n]
    if n == len(rates):
        return rate(k, n)  # one in each set
    if len(rates) < 2:
        return f"{k} of {n}"
    low, high = zip(binomial_interval(k, n), rate_interval(rates), strict=True)
    return f"{k} of {n} [{min(low):.2f}, {max(high):.2f}]"


def ranges(numbers: list[int]) -> str:
    """Numbers in ascending order, as 3000-3005, 3010."""
    ends: list[list[int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)


def of_latest_code(results: dict, one_table: Callable[[dict[str, dict], str], str]) -> str:
    """The table of the seeds by the code of the highest seed; a way to search that changes is measured on new ones."""
    code_of = {seed: row.get("code", results.get("commit")) for seed, row in results["seeds"].items()}
    seeds = sorted(code_of, key=int)
    code = code_of[seeds[-1]]
    rows = {seed: results["seeds"][seed] for seed in seeds if code_of[seed] == code}
    return one_table(rows, f"Seeds: {ranges(list(map(int, rows)))} ({len(rows)}). Code: {code}.")


def table(results: dict) -> str:
    """The results in the microworld as Markdown."""
    return of_latest_code(results, one_table) + "\n" + RIVAL


def world_table(results: dict) -> str:
    """The results in another world as Markdown."""
    return of_latest_code(results, one_world_table)


RIVAL = """CopyrightShield (arXiv 2412.01528) reports a detection F1 of 0.665 in version 2 of the paper, and of 0.709 in
version 1, on its own data with a trained model. Those figures are from the paper and were not run here.
"""


def grouped(seeds: dict[str, dict], part: str) -> dict[str, list[dict]]:
    """The rows of these seeds by ratio, or by change."""
    by_name = defaultdict[str, list[dict]](list)
    for row in seeds.values():
        for name, one in row.get(part, {}).items():
            by_name[name].append(one)
    return by_name


def mean_of(rows: list[dict], *keys: str) -> list[str]:
    return [mean([row[key] for row in rows]) for key in keys]


def pictures_found(rows: list[dict]) -> str:
    return rate_over_sets([(row["found"], row["hidden"]) for row in rows])


def by_ratio(
    seeds: dict[str, dict], which: str, columns: tuple[str, ...], cells: Callable[[list[dict]], list[str]]
) -> str:
    """A line a ratio, and false alarms, over these seeds; `cells` are a world's own, under the last `columns` but one
    of the seconds."""
    ratios = grouped(seeds, "ratios")
    honest = ratios.pop("0")
    lines = []
    for ratio, rows in ratios.items():
        f1 = [row["f1"] for row in rows]
        scores = [interval(f1), f"{min(f1):.3f}", *mean_of(rows, "precision", "recall"), pictures_found(rows)]
        records = str(rows[0]["records"])
        lines.append([f"{100 * float(ratio):g} %", records, *scores, *cells(rows), *mean_of(rows, "seconds")])
    head = ("ratio", "records", "F1", "lowest F1", "precision", "recall", *columns, "processor s")
    alarms = rate(sum(row["sets"] > 0 for row in honest), len(honest))
    table = grid(head, lines)
    return f"{which}\n\n{table}\nFalse alarms on data sets without a hidden picture: {alarms}.\n"


def of_composites(rows: list[dict]) -> list[str]:
    """How many elements of composites are reached, and what the rival finds."""
    reached = [row["composite"]["reached"] for row in rows if "composite" in row]
    rivals = [[row["rival"][name] for row in rows] for name in ("whole pictures", "quarters")]
    elements = rate_over_sets([(sum(of_set), len(of_set)) for of_set in reached])
    return [elements, *(cell for rival in rivals for cell in mean_of(rival, "f1"))]


def one_table(seeds: dict[str, dict], which: str) -> str:
    """A line a ratio and a line a change, over these seeds."""
    columns = ("hidden pictures found", "elements of composites at the strict threshold")
    text = by_ratio(seeds, which, (*columns, "near duplicates: whole F1", "quarters F1"), of_composites)
    lines = [
        [name, str(len(rows)), pictures_found(rows), *mean_of(rows, "f1", "precision", "recall")]
        for name, rows in grouped(seeds, "robust").items()
    ]
    head = ("change", "sets of data", "pictures found", "F1", "precision", "recall")
    return f"{text}\n{grid(head, lines)}" if lines else text


def one_world_table(seeds: dict[str, dict], which: str) -> str:
    """A line a ratio, and false alarms, over these seeds."""

    def elements(rows: list[dict]) -> list[str]:
        return [rate_over_sets([(row["elements"][0], row["elements"][1]) for row in rows])]

    return by_ratio(seeds, which, ("pictures found", "elements found"), elements)


ALONE = "clean records alone"  # what a guard's loss is compared with


# -- models ----------------------------------------------------------------------------------------------------
def auc_interval(auc: float, positives: int, negatives: int) -> tuple[float, float]:
    """95 % interval of an area under the ROC curve, which has a width at 1 as well (Newcombe 2006, method 5)."""

    def far(true: float) -> bool:
        spread = true * (1 - true) / (positives * negatives)
        spread *= 1 + ((positives + negatives) / 2 - 1) * ((1 - true) / (2 - true) + true / (1 + true))
        return abs(auc - true) > 1.96 * np.sqrt(spread)

    ends = []
    for outer in (0.0, 1.0):
        inner = auc
        for _ in range(50):
            middle = (outer + inner) / 2
            outer, inner = (middle, inner) if far(middle) else (outer, middle)
        ends.append(inner)
    return ends[0], ends[1]


AUDITED = 3023  # first target of the present audit; what came before was used for choosing it
SCORES: dict[str, Callable[[dict], float]] = {
    "probes": lambda one: one["probe"],
    "p of the images": lambda one: -np.log10(max(one["p"], 1e-300)),
    "similarity of the images": lambda one: one["between"],
}


def audit_table(rows: list[dict]) -> str:
    """The rows of shield-audit.jsonl as Markdown: those of the present audit, where there are some."""
    usual = [row for row in rows if row["steps"] == rows[-1]["steps"]]
    present = [row for row in usual if int(row["target"]) >= AUDITED]
    return audited(present or usual) if usual else "No pipeline is stored yet.\n"


def audited(rows: list[dict]) -> str:
    """The tables of pipelines by one code."""
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("elements", "placebo", "clean")}
    positive, negative = by_kind["elements"], by_kind["placebo"] + by_kind["clean"]
    ordinary = [one for row in rows for one in row["ordinary"]]
    targets = sorted({row["target"] for row in rows}, key=int)
    text = (
        f"Targets: {', '.join(targets)}. Pipelines: {len(positive)} trained on elements, {len(by_kind['placebo'])} on "
        f"placebo data, {len(by_kind['clean'])} on clean data, {rows[0]['steps']} steps each. "
        f"Code: {', '.join(sorted({row['commit'][:7] for row in rows}))}."
    )
    detections = []
    for name, score in SCORES.items():
        above = [score(row["own"]) for row in positive]
        for what, below in (
            ("composed prompts of placebo and clean pipelines", [score(row["own"]) for row in negative]),
            ("ordinary prompts of all pipelines", [score(one) for one in ordinary]),
        ):
            found = detection(above, below)
            if found is None:
                continue
            low, high = auc_interval(found.auc, len(above), len(below))
            cell = "too few negatives"
            if found.tpr is not None:
                cell = rate(round(found.tpr * len(above)), len(above))
            detections.append([name, f"{len(below)} {what}", f"{found.auc:.3f} [{low:.2f}, {high:.2f}]", cell])
    decisions = []
    for kind, of_kind in by_kind.items():
        decisions.append(["composed", kind, rate(sum(row["own"]["found"] for row in of_kind), len(of_kind))])
    decisions.append(["ordinary", "all", rate(sum(one["found"] for one in ordinary), len(ordinary))])
    ranks = []
    for row in positive:
        among_given = sum(phrase.lower() in row["given"] for phrase in row["phrases"])
        cells = [row["target"], f"{among_given} of {len(row['phrases'])}", f"{row['searched']}"]
        cells += [f"{row[key] or 'not searched'}" for key in ("rank", "part")]
        ranks.append([*cells, f"{last(row['strict']):.2f}"])
    ten = sum(row["rank"] is not None and row["rank"] <= 10 for row in positive)
    head = ("target", "hidden phrases among those given", "prompts searched", "rank of the hidden prompt")
    parts = [
        f"{text}\n",
        grid(("score", "negatives", "AUC", "TPR at 1 % FPR"), detections),
        grid(("prompt", "pipelines", "decided to come back"), decisions),
        grid((*head, "first prompt of hidden phrases alone", "strict CIR"), ranks),
        f"The hidden prompt is among the best 10 in {rate(ten, len(positive))} pipelines.\n",
    ]
    return "\n".join(parts)


def last(curve: dict[str, float]) -> float:
    return curve[max(curve, key=int)]


def guard_table(rows: list[dict]) -> str:
    """The rows of shield-guards.jsonl as Markdown: a line for each arm and guard over its targets."""
    if not rows:
        return "No run is stored yet.\n"
    rows = [{"arm": "recommended_leak_free_adamw", **row} for row in rows]
    alone = {(row["arm"], row["target"]): last(row["clean_loss"]) for row in rows if row["kind"] == ALONE}
    by_guard: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for row in rows:
        by_guard[row["arm"], row["kind"]].append(row)
    head = ["arm", "steps", "guard", "targets", "records flagged", "of them elements", "strict CIR, last", "highest"]
    head += ["targets with any image", "clean loss over the clean records alone", "processor s"]
    lines = []
    for (arm, kind), of_guard in by_guard.items():
        loss = [
            last(row["clean_loss"]) / alone[arm, row["target"]] - 1 for row in of_guard if (arm, row["target"]) in alone
        ]
        flagged, right, elements = (
            sum(row.get(key, 0) for row in of_guard) for key in ("flagged", "right", "elements")
        )
        ever = sum(max(row["strict"].values()) > 0 for row in of_guard)
        cells = [f"`{arm}`", f"{of_guard[0]['steps']}", kind, f"{len(of_guard)}", f"{flagged or ''}"]
        cells += [f"{right} of {elements}" if flagged else "", mean_rate([last(row["strict"]) for row in of_guard])]
        cells += [f"{max(max(row['strict'].values()) for row in of_guard):.2f}", rate(ever, len(of_guard))]
        cells += [f"{100 * min(loss):+.1f} to {100 * max(loss):+.1f} %" if loss else ""]
        lines.append([*cells, f"{np.mean([row['seconds'] for row in of_guard]):.0f}"])
    code = ", ".join(sorted({row["commit"][:7] for row in rows}))
    return f"Code: {code}.\n\n{markdown(head, lines)}\n"


def put_back_table(rows: list[dict]) -> str:
    """The rows of put-back.jsonl as Markdown: a line for each arm and choice of weights, over its recovered targets."""
    head = ["arm", "weights", "put back", "strict rate", "targets with any image", "elements"]
    head += ["clean loss over the base's", "of that rise, left"]
    counts, lines = [], []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        tried = [row for row in rows if row["arm"] == arm]
        recovered = [row["models"] for row in tried if "models" in row]
        counts.append(f"`{arm}`: {len(recovered)} of {len(tried)} targets recovered")
        names = recovered[0] if recovered else {}
        clean = {name: np.array([models[name]["clean"] for models in recovered]) for name in names}
        for name in clean:
            of_choice = [models[name] for models in recovered]
            parts = {model["part"] for model in of_choice} - {"as trained", "base", "drawn"}
            cells = [f"`{arm}`", name, ", ".join(f"`{part}`" for part in sorted(parts))]
            cells += [mean_rate([model["recovered"] / model["images"] for model in of_choice])]
            cells += [rate(sum(model["recovered"] > 0 for model in of_choice), len(of_choice))]
            cells += [mean_rate([model["elements"] for model in of_choice])]
            cells += [f"{100 * (clean[name] / clean['base'] - 1).mean():+.1f} %"]
            left = (clean[name] - clean["base"]) / (clean["as trained"] - clean["base"])
            lines.append([*cells, interval(left.tolist())])
    code = ", ".join(sorted({row["commit"][:7] for row in rows}))
    return f"{'; '.join(counts)}. Code: {code}.\n\n{markdown(head, lines)}\n"
