"""Embedders: one contract, their files, and what they measure."""

import hashlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torchmetrics.functional.image import structural_similarity_index_measure

from silentbad.data.images import resize, to_tensor
from silentbad.errors import UserError
from silentbad.measure.embedders import EMBEDDERS, IMAGENET, load_embedder, region, ssim
from silentbad.model import pipeline
from silentbad.rng import generator
from tests.mistakes import (
    remove,
    tensors,
    with_nan,
    without_first,
    write,
)
from tests.recoveries import make_hook, saved_embedder, smooth
from tests.tiny import tiny_pipeline


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embedder_contract(name, tmp_path):
    embedder = EMBEDDERS[name](saved_embedder(name, tmp_path), "cpu")
    keeps_the_contract(embedder)
    assert name in embedder.describe()


def keeps_the_contract(embedder):
    images = torch.stack([to_tensor(smooth("embed", i, side=40)) for i in range(3)])
    features = embedder.embed(images)
    matrix = embedder.similarity(features, features[:2])
    assert matrix.shape == (3, 2) and matrix.max() <= 1 + 1e-5
    assert torch.diagonal(matrix).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert torch.allclose(
        embedder.paired(features[:2], features[1:]),
        embedder.similarity(features[:2], features[1:]).diagonal(),
    )
    assert embedder.embed(torch.rand(1, 3, 1, 1)).isfinite().all()
    assert any(c.isdigit() for c in embedder.describe())


def test_a_detector_of_ones_own_is_not_called_the_bundled_one(tmp_path):
    own = EMBEDDERS["micro"](saved_embedder("micro", tmp_path), "cpu")
    assert "bundled" not in own.describe() and "SHA-256" in own.describe()
    assert "bundled copy detector" in EMBEDDERS["micro"](None, "cpu").describe()


def test_many_pictures_have_the_features_of_few():
    embedder = load_embedder("micro", None, torch.device("cpu"))
    images = torch.stack([to_tensor(smooth("many", i)) for i in range(40)])
    few = torch.cat([embedder.embed(part) for part in images.split(4)])
    assert torch.allclose(embedder.embed(images), few, atol=1e-4)
    assert embedder.embed(images[:0]).shape == (0, *few.shape[1:])


def test_missing_embedder_files_say_where_to_get_them(tmp_path):
    with pytest.raises(UserError, match="facebookresearch/sscd-copy-detection"):
        EMBEDDERS["sscd"](str(tmp_path / "no.pt"))
    (tmp_path / "bad.pt").write_text("no script")
    with pytest.raises(UserError, match="not a TorchScript"):
        EMBEDDERS["sscd"](str(tmp_path / "bad.pt"))
    for name in ("micro", "clip", "dinov2"):
        with pytest.raises(UserError, match=f"^{name}: "):
            EMBEDDERS[name](str(tmp_path / "nothing"))


def test_sscd_is_read_only_from_the_path_given(tmp_path, monkeypatch):
    """No default from the working directory, nothing fetched: a TorchScript file runs code."""
    import huggingface_hub

    Path(saved_embedder("sscd", tmp_path)).rename(tmp_path / "sscd_disc_mixup.torchscript.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(next(tmp_path.iterdir())))
    for path in (None, "", "owner/repository/sscd.torchscript.pt", str(tmp_path)):
        with pytest.raises(UserError, match="download sscd_disc_mixup.torchscript.pt.*sscd-copy-detection") as refused:
            EMBEDDERS["sscd"](path)
        assert "\n" not in str(refused.value)
    EMBEDDERS["sscd"]("sscd_disc_mixup.torchscript.pt")


def test_sscd_with_another_sha256_is_not_loaded(tmp_path, monkeypatch):
    path = saved_embedder("sscd", tmp_path)
    right = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    options = dict(embedder="sscd", embedder_path=path, threshold=0.5)
    hook = make_hook(tmp_path / "run", **options, embedder_sha256=right.upper())
    assert right in hook.embedder.describe()
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UserError, match=f"embedder_sha256 is 00, but .* has {right}"):
        make_hook(tmp_path / "run", **options, embedder_sha256="00")


