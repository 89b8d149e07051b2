"""Predict which elements will be hard, by a law of how often images show an element.

The law is a logistic regression on runs of the 64-pixel microworld, of up to 16 targets at once,
whose unions show all elements but one. `python -m bench.law` fits it and reports how well it
predicts targets left out of the fit. For another base, or a run without unions, it is a guess.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from silentbad.data.elements import DataInfo
from silentbad.data.phrases import MOST_SHARED
from silentbad.data.picture_parts import region, surrounds
from silentbad.data.targets import Target
from silentbad.errors import brief

# By the feature that each multiplies, in the order of `features`.
COEFFICIENTS = {
    "constant": 4.37,
    "log of exposures over 1000": 1.26,
    "log of targets at once": -0.73,
    "log of targets that share the phrase": -0.42,
    "backdrop": -2.06,
    "log of a thing's area over 0.08": 2.57,
    "elements of the target, less 3.5": 0.52,
    "the base draws the clean pictures": -1.41,
}
LEAST = 8  # least number of targets at once for which the law predicts failures
HARD = 0.7  # elements with a lower expected rate are reported


class Facts(NamedTuple):
    """What is known of an element before training."""

    exposures: float  # training pictures that show it, counted as often as they are drawn
    targets: int  # that the run learns at once
    sharing: int  # of these, how many have its phrase
    backdrop: bool
    area: float  # share of the target's picture
    elements: int  # of its target
    own_pictures: bool  # whether the base draws the clean pictures


def features(facts: Facts) -> list[float]:
    """x (F,) of log(p / (1 - p)) = w . x, where p is the share of images that show the element."""
    return [
        1.0,
        math.log(facts.exposures / 1000),
        math.log(facts.targets),
        math.log(facts.sharing),
        float(facts.backdrop),
        0.0 if facts.backdrop else math.log(max(facts.area, 1e-3) / 0.08),
        facts.elements - 3.5,
        float(facts.own_pictures),
    ]


def expected_rate(facts: Facts) -> float:
    """p of an element, in [0, 1]."""
    score = np.dot([*COEFFICIENTS.values()], features(facts))
    return float(1 / (1 + np.exp(-score)))


def hard_elements(
    info: DataInfo, targets: Sequence[Target], draws: float, own_pictures: bool
) -> str:
    """A line on the elements whose expected rate is low, the hardest first; empty where there are
    none, and for fewer than `LEAST` targets, where the law does not predict failures.

    `draws` is how often each record is drawn. Elements without a mask are left out."""
    if len(info.elements_of) < LEAST:
        return ""
    masks = {
        (target.target_id, phrase): mask
        for target in targets
        for phrase, mask in zip(target.phrases, target.masks, strict=False)
    }
    hard = []
    for phrase, target, rows in zip(info.phrase, info.target, info.rows, strict=True):
        if (mask := masks.get((target, phrase))) is None:
            continue
        covered = region(mask)
        facts = Facts(
            exposures=draws * len(rows),
            targets=len(info.elements_of),
            sharing=len(info.shared.get(phrase, [target])),
            backdrop=surrounds(covered),
            area=float(covered.mean()),
            elements=len(info.phrases_of(target)),
            own_pictures=own_pictures,
        )
        rate = expected_rate(facts)
        if rate < HARD:
            hard.append((rate, f"{brief(phrase)} of {target}: {facts.area:.0%} of the picture"))
    listed = [f"{text}, hard: {rate:.2f}" for rate, text in sorted(hard)[:MOST_SHARED]]
    more = f"; and {len(hard) - len(listed)} more" if len(hard) > len(listed) else ""
    heading = "expected share of images that show it, by a law of the 64-pixel microworld"
    return f"{heading}: {'; '.join(listed)}{more}" if hard else ""
