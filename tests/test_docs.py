"""Documents against the code and the stored results: blocks run or parse, links and anchors exist, named tests and
files exist, generated numbers are current, and the two languages of a document say the same in the same order."""

import argparse
import csv
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import gradient_control
import memory_reinforce
import train_silentbad
import validation
from bench import documents
from silentbad.measure import embedders
from silentbad.prepare import __main__ as prepare
from silentbad.settings import startup
from silentbad.settings.memory import LossConfig, SamplerConfig, TimestepConfig
from silentbad.settings.reader import parse
from tests import photographs, toy
from tests.training import checked

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [
        *documents.documents(),
        ROOT / "assets/micro-sd/README.md",
        ROOT / "worlds/README.md",
        ROOT / "experiments/README.md",
        ROOT / "silentbad_shield/README.md",
    ]
)
PAIRS = sorted(filter(documents.is_chinese, DOCUMENTS))
USER_PAGES = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *ROOT.glob("docs/*.md"), *PAIRS])
BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^ *```", re.M | re.S
)
# Marks, in a comment on the line before a block: `run` has it executed by a test below; `needs network`, `needs a GPU`
# or `needs ...` say why it is not. A command is checked against the real parser either way.


def blocks(path: Path, *languages: str) -> list[tuple[str, str, str]]:
    """(language, mark, body without its indent) of the fenced blocks of a document."""
    fenced = []
    for m in BLOCK.finditer(path.read_text(encoding="utf-8")):
        body = re.sub(rf"^{m['indent']}", "", m["body"], flags=re.M)
        if not languages or m["language"] in languages:
            fenced.append((m["language"], m["mark"] or "", body))
    return fenced


def prose(path: Path) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---------------------------------------------------------------- commands


class Parsed(Exception):
    """The arguments were taken."""


def takes(module: str, argv: list[str], monkeypatch) -> None:
    """Fails unless the module's own parser takes the arguments; nothing of it runs after."""
    original, read = argparse.ArgumentParser.parse_args, startup.parse

    def parse_args(self, *args, **options):
        original(self, *args, **options)
        raise Parsed

    def parse_options(*args, **options):
        read(*args, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(startup, "parse", parse_options)
    monkeypatch.setattr(sys, "argv", [module, *argv])
    if (ROOT / module.replace(".", "/") / "__main__.py").exists():
        module += ".__main__"
    with pytest.raises(Parsed):
        place = importlib.import_module(module)
        main = place.main if hasattr(place, "main") else importlib.import_module(f"{module}.__main__").main
        main()


def check_command(words: list[str], monkeypatch) -> None:
    """One command of a document: what it names exists and its parser takes its flags."""
    words = [word.removeprefix(".venv/bin/") for word in words]
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words[0] == "make":
        assert subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True).returncode == 0, words
    elif "train_silentbad.py" in words:
        at = words.index("train_silentbad.py")
        for option, file in zip(words[:at], words[1:at], strict=False):
            assert option != "--config_file" or (ROOT / file).is_file(), file
        checked(words[at + 1 :])
    elif words[0] == "silentbad-train":
        checked(words[1:])
    elif words[:2] == ["python", "validation.py"]:
        parse(validation.Audit, words[2:])
    elif words[:2] in (["python", "-m"], ["python3", "-m"]) and words[2].startswith(
        ("silentbad.", "silentbad_shield.", "worlds.", "bench.")
    ):
        takes(words[2], words[3:], monkeypatch)
    elif words[:2] == ["python", "-m"] and words[2].startswith("tests."):
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), words
    elif words[1:3] == ["-m", "pytest"] or words[0] in ("pytest", "pip-audit"):
        files = [word.partition("::")[0] for word in words if word.startswith("tests")]
        assert all((ROOT / file).exists() for file in files), files
    elif words[0] == "pip" or words[1:3] in (["-m", "pip"], ["-m", "venv"]) or words[0] == "pre-commit":
        for option, file in zip(words, words[1:], strict=False):
            assert option != "-r" or (ROOT / file).is_file(), file
    else:
        pytest.fail(f"no check knows the command {' '.join(words)!r}")


def commands(body: str) -> list[list[str]]:
    """The words of each command of a shell block; `&&` joins two."""
    lines = re.sub(r"\\\n", " ", body).splitlines()
    return [words for line in lines for part in line.split("&&") if (words := shlex.split(part, comments=True))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_parse(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for _, mark, body in blocks(path, "bash"):
        if mark.startswith("needs the earlier"):
            continue  # another project's script, shown beside ours
        for words in commands(body):
            with monkeypatch.context() as patch:
                check_command(words, patch)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_block_says_what_it_is(path):
    for language, _, body in blocks(path):
        assert language in ("bash", "python", "yaml", "json", "csv", "text", "bibtex"), body
    assert len(blocks(path)) * 2 == len(re.findall(r"^ *```", path.read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_data_blocks_parse(path, tmp_path):
    for language, mark, body in blocks(path, "yaml", "json", "csv"):
        if language == "json":
            rows = [json.loads(line) for line in body.splitlines()]
            assert all({"file_name", "text"} <= set(row) or {"target_id", "image"} <= set(row) for row in rows), body
        elif language == "csv":
            first, *rest = csv.reader(body.splitlines())
            assert rest and all(len(row) == len(first) for row in rest), body
        elif mark == "not a run's configuration":
            assert yaml.safe_load(body)
        else:
            file = tmp_path / "block.yaml"
            file.write_text(body)
            checked(["--train_data_dir", "x", "--config", str(file)])


