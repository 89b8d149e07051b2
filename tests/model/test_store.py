"""Caches on disk: the losses of live encoding, nothing stale, one build for all; batches computed in parts."""

import multiprocessing
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from silentbad.data.loader import chunks
from silentbad.data.records import load_records
from silentbad.errors import UserError
from silentbad.model import store as stores
from silentbad.saving import checkpoint
from tests.conftest import write_data
from tests.folders import config
from tests.mistakes import flip
from tests.toy import L2SP
from tests.training import VALIDATION, rows, step_once
from train_silentbad import main, micro_step


def on_disk(root) -> dict[str, int]:
    """{store: rows on disk}"""
    return {folder.name: len(stores.Store(folder).keys) for folder in sorted((root / "silentbad").iterdir())}


# ---------------------------------------------------------------- cached equals live


@pytest.mark.parametrize("changes", [{"mixed_precision": "bf16"}, {"dataloader_num_workers": 2}], ids=str)
def test_cached_and_live_training_give_equal_losses(build, tmp_path, changes):
    live = build(disk_cache_gb=0, cache_mb=0, **changes)
    cached = build(disk_cache_gb=1, cache_dir=tmp_path / "c", **changes)
    assert cached.loader.draws.unseen.all() and cached.encoder.offloaded and not live.encoder.offloaded
    for _ in range(4):
        torch.testing.assert_close(step_once(cached), step_once(live), rtol=2e-5 if not changes else 5e-3, atol=1e-6)


def test_no_step_encodes_anything_once_all_is_on_disk(build, tmp_path, monkeypatch):
    run = build(cache_dir=tmp_path / "c", **{"memory.region.name": "mask"})
    for module in (run.parts.vae.encoder, run.parts.text_encoders["text_encoder"]):
        module.register_forward_pre_hook(lambda *_: pytest.fail("encoded live"))
    monkeypatch.setattr(
        Image, "open", lambda path, **_: pytest.fail(f"{path} decoded") if "images" in str(path) else opened(path)
    )
    for _ in range(3):
        step_once(run)
    assert run.state.step == 3


opened = Image.open


def test_masks_are_the_same_with_and_without_the_picture(tmp_path):
    from silentbad.data.draws import Draws, Reader, Transform

    root = write_data(tmp_path / "wide")
    for file in (*(root / "images").glob("*.png"), *(root / "masks").glob("*.png")):
        Image.open(file).resize((29, 17)).save(file)
    sampler = Draws(Reader(load_records(config(root)), Transform(8, center_crop=True), seed=0))
    whole = sampler(0, 0, 0)
    reader = sampler.reader
    bare = Draws(reader, unseen=np.ones(len(reader.records), dtype=bool))(0, 0, 0)
    assert bare["pixels"] is None and torch.equal(whole["mask"], bare["mask"])
    assert whole["time_ids"] == bare["time_ids"] and whole["fixed"] and bare["fixed"]


# ---------------------------------------------------------------- nothing is stale


def test_a_second_run_encodes_nothing_and_a_change_encodes_anew(build, data, tmp_path, pipelines):
    settings = {"cache_dir": tmp_path / "c", "held_out_clean": 0}
    build(**settings)
    first = on_disk(tmp_path / "c")
    assert sorted(first.values()) == [10, 16]  # texts, images
    build(**settings, seed=1)
    assert on_disk(tmp_path / "c") == first
    Image.new("RGB", (16, 16), "pink").save(data / "images" / "c0.png")  # an image changed: one row more
    build(**settings)
    assert sorted(on_disk(tmp_path / "c").values()) == [10, 17]
    lines = (data / "metadata.jsonl").read_text().replace("field number 0", "meadow")
    (data / "metadata.jsonl").write_text(lines)  # a caption changed
    build(**settings)
    assert sorted(on_disk(tmp_path / "c").values()) == [11, 17]
    build(**settings, resolution=32)  # another transform, another interpolation, other weights: other stores
    build(**settings, image_interpolation_mode="lanczos")
    assert sorted(on_disk(tmp_path / "c").values()) == [11, 16, 16, 17]
    other = shutil.copytree(pipelines["v_prediction"], tmp_path / "other")
    for part, file in (("vae", "diffusion_pytorch_model"), ("text_encoder", "model")):
        tensors = checkpoint.read_tensors(other / part / f"{file}.safetensors")
        tensors[next(iter(tensors))].view(-1)[0] += 1e-3
        checkpoint.write_tensors(other / part / f"{file}.safetensors", tensors)
    build(**settings, pretrained_model_name_or_path=other)
    assert sorted(on_disk(tmp_path / "c").values()) == [10, 11, 16, 16, 16, 17]


def test_precision_and_configuration_are_part_of_a_name():
    a = torch.nn.Linear(2, 2)
    a.config = {"eps": 1e-5, "_name_or_path": "here"}
    name = stores.digest(a)
    a.config = {"eps": 1e-5, "_name_or_path": "there"}
    assert stores.digest(a) == name
    a.config = {"eps": 1e-6}
    assert stores.digest(a) != name
    a.config = {"eps": 1e-5}
    assert stores.digest(a.bfloat16()) != name


