"""The arms of the recovery benchmark: what each adds to the plain fine-tune, as flags of train_silentbad.py."""

import json
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

Flags = dict[str, str]


def part(slot: str, name: str, **options: Any) -> Flags:
    flags = {f"memory.{slot}.name": name}
    return flags | ({f"memory.{slot}.options": json.dumps(options)} if options else {})


def rule(name: str, **more: str) -> Flags:
    return {"gradient_control.name": name, **{f"gradient_control.{k}": v for k, v in more.items()}}


def experiment(name: str, part: str = "") -> str:
    """The place (FILE.py:NAME) of a part in experiments/."""
    return f"experiments/{name}.py:{part or name}"


def guard(scan: Path) -> Flags:
    """The shield's guard, which leaves out the suspects of a scan.json."""
    place = "silentbad_shield.guard:Drop"
    return {"hooks": json.dumps([place]), "hook_options": json.dumps({place: {"scan": str(scan)}})}


def layers(*patterns: str) -> Flags:
    """Only these layers train."""
    return {"train_layers": json.dumps(patterns)}


@cache
def group_sizes() -> dict[str, int]:
    """{group: parameters} of the bundled base's UNet."""
    from safetensors import safe_open

    from silentbad.model.groups import group_of

    file = Path(__file__).parents[1] / "assets/micro-sd/unet/diffusion_pytorch_model.safetensors"
    sizes: Counter[str] = Counter()
    with safe_open(file, "pt") as weights:
        for name in weights.keys():
            sizes[group_of(name)] += prod(weights.get_slice(name).get_shape())
    return dict(sizes)


def half(seed: int) -> Flags:
    """Groups drawn at random, of as many parameters as the decoder: the placebo of `decoder`."""
    import torch

    from silentbad.rng import generator

    sizes = group_sizes()
    most = sum(size for group, size in sizes.items() if group.startswith("up"))
    drawn: list[str] = []
    total = 0
    names = sorted(sizes)
    for i in torch.randperm(len(names), generator=generator("half", seed)).tolist():
        group = names[i]
        if total + sizes[group] <= 1.001 * most:
            drawn.append(group)
            total += sizes[group]
    return layers(*drawn)


PHRASES = {"memory.phrase_memory.enabled": "true"}
PAIRWISE = part("rehearsal", "pairwise")
LEAK_FREE = part("rehearsal", "leak_free")
REGION = part("region", "mask")
JOINT_CAPTIONS = {**part("rehearsal", "joint_captions"), **part("region", "mask", outside=0.1)}
UNCONDITIONAL = {"memory.roles.clean.caption_dropout": "1.0"}
SHRINK = {"optimizer": "experiments.shrinkage.ShrunkAdamW"}
HIGH_NOISE = {**part("timesteps", "snr_mixture"), "memory.timesteps.importance": "false"}
RECOMMENDED_LEAK_FREE = {**REGION, **HIGH_NOISE, **UNCONDITIONAL}
RECOMMENDED = {**PAIRWISE, **RECOMMENDED_LEAK_FREE}

AT_ONCE = {"warmup": "0", "refresh": "1", "max_log_step": "10"}  # for rules that need no measurement
SOON = {"warmup": "5", "refresh": "2", "averaging": "0.9", "max_log_step": "1"}  # for a budget of 300 steps
KV = {"table": "experiments/prior-kv.yaml"}
GSNR = experiment("gsnr")
PRIOR = experiment("prior")
OF_GSNR = json.dumps({"of": GSNR})
AND = experiment("and_distillation", "AndDistillation")
OPEN = {"after": -100, "every": 1, "refresh": 10}  # the gate open from the first step


def kv(name: str, options: dict[str, Any]) -> Flags:
    """A rule on the table for keys and values, without warm-up and with a bound that admits the whole table."""
    return rule(name, options=json.dumps(options), bound="10", **AT_ONCE)