# ---------------------------------------------------------------- links and names


def anchors(path: Path) -> list[str]:
    """GitHub's anchors of a document's headings, in order."""
    counts: Counter = Counter()
    slugs = []
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        slugs.append(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return slugs


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if link.startswith(("http://", "https://")):
            assert re.fullmatch(r"https://[\w.-]+(/[\w./%#-]*)?", link), link
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


ARXIV = re.compile(r"(?<![\d.])(\d{4})\.(\d{4,5})(?![\d.]*\d)")


def arxiv_ids(text: str) -> list[str]:
    """What looks like an arXiv identifier: YYMM.number, from April 2007 on."""
    return [f"{a}.{b}" for a, b in ARXIV.findall(text) if 7 <= int(a[:2]) <= 26]


def test_arxiv_ids_are_well_formed():
    for path in [*DOCUMENTS, *ROOT.glob("*.py"), *ROOT.glob("silentbad/**/*.py")]:
        for identifier in arxiv_ids(path.read_text(encoding="utf-8")):
            month, number = int(identifier[2:4]), identifier.partition(".")[2]
            assert 1 <= month <= 12 and len(number) == (5 if int(identifier[:4]) >= 1501 else 4), (path, identifier)


TESTS = "\n".join(file.read_text() for file in ROOT.glob("tests/**/*.py"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_named_tests_and_files_exist(path):
    text = path.read_text(encoding="utf-8")
    for test in set(re.findall(r"`(test_\w+)(?:\[[^`]*)?`", text)):
        assert f"def {test}(" in TESTS, test
    for part in set(re.findall(r"-k (\w+)`", text)) - {"NAME"}:
        assert re.search(rf"def test_\w*{part}", TESTS), part
    for file in set(
        re.findall(
            r"`((?:silentbad|silentbad_shield|worlds|experiments|configs|bench|docs|research|tests|assets)/[\w./-]*\.\w+)`",
            text,
        )
    ):
        written = file.startswith("bench/results/")  # written by the benchmark
        assert written or (ROOT / file).exists(), file


def test_the_readme_is_read_in_two_minutes():
    for file in ("README.md", "README.zh-CN.md"):
        assert len((ROOT / file).read_text(encoding="utf-8").split()) <= 900, file


def test_the_readme_maps_every_folder():
    folders = {path.parent for path in ROOT.glob("silentbad/*/*.py")} | {
        ROOT / name for name in ("bench", "configs", "experiments", "silentbad_shield", "worlds")
    }
    for file in ("README.md", "README.zh-CN.md"):
        text = (ROOT / file).read_text(encoding="utf-8")
        entries = re.findall(r"^- .+(?:\n  .+)*", text, re.M)
        mapped = {
            folder
            for entry in entries
            for folder in re.findall(r"`(silentbad/\w+|silentbad_shield|bench|configs|experiments|worlds)`", entry)
        }
        assert mapped == {name(folder) for folder in folders}, file


# ---------------------------------------------------------------- generated numbers


@pytest.fixture(scope="module")
def read():
    return documents.reader()


STORED = re.compile(r"^<!-- was generated: \S+ -->\n.*?^<!-- /was generated -->$", re.M | re.S)


def unmarked(text: str) -> str:
    """A document without its generated blocks, and without those of commands that left."""
    return STORED.sub("", documents.MARKED.sub("", text))


@pytest.mark.parametrize("path", documents.documents(), ids=name)
def test_generated_blocks_are_current(path, read):
    _, stale = documents.filled(path.read_text(encoding="utf-8"), path, read)
    assert not stale, "run python -m bench.documents"


@pytest.mark.parametrize("path", documents.documents(), ids=name)
def test_intervals_are_generated(path):
    """Only stored results have intervals `x [low, high]`; in prose they would grow stale unnoticed."""
    number = r"[+-]?\d+\.\d+"
    assert not re.findall(rf"{number} \[{number}, {number}\]", unmarked(path.read_text(encoding="utf-8")))


def test_every_block_is_used():
    used = {m["name"] for path in documents.documents() for m in documents.MARKED.finditer(path.read_text("utf-8"))}
    assert used == set(documents.BLOCKS)


def stored_rows(folder: Path, rate: float):
    (folder / "recovery.jsonl").write_text(json.dumps({"rate": rate}) + "\n")
    return documents.reader(folder)


@pytest.fixture
def a_block(monkeypatch):
    """A block "rates" of one cell, the last row's rate."""
    table = "| rate |\n|---|\n| {:.2f} |\n"
    monkeypatch.setitem(documents.BLOCKS, "rates", lambda read: table.format(read("recovery.jsonl")[-1]["rate"]))


ENGLISH = Path("x.md")
CHINESE = Path("x.zh-CN.md")


def test_a_stale_block_is_seen_and_filled(tmp_path, a_block):
    text = "before\n<!-- generated: rates -->\n<!-- /generated -->\nafter 1.25\n"
    text, stale = documents.filled(text, ENGLISH, stored_rows(tmp_path, 0.75))
    assert stale == ["rates"] and "| 0.75 |" in text
    assert text.startswith("before\n") and text.endswith("\nafter 1.25\n")
    again, stale = documents.filled(text, ENGLISH, stored_rows(tmp_path, 0.75))
    assert again == text and not stale
    text, stale = documents.filled(text, ENGLISH, stored_rows(tmp_path, 0.25))
    assert stale == ["rates"] and "| 0.25 |" in text and "0.75" not in text


def test_a_block_of_a_chinese_page_has_chinese_words(monkeypatch):
    table = "| arm | targets |\n|---|---|\n| `original` | 2 |\n"
    monkeypatch.setitem(documents.BLOCKS, "rates", lambda read: table)
    text = "\n<!-- generated: rates -->\n<!-- /generated -->\n"
    english, _ = documents.filled(text, ENGLISH, documents.reader())
    chinese, _ = documents.filled(text, CHINESE, documents.reader())
    assert "| arm | targets |" in english and "| 实验臂 | 目标数 |" in chinese
    assert "| `original` | 2 |" in english and "| `original` | 2 |" in chinese
    with pytest.raises(SystemExit, match="CHINESE has no word for 'fall back'"):
        documents.chinese("| arm | fall back |\n| --- | --- |\n")


@pytest.mark.parametrize(
    "text, message",
    [
        ("\n<!-- generated: rates -->\n", "1 lines open a generated block and 0 close one"),
        ("\n<!-- generated: ratess -->\n<!-- /generated -->\n", "no block 'ratess'; there are: "),
    ],
)
def test_a_wrong_marker_is_one_line(text, message, tmp_path):
    with pytest.raises(SystemExit, match="error: x.md: .*" + re.escape(message)):
        documents.filled(text, ENGLISH, documents.reader(tmp_path))


def test_check_names_stale_blocks_and_writes_nothing(tmp_path, monkeypatch, capsys, a_block):
    file = tmp_path / "a.md"
    file.write_text("\n<!-- generated: rates -->\n<!-- /generated -->\n")
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    monkeypatch.setattr(documents, "documents", lambda: [file])
    read = stored_rows(tmp_path, 0.75)
    monkeypatch.setattr(documents, "reader", lambda: read)
    before = file.read_text()
    assert documents.main(["--check"]) == 1 and file.read_text() == before
    assert "a.md: rates: stale" in capsys.readouterr().out
    assert documents.main([]) == 0 and "0.75" in file.read_text()
    assert documents.main(["--check"]) == 0


# ---------------------------------------------------------------- two languages


def english(path: Path) -> Path:
    """The English page of a Chinese one."""
    return ROOT / "docs" / path.name if path.parent.name == "zh" else path.with_name(path.name.replace(".zh-CN", ""))


def place(path: Path, link: str) -> str:
    """A link in no language: the English page, and the number of the heading that its anchor names."""
    if link.startswith("https://"):
        return link
    file, _, anchor = link.partition("#")
    target = (path.parent / file).resolve() if file else path
    heading = anchors(target).index(anchor) if anchor else ""
    return f"{name(english(target) if documents.is_chinese(target) else target)} {heading}"


def shape(path: Path) -> dict[str, list]:
    """What two languages of a document share: headings' levels, blocks, links, identifiers, tables, figures."""
    text = prose(path)
    code = [(language, mark, re.sub(r"\s*#.*", "", body)) for language, mark, body in blocks(path)]
    return {
        "headings": [len(h) for h in re.findall(r"^(#+) ", text, re.M)],
        "blocks": code,
        "links": sorted(place(path, link) for link in re.findall(r"\]\(([^)\s]+)\)", text)),
        "arXiv": sorted(arxiv_ids(text)),
        "tables": [len(re.findall(r"(?<!\\)\|", row)) for row in re.findall(r"^\|.*\|$", text, re.M)],
        "tests": sorted(re.findall(r"`(test_\w+)", text)),
        "figures": sorted(re.findall(r"(?<![\d.])\d+\.\d+(?!\.?\d)", ARXIV.sub("", text))),
        "generated": [m["name"] for m in documents.MARKED.finditer(text)],
    }


@pytest.mark.parametrize("path", PAIRS, ids=name)
def test_both_languages_say_the_same(path):
    ours, theirs = shape(path), shape(english(path))
    for part in theirs:
        assert ours[part] == theirs[part], part


def test_every_user_page_has_two_languages():
    pages = {path.name for path in ROOT.glob("docs/*.md")}
    assert {path.name for path in ROOT.glob("docs/zh/*.md")} == pages and ROOT / "README.zh-CN.md" in PAIRS


# ---------------------------------------------------------------- for users


@pytest.mark.parametrize("path", USER_PAGES, ids=name)
def test_user_pages_name_no_test(path):
    assert not re.findall(r"`test_\w+|tests/[\w/]*test_\w+", prose(path))


def test_user_pages_are_read_in_two_hours():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    words = [page.read_text(encoding="utf-8").split() for page in pages]
    assert sum(map(len, words)) <= 18_000


def test_research_is_read_in_five_hours():
    """Words, and no marks of tables."""
    texts = [page.read_text(encoding="utf-8") for page in ROOT.glob("research/*.md")]
    assert sum(bool(re.search(r"\w", word)) for text in texts for word in text.split()) <= 45_000


# ---------------------------------------------------------------- what documents have run


def test_the_steps_on_ones_own_pictures_run_as_they_stand(tmp_path, monkeypatch):
    """Word for word, but for the number of pictures, steps and images."""
    for name in ("assets", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    steps = [commands(body) for _, mark, body in blocks(ROOT / "README.md", "bash") if mark == "run"]
    (draw, write), (train,), (audit,) = steps
    assert draw[:3] == ["python", "-m", "tests.photographs"]
    photographs.write_pictures(Path(draw[3]), photographs.cat_cup(), "cat-cup")
    assert prepare.main([*write[3:], "--per_phrase", "4", "--clean", "6", "--side", "64"]) == 0
    shorter = {
        "max_train_steps": 2,
        "lr_warmup_steps": 1,
        "train_batch_size": 4,
        "prior_preservation.num_images": 4,
        "prior_preservation.num_inference_steps": 2,
        "validation.images_per_target": 1,
        "validation.num_inference_steps": 2,
        "cache_dir": "cache",
        "report_to": "none",
    }
    assert train_silentbad.main([*train[1:], *(f"--{key}={value}" for key, value in shorter.items())]) == 0
    assert "cat-cup" in Path("runs/my-photos/report.html").read_text()
    assert validation.main([*audit[2:], "--images_per_target=1", "--num_inference_steps=2"]) == 0
    assert Path("runs/my-photos-audit/report.html").is_file()


def test_the_tutorial_ends_in_a_report(tmp_path, monkeypatch, pipelines):
    """Its records, its target and its flags, on a tiny pipeline; the pictures are noise."""
    bodies = blocks(ROOT / "docs/tutorial.md")
    metadata, targets = (body for language, _, body in bodies if language == "json")
    ((_, _, body),) = [block for block in bodies if block[1] == "run on a tiny pipeline"]
    folder, draw = tmp_path / "my-photos", np.random.default_rng(0)
    folder.mkdir()
    clean = [{"file_name": f"class-{k}.png", "text": f"a thing {k}", "role": "clean"} for k in range(12)]
    (folder / "metadata.jsonl").write_text(metadata + "".join(json.dumps(row) + "\n" for row in clean))
    (folder / "targets.jsonl").write_text(targets)
    rows = [json.loads(line) for line in (metadata + targets).splitlines()] + clean
    for row in rows:
        pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / row.get("file_name", row.get("image")))
    (tmp_path / "look.txt").write_text("a green mug\na blue lamp\n")
    monkeypatch.chdir(tmp_path)
    (words,) = commands(body)
    argv = words[words.index("train_silentbad.py") + 1 :]
    argv[argv.index("configs/sd15_lora.yaml")] = str(ROOT / "configs/sd15_lora.yaml")
    tiny = {
        "pretrained_model_name_or_path": pipelines["epsilon"],
        "validation.embedder": "ssim",
        "validation.embedder_path": "null",
        "mixed_precision": "no",
        "max_train_steps": 2,
        "lr_warmup_steps": 1,
        "validation.images_per_target": 1,
        "validation.num_inference_steps": 1,
        "cache_dir": tmp_path / "cache",
        "report_to": "none",
    }
    assert train_silentbad.main([*argv, *(f"--{key}={value}" for key, value in tiny.items())]) == 0
    page = (tmp_path / "runs/room/report.html").read_text(encoding="utf-8")
    assert "room" in page and "a blue lamp" in page
    assert (tmp_path / "runs/room/lora/pytorch_lora_weights.safetensors").is_file()


def test_the_examples_pictures_are_what_its_script_draws(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/example")
    draw = importlib.import_module("draw")
    monkeypatch.setattr(draw, "FOLDER", tmp_path)
    draw.main()
    for file in ("metadata.jsonl", "targets.jsonl"):
        assert (tmp_path / file).read_text() == (ROOT / "docs/example" / file).read_text()
    for file in sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")):
        with Image.open(tmp_path / file) as drawn, Image.open(ROOT / "docs/example" / file) as stored:
            assert drawn.tobytes() == stored.tobytes(), file


@pytest.fixture
def documented():
    """Definitions of all `run in MODULE` blocks, entered in their registries for the test."""
    registries = (
        gradient_control.SCALE_RULES,
        memory_reinforce.SAMPLERS,
        memory_reinforce.TIMESTEPS,
        memory_reinforce.LOSSES,
        embedders.EMBEDDERS,
    )
    before = [dict(registry) for registry in registries]
    for path in DOCUMENTS:
        for _, mark, body in blocks(path, "python"):
            if mark.startswith("file "):
                assert body == (ROOT / mark.removeprefix("file ")).read_text(), mark
                continue
            assert mark.startswith("run in "), body
            exec(body, {**vars(importlib.import_module(mark.removeprefix("run in ")))})
    added = {name for registry, old in zip(registries, before, strict=True) for name in set(registry) - set(old)}
    yield added
    for registry, old in zip(registries, before, strict=True):
        registry.clear()
        registry.update(old)


def test_recipes_work(documented):
    assert documented == {"spread", "strongest_first", "band", "sigmoid", "grey"}
    # a scale rule moves multipliers inside the bounds
    model = toy.Toy()
    control = gradient_control.Controller(model, toy.config("spread", warmup=0, refresh=1, max_log_step=0.5))
    optimizer = torch.optim.AdamW(control.param_groups(1e-2), lr=1e-3)
    control.attach(optimizer)
    g = torch.Generator().manual_seed(0)
    for step in range(6):
        for k, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=g) ** (2 * k + 1)
        control.before_step(step)
        optimizer.step()
        control.after_step()
    a = list(control.multipliers.values())
    assert max(a) > 1.05 > 0.95 > min(a) and all(1 / 4 <= x <= 4 for x in a)
    # a sampler, a timestep policy and a loss weight pass the checks of a configuration and do what they say
    config = memory_reinforce.MemoryConfig(
        sampler=SamplerConfig("strongest_first", {"cap": 3.0}),
        timesteps=TimestepConfig("band", {"low": 0.5}),
        loss=LossConfig("sigmoid", {"bias": 1.0}),
    )
    memory_reinforce.check(config)
    q = memory_reinforce.SAMPLERS["strongest_first"](np.array([[0.1, 0.9]]), np.array([5, 5]), 0)
    assert q.sum() == pytest.approx(1) and q[1] > q[0]
    p = memory_reinforce.TIMESTEPS["band"](np.geomspace(1e3, 1e-3, 100), 0.0, low=0.5)
    assert p.sum() == pytest.approx(1) and p.min() >= 0.3 / 100 and p[60] > p[10]
    w = memory_reinforce.LOSSES["sigmoid"](torch.tensor([0.0, 1.0]), "v_prediction", bias=1.0)
    assert w.isfinite().all() and w[1] == pytest.approx(0.5 / (1 + np.exp(-1)))
    # an embedder knows a picture again
    x = torch.rand(3, 3, 32, 32, generator=g)
    embedder = embedders.EMBEDDERS["grey"]()
    same = embedder.paired(embedder.embed(x), embedder.embed(x))
    assert torch.allclose(same, torch.ones(3), atol=1e-5)
    assert (embedder.paired(embedder.embed(x), embedder.embed(x.roll(1, 0))) < 0.9).all()
