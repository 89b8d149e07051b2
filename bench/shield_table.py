"""The table of bench/results/shield.json, for its own page and for docs/shield.md."""

from collections import defaultdict

import numpy as np


def mean(values: list[float]) -> str:
    return f"{np.mean(values):.3f}" if values else "-"


def table(results: dict) -> str:
    """The results as Markdown."""
    seeds = results["seeds"]
    ratios: dict[str, list[dict]] = defaultdict(list)
    robust: dict[str, list[dict]] = defaultdict(list)
    for row in seeds.values():
        for ratio, one in row["ratios"].items():
            ratios[ratio].append(one)
        for name, one in row.get("robust", {}).items():
            robust[name].append(one)
    lines = [f"Seeds: {', '.join(seeds)} ({len(seeds)} of the 100 from 3000 to 3099). Code: {results['commit']}.", ""]
    lines += [
        "| ratio | records | F1 | lowest F1 | precision | recall | hidden pictures found | elements of composites"
    ]
    lines[-1] += " at the strict threshold | near duplicates: whole F1 | quarters F1 | processor s |"
    lines += ["|---" * 11 + "|"]
    for ratio, rows in ratios.items():
        if ratio == "0":
            continue
        reached = [r for one in rows for r in one.get("composite", {}).get("reached", [])]
        cells = [
            f"{100 * float(ratio):g} %",
            f"{rows[0]['records']}",
            mean([r["f1"] for r in rows]),
            f"{min(r['f1'] for r in rows):.3f}",
            mean([r["precision"] for r in rows]),
            mean([r["recall"] for r in rows]),
            f"{sum(r['found'] for r in rows)} of {sum(r['hidden'] for r in rows)}",
            f"{sum(reached)} of {len(reached)}",
            *(mean([r["rival"][name]["f1"] for r in rows]) for name in ("whole pictures", "quarters")),
            mean([r["seconds"] for r in rows]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    honest = ratios["0"]
    alarms = sum(r["sets"] > 0 for r in honest)
    lines += ["", f"Data sets without a hidden picture: {alarms} false alarms in {len(honest)}.", ""]
    lines += ["| change | sets of data | pictures found | F1 | precision | recall |", "|---" * 6 + "|"]
    for name, rows in robust.items():
        cells = [name, str(len(rows)), f"{sum(r['found'] for r in rows)} of {sum(r['hidden'] for r in rows)}"]
        cells += [mean([r[key] for r in rows]) for key in ("f1", "precision", "recall")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "CopyrightShield (arXiv 2412.01528) reports a detection F1 of 0.665 in version 2 of the paper, and of 0.709 in",
        "version 1, on its own data with a trained model. Those figures are from the paper and were not run here.",
    ]
    return "\n".join(lines) + "\n"
