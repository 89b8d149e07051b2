"""Configuration: merged in order, strict, one line an error; nothing is loaded for any of it."""

import dataclasses
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from silentbad.errors import UserError
from silentbad.settings.check import check
from silentbad.settings.layers import EVERY_GROUP, check_patterns
from silentbad.settings.optimizer_facts import OptimizerFacts, check_optimizer
from silentbad.settings.other_names import LAYERS
from silentbad.settings.reader import Loader, dumped, key_tree, parse, to_dict, with_source
from silentbad.settings.startup import training
from silentbad.settings.train import TrainConfig
from silentbad.settings.types import check_options, plain_types
from tests.training import checked
from train_silentbad import Config, main


def numbers(node, prefix=""):
    """Dotted keys of every number in a configuration."""
    for key, kind in node.items():
        if isinstance(kind, dict):
            yield from numbers(kind, f"{prefix}{key}.")
        elif {int, float} & plain_types(kind):
            yield f"{prefix}{key}"


NESTED = [*numbers(key_tree(Config))]
DATA = ["--train_data_dir", "somewhere"]


def rule(stats, *, beta: float = 1.0, floor: int | None = None, kind: str = "a"):
    return stats


def test_the_quickstart_placebo_trains_as_the_quickstart():
    root = Path(__file__).parents[2]
    files = [["--config", str(root / "configs" / f"{name}.yaml")] for name in ("quickstart", "quickstart-placebo")]
    quickstart, placebo = (asdict(parse(Config, flags)[0]) for flags in (files[0], files[0] + files[1]))
    other = {key for key in quickstart if quickstart[key] != placebo[key]}
    assert other == {"train_data_dir", "output_dir", "validation"}
    measured = {key for key in quickstart["validation"] if quickstart["validation"][key] != placebo["validation"][key]}
    assert measured == {"steps", "controls"}, "the same targets, images and thresholds"
    recipe = (root / "Makefile").read_text().partition("\nquickstart: $(STAMP)")[2].partition("\ntest:")[0]
    assert f"--placebo {placebo['output_dir']}\n" in recipe and f"report {quickstart['output_dir']} " in recipe
    assert f"--out {placebo['train_data_dir']} $(QUICK) --redraws 0 --placebo\n" in recipe


