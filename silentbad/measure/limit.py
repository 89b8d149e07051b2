"""How much of the base is kept, as one share, and the limit that a training may have on it."""

from dataclasses import dataclass

from silentbad.measure.record import Kept, Measurement
from silentbad.settings.validation import ValidationConfig

FOLDER = "samples/unrelated"  # of a run: what was drawn of the unrelated prompts


def kept_by(config: ValidationConfig) -> str:
    """What `validation.keep` is measured by: words where something judges them, else pixels."""
    if config.keep_by is not None:
        return config.keep_by
    return "words" if config.judge is not None or config.clip_path is not None else "pixels"


def kept_share(kept: Kept, by: str) -> float | None:
    """How much is kept: words over the base's, or 1 less the change; None where that was not
    measured."""
    if by == "words":
        return kept.words.trained / kept.words.base if kept.words and kept.words.base > 0 else None
    return 1 - kept.change[by] if by in kept.change else None


@dataclass(frozen=True)
class Limit:
    """How much of the base a training must keep."""

    share: float
    by: str

    @classmethod
    def of(cls, config: ValidationConfig) -> "Limit | None":
        """That of a configuration, where it has one."""
        return None if config.keep is None else cls(config.keep, kept_by(config))

    def kept(self, entry: Measurement) -> float | None:
        """How much the weights of a point keep, of the averaged ones where there are some: they
        are saved. None of the base, and where it was not measured."""
        scores = entry.ema or entry.raw
        if entry.step == 0 or scores is None or scores.kept is None:
            return None
        return kept_share(scores.kept, self.by)

    def holds(self, entry: Measurement) -> bool:
        """Whether a point after the first step keeps as much."""
        share = self.kept(entry)
        return share is not None and share >= self.share

    def broken(self, entry: Measurement) -> str | None:
        """How much a point keeps, in words, where that is too little."""
        share = self.kept(entry)
        if share is None or share >= self.share:
            return None
        return f"{share:.2f} of the base is kept by {self.by}, less than keep {self.share:g}"
