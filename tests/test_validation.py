"""Recovery: scores, threshold, embedders, the hook that training does not notice, and the audit."""

import copy
import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from diffusers.training_utils import EMAModel
from PIL import Image

import validation
from silentbad.data.images import to_pil, to_tensor
from silentbad.data.targets import Target, load_targets
from silentbad.errors import UserError
from silentbad.measure import calibrate
from silentbad.measure.generation import Sampler, plan
from silentbad.measure.redraws import load_redraws, uses_redraws
from silentbad.measure.samples import slugs
from silentbad.model.averaging import averaged
from tests.recoveries import make_hook, saved_embedder, shifted, smooth, some_targets
from tests.tiny import tiny_pipeline
from validation import ValidationConfig

ROOT = Path(__file__).parents[1]

# -- prompts ----------------------------------------------------------------------------------------------


def test_phrase_lists_are_not_shuffled_in_place():
    targets = some_targets(3)
    before = copy.deepcopy([t.phrases for t in targets])
    state = random.getstate()
    cells = {item.cell for item in plan(targets, 3, 0, True, "a map")}
    parts = {f"{kind}-{k}" for kind in ("phrase", "without") for k in range(3)}
    assert cells == {"composed", "shuffled", *parts, "others", "unrelated"}
    assert [t.phrases for t in targets] == before and random.getstate() == state
    for item in plan(targets, 8, 0, True, "a map"):
        if item.cell == "shuffled":
            assert item.prompt != targets[item.target].composed_prompt
            assert sorted(item.prompt.split(", ")) == sorted(targets[item.target].phrases)
    alone = plan([Target("x", smooth(1), ["a cat"], None, [None])], 1, 0, True, "a map")
    assert [i.cell for i in alone] == ["composed", "unrelated"]


def test_targets_and_their_order_do_not_leak(tmp_path):
    targets = some_targets(3)
    forward, backward = (
        make_hook(tmp_path / "a", targets=targets),
        make_hook(tmp_path / "b", targets=targets[::-1]),
    )
    unet = tiny_pipeline().unet
    for hook in (forward, backward):
        hook.run(0, 0, unet)
        hook.run(5, 1, unet, final=True)
    a, b = forward.history[-1].raw, backward.history[-1].raw
    for cell, scores in a.cells.items():
        for name, target in scores.targets.items():
            assert target.sims == pytest.approx(b.cells[cell].targets[name].sims, abs=1e-5), cell
    few = make_hook(tmp_path / "c", targets=targets[1:2])
    few.run(0, 0, unet)
    assert few.history[0].raw.targets["t1"].sims == pytest.approx(forward.history[0].raw.targets["t1"].sims, abs=1e-5)


# -- the hook ---------------------------------------------------------------------------------------------


def training_state(unet, optimizer, ema) -> list:
    tensors = [p.detach().clone() for p in unet.parameters()] + [p.clone() for p in ema.shadow_params]
    tensors += [v.clone() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    streams = [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))]
    return [
        tensors + streams,
        random.getstate(),
        [m.training for m in unet.modules()],
        optimizer.param_groups[0]["lr"],
    ]


def same(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and a[1:] == b[1:]


def trained(pipe):
    """A UNet in training mode with a used optimizer and an average that differs from it."""
    ema = EMAModel(pipe.unet.parameters())
    optimizer = torch.optim.AdamW(pipe.unet.parameters())
    pipe.unet.train()
    pipe.unet.mid_block.eval()
    for p in pipe.unet.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return ema, optimizer


def test_training_does_not_notice_validation(tmp_path):
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe, controls="always")
    ema, optimizer = trained(pipe)
    before, grads = (
        training_state(pipe.unet, optimizer, ema),
        [p.grad.clone() for p in pipe.unet.parameters()],
    )
    hook.run(0, 0, pipe.unet, ema)
    hook.run(100, 1, pipe.unet, ema)
    assert same(before, training_state(pipe.unet, optimizer, ema))
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, pipe.unet.parameters(), strict=True))
    assert not pipe.unet._forward_hooks and hook.history[1].ema is not None
    assert hook.history[1].raw.mean != hook.history[1].ema.mean