def test_files_merge_in_order_then_flags(tmp_path):
    (tmp_path / "a.yaml").write_text("learning_rate: 1e-3\nseed: 1\nmemory: {timesteps: {name: mode}}\n")
    (tmp_path / "b.yaml").write_text("learning_rate: 2e-3\nmemory: {timesteps: {options: {scale: 1.0}}}\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    config, sources = parse(Config, [*files, "--seed", "3", "--memory.timesteps.options.scale", "0.5"])
    assert (config.learning_rate, config.seed, config.memory.timesteps.name) == (2e-3, 3, "mode")
    assert config.memory.timesteps.options == {"scale": 0.5}
    assert sources["learning_rate"].endswith("b.yaml:1") and sources["seed"] == "command line"


def test_another_name_leaves_the_options_of_the_earlier_one_behind(tmp_path):
    file = tmp_path / "recommended.yaml"
    file.write_text("memory: {rehearsal: {name: pairwise, options: {elements: null}}}\n")

    def options(*flags: str) -> dict:
        config, _ = parse(TrainConfig, ["--config", str(file), *flags])
        return config.memory.rehearsal.options

    assert options() == options("--memory.rehearsal.name=pairwise") == {"elements": None}
    assert options("--memory.rehearsal.name=leak_free") == {}
    flags = ["--memory.rehearsal.options.share=0.5", "--memory.rehearsal.name=leak_free"]
    assert options(*flags) == options(*reversed(flags)) == {"share": 0.5}


def test_diffusers_spelling_of_flags():
    argv = ["--use_ema", "--validation_prompts", "a cat", "b: c, d", "--center_crop", "--random_flip", "0"]
    config, _ = parse(Config, argv)
    assert config.use_ema and config.center_crop and not config.random_flip
    assert config.validation_prompts == ["a cat", "b: c, d"]


def test_lists_are_words_or_yaml(tmp_path):
    words = "--validation.early_steps 1 2 4 8 --lora.targets attn xattn".split()
    (tmp_path / "a.yaml").write_text("validation: {early_steps: [1, 2, 4, 8]}\nlora: {targets: [attn, xattn]}\n")
    inline = [
        "--validation.early_steps=[1, 2, 4, 8]",
        "--lora.targets=[attn, xattn]",
    ]
    first, second, third = (parse(Config, argv)[0] for argv in (words, ["--config", str(tmp_path / "a.yaml")], inline))
    assert first == second == third and first.validation.early_steps == [1, 2, 4, 8]


def test_commas_part_a_list_of_numbers():
    assert parse(Config, ["--validation.early_steps", "1,2,4"])[0].validation.early_steps == [1, 2, 4]


def test_prompts_may_hold_any_character():
    prompts = ["a 😀 cat", "[a hat]: big", "猫", "1e-3", "null"]
    assert parse(Config, ["--validation_prompts", *prompts])[0].validation_prompts == prompts


def test_numbers_are_read_as_people_write_them(tmp_path):
    (tmp_path / "a.yaml").write_text("learning_rate: 1e-4\nmax_grad_norm: 1\nrun_suffix: 2024-01-01\n")
    config, _ = parse(Config, ["--config", str(tmp_path / "a.yaml"), "--adam_epsilon", "1E-7"])
    assert (config.learning_rate, config.max_grad_norm, config.adam_epsilon) == (1e-4, 1.0, 1e-7)
    assert config.run_suffix == "2024-01-01"


def test_no_is_a_word_where_words_are_asked_for(tmp_path):
    (tmp_path / "a.yaml").write_text("mixed_precision: no\nuse_ema: no\nseed: 0x10\nmax_train_steps: 1_000\n")
    config, _ = parse(Config, ["--config", str(tmp_path / "a.yaml")])
    assert (config.mixed_precision, config.use_ema, config.seed, config.max_train_steps) == ("no", False, 16, 1000)


def test_a_word_that_yaml_takes_for_a_truth_is_text_where_text_is_asked_for(tmp_path):
    (tmp_path / "a.yaml").write_text("tracker_project_name: no\nvalidation_prompts: [no, a cat]\nrun_suffix: on\n")
    config, _ = parse(Config, ["--config", str(tmp_path / "a.yaml")])
    assert (config.tracker_project_name, config.run_suffix) == ("no", "on")
    assert config.validation_prompts == ["no", "a cat"]


@pytest.mark.parametrize("number", ["1:30", "010", "1:30.5", "+.nan"])
def test_numbers_that_read_otherwise_than_they_look_are_refused(number, tmp_path):
    (tmp_path / "a.yaml").write_text(f"max_train_steps: {number}\n")
    with pytest.raises(UserError, match="max_train_steps .*must be int or null, got"):
        parse(Config, ["--config", str(tmp_path / "a.yaml")])


def test_an_alias_stands_for_its_value(tmp_path):
    (tmp_path / "a.yaml").write_text("learning_rate: &rate 1e-3\nadam_weight_decay: *rate\n")
    assert parse(Config, ["--config", str(tmp_path / "a.yaml")])[0].adam_weight_decay == 1e-3


def test_options_of_a_part_are_replaced_whole(tmp_path):
    (tmp_path / "a.yaml").write_text("memory: {loss: {name: min_snr, options: {gamma: 3}}}\n")
    (tmp_path / "b.yaml").write_text("memory: {loss: {name: x0, options: {cap: 4}}}\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    config, _ = parse(Config, [*files, "--memory.loss.options.cap", "5"])
    assert config.memory.loss.options == {"cap": 5}


@pytest.mark.parametrize("option", NESTED)
def test_no_number_may_be_infinite_or_nan(option):
    for value in (".nan", "-.inf"):
        with pytest.raises(UserError, match=f"^{option} "):
            parse(Config, [f"--{option}", value])


def test_print_config_round_trips(tmp_path, capsys):
    argv = ["--learning_rate", "3e-4", "--memory.loss.name", "min_snr", "--memory.loss.options.gamma", "2"]
    with pytest.raises(SystemExit) as stopped:
        parse(Config, [*argv, "--print_config"])
    assert stopped.value.code in (0, None)
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    first, second = (parse(Config, a)[0] for a in (argv, ["--config", str(tmp_path / "printed.yaml")]))
    assert asdict(first) == asdict(second)


@pytest.mark.parametrize("style", ["--print_config", "--print_config=skip_default"])
def test_print_config_prints_no_hub_token(style, tmp_path, capsys):
    (tmp_path / "token.yaml").write_text("hub_token: hf_secret\n")
    for argv in (["--hub_token", "hf_secret"], ["--config", str(tmp_path / "token.yaml")]):
        with pytest.raises(SystemExit):
            parse(Config, [*argv, "--push_to_hub", "--seed", "7", style])
        printed = capsys.readouterr()
        assert "hf_secret" not in printed.out + printed.err and "seed: 7" in printed.out
    config, _ = parse(Config, ["--hub_token", "hf_secret", "--push_to_hub"])
    assert config.hub_token == "hf_secret"


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1)
        | st.sampled_from(["1e5", "010", "yes", "1:30", "0x1", "~", "2020-01-01", ".5e3", "1_0"])
    )
)
def test_text_is_written_so_that_it_is_read_back_as_text(words):
    assert yaml.load(dumped({"a": words, "b": [1e5, 1e-5, 10, True, None]}), Loader=Loader) == {  # noqa: S506
        "a": words,
        "b": [1e5, 1e-5, 10, True, None],
    }


