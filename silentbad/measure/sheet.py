"""sample_prompts.json and PRIOR as typed data: the pictures of plain prompts that a run has drawn.

`prompts.py` draws them, and before training `loop/prior.py`; a report reads only these files, so it
needs no model."""

from dataclasses import dataclass, field
from pathlib import Path

from silentbad.settings.types import validated_file

NAME = "sample_prompts.json"  # in the run folder
PRIOR = "samples/prior/prompts.json"  # of some of the base's own pictures, beside them


@dataclass
class Drawn:
    """A picture, and the prompt it was drawn from."""

    prompt: str
    file: str


@dataclass
class Draw:
    """The pictures of one step."""

    step: int
    images: list[Drawn] = field(default_factory=list)


def read_draws(folder: Path) -> list[Draw]:
    """What was drawn so far, by step. Raises UserError where the file has another form."""
    file = folder / NAME
    return validated_file(file, list[Draw]) if file.is_file() else []