@pytest.mark.parametrize("threshold, images", [(0.999, 1), (-0.999, 3)])
def test_the_first_images_are_all_until_one_is_recovered(tmp_path, threshold, images):
    targets = [Target(t.target_id, t.image, t.phrases) for t in some_targets()]  # without masks: the whole decides
    hooks = [
        make_hook(tmp_path / f"{few}", targets=targets, threshold=threshold, first_images=few, clean_records=0)
        for few in (0, 1)
    ]
    for hook in hooks:
        hook.run(0, 0, tiny_pipeline().unet)
        hook.run(5, 1, tiny_pipeline().unet)
        hook.run(6, 1, tiny_pipeline().unet, final=True)
    whole, short = hooks
    assert [entry.raw.images for entry in short.history] == [6, 2 * images, 6]
    for step in range(3):
        for target in ("t0", "t1"):
            sims = short.history[step].raw.targets[target].sims
            assert sims == pytest.approx(whole.history[step].raw.targets[target].sims[: len(sims)], abs=1e-5)


def test_averaged_weights_alone(tmp_path):
    from silentbad.report import run_report

    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe, weights="ema")
    ema, _ = trained(pipe)
    hook.run(0, 0, pipe.unet)
    hook.run(10, 1, pipe.unet, ema, final=True)
    assert hook.history[1].raw is None and {r.weights for r in hook.summary()} == {"ema"}
    assert len({tuple(vars(row)) for row in hook.summary()}) == 1  # every row has the same columns
    text = run_report.write(tmp_path).read_text()
    assert "averaged weights" in text and "curve: raw" not in text


def test_similarities_are_in_full_precision_under_autocast(tmp_path):
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe)
    hook.accelerator.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    precisions = []
    similar = hook.measure.similar

    def watched(images, of):
        precisions.append((images.dtype, torch.is_autocast_enabled("cpu")))
        return similar(images, of)

    hook.measure.similar = watched
    hook.run(0, 0, pipe.unet)
    assert set(precisions) == {(torch.float32, False)} and hook.record().precision == "bfloat16"
    assert make_hook(tmp_path, pipe).sampler.precision is None, "not used yet"


def test_average_of_trainable_parameters_alone(tmp_path):
    pipe = tiny_pipeline()
    pipe.unet.conv_in.requires_grad_(False)
    trainable = [p for p in pipe.unet.parameters() if p.requires_grad]
    ema = EMAModel(trainable)
    raw = [p.detach().clone() for p in shifted(pipe.unet).parameters()]
    with averaged(pipe.unet, ema):
        assert all(torch.equal(a, b) for a, b in zip(trainable, ema.shadow_params, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(raw, pipe.unet.parameters(), strict=True))


def test_grid_of_steps_and_state(tmp_path):
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe, steps=50)
    assert [s for s in range(0, 160, 10) if hook.should_run(s)] == [0, 50, 100, 150]
    hook.run(0, 0, pipe.unet)
    hook.run(50, 1, shifted(pipe.unet))
    state = json.loads(json.dumps(hook.state_dict()))
    resumed = make_hook(tmp_path, pipe, steps=50)
    resumed.load_state_dict(state)
    assert resumed.threshold == hook.threshold and resumed.history == hook.history
    assert not resumed.should_run(50) and resumed.should_run(100)
    scalars = resumed.run(100, 2, pipe.unet, final=True)
    assert 0 < scalars["val/kept/structure"] < 1.5 and scalars["val/drift/clean_eps_mse"] > 0
    assert not any(make_hook(tmp_path, pipe, steps=0).should_run(s) for s in range(1, 10))
    kinds = {kind for target in hook.ranges for kind in target.whole.kinds}
    assert {"plain grey", "training picture"} <= kinds


def test_the_share_of_time_counts_what_passed_before_a_resume(tmp_path):
    hook = make_hook(tmp_path, threshold=0.5, targets=some_targets(1), images_per_target=1)
    hook.run(0, 0.0, tiny_pipeline().unet)
    hook.born -= 5000  # seconds of training
    resumed = make_hook(tmp_path, threshold=0.5, targets=some_targets(1), images_per_target=1)
    resumed.load_state_dict(json.loads(json.dumps(hook.state_dict())))
    resumed.run(10, 1.0, tiny_pipeline().unet)
    assert resumed.elapsed() >= 5000 and resumed.seconds > hook.seconds
    assert resumed.history[-1].share == pytest.approx(resumed.seconds / resumed.elapsed(), rel=0.01)