# The most informative arms first.
ARMS: dict[str, Flags] = {
    "plain": {},
    "recommended": RECOMMENDED,
    "original": rule("mean_abs", apply="gradient"),
    "recommended_leak_free": RECOMMENDED_LEAK_FREE,  # recommended without its unions
    "recommended_estimated": {**RECOMMENDED, **part("region", "estimated")},  # on data without masks
    "recommended+shrink": {**RECOMMENDED, **SHRINK},
    "recommended_leak_free+shrink": {**RECOMMENDED_LEAK_FREE, **SHRINK},
    "recommended+gsnr": {**RECOMMENDED, **rule(GSNR, **SOON)},
    "recommended+placebo": {**RECOMMENDED, **rule("placebo", options=OF_GSNR, **SOON)},
    "shrink": SHRINK,
    "unconditional": UNCONDITIONAL,
    "keys_values": kv(PRIOR, KV),
    "keys_values_placebo": kv("placebo", {"of": PRIOR, "options": KV}),
    "prior": rule(PRIOR, **AT_ONCE),
    "prior_gsnr": rule(f"{PRIOR}+{GSNR}", **SOON),
    "placebo": rule("placebo", options=json.dumps({"of": f"{PRIOR}+{GSNR}"}), **SOON),
    "gsnr": rule(GSNR, **SOON),
    "original_as_rate": rule("mean_abs", **SOON),
    "auto_rgn": rule(experiment("auto_rgn"), **SOON),
    "inverse_rms": rule(experiment("inverse_rms"), **SOON),
    "hypergradient": {
        **LEAK_FREE,
        **rule(experiment("hypergradient"), **SOON),
        "hooks": json.dumps([experiment("hypergradient", "Transfer")]),
    },
    "pairwise": {**PAIRWISE, **REGION},
    "leak_free": LEAK_FREE,
    "joint_captions": JOINT_CAPTIONS,
    "pairwise_captions": {**JOINT_CAPTIONS, **part("rehearsal", "pairwise_captions")},
    "region": REGION,
    "region_estimated": part("region", "estimated"),  # on data without masks
    "snr_mixture": HIGH_NOISE,
    "curriculum": {**part("timesteps", experiment("curriculum")), "memory.timesteps.importance": "false"},
    "learning_progress": {"hooks": json.dumps([experiment("learning_progress", "LearningProgress")])},
    "weakest_first": {**part("sampler", "weakest_first"), **PHRASES},
    "and_distillation": {**part("distillation", AND, **OPEN), **PHRASES},
    "and_distillation_gated": {**part("distillation", AND), **PHRASES},  # by default, once all elements are recalled
    "retention": part("retention", experiment("l2_sp", "L2SP")),
    "recommended-unconditional": {**PAIRWISE, **REGION, **HIGH_NOISE},
    "recommended-snr_mixture": {**PAIRWISE, **REGION, **UNCONDITIONAL},
    "recommended_leak_free-region": {**HIGH_NOISE, **UNCONDITIONAL},
    "recommended_leak_free-snr_mixture": {**REGION, **UNCONDITIONAL},
    "region+snr_mixture": {**REGION, **HIGH_NOISE},
    "leak_free+region+snr_mixture": {**LEAK_FREE, **REGION, **HIGH_NOISE},
    "leak_free+snr_mixture": {**LEAK_FREE, **HIGH_NOISE},
}
SMOKE = ("plain", "original", "recommended")