def saved_onnx(folder: Path, weight: torch.Tensor, batch: int | str = "B", side: int = 320) -> str:
    """A network of SSCD's interface (mean of a 4x4 grid, one linear layer) as an ONNX file."""
    from onnx import TensorProto, helper, numpy_helper

    pool = helper.make_node("AveragePool", ["images"], ["grid"], kernel_shape=[side // 4] * 2, strides=[side // 4] * 2)
    nodes = [pool, helper.make_node("Flatten", ["grid"], ["flat"]), helper.make_node("MatMul", ["flat", "w"], ["out"])]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, side, side])
    features = helper.make_tensor_value_info("out", TensorProto.FLOAT, [batch, weight.shape[1]])
    graph = helper.make_graph(nodes, "net", [images], [features], [numpy_helper.from_array(weight.numpy(), "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    (folder / "sscd.onnx").write_bytes(model.SerializeToString())
    return str(folder / "sscd.onnx")


@pytest.mark.parametrize("batch, side", [("B", 320), (1, 288)], ids=["any batch", "one picture of 288 pixels"])
def test_an_onnx_file_measures_what_its_network_does(batch, side, tmp_path):
    weight = torch.randn(48, 16, generator=generator("onnx", 0))
    embedder = load_embedder("sscd", saved_onnx(tmp_path, weight, batch, side), "cpu")
    images = torch.stack([to_tensor(smooth("embed", i, side=40)) for i in range(3)])
    mean, deviation = torch.tensor(IMAGENET).view(2, 3, 1, 1)
    pixels = (resize(images, (side, side)) - mean) / deviation
    expected = F.normalize(F.adaptive_avg_pool2d(pixels, 4).flatten(1) @ weight, dim=-1)
    assert torch.allclose(embedder.embed(images), expected, atol=1e-5)
    assert f"{side}x{side}" in embedder.describe() and "SHA-256" in embedder.describe()


def test_an_onnx_file_that_takes_bytes_gets_bytes(tmp_path):
    """As files that normalise by themselves do: (B,H,W,3), of any size."""
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Cast", ["image"], ["levels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["levels", "axes"], ["out"], keepdims=0),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["batch", "height", "width", 3])
    means = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", 3])
    axes = helper.make_tensor("axes", TensorProto.INT64, [2], [1, 2])
    graph = helper.make_graph(nodes, "net", [image], [means], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (tmp_path / "sscd.onnx").write_bytes(model.SerializeToString())
    embedder = load_embedder("sscd", str(tmp_path / "sscd.onnx"), "cpu")
    images = torch.stack([to_tensor(smooth("embed", i, side=40)) for i in range(3)])
    levels = resize(images, (320, 320)).mul(255).round().mean((2, 3))
    assert torch.allclose(embedder.embed(images), F.normalize(levels, dim=-1), atol=1e-5)
    assert "bytes" in embedder.describe()


def test_an_onnx_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "bad.onnx").write_bytes(b"no network")
    with pytest.raises(UserError, match="^sscd: .*is not an ONNX file of this network"):
        EMBEDDERS["sscd"](str(tmp_path / "bad.onnx"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"needs onnxruntime: pip install '\.\[sscd\]'"):
        EMBEDDERS["sscd"](str(tmp_path / "bad.onnx"))


def pickled(folder: Path) -> None:
    """Safetensors of a folder replaced by the same weights, pickled under their former names."""

    for file in list(folder.rglob("*.safetensors")):
        torch.save(load_file(file), file.with_name({"model": "pytorch_model"}.get(file.stem, file.stem) + ".bin"))
        file.unlink()


@pytest.mark.parametrize("name", ["clip", "dinov2", "pipeline"])
def test_pickled_weights_are_refused(name, tmp_path):
    folder = tmp_path / "weights"
    expected = "no safetensors weights; pickled ones are not loaded"
    folder.mkdir()
    if name in EMBEDDERS:
        saved_embedder(name, folder)
        pickled(folder)
        with pytest.raises(UserError, match=f"^{name}: .*{expected}") as refused:
            EMBEDDERS[name](str(folder))
        assert "\n" not in str(refused.value)
        return
    tiny_pipeline().save_pretrained(folder)
    pipeline.load_pipeline(str(folder), "float32", "cpu")
    pickled(folder / "text_encoder")
    with pytest.raises(UserError, match=expected):
        pipeline.load_pipeline(str(folder), "float32", "cpu")


@pytest.mark.parametrize("side", [8, 11, 48])
def test_ssim_is_torchmetrics_where_the_window_lies_inside(side):
    a, b = (torch.stack([to_tensor(smooth(k, i, side=side)).double() for i in range(2)]) for k in "ab")
    options = {"kernel_size": 11, "sigma": 1.5, "data_range": 1.0, "return_full_image": True}
    _, scores = structural_similarity_index_measure(a, b, **options)
    inside = scores if side < 11 else scores[..., 5:-5, 5:-5]
    assert torch.allclose(ssim(a, b), inside.flatten(1).mean(1).float(), atol=1e-6)
    assert torch.allclose(ssim(a, b[:1]), torch.cat([ssim(a[:1], b[:1]), ssim(a[1:], b[:1])]))


@pytest.mark.parametrize("side", (6, 10, 11, 64))
def test_ssim_of_a_picture_with_itself_is_one(side):
    x = torch.rand(3, 1, side, side, generator=generator("ssim", side))
    assert ssim(x, x).tolist() == pytest.approx([1.0] * 3, abs=1e-5)
    assert (ssim(x, x.flip(-1)) < 0.9).all()


def test_region_keeps_the_element_and_greys_the_rest():
    image = torch.zeros(1, 3, 20, 20)
    mask = torch.zeros(1, 40, 40)
    mask[:, 10:20, 20:30] = 1
    image[..., 5:10, 10:15] = 1
    part = region(image, mask)
    assert part.shape[-2:] == (7, 7) and part[0, 0, 3, 3] == 1 and part[0, 0, 0, 0] == pytest.approx(0.5, abs=0.02)
    assert region(image, torch.zeros(1, 4, 4)).shape == image.shape


def scripted(features):
    """A TorchScript file's module that gives these features."""

    class Net(torch.nn.Module):
        def forward(self, x):
            return features(x)

    return torch.jit.trace(Net(), torch.rand(2, 3, 320, 320))


NO_EMBEDDERS = {
    "one row for all": (lambda x: x.flatten(1).mean(0, keepdim=True), "is no embedder"),
    "NaN": (lambda x: x.flatten(1)[:, :8] * torch.nan, "not finite"),
    "zeros": (lambda x: x.flatten(1)[:, :8] * 0, "are zero"),
    "the same for all": (lambda x: x.flatten(1)[:, :8] * 0 + 1, "the same for every picture"),
}


@pytest.mark.parametrize("name", NO_EMBEDDERS)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_is_no_embedder_is_refused_when_loaded(name, tmp_path):
    features, said = NO_EMBEDDERS[name]
    scripted(features).save(str(tmp_path / "net.pt"))
    with pytest.raises(UserError, match=f"^sscd: .*{said}"):
        load_embedder("sscd", str(tmp_path / "net.pt"), "cpu")


SPOILED_EMBEDDERS = {
    "NaN": (tensors("model.safetensors", with_nan), "NaN"),
    "a tensor is missing": (tensors("model.safetensors", without_first), "cannot load"),
    "no weights": (remove("model.safetensors"), "cannot load"),
    "another JSON value": (write("config.json", "[]"), "cannot load"),
}


@pytest.mark.parametrize("kind", ["micro", "clip", "dinov2"])
@pytest.mark.parametrize("name", SPOILED_EMBEDDERS)
def test_a_spoiled_embedder_is_one_line(name, kind, tmp_path):
    spoil, said = SPOILED_EMBEDDERS[name]
    saved_embedder(kind, tmp_path)
    if kind == "micro" and "processor" in name:
        pytest.skip("it has none")
    spoil(tmp_path)
    with pytest.raises(UserError, match=f"^{kind}: ") as refused:
        EMBEDDERS[kind](str(tmp_path), "cpu")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_whole_embedders_pass_the_trial(tmp_path):
    for kind in ("micro", "clip", "dinov2", "ssim"):
        (tmp_path / kind).mkdir()
        load_embedder(kind, saved_embedder(kind, tmp_path / kind), "cpu")
    load_embedder("micro", None, "cpu")
