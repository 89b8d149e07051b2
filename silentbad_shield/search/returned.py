"""Whether a prompt's images from several seeds are one picture: how alike they are, against
ordinary prompts.

Legend: S seeds; between: mean similarity of a prompt's images to each other; shares in [0,1]."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from silentbad.measure.embedders import Embedder
from silentbad.measure.generation import Item, Sampler
from silentbad.progress import Bar

LEVEL = 0.01  # adjusted p at most, where a picture comes back
SHARE = 0.5  # and share of the seeds at least
# least similarity within a cluster: about what a redraw of a scene must exceed to count as the
# picture
ALIKE = 0.4
QUANTILE = 0.99  # of similarities under ordinary prompts, which a cluster must reach
STEADY = 0.05  # least deviation of the null, in roots of similarities
SEEDS = 3  # drafts of a prompt
STEPS = 6  # sampling steps of a draft at most


@dataclass
class Returned:
    """What a prompt's images (S) have in common; `centre` is an image's number."""

    between: float
    share: float
    centre: int


def returned(similarity: np.ndarray, alike: float) -> Returned:
    """From similarities (S,S): the cluster is all images `alike` to one image, the one with the
    most."""
    off = ~np.eye(len(similarity), dtype=bool)
    near = (similarity >= alike) & off
    centre = int(np.lexsort((similarity.sum(1), near.sum(1)))[-1])
    return Returned(
        float(similarity[off].mean()), float((1 + near[centre].sum()) / len(similarity)), centre
    )


@dataclass
class Null:
    """What ordinary prompts' images have in common: `between` of each prompt."""

    alike: float
    between: list[float]

    @classmethod
    def of(cls, similarities: Sequence[np.ndarray]) -> "Null":
        """From the similarities (S,S) of each ordinary prompt's images."""
        off = ~np.eye(len(similarities[0]), dtype=bool)
        pairs = np.concatenate([similarity[off] for similarity in similarities])
        return cls(
            max(ALIKE, float(np.quantile(pairs, QUANTILE))),
            [float(similarity[off].mean()) for similarity in similarities],
        )

    def judge(self, similarity: np.ndarray, tests: int = 1) -> tuple[Returned, float, bool]:
        """(what a prompt's images share, p over so many tests, whether a picture returns)."""
        common = returned(similarity, self.alike)
        p = p_value(common.between, self.between, tests)
        return common, p, p <= LEVEL and common.share >= SHARE


def p_value(value: float, null: Sequence[float], tests: int = 1) -> float:
    """The chance that an ordinary prompt's images are as alike, times the number of tests, at most
    1.

    `null` are values of ordinary prompts. Their square roots are taken as normal: Student's
    prediction of one more."""
    return min(1.0, tests * student_tail(deviations(value, null), len(null) - 1))


def deviations(value: float, null: Sequence[float]) -> float:
    """How many standard deviations, in square roots, a similarity lies above the null."""
    roots = np.sqrt(np.maximum(null, 0))
    scale = max(float(roots.std(ddof=1)) * math.sqrt(1 + 1 / len(roots)), STEADY)
    return (math.sqrt(max(value, 0)) - float(roots.mean())) / scale


def student_tail(t: float, degrees: int) -> float:
    """P(T > t) of Student's distribution, by Simpson's rule over the angle atan(t / sqrt(degrees)).

    With t = sqrt(v) tan(u) the density is proportional to cos(u)^(v - 1).
    """
    u = np.linspace(math.atan(t / math.sqrt(degrees)), math.pi / 2, 2001)
    whole = np.linspace(-math.pi / 2, math.pi / 2, 2001)

    def area(at: np.ndarray) -> float:
        y = np.cos(at).clip(0) ** (degrees - 1)
        return float(
            (at[1] - at[0]) / 3 * (y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum())
        )

    return area(u) / area(whole)


def compared(
    sampler: Sampler, embedder: Embedder, prompts: Sequence[str], seeds: int
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """(similarities (S,S), images (S,3,H,W)) of each prompt, all under the same noise."""
    for prompt in Bar(prompts, desc="images"):
        items = [
            Item(cell="search", target=-1, image=k, prompt=prompt, address="search")
            for k in range(seeds)
        ]
        images = torch.stack(list(sampler.map(items, lambda chunk, batch, _: list(batch.cpu()))))
        features = embedder.embed(images)
        yield embedder.similarity(features, features).double().cpu().numpy(), images


def drafting(options: Any) -> Any:
    """The settings of an audit, with as few sampling steps as drafts have."""
    return replace(options, num_inference_steps=min(STEPS, options.num_inference_steps))


class Drafts:
    """How alike a few rough images of two prompts are, or of one prompt and itself. `sampler` takes
    few steps (`drafting`). A prompt is drawn once."""

    def __init__(self, sampler: Sampler, embedder: Embedder):
        self.sampler = sampler
        self.embedder = embedder
        self.features: dict[str, Tensor] = {}

    def __call__(self, pairs: Sequence[tuple[list[str], list[str]]]) -> list[float]:
        """Mean similarity of each pair's images from different seeds."""
        prompts = [(", ".join(a), ", ".join(b)) for a, b in pairs]
        every_prompt = dict.fromkeys(itertools.chain(*prompts))
        self.draw([prompt for prompt in every_prompt if prompt not in self.features])
        off = ~np.eye(SEEDS, dtype=bool)
        means = []
        for a, b in prompts:
            similarity = self.embedder.similarity(self.features[a], self.features[b])
            means.append(float(similarity.double().cpu().numpy()[off].mean()))
        return means

    def draw(self, prompts: Sequence[str]) -> None:
        """Features of new prompts; batches go over all of them, and no image is kept. Drafts choose
        what is tested, so they share no noise with `compared`."""
        items = [
            Item(cell="search", target=-1, image=k, prompt=prompt, address="draft")
            for prompt in prompts
            for k in range(SEEDS)
        ]
        features = self.sampler.map(
            items, lambda chunk, images, _: list(self.embedder.embed(images))
        )
        rows = [row for _, row in zip(Bar(range(len(items)), desc="drafts"), features, strict=True)]
        for k, prompt in enumerate(prompts):
            self.features[prompt] = torch.stack(rows[k * SEEDS : (k + 1) * SEEDS])


class Extrapolated(nn.Module):
    """A UNet that predicts eps0 + factor (eps - eps0) from a base's eps0: guidance from the base to
    the fine-tuned model (2410.03039)."""

    def __init__(self, unet: Any, base: Any, factor: float):
        super().__init__()
        self.unet = unet
        self.base = base
        self.factor = factor
        self.config = unet.config
        self.add_embedding = getattr(unet, "add_embedding", None)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.unet.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.unet.parameters()).device

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        first = self.base(*arguments, **keywords)
        tuned = self.unet(*arguments, **keywords)
        a = first[0]
        b = tuned[0]
        extrapolated = a + self.factor * (b - a)
        return (extrapolated,) if isinstance(tuned, tuple) else type(tuned)(sample=extrapolated)
