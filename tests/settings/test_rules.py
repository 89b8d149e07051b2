"""The tables of what needs, excludes and stands for what: each row refuses, and the documents show it."""

import dataclasses
import re
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest

from silentbad.errors import UserError
from silentbad.settings.__main__ import document
from silentbad.settings.check import merged
from silentbad.settings.optimizer_facts import OptimizerFacts
from silentbad.settings.rules import (
    ALIASES,
    FACTS,
    INCOMPATIBLE,
    OF_MEASUREMENT,
    Condition,
    Facts,
    check_measurement,
    check_rules,
    fields_of,
    meanings,
    pairs,
    put,
    value_of,
)
from silentbad.settings.train import TrainConfig
from silentbad.settings.types import problem

ROOT = Path(__file__).parents[2]
ADAMW = OptimizerFacts("AdamW", dict.fromkeys(("betas", "eps", "weight_decay")), False, "")
SD3 = SimpleNamespace(name="Stable Diffusion 3", flow=True, backbone="transformer", attention="joint attention")
KEYS = {key for key, _ in fields_of(TrainConfig)}
NEEDS = [(key, field) for key, field in fields_of(TrainConfig) if field.metadata.get("needs")]
OTHERS = (True, False, 3, 0.25, "x", "nothing", ["x"], [3], {"x": 1.0}, "constant_with_warmup")


def hint_of(key):
    cls = TrainConfig
    for part in key.split("."):
        cls = typing.get_type_hints(cls, include_extras=True)[part]
    return cls


def set_to(config, key, text):
    """Put the value that a condition writes as `text`."""
    values = {"true": True, "false": False, "null": None, "0": 0, "0.0": 0.0}
    put(config, key, values.get(text, text))


def differing(key):
    """A value of a key that its type takes and that is not its default."""
    default = value_of(TrainConfig(), key)
    literals = [value for one in (hint_of(key), *typing.get_args(hint_of(key))) for value in typing.get_args(one)]
    return next(v for v in (*OTHERS, *literals) if v != default and problem(v, hint_of(key)) is None)


FACT = {  # how each fact comes about
    "LAYOUT": lambda config, facts: put(config, "train_data_dir", "nowhere"),
    "HUB": lambda config, facts: put(config, "pretrained_model_name_or_path", "someone/some"),
    "AVERAGING": lambda config, facts: setattr(facts, "optimizer", dataclasses.replace(ADAMW, averages=True)),
    "AVERAGE_UNMEASURED": lambda config, facts: (
        put(config, "use_ema", True),
        put(config, "validation.weights", "raw"),
    ),
    "WHOLE_TENSORS": lambda config, facts: put(config, "optimizer", "Adafactor"),
    "FSDP": lambda config, facts: setattr(facts, "sharded", True),
    "LOSS_SCALE": lambda config, facts: put(config, "mixed_precision", "fp16"),
    "FLOW": lambda config, facts: setattr(facts, "family", SD3),
    "TRANSFORMER": lambda config, facts: setattr(facts, "family", SD3),
    "NO_REDRAWS": lambda config, facts: setattr(facts, "redraws", False),
    "NO_MASKS": lambda config, facts: setattr(facts, "masks", False),
    "NO_BASE": lambda config, facts: setattr(facts, "base", False),
    "NO_ELEMENTS": lambda config, facts: (
        put(config, "validation.threshold", 0.5),
        setattr(facts, "masks", False),
    ),
    "NO_NULLS": lambda config, facts: setattr(facts, "redraws", False),
}


def bring_about(text, config, facts):
    condition = Condition.of(text)
    if condition.sign == "fact":
        FACT[condition.key](config, facts)
    elif condition.sign == "=":
        set_to(config, condition.key, condition.values[0])
    else:
        values = {
            "validation.embedder": "ssim",
            "optimizer": "SGD",
        }
        put(config, condition.key, values.get(condition.key) or differing(condition.key))
    assert condition.holds(config, TrainConfig(), facts), text


def brought_about(first, second):
    """(configuration, facts) in which both conditions hold, the second first."""
    config = TrainConfig()
    facts = Facts(optimizer=ADAMW)
    bring_about(second, config, facts)
    if Condition.of(first).holds(config, TrainConfig(), facts) is not True:
        check_rules(config, {}, facts)
        check_measurement(config.validation, facts, "--")
    bring_about(first, config, facts)
    return config, facts


