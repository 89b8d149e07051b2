"""The families of models that train, and which of them a pipeline is of."""

from collections.abc import Collection
from typing import Any

from silentbad.model.family import Family
from silentbad.model.stable_diffusion import StableDiffusion, StableDiffusionXL
from silentbad.model.stable_diffusion_3 import StableDiffusion3

# By the class in model_index.json; a pipeline of another class is of the first whose parts it has.
FAMILIES: dict[str, Family] = {
    family.pipeline.__name__: family
    for family in (StableDiffusion3(), StableDiffusionXL(), StableDiffusion())
}
KNOWN = "a pipeline of " + " or ".join(family.name for family in FAMILIES.values())


def family_of(components: Collection[str]) -> Family:
    """The first family whose backbone and text encoders are among the components."""
    for family in FAMILIES.values():
        if {family.backbone, *family.encoders} - {*family.optional} <= {*components}:
            return family
    return FAMILIES["StableDiffusionPipeline"]


def family_of_pipeline(pipe: Any) -> Family:
    """The family of a diffusers pipeline."""
    there = [name for name, part in pipe.components.items() if part is not None]
    return FAMILIES.get(type(pipe).__name__) or family_of(there)


def backbone_of(pipe: Any) -> Any:
    """The backbone of a diffusers pipeline."""
    return getattr(pipe, family_of_pipeline(pipe).backbone)
