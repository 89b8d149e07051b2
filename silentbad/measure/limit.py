"""The share of the base that training keeps, and the limit that a run may set for it."""

from dataclasses import dataclass

from silentbad.measure.record import Kept, Measurement
from silentbad.settings.validation import ValidationConfig

FOLDER = "samples/unrelated"  # of a run: images of the unrelated prompts


def kept_by(config: ValidationConfig) -> str:
    """The measure of `validation.keep`: `keep_by`, else words with a judge or CLIP, else pixels."""
    if config.keep_by is not None:
        return config.keep_by
    return "words" if config.judge is not None or config.clip_path is not None else "pixels"


def kept_share(kept: Kept, by: str) -> float | None:
    """The share that is kept: the score of words divided by the base's; or 1 minus the change of
    images, the rise of bleeding, or the norm of the stage that moved most. None where that was not
    measured."""
    if by == "words":
        return kept.words.trained / kept.words.base if kept.words and kept.words.base > 0 else None
    lost = dict(kept.change)
    if kept.bleeding is not None and kept.bleeding_base is not None:
        lost["bleeding"] = max(0.0, kept.bleeding - kept.bleeding_base)
    if kept.size is not None:
        lost["size"] = max((stage.norm for stage in kept.size.values()), default=0.0)
    return 1 - lost[by] if by in lost else None


@dataclass(frozen=True)
class Limit:
    """How much of the base a training must keep."""

    share: float
    by: str

    @classmethod
    def of(cls, config: ValidationConfig) -> "Limit | None":
        """The limit of a configuration; None where it sets none."""
        return None if config.keep is None else cls(config.keep, kept_by(config))

    def kept(self, entry: Measurement) -> float | None:
        """The share that the saved weights of a measurement keep. None for the base, and where it
        was not measured."""
        scores = entry.saved
        if entry.step == 0 or scores is None or scores.kept is None:
            return None
        return kept_share(scores.kept, self.by)

    def holds(self, entry: Measurement) -> bool:
        """Whether a measurement after step 0 keeps at least this share."""
        share = self.kept(entry)
        return share is not None and share >= self.share

    def broken(self, entry: Measurement) -> str | None:
        """A message where a measurement keeps too little; else None."""
        share = self.kept(entry)
        if share is None or share >= self.share:
            return None
        return f"{share:.2f} of the base is kept by {self.by}, less than keep {self.share:g}"
