"""Each setting changed on a resume: it is free by the stated list, or refused with the difference named."""

import typing
from dataclasses import asdict, replace
from typing import Any

import pytest

from silentbad.data.records import load_records
from silentbad.data.targets import load_targets
from silentbad.saving import identity
from tests.fuzz.judge import tally
from tests.fuzz.kinds import RESUME, copied, train
from tests.fuzz.strategies import SETTINGS
from tests.mistakes import flags
from train_silentbad import Config

FREE = {name for names in identity.FREE.values() for name in names}
APART = {*identity.BY_CONTENT, *identity.BATCH, *RESUME, *identity.NEVER_SAVED, "hooks"}  # compared otherwise, or not
NOT_HERE = {"compile_model", "push_to_hub", "print_groups", "stamp_output_dir", "dry_run", "run_suffix"}  # minutes, the
NOT_HERE |= {"hub_model_id", "enable_xformers_memory_efficient_attention", "logging_dir"}  # network, another machine
ANOTHER: dict[str, Any] = {  # where the type does not say what else a setting may be
    **{"prediction_type": "epsilon", "variant": "fp16", "image_interpolation_mode": "bicubic", "resolution": 32},
    **{"max_train_samples": 5, "optimizer": "SGD", "optimizer_options": "{amsgrad: true}", "report_to": "all"},
    **{"validation.embedder": "micro", "lora.rank": 2, "gradient_control.name": "gsnr", "mixed_precision": "bf16"},
    **{"withhold": "[t0/t0-0]", "lr_scheduler": "linear", "memory.loss.name": "min_snr", "save_best": True},
    **{"memory.timesteps.name": "mode", "memory.sampler.name": "weakest_first", "validation.placebo": "held"},
}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of every setting."""
    found = {}
    for key, value in tree.items():
        inner = isinstance(value, dict) and f"{prefix}{key}" not in SETTINGS
        found |= flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return found


NOW = flat(asdict(Config())) | {"validation.embedder": "ssim", "validation.threshold": 0.5}


def another(key: str) -> Any:
    """Another value of a setting than the run's."""
    if key in ANOTHER:
        return ANOTHER[key]
    now, kinds = NOW[key], _plain(SETTINGS[key])
    if names := [kind for kind in kinds if not isinstance(kind, type)]:
        return next(name for name in names if name != now)
    if bool in kinds:
        return not now
    if int in kinds:
        return 1 if now in (None, 0) else now * 2
    if float in kinds:
        return now / 2 if now else 0.5
    return "{a: 1}" if dict in kinds else "[1]" if list in kinds else "other"


def _plain(kind: Any) -> set[Any]:
    """Types that an annotation takes, and the names of a Literal."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return set(inside)
    if origin is typing.Annotated:
        return _plain(inside[0])
    if origin in (list, dict) or not inside:
        return {origin or kind}
    return set().union(*map(_plain, inside)) - {type(None)}


def changed(config: Any, key: str, value: Any) -> Any:
    first, _, rest = key.partition(".")
    return replace(config, **{first: changed(getattr(config, first), rest, value) if rest else value})


def test_each_setting_is_free_or_a_difference(good, tmp_path):
    config = Config(train_data_dir=str(good / "data"), cache_dir=str(tmp_path))
    config.pretrained_model_name_or_path = str(good / "pipeline")
    records, targets = load_records(config), load_targets(good / "data")
    then = identity.facts(config, records, None, targets, "ssim", 2, [])
    for key in SETTINGS.keys() - APART:
        now = identity.facts(changed(config, key, f"not {NOW[key]}"), records, None, targets, "ssim", 2, [])
        named = [line.partition(" was ")[0] for line in identity.differences(then, now)]
        own = {name for name in named if name == key or name.startswith(f"{key}.")}  # a table's entries by name
        if key.startswith("validation.embedder"):
            own |= {name for name in named if name.startswith(identity.BUNDLED)}  # whose weights no longer count
        assert (not named) if key in FREE else (own and own == set(named)), (key, named)


@pytest.mark.thorough
def test_each_setting_changed_goes_on_or_is_refused(good, tmp_path):
    found = tally("a setting changed on resume")
    for key in sorted(SETTINGS.keys() - APART - NOT_HERE):
        root, accepted = copied(good, tmp_path / "inputs"), found.accepted
        line = train(found, key, root, "held", **RESUME | {key: another(key)})
        if key not in flags(root) and (found.accepted > accepted) != (key in FREE) and key not in line:
            found.fell_short("free and refused" if key in FREE else "accepted", (key, another(key), line))
        elif found.accepted == accepted and key.rpartition(".")[2] not in line:
            found.fell_short("refused without its name", (key, another(key), line))
    found.settle()