# In the published setting (bench/published.py), where every record is shown once an epoch.
REPLAY = {"memory.sampler.clean_ratio": "0.5"}  # two elements to one clean picture
MOSTLY_ELEMENTS = {"memory.sampler.clean_ratio": "0.1"}  # ten to one
LOWER_NOISE = {
    **part("timesteps", "snr_mixture", centre=3.0, width=1.0, high=0.1),
    "memory.timesteps.importance": "false",
}
LEAK_FREE_STRONG = {**MOSTLY_ELEMENTS, **part("region", "mask", outside=0.05), **LOWER_NOISE, **UNCONDITIONAL}
WARM = {"lr_warmup_steps": "10"}
SPECTRAL = {"gradient_control.spectral": "true"}
CHEAPER = {
    "gradient_control.spectral_except": '["time", "proj"]',
    "optimizer_options": '{"iteration": "polar_express"}',
}
THREE_STEPS = {"optimizer_options": '{"iteration": "newton_schulz_3"}'}
ROW_GROUPS = {"optimizer_options": '{"iteration": "newton_schulz_3", "row_groups": 2}'}
LONGER = {"lr_scheduler": "polynomial", "lr_power": "2"}
DECODER = layers("up*")
# adapters of as many parameters as the decoder has (1.03 times)
ADAPTERS = {"lora.rank": "64", "lora.targets": '["attn", "xattn", "ff", "resnet"]'}
ALL_BUT_ONE = part("rehearsal", "pairwise", elements=None)
MOSTLY_UNIONS = part("rehearsal", "pairwise", elements=None, share=0.75)
STRONG = {**WARM, **ALL_BUT_ONE, **LEAK_FREE_STRONG}
# what keeps the model: its own pictures, and decay to its weights
OWN_PICTURES = {
    "prior_preservation.num_images": "360",
    "prior_preservation.unconditional": "0.33",
    "prior_preservation.guidance_scale": "2.0",
    "prior_preservation.num_inference_steps": "12",
}
KEEPING = {
    **WARM,
    **ALL_BUT_ONE,
    **part("region", "mask", outside=0.05),
    **LOWER_NOISE,
    **SPECTRAL,
    **THREE_STEPS,
    **layers("!sampler"),
    "memory.sampler.clean_ratio": "1.0",
    "memory.roles.clean.timesteps.name": "uniform",
    "memory.roles.clean.loss_weight": "0.5",
    **part("retention", "self_distillation", weight=0.5),
    **OWN_PICTURES,
}
# the vectors of words that only elements' captions have, of a text encoder that else stays as it is
LEARNT_NAMES = {
    "train_text_encoder": "true",
    **layers("!sampler", "!text1.attn", "!text1.ff", "!text1.norm"),
    "hooks": '["silentbad.memory.words:LearntWords"]',
}
KEEPING_BASE = {**KEEPING, "train_batch_size": "32", "decay_to_base": "3.0"}
PUBLISHED: dict[str, Flags] = {
    "plain": {},
    "plain_warm": WARM,
    "clean_weight": {"memory.roles.clean.loss_weight": "0.1"},
    "clean_weight_warm": {**WARM, "memory.roles.clean.loss_weight": "0.1"},  # gradient control alone
    "replay": REPLAY,
    "recommended": {**STRONG, **SPECTRAL},
    "recommended_long": {**STRONG, **SPECTRAL, **LONGER},
    "unions_long": {**STRONG, **SPECTRAL, **LONGER, **MOSTLY_UNIONS},
    "unions_keeping": {**KEEPING_BASE, **LONGER, **MOSTLY_UNIONS},
    "unions_keeping_names": {**KEEPING_BASE, **LONGER, **MOSTLY_UNIONS, **LEARNT_NAMES},
    "recommended_leak_free": {**WARM, **LEAK_FREE_STRONG, **SPECTRAL},  # no picture of two elements
    "recommended_adamw": {**WARM, **PAIRWISE, **LEAK_FREE_STRONG},  # those of targets 2000-2011
    "recommended_leak_free_adamw": {**WARM, **LEAK_FREE_STRONG},
    "recommended_gsnr": {**STRONG, **SPECTRAL, **rule(GSNR, **SOON)},
    "recommended_gsnr_placebo": {**STRONG, **SPECTRAL, **rule("placebo", options=OF_GSNR, **SOON)},
    "spectral": SPECTRAL,
    "recommended_cheaper": {**STRONG, **SPECTRAL, **CHEAPER},
    "recommended_three_steps": {**STRONG, **SPECTRAL, **THREE_STEPS},
    "recommended_row_groups": {**STRONG, **SPECTRAL, **ROW_GROUPS},
    # `recommended` where some of the layers train (bench/layers.py)
    "decoder": {**STRONG, **SPECTRAL, **DECODER},
    "decoder_long": {**STRONG, **SPECTRAL, **LONGER, **DECODER},
    "decoder_unions_long": {**STRONG, **SPECTRAL, **LONGER, **MOSTLY_UNIONS, **DECODER},
    "adamw": STRONG,  # `recommended` without spectral updates
    "decoder_adamw": {**STRONG, **DECODER},
    "decoder_resnets": {**STRONG, **SPECTRAL, **layers("up*.resnet")},
    "up1": {**STRONG, **SPECTRAL, **layers("up1")},
    "all_but_decoder": {**STRONG, **SPECTRAL, **layers("stem", "down*", "mid")},
    "decoder_leak_free": {**WARM, **LEAK_FREE_STRONG, **SPECTRAL, **DECODER},
    "lora": {**STRONG, **SPECTRAL, **ADAPTERS},
    "clean_weight_decoder": {**WARM, "memory.roles.clean.loss_weight": "0.1", **DECODER},
    "recommended_first": {**REPLAY, **RECOMMENDED},  # that of the first edition
}