def name(row):
    return f"{row[0]} beside {row[1]}"


@pytest.mark.parametrize("row", [*pairs(INCOMPATIBLE)], ids=name)
def test_each_row_refuses_its_pair_and_neither_alone(row, monkeypatch):
    first, second, why = row
    monkeypatch.setattr("silentbad.settings.rules.INCOMPATIBLE", {second: {first: why}})
    monkeypatch.setattr("silentbad.settings.rules.OF_MEASUREMENT", {})
    monkeypatch.setattr("silentbad.settings.rules.check_needs", lambda *_: None)
    config, facts = brought_about(first, second)
    with pytest.raises(UserError) as refused:
        check_rules(config, {Condition.of(first).about: "a.yaml:3"}, facts)
    assert re.match(rf"{re.escape(Condition.of(first).about)} \(a\.yaml:3\): \S", str(refused.value))
    assert "{" not in str(refused.value)
    check_rules(TrainConfig(), {}, Facts(optimizer=ADAMW))


@pytest.mark.parametrize("row", [*pairs(OF_MEASUREMENT)], ids=name)
def test_each_row_of_a_measurement_refuses_its_pair_and_neither_alone(row, monkeypatch):
    first, second, why = row
    monkeypatch.setattr("silentbad.settings.rules.INCOMPATIBLE", {})
    monkeypatch.setattr("silentbad.settings.rules.OF_MEASUREMENT", {second: {first: why}})
    monkeypatch.setattr("silentbad.settings.rules.check_needs", lambda *_: None)
    config, facts = brought_about(first, second)
    key = Condition.of(first).about.removeprefix("validation.")
    with pytest.raises(UserError, match=rf"^--{key}: [^{{]+$"):
        check_measurement(config.validation, facts, "--")
    check_measurement(TrainConfig().validation, Facts(), "--")


@pytest.mark.parametrize(("key", "field"), NEEDS, ids=[key for key, _ in NEEDS])
def test_each_option_that_needs_another_is_refused_without_it(key, field, monkeypatch):
    monkeypatch.setattr("silentbad.settings.rules.INCOMPATIBLE", {})
    config = TrainConfig(pretrained_model_name_or_path=str(ROOT), train_data_dir=str(ROOT))
    facts = Facts(optimizer=OptimizerFacts("Plain", {}, False, ""))
    if key == "validation.unrelated":
        put(config, "validation.controls", "never")
    if key in ("validation.prompts", "validation.judge", "validation.keep"):
        put(config, "validation.unrelated_images", 0)
    if key == "num_train_epochs":
        put(config, "max_train_steps", 5)
    if key == "tracker_project_name":
        put(config, "report_to", "none")
    put(config, key, differing(key))
    with pytest.raises(
        UserError,
        match=rf"^{re.escape(key)} \(command line\): needs .*, without which it has no effect",
    ):
        check_rules(config, {"validation.controls": "a.yaml:1", key: "command line"}, facts)


def test_what_every_condition_names_is_there():
    texts = [text for table in (INCOMPATIBLE, OF_MEASUREMENT) for row in pairs(table) for text in row[:2]]
    texts += [text for _, field in NEEDS for text in field.metadata["needs"].split(" or ")]
    for condition in map(Condition.of, texts):
        named = condition.key in KEYS or condition.key.startswith("memory.distillation.options.")
        assert named or condition.key in FACTS, condition
    assert {c.key for c in map(Condition.of, texts) if c.sign == "fact"} == FACTS.keys()


@pytest.mark.parametrize("flag", ALIASES)
def test_a_flag_is_put_into_the_settings_that_it_stands_for(flag):
    config = TrainConfig()
    put(config, flag, differing(flag))
    check_rules(config, {}, Facts(optimizer=ADAMW))
    assert merged(config) != config
    assert {(flag, key, value_of(merged(config), key)) for key in ALIASES[flag]} == {*meanings(config)}
    check_rules(merged(config), {}, Facts(optimizer=ADAMW))  # as config.yaml of a run holds both
    for key in ALIASES[flag]:
        config = merged(config)
        put(config, key, differing(key) if key in KEYS else 0.5)
        with pytest.raises(UserError, match=rf"^{flag}: means {key}=.*, which is set to .*; set one of them"):
            check_rules(config, {}, Facts(optimizer=ADAMW))


def test_the_document_shows_the_tables():
    assert document() == (ROOT / "research" / "settings.md").read_text(encoding="utf-8")
