"""Settings are parsed and checked without torch; what they read from the sources is what is imported."""

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import gradient_control
import memory_reinforce
from silentbad.loop import optimizers
from silentbad.measure.embedders import EMBEDDERS
from silentbad.model.averaging import keeps_average
from silentbad.owned import MARKER
from silentbad.settings import check
from silentbad.settings.optimizer_facts import read_optimizer
from silentbad.settings.registries import from_source
from silentbad.settings.train import Interpolation, TrainConfig
from silentbad.settings.types import options_of
from silentbad.settings.validation import ValidationConfig
from silentbad_shield.options import ADVICE
from tests.processes import cost_of

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "diffusers", "transformers", "datasets", "accelerate", "numpy", "pyarrow", "peft")
IN_CODE = {
    check.SCALE_RULES: gradient_control.SCALE_RULES,
    check.MEMORY["loss.error"]: memory_reinforce.ERRORS,
}
LIGHT = """
import sys
from pathlib import Path
import silentbad.settings
for path in Path("silentbad/settings").glob("*.py"):
    __import__(f"silentbad.settings.{path.stem}".removesuffix(".__init__"))
from silentbad.settings.startup import training
folder = sys.argv[1]
rest = ["--memory.loss.name", "experiments/p2.py:p2", "--gradient_control.name", "mean_abs+experiments/gsnr.py:gsnr"]
training(["--train_data_dir", folder, "--pretrained_model_name_or_path", folder, *rest], "")
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
DATA = "--train_data_dir data"
TRAIN = f"{DATA} --validation.targets targets.jsonl"
AUDIT = "--pipeline data --targets targets.jsonl"
SEARCH = "--pipeline data --phrases phrases.txt"
RUN = "give the output_dir of a run"
CONTROL = "--gradient_control"
NO_FILE = "no file nowhere.py; PATH.py:NAME names what a Python file defines"
PIPELINE = "no file nowhere/model_index.json; give the folder of a pipeline"
MISSING = {  # (what reads the words, the words) -> the line
    ("train", f"{TRAIN} --validation.placebo nowhere"): f"validation.placebo (command line): no file "
    f"nowhere/validation.json; {RUN}",
    ("train", f"{TRAIN} --validation.clip_path ./nowhere"): "validation.clip_path (command line): no folder ./nowhere",
    ("train", f"{TRAIN} --validation.embedder clip --validation.embedder_path a/b/c"): "validation.embedder_path "
    "(command line): no folder a/b/c",
    ("train", f"{DATA} {CONTROL}.name nowhere.py:mine"): f"gradient_control.name (command line): {NO_FILE}",
    ("train", f"{DATA} {CONTROL}.name placebo {CONTROL}.options.of nowhere.py:mine"): "gradient_control.name "
    f"(command line): {NO_FILE}",
    ("train", f"{DATA} --memory.loss.name nowhere.py:mine"): f"memory.loss.name (command line): {NO_FILE}",
    ("train", f"{DATA} --output_dir trained"): "output_dir trained: holds a run already "
    "(metrics.jsonl); resume it with --resume_from_checkpoint latest, delete it with --overwrite_output_dir, or choose "
    "another folder",
    ("train", f"{DATA} --output_dir run"): "output_dir run: holds validation.json, which no training "
    "wrote; choose an empty folder",
    ("Audit", "--pipeline nowhere --targets targets.jsonl"): "--pipeline: no folder nowhere",
    ("Audit", f"{AUDIT} --baseline ./nowhere"): "--baseline: no folder ./nowhere",
    ("Audit", f"{AUDIT} --lora ./nowhere"): "--lora: no file or folder ./nowhere",
    ("Audit", f"{AUDIT} --clip_path ./nowhere"): "--clip_path: no folder ./nowhere",
    ("Audit", f"{AUDIT} --placebo nowhere"): f"--placebo: no file nowhere/validation.json; {RUN}",
    ("SearchOptions", "--pipeline data --phrases nowhere"): "--phrases: no file nowhere; it holds one phrase a line",
    ("SearchOptions", "--pipeline data --scan nowhere"): f"--scan: no file nowhere; {ADVICE}",
    ("SearchOptions", "--pipeline data --train_data_dir nowhere"): "--train_data_dir: no folder nowhere",
    ("SearchOptions", f"{SEARCH} --ordinary nowhere"): "--ordinary: no file nowhere; it holds one prompt a line",
    ("SearchOptions", f"{SEARCH} --lora ./nowhere"): "--lora: no file or folder ./nowhere",
    ("ReportOptions", "run --placebo nowhere"): f"--placebo: no file nowhere/validation.json; {RUN}",
    ("LocaliseOptions", "nowhere"): f"RUN: no file nowhere/config.yaml; {RUN}",
    ("LocaliseOptions", "unmeasured"): f"RUN: no file unmeasured/validation.json; {RUN}",
    ("LocaliseOptions", "run --base ./nowhere"): "--base: no folder ./nowhere",
    ("LocaliseOptions", "run --targets nowhere"): "--targets: no file or folder nowhere",
    ("LocaliseOptions", "run --train_data_dir nowhere"): "--train_data_dir: no file or folder nowhere",
    ("BaseOptions", "--vae nowhere"): "--vae nowhere: no autoencoder of diffusers",
    ("EmojiBaseOptions", "--vae nowhere"): "--vae nowhere: no autoencoder of diffusers",
    ("EmojiBaseOptions", "--begin nowhere"): f"--begin: {PIPELINE}",
    ("MeasureOptions", "--pipeline nowhere"): f"--pipeline: {PIPELINE}",
}
NO_MISTAKE = [  # a name may be on the Hub, a run be resumed or replaced
    ("train", f"{DATA} --output_dir trained --overwrite_output_dir"),
    ("train", f"{DATA} --output_dir trained --resume_from_checkpoint latest"),
    ("train", f"{TRAIN} --validation.clip_path openai/clip-vit-base-patch32"),
    ("train", f"{TRAIN} --validation.embedder dinov2 --validation.embedder_path facebook/dinov2-base"),
    ("Audit", f"{AUDIT} --baseline owner/name --lora owner/name --clip_path owner/name"),
    ("SearchOptions", f"{SEARCH} --lora owner/name"),
    ("LocaliseOptions", "run --base owner/name"),
]
REFUSALS = """
import json, sys
from silentbad.errors import UserError
from silentbad.settings import commands, startup, validation
from silentbad_shield import options as shield
from worlds import options
readers = vars(options) | vars(shield) | vars(validation) | vars(commands)
lines = []
for reader, words in json.load(sys.stdin):
    try:
        if reader == "train":
            startup.training(words.split(), "")
        else:
            startup.options(readers[reader], words.split())
        lines.append(None)
    except UserError as error:
        lines.append(str(error))