def test_dump_round_trips_and_keeps_no_token(tmp_path):
    config, _ = parse(Config, [*DATA, "--hub_token", "hf_secret", "--push_to_hub", "--learning_rate", "1e-5"])
    text = dumped(to_dict(config))
    assert "hf_secret" not in text
    (tmp_path / "c.yaml").write_text(text)
    again, _ = parse(Config, ["--config", str(tmp_path / "c.yaml")])
    assert asdict(again) | {"hub_token": "hf_secret"} == asdict(config)


WRONG_FILES = {
    "learnin_rate: 1": ("'learnin_rate'", "'learning_rate'"),
    "memory: {timestep: {}}": ("'memory.timestep'", "'memory.timesteps'"),
    "memory: 3": ("memory", "key: value"),
    "learning_rate: fast": ("learning_rate", "float"),
    "lr_scheduler: cosin": ("lr_scheduler", "cosine"),
    "use_ema: perhaps": ("use_ema", "bool"),
    "validation: {steps: 1.5}": ("validation.steps", "int"),
    "- a list": ("key: value",),
}


@pytest.mark.parametrize("text", WRONG_FILES, ids=WRONG_FILES)
def test_a_wrong_file_is_one_line_that_names_key_and_file(text, tmp_path, capsys):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    assert main(["--config", str(file)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("error: ") and "wrong.yaml" in message
    assert all(part in message for part in WRONG_FILES[text])


WRONG_FLAGS = {  # what the tables of settings refuse is in test_rules.py
    "stray": "stray",
    "--train_batch_size 0": "train_batch_size",
    "--learning_rate -1": "learning_rate",
    "--adam_beta1 1.0": "adam_beta1",
    "--poisoning_ratio 0": "poisoning_ratio",
    "--report_to board": "tensorboard",
    "--lr_scheduler cosine --lr_warmup_steps 9 --max_train_steps 9": "lr_warmup_steps",
    "--lr_scheduler polynomial --learning_rate 1e-7": "above 1e-7",
    "--memory.loss.name min_snr --memory.loss.options.gama 5": "did you mean 'gamma'",
    "--memory.sampler.name weakest": "weakest_first",
    "--gradient_control.name mean_ab": "mean_abs",
    "--gradient_control.name gsnr": "use experiments/gsnr.py:gsnr",
    "--memory.loss.error huber": "use experiments/huber.py:huber",
    "--memory.roles.clean.timesteps.name curriculum": "use experiments/curriculum.py:curriculum",
    "--gradient_control.apply both": "gradient_control.apply",
    "--mixed_precision fp8": "fp16",
    "--enable_xformers_memory_efficient_attention": "scaled_dot_product_attention",
    "--image_interpolation_mode nearly --train_data_dir DATA": "image_interpolation_mode",
    "--resolution 30 --train_data_dir DATA": "resolution",
}


@pytest.mark.parametrize("flags", WRONG_FLAGS, ids=WRONG_FLAGS)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags, data, pipelines, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [str(data) if word == "DATA" else word.strip("'") for word in flags.split()]
    usual = {
        "--pretrained_model_name_or_path": str(pipelines["v_prediction"]),
        "--train_data_dir": str(data),
        "--output_dir": "out",
        "--report_to": "none",
    }
    rest = [word for key, value in usual.items() if key not in argv for word in (key, value)]
    assert main([*rest, *argv]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ") and WRONG_FLAGS[flags] in message
    assert not Path("out/metrics.jsonl").exists()


@pytest.mark.parametrize("name", TrainConfig.RENAMED)
def test_a_flag_of_another_script_names_its_successor(name):
    with pytest.raises(UserError) as refused:
        parse(Config, [f"--{name}", "1"])
    assert TrainConfig.RENAMED[name] in str(refused.value)


def test_every_field_has_help_and_a_source():
    for f in TrainConfig.__dataclass_fields__.values():
        if dataclasses.is_dataclass(f.default_factory):  # settings of their own, documented where they stand
            continue
        assert f.metadata["help"] and f.metadata["source"] in ("diffusers", "SilentBadDiffusion", "sd-scripts", "here")


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit):
        parse(Config, ["--help"])
    shown = capsys.readouterr().out
    for name in (*TrainConfig.__dataclass_fields__, "gradient_control.name", "memory.sampler.name"):
        assert f"--{name}" in shown
    assert "learning rate [diffusers] (type: float, default: 0.0001)" in " ".join(shown.split())


PLACES = {
    "memory.sampler.name": "c.yaml:2",
    "gradient_control.options.betta": "command line",
    "memory.fade": "c.yaml:9",
}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("memory.sampler: unknown name 'x'", "memory.sampler (c.yaml:2): unknown name 'x'"),
        ("gradient_control.options: gsnr: unknown", "gradient_control.options (command line): gsnr: unknown"),
        ("memory: two places below", "memory: two places below"),
        ("seed: by default", "seed: by default"),
        ("c.yaml:2: a file", "c.yaml:2: a file"),
    ],
)
def test_a_refusal_says_where_its_key_was_set(message, expected):
    assert with_source(message, PLACES) == expected