def test_random_windows_are_encoded_live_with_one_line(build, tmp_path, capsys):
    run = build(random_flip=True, cache_dir=tmp_path / "c", train_data_dir=write_data(tmp_path / "d", clean=0))
    step_once(run)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cache:")]
    assert lines == ["cache: 8 of 8 records are cut or flipped at random and encoded live"]
    assert [name.split("-")[0] for name in on_disk(tmp_path / "c")] == ["states"]
    assert (
        run.parts.vae not in run.encoder.offloaded and run.parts.text_encoders["text_encoder"] in run.encoder.offloaded
    )


def test_what_does_not_fit_the_budget_is_encoded_live(build, tmp_path, capsys):
    run = build(disk_cache_gb=5e-5, cache_dir=tmp_path / "c")
    step_once(run)
    assert "states take" in capsys.readouterr().out and not run.encoder.disk.all_texts and run.encoder.disk.all_images


def test_rehearsal_and_made_up_captions_keep_the_encoders(build, tmp_path):
    three = write_data(tmp_path / "three", elements=6, clean=0, kinds=3)
    run = build(
        train_data_dir=three,
        cache_dir=tmp_path / "c",
        train_batch_size=8,
        **{"memory.rehearsal.name": "pairwise", "memory.region.name": "mask"},
    )
    assert not run.encoder.offloaded and run.loader.draws.unseen is None and (run.encoder.disk.posterior >= 0).all()
    for _ in range(2):
        step_once(run)
    assert run.memory.rehearsed.count > 0
    for changes in ({"shuffle_phrases": True}, {"memory.roles.clean.caption_dropout": 0.5}):
        run = build(cache_dir=tmp_path / "c", **changes)
        assert run.encoder.offloaded == [run.parts.vae]


def test_encodings_are_the_same_inside_autocast(build):
    run = build(cache_mb=0)
    pictures = torch.rand(2, 3, 16, 16) * 2 - 1
    plain = (run.encoder.states(["a red cat", ""]), run.encoder.moments(pictures))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = (run.encoder.states(["a red cat", ""]), run.encoder.moments(pictures))
    assert all(map(torch.equal, plain, inside)) and all(x.dtype == torch.float32 for x in inside)


def test_modules_that_rest_are_fetched_for_the_call(build, tmp_path):
    run = build(cache_dir=tmp_path / "c")
    moved = []
    run.parts.text_encoders["text_encoder"].to = lambda device: moved.append(str(device))
    before = len(run.encoder.kept_texts)
    run.encoder.condition(["words that no record holds"])
    assert moved == ["cpu", "cpu"] and len(run.encoder.kept_texts) == before + 1  # there and back
    moved.clear()
    run.encoder.condition([run.records.row(0)["text"]])
    assert not moved


def test_validation_and_prompts_work_while_the_encoders_rest(flags, data, tmp_path):
    argv = flags(
        max_train_steps=2, cache_dir=tmp_path / "c", **VALIDATION, **{"validation.targets": data / "targets.jsonl"}
    )
    assert main([*argv, "--validation_prompts", "a red cat", "--validation_epochs", "1"]) == 0
    assert [row["step"] for row in rows(tmp_path / "run", validation=True)] == [0, 2]


def test_a_folder_that_cannot_be_written_is_one_line(build, tmp_path):
    run = build(cache_dir=tmp_path / "c", disk_cache_gb=0)
    (tmp_path / "file").touch()
    config = replace(run.config, cache_dir=str(tmp_path / "file"), disk_cache_gb=1)
    with pytest.raises(UserError, match="cannot write"):
        stores.Cached(run.encoder, run.loader.draws.reader, config, composes=False, blank=False, show=False, say=print)


# ---------------------------------------------------------------- the store


def keys(*numbers: int) -> np.ndarray:
    return stores.text_keys([str(n) for n in numbers])


def test_a_store_gives_each_row_back_by_its_key(tmp_path):
    store, rows_ = stores.Store(tmp_path), torch.arange(20.0).reshape(10, 2)
    store.add(keys(*range(6)), rows_[:6])
    store.add(keys(*range(4, 10)), rows_[4:])  # a shard may repeat rows
    store.refresh()
    numbers = store.find(keys(*range(12)))
    assert (numbers[10:] == -1).all()
    assert torch.equal(torch.stack([store.read(number) for number in numbers[:10]]), rows_)