print(json.dumps([lines, [*sys.modules]]))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """{(what reads the words, the words): the line, or None}, all of one process that imports nothing heavy."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "phrases.txt").write_text("a cat\na hat\n")
    (folder / "targets.jsonl").write_text("")
    (folder / "data").mkdir()
    (folder / "trained").mkdir()
    (folder / "trained" / MARKER).write_text('{"run": "1", "kind": "training"}')
    (folder / "trained" / "metrics.jsonl").write_text("")
    for run in ("run", "unmeasured"):
        (folder / run).mkdir()
        (folder / run / "config.yaml").write_text("train_data_dir: data\nvalidation: {targets: targets.jsonl}\n")
    (folder / "run" / "validation.json").write_text("")
    cases = [*MISSING, *NO_MISTAKE]
    command = [sys.executable, "-c", REFUSALS]
    where = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, **where)
    assert done.returncode == 0, done.stderr
    lines, modules = json.loads(done.stdout)
    assert not {name.partition(".")[0] for name in modules} & {*HEAVY}
    return dict(zip(cases, lines, strict=True))


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_said_before_anything_heavy_is_imported(case, refusals):
    assert refusals[case] == MISSING[case]


@pytest.mark.parametrize("case", NO_MISTAKE)
def test_what_is_no_mistake_is_taken(case, refusals):
    assert refusals[case] is None


def test_parsing_and_checking_a_training_imports_nothing_heavy(tmp_path):
    command = [sys.executable, "-c", LIGHT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not {*done.stdout.split()} & {*HEAVY}


def test_a_report_is_drawn_without_what_a_model_needs():
    script = "import sys, silentbad.report.run_report; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not {*done.stdout.split()} & {"diffusers", "transformers", "datasets", "accelerate", "peft"}


COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train_silentbad.py",),
    "audit": ("validation.py",),
    "scan": ("-m", "silentbad_shield.scan"),
    "search": ("-m", "silentbad_shield.search"),
    "prepare": ("-m", "silentbad.prepare"),
    "prepare.preview": ("-m", "silentbad.prepare.preview"),
    "report": ("-m", "silentbad.report"),
    "localise": ("-m", "silentbad.localise"),
    "microworld.make": ("-m", "worlds.microworld.make"),
    "microworld.build": ("-m", "worlds.microworld.build"),
    "microworld.export": ("-m", "worlds.microworld.export"),
    "emoji.make": ("-m", "worlds.emoji.make"),
    "emoji.build": ("-m", "worlds.emoji.build"),
    "emoji.sets": ("-m", "worlds.emoji.sets"),
}
OF_EACH = {"--help": "--help", "a typo in a flag": "--sed 1"}
SAMPLER = "--memory.sampler.name experiments/leitner.py:leitner --memory.sampler.options.boxs 3"
MISTAKES = {  # "no such ..." is of a path that has `nowhere` in it
    "train: a wrong range": "--train_data_dir . --learning_rate -1",
    "train: an unknown YAML key": "--train_data_dir . --config {folder}/unknown.yaml",
    "train: no such YAML file": "--train_data_dir . --config {folder}/nowhere.yaml",
    "train: no such data": "--train_data_dir {folder}/nowhere",
    "train: an unknown rule": "--train_data_dir . --gradient_control.name gsn",
    "train: an unknown option of a sampler": f"--train_data_dir . {SAMPLER}",
    "train: an unknown optimizer": "--train_data_dir . --optimizer AdmW",
    "train: what excludes what": "--train_data_dir . --buckets --compile_model",
    "audit: a wrong range": "--pipeline x --threshold 3",
    "audit: no such targets": "--pipeline x --targets {folder}/nowhere",
    "search: no such phrases": "--pipeline x --phrases {folder}/nowhere",
    "scan: no such data": "--train_data_dir {folder}/nowhere",
    "prepare: a wrong range": "--per_phrase 0",
    "prepare: no such target": "--target {folder}/nowhere --masks x --phrases a b --backgrounds . --out {folder}/out",
    "prepare.preview: no such data": "{folder}/nowhere",
    "report: no such run": "{folder}/nowhere",
    "localise: a wrong range": ". --images 0",
    "localise: no such run": "{folder}/nowhere",
    "microworld.make: a wrong range": "--clean -1",
    "microworld.build: no autoencoder": "--vae {folder}/nowhere",
    "microworld.export: no such base": "--pipeline {folder}/nowhere",
    "emoji.make: a wrong range": "--clean -1",
    "emoji.build: no such base": "--begin {folder}/nowhere",
}
ROWS = {
    f"{name}: {what}": (*command, *words.split())
    for name, command in COMMANDS.items()
    for what, words in OF_EACH.items()
}
ROWS |= {name: (*COMMANDS[name.partition(":")[0]], *words.split()) for name, words in MISTAKES.items()}


@pytest.mark.parametrize("name", ROWS)
def test_a_mistake_is_said_within_a_second_in_little_memory(name, tmp_path):
    (tmp_path / "unknown.yaml").write_text("learnin_rate: 1\n")
    words = tuple(word.format(folder=tmp_path) for word in ROWS[name])
    cost = cost_of(words)
    assert cost.code == (0 if name.endswith("--help") else 2), cost
    assert cost.is_light, cost
    missing = re.search(r"no (file|folder|file or folder) \S*nowhere", cost.said)
    assert ("no such" in name) == (missing is not None), cost


@pytest.mark.parametrize("place", IN_CODE)
def test_a_registry_read_from_its_source_is_the_one_in_the_code(place):
    agree(from_source(place), IN_CODE[place])


@pytest.mark.parametrize("slot", memory_reinforce.REGISTRIES)
def test_the_slots_of_memory_read_from_their_sources_are_those_in_the_code(slot):
    agree(check.memory_registries()[slot], memory_reinforce.REGISTRIES[slot])


def agree(read, imported):
    assert list(read) == list(imported)
    for name in imported:
        read_options, options = options_of(read[name]), options_of(imported[name])
        assert list(read_options) == list(options), name
        for key, option in options.items():
            assert (read_options[key].hint, read_options[key].default) == (option.hint, option.default), (name, key)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "torch.optim.Adafactor", "LBFGS", "SparseAdam", "spectral"])
def test_an_optimizer_read_from_its_source_is_the_class(name):
    config = TrainConfig()
    if name == "spectral":
        config.gradient_control.spectral = True
    else:
        config.optimizer = name
    read, kind = read_optimizer(config), optimizers.optimizer_class(config)
    assert (read.name, read.averages) == (kind.__name__, keeps_average(kind))
    assert list(read.options) == [*inspect.signature(kind).parameters]


def test_a_rule_added_to_a_dict_is_found(tmp_path, monkeypatch):
    (tmp_path / "mine_rules.py").write_text(
        "from silentbad.settings.types import Positive\n"
        "def mine(stats, *, power: Positive = 2.0): ...\n"
        "RULES = {'mine': mine}\n"
        "def late(stats): ...\n"
        "RULES['late'] = late\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rules = from_source("mine_rules:RULES")
    assert list(rules) == ["mine", "late"]
    assert rules["mine"]["power"].default == 2.0 and not rules["late"]


def test_names_in_annotations_are_those_of_the_code():
    named = {field.name: field.metadata["help"] for field in fields(ValidationConfig)}["embedder"]
    assert [*from_source("silentbad.measure.embedders:EMBEDDERS")] == [*EMBEDDERS]
    assert all(name in named for name in EMBEDDERS)
    from torchvision.transforms.functional import InterpolationMode

    assert {name.replace("_", "-") for name in Interpolation.__args__} == {mode.value for mode in InterpolationMode}
