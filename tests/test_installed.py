"""The package as `pip install` lays it out, in an environment and a folder of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.processes import cost_of

ROOT = Path(__file__).parents[1]
WITHOUT = {
    "signals": "import signal; del signal.SIGUSR1",
    "file locks": "import importlib.util as u; find = u.find_spec\n"
    "u.find_spec = lambda name, *more: None if name == 'fcntl' else find(name, *more)",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of the installed commands; libraries come from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in ("silentbad", "silentbad_shield", "configs", "assets"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=unwanted)
    for file in (*ROOT.glob("*.py"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt"), ROOT / "README.md", ROOT / "LICENSE"):
        shutil.copy(file, folder / "source")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (libraries,) = (folder / "venv").glob("lib/python*/site-packages")
    (libraries / "tests.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", folder / "venv/bin/python", "install"]
    sources = [folder / "source", folder / "source/silentbad_shield"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation", *sources]
    subprocess.run([*pip, *offline], check=True)
    return folder / "venv" / "bin"


@pytest.mark.parametrize("name", ["train", "audit", "prepare", "scan", "search"])
def test_an_installed_command_says_a_mistake_within_a_second(name, programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = [str(programs / "python"), str(programs / f"silentbad-{name}"), "--sed", "1"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    cost = cost_of(tuple(line[1:]))
    assert cost.is_light, cost


def test_an_installed_training_has_the_bundled_base_and_configurations(programs, tmp_path):
    flags = ["--train_data_dir", str(ROOT / "docs/example"), "--max_train_steps", "1", "--report_to", "none"]
    flags += ["--prior_preservation.num_images", "8", "--prior_preservation.num_inference_steps", "1"]
    command = [programs / "silentbad-train", "--config", "configs/recommended.yaml", "--output_dir", "run", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "pipeline" / "model_index.json").is_file()
    assert "_bundled/assets/micro-sd" in (tmp_path / "run" / "config.yaml").read_text()


def test_an_installed_command_finds_code_in_the_current_folder(programs, tmp_path):
    """As `python -m` does: the quickstart's judge imports the world of its clone."""
    (tmp_path / "sight.py").write_text("def sees(images, prompts): ...\n")
    (tmp_path / "judge.py").write_text("from sight import sees\n")
    example = ["--train_data_dir", str(ROOT / "docs/example"), "--validation.targets", str(ROOT / "docs/example")]
    command = [programs / "silentbad-train", *example, "--validation.judge", "judge.py:missing", "--output_dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 2 and "missing" in done.stderr and "ModuleNotFound" not in done.stderr, done.stderr


@pytest.mark.parametrize("what", WITHOUT)
def test_a_system_without_posix_gets_one_line(what):
    code = f"{WITHOUT[what]}\nfrom silentbad.settings.installed import train\ntrain()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: this system") and done.stderr.count("\n") == 1