CHECKS = {
    ("rules", ()): ("unknown name", "did you mean 'rule'"),
    ("rule", (("betta", 1),)): ("rule: unknown option 'betta'; did you mean 'beta'? it takes: beta, floor, kind"),
    ("rule", (("beta", "x"),)): ("'beta' must be float",),
    ("rule", (("floor", 1.5),)): ("'floor' must be",),
    ("rule", (("kind", True),)): ("'kind' must be str",),
    ("needs", ()): ("'must' is missing",),
}


@pytest.mark.parametrize("case", CHECKS, ids=str)
def test_check_options(case):
    def needs(x, *, must: int):
        return x

    name, options = case
    with pytest.raises(UserError) as refused:
        check_options("kind", {"rule": rule, "needs": needs}, name, dict(options))
    parts = CHECKS[case]
    assert all(part in str(refused.value) for part in ((parts,) if isinstance(parts, str) else parts))


def test_right_options_pass():
    right = {"beta": 1, "floor": None, "kind": "b"}
    check_options("kind", {"rule": rule}, "rule", right)
    assert right == {"beta": 1, "floor": None, "kind": "b"}  # as they were


def test_a_tuple_is_written_as_a_list():
    def hook(context, *, at: tuple[float, ...] = (0.5,)):
        return context

    check_options("hook", {"hook": hook}, "hook", {"at": [0.3, 0.6]})
    with pytest.raises(UserError, match=r"'at' each value must be float, got \['x'\]"):
        check_options("hook", {"hook": hook}, "hook", {"at": ["x"]})


