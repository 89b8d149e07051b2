"""Which prompts of candidate phrases look memorised: ranked by what single predictions say of them,
then by drafts.

Three probes: the text-conditional magnitude (2407.21720), the alignment of guidance (anisotropy,
2601.20642), and how far predictions from different noise agree, measured against ordinary prompts
of as many phrases. Drafts are images from few seeds and in few sampling steps. Where they are
alike, what counts is the effect of each phrase: how much less alike they are to drafts of the
prompt without it. A phrase that the model ignores has none, and one that it draws in a new way each
time makes the drafts differ. Each phrase costs something, so that the prompt of all elements comes
before its parts and before longer ones.

Legend: N prompts; a prompt is a list of phrases, joined by commas."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from silentbad.measure.generation import Sampler
from silentbad.progress import Bar
from silentbad.rng import noise
from silentbad_shield.scan.words import names_place

# of the schedule: where predictions are compared; picture and noise are both to be seen there
MIDDLE = 0.3
LOW_NOISE = 0.02  # of the schedule: where the alignment of guidance is measured
NOISES = 4  # predictions a prompt
BEAM = 20  # prompts that grow by a phrase
DRAFTED = 0.75  # share of the prompts of a size, by best probes, that get drafts
# prompts of a size whose phrases are left out in turn: those with the drafts most alike
WEIGHED = 40
PRICE = 0.2  # of a phrase, taken off its effect: one that changes little does not raise a prompt
Alike = Callable[[list[tuple[list[str], list[str]]]], list[float]]


def probed(sampler: Sampler, prompts: Sequence[str]) -> np.ndarray:
    """(N,3) text-conditional magnitude, anisotropy and agreement of prompts, from NOISES
    predictions of pure noise.

    Agreement is minus the logarithm of the spread of the predicted pictures over the noises, in
    shares of their own."""
    pipe = sampler.pipe
    probes = []
    side = sampler.side // pipe.vae_scale_factor
    bars = pipe.scheduler.alphas_cumprod
    x = noise(
        (pipe.unet.config.in_channels, side, side), sampler.seed, "probe", 0, list(range(NOISES))
    )
    x = x.to(pipe.unet.device, pipe.unet.dtype)
    size = (sampler.side, sampler.side)

    def predicted(t: int, prompt: str) -> Tensor:
        return sampler.predict_eps(
            x, torch.full((NOISES,), t), sampler.encode([prompt] * NOISES), size
        ).float()

    low, middle = (round(share * len(bars)) for share in (LOW_NOISE, MIDDLE))
    a = float(bars[middle])
    empty = predicted(middle, "")
    blank = predicted(low, "").flatten(1)
    for prompt in Bar(prompts, desc="probes"):
        eps = predicted(middle, prompt)
        x0 = (x.float() - math.sqrt(1 - a) * eps) / math.sqrt(a)
        spread = x0.var(0).mean().sqrt() / x0.std().clamp_min(1e-6)
        guidance = predicted(low, prompt).flatten(1) - blank
        magnitude = (eps - empty).flatten(1).norm(dim=1).mean()
        probes.append(
            [
                float(magnitude),
                float(cosine_similarity(guidance, blank).mean()),
                -float(spread.log()),
            ]
        )
    return np.asarray(probes).reshape(-1, 3)


@dataclass
class Probe:
    """Probes of a prompt in standard deviations of the ordinary prompts', and their sum; `draft`,
    how alike its drafts are; `effect`, the sum over its phrases of how much less alike they are to
    drafts without the phrase, less PRICE."""

    phrases: list[str]
    magnitude: float
    anisotropy: float
    agreement: float
    score: float
    draft: float | None = None
    effect: float | None = None

    @property
    def suspicion(self) -> tuple[int, float]:
        """By effect; then, of those without one, by drafts; then by probes."""
        measured = [value for value in (self.score, self.draft, self.effect) if value is not None]
        return len(measured), measured[-1]


def search(
    measure: Callable[[list[str]], np.ndarray],
    null: Callable[[int], np.ndarray],
    alike: Alike,
    phrases: list[str],
    most: int,
) -> list[Probe]:
    """Prompts of two up to `most` phrases, the most suspicious first.

    measure(prompts) -> probes (N,3); null(size) -> those of ordinary prompts of so many phrases;
    alike(pairs) -> how alike the drafts of two prompts are, of each pair. Of each size the DRAFTED
    share with the best probes has drafts, and the WEIGHED whose drafts are most alike have effects.
    All pairs that fit are probed; the BEAM most suspicious prompts of a size grow by each other
    phrase."""
    probes: list[Probe] = []
    grown = [list(pair) for pair in itertools.combinations(phrases, 2) if fits(pair)]
    for _ in range(2, most + 1):
        ranks = sorted(ranked(measure, null, grown), key=lambda p: -p.score)
        drafted = ranks[: math.ceil(DRAFTED * len(ranks))]
        pairs = [(probe.phrases, probe.phrases) for probe in drafted]
        for probe, draft in zip(drafted, alike(pairs), strict=True):
            probe.draft = draft
        weighed = sorted(drafted, key=lambda p: p.suspicion, reverse=True)[:WEIGHED]
        for probe, effect in zip(weighed, effects(alike, weighed), strict=True):
            probe.effect = effect
        probes += ranks
        best = sorted(ranks, key=lambda p: p.suspicion, reverse=True)[:BEAM]
        longer = {
            frozenset([*p.phrases, other]): None
            for p in best
            for other in phrases
            if other not in p.phrases
        }
        grown = [sorted(prompt, key=phrases.index) for prompt in longer if fits(prompt)]
        if not grown:
            break
    return sorted(probes, key=lambda p: p.suspicion, reverse=True)


def effects(alike: Alike, prompts: list[Probe]) -> list[float]:
    """The effects of prompts with drafts."""
    pairs = [
        (probe.phrases, [p for p in probe.phrases if p != left])
        for probe in prompts
        for left in probe.phrases
    ]
    without = iter(alike(pairs))
    return [
        sum((probe.draft or 0) - next(without) - PRICE for _ in probe.phrases) for probe in prompts
    ]


def fits(phrases: Iterable[str]) -> bool:
    """Whether a prompt names at most one place."""
    return sum(map(names_place, phrases)) <= 1


def ranked(
    measure: Callable[[list[str]], np.ndarray],
    null: Callable[[int], np.ndarray],
    prompts: list[list[str]],
) -> list[Probe]:
    """Probes of prompts, against ordinary ones of as many phrases."""
    probes = []
    for row, phrases in zip(measure([", ".join(p) for p in prompts]), prompts, strict=True):
        usual = null(len(phrases))
        z = (row - usual.mean(0)) / usual.std(0, ddof=1).clip(1e-9)
        probes.append(
            Probe(
                phrases=phrases,
                magnitude=float(z[0]),
                anisotropy=float(z[1]),
                agreement=float(z[2]),
                score=float(z.sum()),
            )
        )
    return probes