def test_a_killed_build_goes_on_where_its_last_shard_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "SHARD", 64)  # four rows of 16 bytes
    store, asked = stores.Store(tmp_path), []

    def encode(numbers: list[int]) -> torch.Tensor:
        if len(asked) == 5:
            raise KeyboardInterrupt
        asked.append(numbers)
        return torch.tensor(numbers)[:, None].expand(-1, 4).float()

    with pytest.raises(KeyboardInterrupt):
        store.fill(keys(*range(20)), encode, batch=2, label="", show=False)
    (tmp_path / ".half").write_bytes(b"a shard cut off")
    asked.clear()
    again = stores.Store(tmp_path)
    again.fill(keys(*range(20)), encode, batch=4, label="", show=False)
    assert sorted(sum(asked, [])) == list(range(8, 20)) and not (tmp_path / ".half").exists()
    assert [int(again.read(n)[0]) for n in again.find(keys(*range(20)))] == list(range(20))


def fill_slowly(folder, out) -> None:
    encoded = []

    def encode(numbers: list[int]) -> torch.Tensor:
        encoded.extend(numbers)
        return torch.zeros(len(numbers), 4)

    store = stores.Store(folder)
    store.fill(keys(*range(40)), encode, batch=2, label="", show=False)
    assert (store.find(keys(*range(40))) >= 0).all()
    out.put(len(encoded))


def test_two_ranks_build_one_cache(tmp_path):
    context = multiprocessing.get_context("fork")
    counts = context.Queue()
    both = [context.Process(target=fill_slowly, args=(tmp_path, counts)) for _ in range(2)]
    for process in both:
        process.start()
    encoded = sorted(counts.get(timeout=60) for _ in both)
    for process in both:
        process.join()
    assert encoded == [0, 40] and len(list(tmp_path.glob("*.safetensors"))) == 1


# ---------------------------------------------------------------- parts of a batch that does not fit


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory.region.name": "mask"},
        {"memory.retention.name": "self_distillation"},
        {"memory.retention.name": L2SP},
        {"disk_cache_gb": 0, "random_flip": True},
    ],
    ids=str,
)
def test_chunked_equals_unchunked_gradient(build, changes):
    ends = []
    for size in (None, 3, 2, 1):
        run = build(train_batch_size=7, gradient_accumulation_steps=1, max_batch_size=size, **changes)
        (batch,) = run.loader.draw(0)
        with run.accelerator.accumulate(run.model):
            loss = micro_step(run, batch, 0)
        ends.append({"loss": loss, **{n: p.grad for n, p in run.parts.backbone.named_parameters()}})
    for end in ends[1:]:
        for name, value in end.items():
            torch.testing.assert_close(value, ends[0][name], rtol=1e-6, atol=1e-6)


def test_chunks_share_a_batch_evenly():
    batch = {"text": list("abcdefg"), "index": torch.arange(7)}
    assert chunks(batch, None)[0][0] == chunks(batch, 7)[0][0] == 1
    parts = chunks(batch, 3)
    assert [part["text"] for _, part in parts] == [list("abc"), list("de"), list("fg")]
    assert sum(share for share, _ in parts) == pytest.approx(1) and torch.cat([p["index"] for _, p in parts]).equal(
        batch["index"]
    )


# ---------------------------------------------------------------- the step's forms


@pytest.mark.parametrize(
    "changes", [{"channels_last": True}, pytest.param({"compile_model": True}, marks=pytest.mark.thorough)], ids=str
)
def test_memory_format_and_compilation_change_rounding_only(build, changes, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **k: compiled(model, **k, backend="aot_eager"))
    plain, other = build(adam_epsilon=1e-3), build(adam_epsilon=1e-3, **changes)
    for _ in range(2):
        torch.testing.assert_close(step_once(other), step_once(plain), rtol=1e-5, atol=1e-6)
    state = other.parts.backbone.state_dict()
    assert state.keys() == plain.parts.backbone.state_dict().keys()
    last = state["conv_in.weight"].is_contiguous(memory_format=torch.channels_last)
    assert last == ("channels_last" in changes) and (other.forward is other.model) == ("channels_last" in changes)
    for name, value in plain.parts.backbone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-5)


def test_a_damaged_shard_is_encoded_anew_with_one_line(tmp_path):
    said, keys = [], stores.text_keys(["a", "b"])
    for text, value in (("a", 1.0), ("b", 2.0)):
        stores.Store(tmp_path).add(stores.text_keys([text]), torch.full((1, 64), value))
    flip(sorted(tmp_path.glob("*.safetensors"))[0])
    damaged = stores.Store(tmp_path, said.append)
    assert (damaged.find(keys) < 0).sum() == 1 and len(said) == 1 and "damaged" in said[0]
    values = {"a": 1.0, "b": 2.0}
    damaged.fill(
        keys,
        lambda rows: torch.stack([torch.full((64,), values["ab"[r]]) for r in rows]),
        batch=2,
        label="",
        show=False,
    )
    assert [damaged.read(n)[0].item() for n in damaged.find(keys)] == [1.0, 2.0]


def test_nothing_that_is_not_finite_is_kept_in_a_cache():
    rows = torch.zeros(3, 4)
    assert stores.refuse_not_finite(rows, str) is rows
    rows[1, 2] = torch.nan
    with pytest.raises(UserError, match="^vae: record 1 "):
        stores.refuse_not_finite(rows, lambda k: f"vae: record {k}")
