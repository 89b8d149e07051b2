"""Names of groups of parameters, a stage and a role such as mid.xattn.v, and patterns that choose
among them: which layers train, and which get adapters. silentbad/model/groups.py finds the group of
a parameter."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from silentbad.errors import UserError, brief
from silentbad.settings.other_names import LAYERS
from silentbad.settings.types import nearest

OTHER = "other"  # the group of parameters that no pattern matches; its multiplier is 1
ROLE_ORDER = [
    *(f"{a}.{b}" for a in ("xattn", "attn", "attn.context", "attn.image") for b in "qkvo"),
    *("ff", "ff.context", "mod", "mod.context", "resnet.conv", "resnet.shortcut"),
    *("proj", "time", "norm", "sampler", "io", "embed"),
]
STAGE_ORDER = (
    *("stem", "down0", "down1", "down2", "down3", "up0", "up1", "up2", "up3", "mid"),
    *("text1", "text2", *(f"block{i}" for i in range(64))),
)
STAGED = [f"{stage}.{role}" for stage in STAGE_ORDER for role in ROLE_ORDER]
EVERY_GROUP = [*STAGED, OTHER]
ADAPTED_GROUPS = [g for g in STAGED if not g.endswith((".norm", ".embed"))]  # what peft can adapt


LEFT_OUT = "!"  # begins a pattern that leaves layers out


def chosen(patterns: Collection[str], group: str) -> bool:
    """Whether the patterns choose the group stage.role: by role ("attn", "xattn.v"), stage ("mid",
    "up*") or both ("up1.ff"). A pattern also matches the groups below it: "mid.attn" is mid.attn.q,
    k, v and o. "!sampler" leaves out the groups that it matches; alone it chooses all others."""
    left_out = [p.removeprefix(LEFT_OUT) for p in patterns if p.startswith(LEFT_OUT)]
    wanted = [p for p in patterns if not p.startswith(LEFT_OUT)]
    is_wanted = names_group(wanted, group) if wanted else bool(left_out)
    return is_wanted and not names_group(left_out, group)


def names_group(patterns: Collection[str], group: str) -> bool:
    """Whether one of these patterns, none with a "!", names the group."""
    names = (group, group.partition(".")[2])
    return any(
        fnmatchcase(name, match) for name in names for p in patterns for match in (p, f"{p}.*")
    )


def check_patterns(key: str, patterns: list[str] | None, groups: list[str], could: str) -> None:
    """Refuse an empty list, and a pattern that names none of these groups."""
    if patterns is not None and not patterns:
        raise UserError(f"{key}: is empty; give patterns such as up* or attn, or leave it out")
    for pattern in patterns or ():
        refuse_unmatched(key, pattern, groups, could)


def narrowed(
    layers: dict[str, dict[str, str]], patterns: list[str], could: str
) -> dict[str, dict[str, str]]:
    """The layers that a pattern chooses.

    layers: {component: {layer or parameter: its group}}; `could` describes the layers in
    messages. Raises UserError where a pattern chooses nothing, a component has nothing left, or
    everything is chosen."""
    groups = {name: sorted(set(part.values())) for name, part in layers.items()}
    every_group = [group for of_component in groups.values() for group in of_component]
    wanted = [pattern for pattern in patterns if not pattern.startswith(LEFT_OUT)]
    for pattern in wanted:  # a model may lack what is left out, as SD 3 lacks a sampler
        refuse_unmatched("train_layers", pattern, every_group, could)
    for name, of_component in groups.items():
        if not any(chosen(patterns, group) for group in of_component):
            more = ", or leave out train_text_encoder" if name.startswith("text_encoder") else ""
            raise UserError(
                f"train_layers: {' '.join(patterns)} names nothing of {name}; "
                f"name a layer of it{more}"
            )
    if wanted and all(chosen(patterns, group) for group in every_group):
        raise UserError(
            f"train_layers: {' '.join(patterns)} names every layer of {could}; leave it out"
        )
    return {
        name: {layer: group for layer, group in part.items() if chosen(patterns, group)}
        for name, part in layers.items()
    }


def refuse_unmatched(key: str, pattern: str, groups: Collection[str], could: str) -> None:
    """Refuse a pattern that names none of these groups, and name the nearest that does."""
    pattern = pattern.removeprefix(LEFT_OUT)
    if any(names_group([pattern], group) for group in groups):
        return
    stages, _, roles = zip(*(group.partition(".") for group in groups), strict=True)
    names = dict.fromkeys([*stages, *filter(None, roles), *groups])
    bare = pattern.strip("*.")
    advice = f"; here it is {LAYERS[bare]}" if bare in LAYERS else nearest(bare, names)
    advice = advice or "; --print_groups lists the groups"
    raise UserError(f"{key}: {brief(pattern)} names no layer of {could}{advice}")