# Arms of bench/kept.py. `recommended` is that of configs/recommended.yaml; the rows of older benchmarks call
# `recommended` what is `recommended_2026` here.
CLEAN_ALONE = {"memory.roles.element.loss_weight": "0.0", "memory.roles.rehearsal.loss_weight": "0.0"}
OWN_UNIONS = {  # unions that the model draws itself
    **KEEPING_BASE,
    "memory.rehearsal.name": experiment("own_unions"),
    "memory.rehearsal.options": "{}",
    "hooks": json.dumps([experiment("own_unions", "OwnUnions")]),
}
LEFT_OUT = {"prior_preservation.leave_out": "backdrops"}
ALONE = {**KEEPING_BASE, "memory.rehearsal.name": "none", "memory.rehearsal.options": "{}"}  # no two elements together
UNIONS = {
    **KEEPING_BASE,
    **part("rehearsal", "pairwise", elements=None, share=0.75, backdrop=True),
    "decay_to_base": "5.0",
}
KEPT: dict[str, Flags] = {
    "recommended": KEEPING_BASE,
    "recommended_800": KEEPING_BASE,  # steps
    "recommended_no_decay": {**KEEPING_BASE, "decay_to_base": "0.0"},
    # unions always show the backdrop
    "recommended_backdrop": {**KEEPING_BASE, **part("rehearsal", "pairwise", elements=None, backdrop=True)},
    # three of four element pictures are such unions, and weights decay more
    "recommended_unions": UNIONS,
    "recommended_unions_64": {**UNIONS, "train_batch_size": "64"},  # as many steps of 64 pictures
    "recommended_unions_placebo": {**UNIONS, "placebo": "true"},
    "recommended_placebo": {**KEEPING_BASE, "placebo": "true"},  # data that shows no exact element
    "clean_alone": {**KEEPING_BASE, **CLEAN_ALONE},  # as many updates, and no element
    "recommended_2026": {**STRONG, **SPECTRAL},
    "plain": {},
    "recommended_leak_free": ALONE,
    # the base draws no picture under the backdrop's words
    "recommended_leak_free_left_out": {**ALONE, **LEFT_OUT},
    "recommended_own_unions": {
        **OWN_UNIONS,
        "hook_options": json.dumps({experiment("own_unions", "OwnUnions"): {"guidance_scale": 2.0}}),
    },
    "recommended_own_unions_unguided": OWN_UNIONS,
    "recommended_own_unions_left_out": {**OWN_UNIONS, **LEFT_OUT},
    "replay": REPLAY,
    "decoder_2026": {**STRONG, **SPECTRAL, **DECODER},
    "lora_2026": {**STRONG, **SPECTRAL, **ADAPTERS},
    "recommended_2026_adamw": {**WARM, **PAIRWISE, **LEAK_FREE_STRONG},
    # `recommended_2026` and `decoder_2026` without spectral updates (bench/match.py)
    "adamw_2026": STRONG,
    "decoder_adamw_2026": {**STRONG, **DECODER},
    "own_pictures": KEEPING,  # 16 pictures a step, no decay: `recommended` until the targets from 2760
    "own_pictures_long": KEEPING,  # at 800 steps
}
KEPT_AT: dict[str, tuple[float, int]] = {  # learning rate in units of 1e-4, optimizer steps
    **dict.fromkeys(KEPT, (25.0, 400)),
    **dict.fromkeys(("recommended_2026", "decoder_2026", "lora_2026"), (40.0, 200)),
    "recommended_800": (25.0, 800),
    "own_pictures": (20.0, 400),
    "own_pictures_long": (20.0, 800),
    **dict.fromkeys(("recommended_2026_adamw", "adamw_2026", "decoder_adamw_2026"), (16.0, 400)),
    "replay": (8.0, 600),
    "plain": (8.0, 1500),
}
HALVES = {f"half_{seed}": seed for seed in range(4)}  # further arms: `recommended` where a random half trains
UPDATES = ("recommended_cheaper", "recommended_three_steps", "recommended_row_groups")  # bench/spectral.py
LAYERS = ("decoder", "decoder_resnets", "all_but_decoder", *HALVES, "decoder_leak_free", "lora")


