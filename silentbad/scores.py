"""Scores of generations against their targets, as pure functions. docs/metrics.md defines the numbers.

Legend: sim (N,T) or (N,) similarities of N generations to T targets; target_of (N,); a cell is a kind of prompt
(silentbad/generation.py lists them).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silentbad.calibration import of_element
from silentbad.similarity import binomial_interval, bootstrap_interval, mean_of


def recovery(sim: Tensor, target_of: Sequence[int] | Tensor, threshold: float | Tensor) -> dict[str, Tensor]:
    """Per-target scores of the generations, each compared with its own target.

    sim (N,T) or (N,), target_of (N,), threshold number or (T,) -> rate, mean, max, p75, p90, p95, count (T,).
    `rate` is the share of a target's images at or above the threshold; a target without images gets nan.
    """
    sim = torch.as_tensor(sim, dtype=torch.float64)
    target_of = torch.as_tensor(target_of, dtype=torch.long)
    T = sim.shape[1] if sim.ndim == 2 else int(target_of.max()) + 1
    own = sim.gather(1, target_of[:, None])[:, 0] if sim.ndim == 2 else sim
    threshold = torch.as_tensor(threshold, dtype=torch.float64).expand(T)

    def of_target(j: int) -> list[float]:
        x = own[target_of == j]
        if len(x) == 0:
            return [float("nan")] * 6 + [0.0]
        quantiles = torch.quantile(x, torch.tensor([0.75, 0.90, 0.95], dtype=x.dtype)).tolist()
        rate = (x >= threshold[j]).double().mean().item()
        return [rate, x.mean().item(), x.max().item(), *quantiles, len(x)]

    table = torch.tensor([of_target(j) for j in range(T)], dtype=torch.float64).reshape(T, 7)
    return dict(zip(("rate", "mean", "max", "p75", "p90", "p95", "count"), table.T, strict=True))


def length_scores(rows: list[dict[str, Any]], base: dict[str, float]) -> dict[str, float]:
    """Cosines of the images of one sampling length: to the target they are asked for (`original`) and to the others
    (`others`), by the run's embedder; to their own caption (`own`) and those of other targets (`shuffled`), by CLIP;
    `difference` is `original` less the base model's at the same length and noise. What cannot be had is absent.

    rows: {target, sims (T), clip (T) or None} an image.
    """
    pairs = {
        "original": mean_of(r["sims"][r["target"]] for r in rows),
        "others": mean_of(s for r in rows for j, s in enumerate(r["sims"]) if j != r["target"]),
        "own": mean_of(r["clip"][r["target"]] for r in rows if r["clip"]),
        "shuffled": mean_of(s for r in rows for j, s in enumerate(r["clip"] or []) if j != r["target"]),
    }
    scores = {name: value for name, value in pairs.items() if value is not None}
    return scores | ({"difference": scores["original"] - base["original"]} if base else {})


def cell_scores(
    rows: list[dict[str, Any]], ids: list[str], threshold: float, element_threshold: dict[str, Any]
) -> dict[str, Any]:
    """Scores of a cell: per target, and over targets with the rate's interval (one target: over images)."""
    present = sorted({r["target"] for r in rows})
    sims, target_of = [r["sim"] for r in rows], [present.index(r["target"]) for r in rows]
    per = recovery(torch.tensor(sims, dtype=torch.float64), target_of, threshold)
    targets: dict[str, Any] = {}
    for k, j in enumerate(present):
        mine = [r for r in rows if r["target"] == j]
        columns = zip(*(r["elements"] for r in mine), strict=True)  # (K, images)
        parts = [[s for s in column if s is not None] for column in columns]
        targets[ids[j]] = {
            **{name: per[name][k].item() for name in ("rate", "mean", "max", "p75", "p90", "p95")},
            "sims": [r["sim"] for r in mine], "magnitude": mean_of(r["magnitude"] for r in mine),
            "elements": [
                {"mean": mean_of(x), "rate": mean_of(s >= of_element(element_threshold, j, i) for s in x)}
                for i, x in enumerate(parts)
            ],
        }  # fmt: skip
    rates, hits = per["rate"].numpy(), sum(s >= threshold for s in sims)
    interval = bootstrap_interval(rates) if len(present) > 1 else binomial_interval(hits, len(sims))
    if len(present) > 1 and hits in (0, len(sims)):  # nothing to resample: what so many targets can tell
        interval = binomial_interval(len(present) * (hits > 0), len(present))
    p75, p90, p95 = np.quantile(sims, [0.75, 0.90, 0.95]).tolist()
    return {
        "cir": float(rates.mean()), "interval": list(interval), "images": len(sims), "above": hits,
        "recovered": float((per["max"] >= threshold).double().mean()), "mean": float(np.mean(sims)),
        "p75": p75, "p90": p90, "p95": p95, "max": max(sims),
        "element_rate": mean_of(e["rate"] for t in targets.values() for e in t["elements"]),
        **{name: mean_of(r.get(name) for r in rows) for name in ("magnitude", "clip_own", "clip_shuffled")},
        "targets": targets,
    }  # fmt: skip
