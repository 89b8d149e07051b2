"""pyproject.toml against the tree: what `pip install .` copies, and what it requires."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import silentbad
import silentbad_shield

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings this there
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUP = CONFIG["tool"]["setuptools"]
# where a module's name is not its distribution's
DISTRIBUTION = {"yaml": "pyyaml", "PIL": "pillow", "annotated_types": "annotated-types", "resvg_py": "resvg-py"}


def folder_of(package: str) -> str:
    """A package's folder in the checkout, by the longest mapped name it begins with."""
    for name, folder in sorted(SETUP["package-dir"].items(), reverse=True):
        if package == name or package.startswith(f"{name}."):
            return folder + package.removeprefix(name).replace(".", "/")
    return package.replace(".", "/")


def of_shield() -> tuple[dict, set[str]]:
    """(its project table, files of the checkout that its wheel contains)."""
    config = tomllib.loads((ROOT / "silentbad_shield/pyproject.toml").read_text())
    files = set()
    for package in config["tool"]["setuptools"]["packages"]:
        folder = ROOT / package.replace(".", "/")
        for pattern in ["*.py", *config["tool"]["setuptools"]["package-data"].get(package, [])]:
            files |= {path.relative_to(ROOT).as_posix() for path in folder.glob(pattern) if path.is_file()}
    return config["project"], {file for file in files if "__pycache__" not in file}


def packaged() -> set[str]:
    """Files of the checkout that a wheel contains."""
    files = {f"{name}.py" for name in SETUP["py-modules"]}
    for package in SETUP["packages"]:
        folder = ROOT / folder_of(package)
        for pattern in ["*.py", *SETUP["package-data"].get(package, [])]:
            files |= {path.relative_to(ROOT).as_posix() for path in folder.glob(pattern) if path.is_file()}
    return {file for file in files if "__pycache__" not in file}


def tracked(*places: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return {file for file in listed.stdout.split("\0") if file and (ROOT / file).is_file()}


def requirements(file: str) -> dict[str, str]:
    """{distribution in lower case: its line} of a requirements file."""
    lines = [line.partition(" #")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return {re.match(r"[\w.-]+", line)[0].lower(): line for line in lines if line and line[0] not in "#-"}


def imported(path: Path) -> set[str]:
    """Top-level names of the modules imported anywhere in a file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


def test_every_file_is_in_the_wheel():
    modules = (f"{name}.py" for name in SETUP["py-modules"])
    assert packaged() == tracked("silentbad", "configs", "assets/micro-sd", *modules)


def test_every_file_of_the_shield_is_in_its_wheel():
    project, files = of_shield()
    assert files == tracked("silentbad_shield") - {"silentbad_shield/README.md", "silentbad_shield/pyproject.toml"}
    assert project["version"] == silentbad_shield.__version__ == silentbad.__version__
    needed = set().union(*(imported(ROOT / file) for file in files if file.endswith(".py")))
    ours = {"silentbad", "silentbad_shield", *SETUP["py-modules"], *project["optional-dependencies"]["cluster"]}
    others = needed - set(sys.stdlib_module_names) - ours
    assert {DISTRIBUTION.get(name, name).lower() for name in others} <= requirements("requirements.txt").keys()


def test_every_package_exists():
    for package in SETUP["packages"]:
        assert (ROOT / folder_of(package)).is_dir(), package


def test_configs_and_assets_have_one_root():
    assert (silentbad.ROOT / "configs" / "recommended.yaml").is_file()
    assert (silentbad.ROOT / "assets" / "micro-sd" / "embedder" / "config.json").is_file()
    for name, folder in SETUP["package-dir"].items():  # as an installed package has them
        assert silentbad.BUNDLED / folder == silentbad.BUNDLED.parents[1] / name.replace(".", "/")


def test_metadata():
    project = CONFIG["project"]
    assert project["name"] == "silentbad" and silentbad.__version__ == "0.2.0"
    assert project["license"] == "Apache-2.0" and (ROOT / project["license-files"][0]).is_file()
    assert SETUP["dynamic"]["version"] == {"attr": "silentbad.__version__"}
    assert SETUP["dynamic"]["dependencies"] == {"file": ["requirements.txt"]}


def test_what_is_imported_is_required():
    files = [*ROOT.glob("*.py"), *ROOT.glob("silentbad/**/*.py")]
    names = set().union(*map(imported, files)) - set(sys.stdlib_module_names) - {"silentbad", *SETUP["py-modules"]}
    extras = {name.partition("=")[0] for extra in CONFIG["project"]["optional-dependencies"].values() for name in extra}
    assert {DISTRIBUTION.get(name, name).lower() for name in names} <= requirements("requirements.txt").keys() | extras


def test_what_testing_needs_is_apart():
    running, testing = requirements("requirements.txt"), requirements("requirements-dev.txt")
    assert {
        "pytest",
        "pytest-xdist",
        "hypothesis",
        "ruff",
        "mypy",
    } <= testing.keys() and not testing.keys() & running.keys()


def test_the_lock_names_every_requirement():
    locked = {re.sub(r"[_.]", "-", name): line for name, line in requirements("requirements.lock").items()}
    for file in ("requirements.txt", "requirements-dev.txt"):
        assert {re.sub(r"[_.]", "-", name) for name in requirements(file)} <= locked.keys()
    assert all("==" in line for line in locked.values())


def test_the_fast_tests_exist():
    listed = subprocess.run(["make", "-n", "test-fast"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = re.findall(r"\btests/\S+", listed)
    assert len(files) >= 10 and all((ROOT / file).exists() for file in files)