def flags_of(arm: str) -> Flags:
    """The flags of an arm of the published setting. A random half is drawn on request, since that needs torch."""
    if arm in HALVES:
        return {**STRONG, **SPECTRAL, **half(HALVES[arm])}
    return PUBLISHED[arm]


def setting_of(flags: Flags) -> str:
    """A: no picture shows two elements, and the trainer is plain. B: memory reinforcement or gradient control without
    such pictures. C: with unions, which show all elements of a target but one, or two. Unions that the model draws
    itself are B: no picture of two elements is read."""
    rehearsal = flags.get("memory.rehearsal.name", "")
    if "own_unions" not in rehearsal and any(word in rehearsal for word in ("pairwise", "union")):
        return "C"
    levers = ("memory.", "gradient_control.", "prior_preservation.", "decay_to_base", "optimizer")
    return "B" if any(key.startswith(levers) for key in flags) else "A"


def said(arm: str) -> str:
    """The name and setting of an arm of bench/published.py as tables write it; a random half has the setting of
    `recommended`."""
    return f"`{arm}` ({setting_of(PUBLISHED.get(arm.partition(' ')[0], STRONG))})"


LONG_RUNS = ("decoder_long", "unions_long", "unions_keeping", "unions_keeping_names", "decoder_unions_long")
# (learning rate in units of 1e-4, optimizer steps, steps between evaluations) of each reported arm
PUBLISHED_AT: dict[str, tuple[float, int, int]] = {
    **dict.fromkeys(LAYERS, (40.0, 200, 200)),
    "up1": (40.0, 400, 200),
    **dict.fromkeys(LONG_RUNS, (40.0, 600, 600)),
    "recommended": (40.0, 200, 20),
    **dict.fromkeys(UPDATES, (40.0, 200, 200)),
    "recommended_long": (40.0, 600, 50),
    "recommended_leak_free": (40.0, 200, 20),
    **dict.fromkeys(("adamw", "decoder_adamw", "recommended_adamw"), (16.0, 400, 40)),
    "recommended_leak_free_adamw": (16.0, 400, 40),
    "replay": (8.0, 600, 100),
    "clean_weight_warm": (16.0, 1500, 125),
    "plain": (8.0, 1500, 250),
}
# reported only on targets of their own
LATER = (
    *("recommended_long", *LONG_RUNS),
    *("up1", "adamw", "decoder_adamw", *UPDATES, *LAYERS),
)

# The learning rate each arm is reported at, in units of 1e-4 (research/protocol.md says what it was chosen by).
RATES: dict[str, float] = dict.fromkeys(ARMS, 8.0)