KEYS = st.one_of(st.sampled_from([*TrainConfig.__dataclass_fields__, "memory", "validation"]), st.text(max_size=12))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_file_is_read_or_refused(tmp_path_factory, entries):
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(yaml.safe_dump(entries))
    try:
        config, sources = parse(Config, ["--config", str(file)])
        check(config, sources)
    except UserError as error:
        assert "\n" not in str(error) and str(error)


@pytest.mark.parametrize("key", ["target_start_id", "n_few_shot", "learning_rate", "memory"])
def test_null_where_a_value_is_needed_is_named(tmp_path, key):
    file = tmp_path / "a.yaml"
    file.write_text(f"{key}: null\n")
    with pytest.raises(UserError, match=f"^{key}"):
        parse(Config, ["--config", str(file)])


def test_what_a_file_sets_without_effect_is_said(flags, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(
        "memory: {loss: {huber_delta: 0.05, error: mse}}\ngradient_control: {bound: 4.0}\n"
    )
    checked([*flags(), "--config", str(tmp_path / "a.yaml")])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert said == [
        f"warning: memory.loss.huber_delta ({tmp_path}/a.yaml:1): needs memory.loss.error, without which it "
        "has no effect"
    ]  # a value at its default is no mistake


@pytest.mark.parametrize(
    "given, ours", {"use_lora": "lora.rank", "network_module": "lora.kind", "min_snr": "snr_gamma"}.items()
)
def test_names_of_other_trainers_are_known_in_files_too(given, ours, tmp_path):
    (tmp_path / "a.yaml").write_text(f"{given}: 1\n")
    for words in (["--config", str(tmp_path / "a.yaml")], [f"--{given}", "1"]):
        with pytest.raises(UserError, match=f"--{ours}"):
            parse(TrainConfig, words)


@pytest.mark.parametrize("given, ours", LAYERS.items())
def test_names_of_layers_in_diffusers_are_known(given, ours):
    for pattern in ours.split():
        check_patterns("lora.targets", [pattern], EVERY_GROUP, "any model")
    with pytest.raises(UserError, match=f"here it is {ours}$"):
        check_patterns("lora.targets", [given], EVERY_GROUP, "any model")


@pytest.mark.parametrize("key", ["validation.targets", "train_data_dir", "sample_prompts", "validation.prompts"])
def test_a_missing_file_is_named_with_key_file_and_line(key, data, tmp_path):
    """Of every setting that names one; the nearest name that is there stands in the line."""
    (tmp_path / "nosuch.jsonl").mkdir() if key == "train_data_dir" else (tmp_path / "nosuch.jsonl").write_text("")
    settings = {"train_data_dir": str(data), "validation": {"targets": str(data)}}
    part, _, name = key.rpartition(".")
    (settings.setdefault(part, {}) if part else settings)[name] = str(tmp_path / "nosuhc.jsonl")
    text = yaml.safe_dump({"seed": 1} | settings, sort_keys=False)
    (tmp_path / "a.yaml").write_text(text)
    line = 1 + [row.strip().startswith(f"{name}:") for row in text.splitlines()].index(True)
    with pytest.raises(UserError) as refusal:
        training(["--config", str(tmp_path / "a.yaml"), "--output_dir", str(tmp_path / "out")], None)
    assert str(refusal.value).startswith(f"{key} ({tmp_path}/a.yaml:{line}): no f"), refusal.value
    assert f"nosuhc.jsonl; did you mean {tmp_path}/nosuch.jsonl?" in str(refusal.value)


def test_an_optimizer_that_finds_its_own_rate_wants_one(capsys):
    facts = OptimizerFacts("Prodigy", {}, averages=False, needs="")
    check_optimizer(TrainConfig(learning_rate=1.0), facts)
    assert capsys.readouterr().err == ""
    check_optimizer(TrainConfig(learning_rate=1e-4), facts)
    assert "learning_rate: 0.0001 is a factor of the rate that Prodigy finds" in capsys.readouterr().err