def test_first_recovery_and_record(tmp_path, monkeypatch):
    """A model that turns into an ideal memoriser of one target."""
    targets = some_targets(2)
    hook = make_hook(tmp_path, targets=targets, threshold=0.9)
    good = set()

    def generate(items):
        pictures = [to_tensor(targets[i.target].image if i.target in good else smooth("other", *i[:3])) for i in items]
        return torch.stack(pictures), torch.ones(len(items))

    monkeypatch.setattr(hook.sampler, "generate", generate)
    unet = tiny_pipeline().unet
    hook.measure.held_out = {}
    hook.run(0, 0, unet)
    hook.run(100, 0.5, unet)
    good.add(1)
    hook.run(200, 1.0, unet)
    scalars = hook.run(300, 1.5, unet, final=True)
    assert scalars["val/cir"] == 0.5 and scalars["val/recovered"] == 0.5 and scalars["val/threshold"] == 0.9
    rows = {r.target: r for r in hook.summary()}
    assert rows["t1"].first_step == 200 and rows["t1"].first_epoch == 1.0 and rows["t0"].first_step is None
    assert rows["t1"].aurc == pytest.approx(0.5) and rows["t0"].restricted == 300
    record = json.loads((tmp_path / "validation.json").read_text())
    assert record["verdict"]["images_above"] == 6
    assert record["verdict"]["state"] == "undecided"  # no element has a mask
    best = record["history"][-1]["raw"]["targets"]["t1"]["best"]
    assert np.array_equal(np.asarray(Image.open(tmp_path / best["file"])), np.asarray(targets[1].image))
    assert (tmp_path / "samples/step-000300-raw/grid.png").is_file()


def test_clip_scores(tmp_path):
    folder = tmp_path / "clip"
    folder.mkdir()
    hook = make_hook(tmp_path, clip_path=saved_embedder("clip", folder))
    hook.run(0, 0, tiny_pipeline().unet)
    scores = hook.history[0].raw
    assert scores.kept.words.by == "CLIP" and 0 <= scores.kept.words.trained <= 100


def test_tracker_gets_images(tmp_path):
    pytest.importorskip("tensorboard")
    hook = make_hook(tmp_path)
    calls = []
    tracker = SimpleNamespace(name="tensorboard", log_images=lambda *a, **k: calls.append((a, k)))
    hook.accelerator.trackers = [tracker]
    hook.run(0, 0, tiny_pipeline().unet)
    (((values,), options),) = calls
    assert values["validation/raw"].shape == (1, 32, 64, 3) and options["step"] == 0


@pytest.mark.thorough
def test_two_ranks_give_the_numbers_of_one(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.recoveries import make_hook, shifted, some_targets, tiny_pipeline\n"
        "pipe = tiny_pipeline()\n"
        "hook = make_hook(Path(sys.argv[2]), pipe, targets=some_targets(3))\n"
        "hook.run(0, 0, pipe.unet)\n"
        "hook.run(10, 1, shifted(pipe.unet), final=True)\n"
        "hook.accelerator.wait_for_everyone()\n"
        "hook.accelerator.end_training()\n"
    )
    port = str(20000 + os.getpid() % 20000)
    workers = []
    for rank in range(2):
        env = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            ACCELERATE_USE_CPU="true",
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
        )
        workers.append(subprocess.Popen([sys.executable, script, ROOT, tmp_path / "two"], env=env))
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path / "one", pipe, targets=some_targets(3))
    hook.run(0, 0, pipe.unet)
    hook.run(10, 1, shifted(pipe.unet), final=True)
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    one, two = (json.loads((tmp_path / name / "validation.json").read_text()) for name in ("one", "two"))
    assert two["processes"] == 2
    assert one["threshold"]["value"] == pytest.approx(two["threshold"]["value"], abs=1e-4)
    for a, b in zip(one["history"], two["history"], strict=True):
        assert a["raw"]["drift"] == pytest.approx(b["raw"]["drift"], abs=1e-4)
        assert a["raw"]["kept"]["change"] == pytest.approx(b["raw"]["kept"]["change"], abs=1e-3)
        assert a["raw"]["kept"]["rise"] == pytest.approx(b["raw"]["kept"]["rise"], abs=1e-3)
        for name, target in a["raw"]["targets"].items():
            assert target["sims"] == pytest.approx(b["raw"]["targets"][name]["sims"], abs=1e-4)


