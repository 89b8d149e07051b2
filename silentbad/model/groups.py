"""Groups of parameters: stage and role of each in the UNets of SD 1, 2 and XL, the transformer of
SD 3 and the text encoders, full or LoRA."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from silentbad.settings.layers import OTHER, ROLE_ORDER

logger = logging.getLogger(__name__)

MMDIT = (
    # of SD 3; UNets have transformer_blocks deeper down
    r"^(?:(?:module|_orig_mod|base_model|model|transformer)\.)*"
)
BLOCK = MMDIT + r"transformer_blocks\.\d+\."

STAGES = [  # first match wins
    (MMDIT + r"transformer_blocks\.(\d+)\.", r"block\1"),
    (MMDIT + r"(?:pos_embed|time_text_embed|context_embedder|norm_out|proj_out)\.", "stem"),
    (r"(?:^|\.)text_encoder\.", "text1"),
    (r"(?:^|\.)text_encoder_2\.", "text2"),
    (r"(?:^|\.)down_blocks\.(\d+)\.", r"down\1"),
    (r"(?:^|\.)mid_block\.", "mid"),
    (r"(?:^|\.)up_blocks\.(\d+)\.", r"up\1"),
    (r"(?:^|\.)(?:conv_in|conv_norm_out|conv_out|time_embedding|add_embedding)\.", "stem"),
]

# in SD 3 image and text tokens attend jointly, each by weights of their own; 3.5 also has image
# alone
ROLES = [
    (BLOCK + r"attn\.to_([qkv])[._]", r"attn.\1"),
    (BLOCK + r"attn\.to_out[._]", "attn.o"),
    (BLOCK + r"attn\.add_([qkv])_proj\.", r"attn.context.\1"),
    (BLOCK + r"attn\.to_add_out\.", "attn.context.o"),
    (BLOCK + r"attn2\.to_([qkv])[._]", r"attn.image.\1"),
    (BLOCK + r"attn2\.to_out[._]", "attn.image.o"),
    (BLOCK + r"ff_context\.", "ff.context"),
    (BLOCK + r"norm1\.|" + MMDIT + r"norm_out\.", "mod"),
    (BLOCK + r"norm1_context\.", "mod.context"),
    (BLOCK + r"attn2?\.norm_", "norm"),
    (MMDIT + r"time_text_embed\.", "time"),
    (MMDIT + r"context_embedder\.", "proj"),
    (MMDIT + r"(?:pos_embed|proj_out)\.", "io"),
    (r"\.attn2\.(?:processor\.)?to_([qkv])[._]", r"xattn.\1"),
    (r"\.attn2\.(?:processor\.)?to_out[._]", "xattn.o"),
    (r"\.attn1\.(?:processor\.)?to_([qkv])[._]", r"attn.\1"),
    (r"\.attn1\.(?:processor\.)?to_out[._]", "attn.o"),
    (r"\.self_attn\.([qkv])_proj\.", r"attn.\1"),
    (r"\.self_attn\.out_proj\.", "attn.o"),
    (r"\.(?:ff|mlp)\.", "ff"),
    (r"\.resnets\.\d+\.conv[12]\.", "resnet.conv"),
    (r"\.resnets\.\d+\.conv_shortcut\.", "resnet.shortcut"),
    (r"\.proj_(?:in|out)\.|\.text_projection\.", "proj"),
    (r"\.time_emb_proj\.|(?:^|\.)(?:time|add)_embedding\.", "time"),
    (r"\.norm\d?\.|(?:^|\.)conv_norm_out\.|\.(?:layer_norm[12]|final_layer_norm)\.", "norm"),
    (r"\.(?:down|up)samplers\.", "sampler"),
    (r"(?:^|\.)conv_(?:in|out)\.", "io"),
    (r"\.(?:token|position)_embedding\.", "embed"),
]

APART = ("norm", "io", "embed")  # roles that join no other


@dataclass(frozen=True)
class Groups:
    """members[group][tensor name] = parameter; every trainable parameter in exactly one group."""

    members: dict[str, dict[str, nn.Parameter]]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[list[nn.Parameter]]:
        return (list(tensors.values()) for tensors in self.members.values())

    @property
    def names(self) -> list[str]:
        """Groups in the table's order."""
        return list(self.members)

    @property
    def sizes(self) -> list[int]:
        """Parameters of each group, in that order."""
        return [sum(p.numel() for p in group) for group in self]

    @property
    def parameters(self) -> dict[str, int]:
        """Name of each group: how many parameters it has."""
        return dict(zip(self.names, self.sizes, strict=True))


def group_of(name: str) -> str:
    """Group of a parameter by its module path, LoRA and wrapper prefixes allowed: "mid.xattn.v"."""
    stage, role = (
        next((m.expand(to) for pattern, to in patterns if (m := re.search(pattern, name))), None)
        for patterns in (STAGES, ROLES)
    )
    return f"{stage}.{role}" if stage and role else OTHER


def stage_of(name: str) -> str:
    """Stage of a parameter by its module path: "mid"."""
    return group_of(name).partition(".")[0]


def group_parameters(model: nn.Module, min_size: int | None = None) -> Groups:
    """Partition the trainable parameters by stage and role.

    A group under `min_size` joins the nearest role of its stage, norm, io and embed aside.
    `min_size` is 0.05 M, or 1/2000 of the trainable parameters where that is less (LoRA and small
    models would collapse into one group a stage)."""
    members: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members.setdefault(group_of(name), {})[name] = parameter
    if OTHER in members:
        logger.warning(
            "%d tensors of unknown name keep multiplier 1: %s",
            len(members[OTHER]),
            [*members[OTHER]][:3],
        )
    size = {group: sum(p.numel() for p in tensors.values()) for group, tensors in members.items()}
    least = min(50_000, sum(size.values()) // 2000) if min_size is None else min_size
    for group in sorted(size, key=lambda group: (size[group], group)):
        host = _neighbour(group, members)
        if size[group] < least and host:
            members[host] = {**members.pop(group), **members[host]}
            size[host] += size[group]
    groups = Groups({group: members[group] for group in sorted(members, key=_position)})
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert (
        sum(len(g) for g in groups) == len(trainable)
        and set().union(*groups.members.values()) == trainable
    )
    return groups


def _neighbour(group: str, members: dict) -> str | None:
    """Group of the same stage with the nearest role, the earlier on a tie, if any."""
    stage, _, role = group.partition(".")
    if role not in ROLE_ORDER or role in APART:
        return None
    near = [r for r in ROLE_ORDER if f"{stage}.{r}" in members and r not in (*APART, role)]
    at = ROLE_ORDER.index(role)
    return f"{stage}.{min(near, key=lambda r: abs(ROLE_ORDER.index(r) - at))}" if near else None


def _position(group: str) -> tuple[int, int, int]:
    """Sort key: stem, down, mid, up, block, text, each by number and role; other last."""
    stage, _, role = group.partition(".")
    kind = stage.rstrip("0123456789")
    place = ["stem", "down", "mid", "up", "block", "text", OTHER].index(kind)
    return place, int(stage[len(kind) :] or 0), ROLE_ORDER.index(role) if role else 0