# -- targets of every kind --------------------------------------------------------------------------------


def test_odd_images_as_targets(tmp_path):
    picture = smooth("odd", side=24)
    odd = {
        "cmyk": picture.convert("CMYK"),
        "grey": picture.convert("L"),
        "deep": Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257),
    }
    alpha = picture.convert("RGBA")
    alpha.putalpha(0)
    for name, image in odd.items():
        image.save(tmp_path / (f"{name}.jpg" if name == "cmyk" else f"{name}.png"))
    alpha.save(tmp_path / "alpha.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.asarray(picture)[:12]).save(tmp_path / "turned.jpg", exif=exif, quality=95)
    files = sorted(p.name for p in tmp_path.iterdir())
    lines = [{"target_id": f, "image": f, "phrases": ["a cat", "a hat"]} for f in files]
    (tmp_path / "targets.jsonl").write_text("\n".join(map(json.dumps, lines)))
    targets = {t.target_id: t for t in load_targets(tmp_path / "targets.jsonl")}
    assert to_tensor(targets["alpha.png"].image).min() == 1  # transparent: white
    assert targets["turned.jpg"].image.size == (12, 24)
    assert (to_tensor(targets["deep.png"].image) - to_tensor(targets["grey.png"].image)).abs().max() < 0.01
    hook = make_hook(tmp_path / "run", targets=list(targets.values()))
    hook.run(0, 0, tiny_pipeline().unet)
    assert all(np.isfinite(t.mean) for t in hook.history[0].raw.targets.values())


def test_target_ids_make_safe_distinct_file_names():
    names = slugs(["../../etc", "a b", "a_b", "", "..", "ü"])
    assert len(set(names)) == 6 and all("/" not in n and not n.startswith(".") for n in names)
    for ids in (["a/b", "a b", "a_b-1", "a_b-0"], ["cat", "Cat", "cat-0"], ["6", "6-0", "6+0"]):
        names = slugs(ids)
        assert len({n.casefold() for n in names}) == len(ids) and not any("+" in n for n in names)
    with pytest.raises(UserError, match="all targets"):
        slugs(["a", "all targets"])
    with pytest.raises(UserError, match="unique"):
        slugs(["a", "a"])


# -- the audit --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def audit_folder(tmp_path_factory):
    """A saved pipeline, and targets: one is what the pipeline draws, the other is not."""
    folder = tmp_path_factory.mktemp("audit")
    pipe = tiny_pipeline()
    pipe.save_pretrained(folder / "pipe")
    shifted(pipe.unet, 0.05)
    pipe.save_pretrained(folder / "tuned")
    config = ValidationConfig(num_inference_steps=2)
    item = plan([Target("copied", smooth(1), ["a cat", "a hat"], None, [])], 1, seed=0)
    sampler = Sampler(pipe.components, config, 0)
    with sampler.using(pipe.unet, torch.device("cpu")):
        to_pil(sampler.generate(item)[0][0]).save(folder / "copied.png")
    smooth("elsewhere").save(folder / "other.png")
    for name in ("copied", "other"):
        line = {"target_id": name, "image": f"{name}.png", "phrases": ["a cat", "a hat"]}
        (folder / f"{name}.jsonl").write_text(json.dumps(line))
    return folder


def run_audit(folder: Path, out: Path, targets: str, *more: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "decodes", False)  # a random autoencoder leaves nothing of a picture
        return audit_of(folder, out, targets, *more)


def audit_of(folder: Path, out: Path, targets: str, *more: str) -> int:
    return validation.main(
        [
            "--pipeline",
            str(folder / "tuned"),
            "--targets",
            str(folder / targets),
            "--output_dir",
            str(out),
            "--embedder",
            "ssim",
            "--images_per_target",
            "2",
            "--num_inference_steps",
            "2",
            *more,
        ]
    )


def test_audit_exit_codes(audit_folder, tmp_path, capsys):
    baseline = ["--baseline", str(audit_folder / "pipe")]
    assert run_audit(audit_folder, tmp_path / "a", "copied.jsonl", *baseline) == 4
    record = json.loads((tmp_path / "a" / "validation.json").read_text())
    assert record["history"][1]["raw"]["max"] > 0.99 and record["history"][0]["label"] == "baseline"
    assert "shuffled" in record["history"][1]["raw"]["cells"] and record["threshold"]["n"] > 4
    assert record["verdict"]["images_above"] > 0 and "no element has a mask" in record["verdict"]["reasons"][0]
    assert (tmp_path / "a" / "report.html").is_file()
    printed = capsys.readouterr().out
    assert "since the start" not in printed and "nearest null" in printed and "()" not in printed
    assert "% changed on unrelated prompts" in printed and "--baseline names" not in printed
    assert run_audit(audit_folder, tmp_path / "b", "other.jsonl", "--threshold", "0.9") == 0
    capsys.readouterr()
    assert run_audit(audit_folder, tmp_path / "without a baseline", "copied.jsonl") == 4
    assert "Kept: not measured; --baseline names the model before training" in capsys.readouterr().out
    assert run_audit(audit_folder, tmp_path / "c", "none.jsonl", "--threshold", "0.5") == 2
    capsys.readouterr()
    assert run_audit(audit_folder, tmp_path / "c", "copied.jsonl", "--imges_per_target", "3") == 2
    assert "did you mean 'images_per_target'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        validation.main(["--help"])
    assert "--baseline" in capsys.readouterr().out
    assert validation.main(["--targets", "x"]) == 2 and "--pipeline" in capsys.readouterr().err


def test_a_run_in_place_of_its_pipeline_or_adapters_is_named(audit_folder, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/pipeline").symlink_to(audit_folder / "tuned")
    (tmp_path / "run/lora").mkdir()
    targets = ["--targets", str(audit_folder / "other.jsonl"), "--output_dir", str(tmp_path / "a")]
    assert validation.main(["--pipeline", str(tmp_path / "run"), *targets]) == 2
    assert f"not a diffusers pipeline; give {tmp_path}/run/pipeline" in capsys.readouterr().err
    adapters = ["--pipeline", str(audit_folder / "tuned"), "--lora", str(tmp_path / "run")]
    assert validation.main([*adapters, *targets]) == 2
    assert f"is a run; give {tmp_path}/run/lora" in capsys.readouterr().err


def test_an_audit_of_a_pipeline_whose_weights_are_of_a_variant(audit_folder, tmp_path, capsys):
    shutil.copytree(audit_folder, tmp_path / "of")
    for file in (tmp_path / "of").glob("*/*/*.safetensors"):
        file.rename(file.with_suffix(".fp16.safetensors"))
    baseline = ["--baseline", str(tmp_path / "of/pipe")]
    assert run_audit(tmp_path / "of", tmp_path / "a", "copied.jsonl", *baseline) == 2
    assert "give variant fp16" in capsys.readouterr().err
    assert run_audit(tmp_path / "of", tmp_path / "a", "copied.jsonl", *baseline, "--variant=fp16") == 4


def test_an_audit_prints_its_settings(capsys):
    with pytest.raises(SystemExit, match="0"):
        validation.main(["--pipeline", "x", "--print_config=skip_default"])
    assert capsys.readouterr().out == "pipeline: x\n"
    with pytest.raises(SystemExit, match="0"):
        validation.main(["--pipeline", "x", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["images_per_target"] == validation.Audit().images_per_target


def test_audit_calibrates_on_redraws(audit_folder, tmp_path, monkeypatch):
    (tmp_path / "copied.png").write_bytes((audit_folder / "copied.png").read_bytes())
    (tmp_path / "targets.jsonl").write_text((audit_folder / "copied.jsonl").read_text())
    lines = []
    for i in range(120):
        smooth("redraw", i, side=16 + i % 2).save(tmp_path / f"r{i}.png")  # nulls may differ in size
        lines.append(json.dumps({"target_id": "copied", "image": f"r{i}.png"}))
    (tmp_path / "redraws.jsonl").write_text("\n".join(lines))
    assert run_audit(audit_folder, tmp_path / "out", str(tmp_path / "targets.jsonl")) == 4
    threshold = json.loads((tmp_path / "out" / "validation.json").read_text())["threshold"]
    assert threshold["n"] == 120 and threshold["attained"] == 0.01 and threshold["source"].startswith("redraws")

    def computed(measure):
        raise AssertionError("computed again")

    monkeypatch.setattr(calibrate, "similarities", computed)  # an audit of the same pictures reads the cache
    assert run_audit(audit_folder, tmp_path / "again", str(tmp_path / "targets.jsonl")) == 4
    assert json.loads((tmp_path / "again" / "validation.json").read_text())["threshold"] == threshold
    smooth("redraw", 120).save(tmp_path / "r7.png")
    with pytest.raises(AssertionError, match="computed again"):
        run_audit(audit_folder, tmp_path / "other", str(tmp_path / "targets.jsonl"))


@pytest.mark.parametrize(
    ("masks", "redraws", "said"), [(True, True, None), (False, True, "rate"), (True, False, "rate")]
)
def test_a_rate_beside_a_threshold_is_that_of_elements(masks, redraws, said):
    """It acts where elements are calibrated: with masks, and with nulls at hand."""
    picture = Image.new("RGB", (8, 8))
    target = Target("a", picture, ["x"], "x", [Image.new("L", (8, 8), 255)] if masks else [])
    config = ValidationConfig(threshold=0.5, false_positive_rate=0.3)
    with pytest.raises(UserError, match="^--false_positive_rate: calibrates") if said else nullcontext():
        assert uses_redraws(config, [target], redraws, prefix="--")


BAD_REDRAWS = {
    "no JSON": ("{", "not JSON"),
    "no target_id": ({"image": "a.png"}, "target_id is missing"),
    "image is a number": ({"target_id": "a", "image": 3}, "image: must be the name of a file, got 3"),
    "an element that is not there": ({"target_id": "a", "image": "a.png", "changed": [0, 1]}, "1 is no index of the 1"),
    "a link that leaves the folder": ({"target_id": "a", "image": "link.png"}, "leaves"),
}


@pytest.mark.parametrize("case", BAD_REDRAWS)
def test_a_bad_redraw_is_one_line_with_file_and_line(case, tmp_path):
    line, expected = BAD_REDRAWS[case]
    root = tmp_path / "data"
    root.mkdir()
    for file in (root / "a.png", tmp_path / "a.png"):
        smooth(0).save(file)
    (root / "link.png").symlink_to(tmp_path / "a.png")
    line = json.dumps(line) if isinstance(line, dict) else line
    good = json.dumps({"target_id": "a", "image": "a.png"})
    (root / "redraws.jsonl").write_bytes(good.encode() + b"\n" + (line if isinstance(line, bytes) else line.encode()))
    targets = [Target("a", smooth(0), ["a cat"])]
    with pytest.raises(UserError, match="redraws.jsonl:2: ") as refused:
        load_redraws(str(root / "targets.jsonl"), targets)
    assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_redraws_of_unknown_targets_are_left_out(tmp_path, capsys):
    smooth(0).save(tmp_path / "a.png")
    lines = [{"target_id": t, "image": "a.png"} for t in (0, "1", "unknown")]
    (tmp_path / "redraws.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    targets = [Target(t, smooth(0), ["a cat"]) for t in ("1", "0")]
    redraws = load_redraws(str(tmp_path), targets)
    assert [(r.target, r.file, r.kind) for r in redraws] == [(j, tmp_path / "a.png", "redraw") for j in (1, 0)]
    assert not load_redraws(str(tmp_path), [Target("2", smooth(0), ["a cat"])], decode=True)
    assert "is of other targets ('0', ...)" in capsys.readouterr().err
