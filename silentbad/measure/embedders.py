"""Embedders: how similar two images are.

Each embedder has its own preprocessing and names it in `describe()`, since a threshold holds for
one preprocessing only (SSCD's authors advise a small edge of 288 or a square of 320, DCR crops 224
of 256, SilentBadDiffusion squashes to 512).

Legend: images (B,3,H,W) float in [0,1]; features (B,...); N generations, T targets; m mask (1,h,w)
in [0,1]."""

import hashlib
import io
import math
import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from silentbad import ROOT
from silentbad.data.images import RIM, resize
from silentbad.data.targets import Target
from silentbad.errors import UserError, user_errors
from silentbad.files import names_folder
from silentbad.files import sha256 as sha256_of
from silentbad.measure.micro import MicroEmbedder, alignments
from silentbad.measure.redraws import load_redraws
from silentbad.measure.structure import (
    box_of,
    colours,
    detail,
    inner,
    same_colours,
    structure,
    whole_of,
)
from silentbad.model.gate import check_files, check_finite, load_model, loaded
from silentbad.rng import generator
from silentbad.settings import user_code
from silentbad.settings.registries import Parts

MICRO = ROOT / "assets" / "micro-sd" / "embedder"
SSCD_ADVICE = (
    "download sscd_disc_mixup.torchscript.pt (or another *.torchscript.pt) from "
    "https://github.com/facebookresearch/sscd-copy-detection (README, pretrained models) and give "
    "its path, or an .onnx file made of it, as embedder_path"
)

WINDOW = 11  # pixels, of SSIM's Gaussian
MARGIN = 0.05  # of a picture's side, around an element's box
Masks = Sequence[Tensor | None]  # of a target's elements, (1,h,w) in [0,1] each
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation of its levels


def region(images: Tensor, mask: Tensor) -> Tensor:
    """Pictures cut to the box of an element's mask, grey outside the mask.

    images (B,3,H,W), mask (1,h,w) -> (B,3,h',w'). An empty mask leaves the whole picture."""
    H, W = images.shape[-2:]
    m = resize(mask[None], (H, W))[0]
    if not (m > 0.5).any():
        return images
    rows, columns = box_of(m)
    pad_y = max(1, round(MARGIN * H))
    pad_x = max(1, round(MARGIN * W))
    ys = slice(max(0, rows.start - pad_y), rows.stop + pad_y)
    xs = slice(max(0, columns.start - pad_x), columns.stop + pad_x)
    m = m.to(images)
    return (images * m + 0.5 * (1 - m))[..., ys, xs]


# -- embedders -------------------------------------------------------------------------------------
class Embedder:
    """`embed` maps images to features; the default similarity is the cosine of unit features."""

    def embed(self, images: Tensor) -> Tensor:
        """Images (B,3,H,W) in [0,1] -> features (B,...)."""
        raise NotImplementedError

    def compared_masks(self, masks: Masks) -> tuple[Tensor | None, Masks]:
        """The masks (1,h,w) inside which pictures are compared, from the masks of a target's
        elements: for the whole (None: all of it), and for each element."""
        return None, masks

    def of_region(self, images: Tensor, mask: Tensor) -> Tensor:
        """Features (B,...) of images (B,3,H,W) inside a mask (1,h,w)."""
        return self.embed(region(images, mask))

    def reference(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Features (1,...) that images are compared with: of a target (1,3,H,W), or of its region
        in a mask (1,h,w)."""
        return self.embed(image) if mask is None else self.of_region(image, mask)

    def paired(self, a: Tensor, b: Tensor) -> Tensor:
        """Features (N,...) and (N or 1,...) -> similarities (N,), pair by pair."""
        return (a * b).sum(-1)

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """Features (N,...), (T,...) -> (N,T)."""
        return torch.stack([self.paired(a, row[None]) for row in b], dim=1)

    def describe(self) -> str:
        raise NotImplementedError


class Micro(Embedder):
    """The bundled copy detector: features by place. A target is compared at its nine alignments.
    Colour has a score of its own, since the detector tolerates other colours (`structure.py`); the
    lower score counts.

    Features (B,D): the tensors of `_parts`, flattened and concatenated."""

    SIDE = 64  # pixels
    MAP = (16, 16)  # places of the detector's features, and of colours
    # Difference of chroma, of [0,1], at which its score is 1/e. A tint of 0.15 has 0.12. A true copy
    # has up to 0.08 against the target's file, since the autoencoder loses some colour.
    TINT = 0.08

    def __init__(self, path: str | None, device: torch.device | str = "cpu"):
        self.path = str(path or MICRO)
        self.device = device
        check_files(Path(self.path), failed := f"micro: cannot load '{self.path}'")
        with user_errors(failed):
            self.model = MicroEmbedder.from_pretrained(self.path).to(device).eval()
        check_finite(self.model, failed)
        self.shapes = [(self.model.config["dim"], *self.MAP), (3, *self.MAP)]  # of the parts

    def embed(self, images: Tensor) -> Tensor:
        return self.of_region(images, torch.ones(1, self.SIDE, self.SIDE))

    @torch.no_grad()
    def of_region(self, images: Tensor, mask: Tensor) -> Tensor:
        parts = self._parts(self._small(images), self._small(mask[None])[0])
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def reference(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Features (1,9,D) of a target, or of its region, at its nine alignments within a pixel."""
        return super().reference(alignments(self._small(image)), mask)[None]

    def paired(self, a: Tensor, b: Tensor) -> Tensor:
        """Features (N,D), and of other images (1 or N,D) or of a target at A alignments (1,A,D) ->
        (N,): the lowest score, each at its best alignment."""
        parts = self._split(a)
        if b.ndim == a.ndim:
            return torch.stack(self._scores(parts, self._split(b))).amin(0)
        of_alignments = []
        for alignment in map(self._split, b.unbind(1)):
            colour = same_colours(parts[1], alignment[1], self.TINT)
            of_alignments.append(torch.stack([*self._scores(parts, alignment), colour]))
        return torch.stack(of_alignments).amax(0).amin(0)

    def describe(self) -> str:
        whose = "bundled copy detector"
        if Path(self.path).resolve() != MICRO.resolve():
            whose = f"copy detector of SHA-256 {sha256_of(Path(self.path) / 'model.safetensors')}"
        return (
            f"micro: {whose}, 64x64 squashed, bilinear antialiased, [-1,1], "
            "exp(-distance) of 16x16 features at the best alignment within 1 pixel, no higher than "
            f"the score of chroma (1/e at {self.TINT:g})"
        )

    def _small(self, images: Tensor) -> Tensor:
        return resize(images.to(self.device), (self.SIDE, self.SIDE))

    def _parts(self, images: Tensor, mask: Tensor) -> list[Tensor]:
        """The detector's map and the colours of images (B,3,64,64) in a mask (1,64,64)."""
        pixels = region(images, mask)
        pixels = self._small(pixels) * 2 - 1
        # larger batches do not fit a core's cache, smaller ones round differently
        parts = max(1, len(pixels) // 16) if pixels.is_cpu else 1
        maps = torch.cat([self.model(part) for part in pixels.tensor_split(parts)]).float()
        return [maps, colours(images, (mask > 0.5).float())]

    def _split(self, features: Tensor) -> list[Tensor]:
        """The parts of features (N,D)."""
        parts = features.split([math.prod(shape) for shape in self.shapes], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _scores(self, a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        """Parts of N and of 1 or N pictures -> scores (N,) by part, without colour."""
        return [self.model.paired(a[0], b[0])]


class Copy(Micro):
    """`Micro`, but no higher than the score of fine structure (`structure.py`): the detector alone
    overlooks the lost texture of a photograph. The rims of elements are left out."""

    # difference of chroma to a photograph after the autoencoder: true copies 0.04, grey ones 0.07
    # or more
    TINT = 0.06

    def __init__(self, path: str | None, device: torch.device | str = "cpu"):
        super().__init__(path, device)
        self.shapes.append((3, self.SIDE, self.SIDE))

    def compared_masks(self, masks: Masks) -> tuple[Tensor | None, Masks]:
        small = [m if m is None else resize(m[None], (self.SIDE, self.SIDE))[0] for m in masks]
        inners = [m if m is None else inner(m) for m in small]
        return whole_of(small, inners), inners

    def describe(self) -> str:
        return (
            f"copy: {super().describe()}, nor than that of detail at sigma 2 of 64x64; without the "
            f"rims of elements, 1/{1 / RIM:g} of the side"
        )

    def _parts(self, images: Tensor, mask: Tensor) -> list[Tensor]:
        return [*super()._parts(images, mask), detail(images, (mask > 0.5).float())]

    def _scores(self, a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        return [*super()._scores(a, b), structure(a[2], b[2])]


class SSCD(Embedder):
    """Copy detection, arXiv 2202.10261: a local TorchScript file, or an ONNX file of the same
    network. TorchScript runs code, so a file is read only from the path given, and only if its
    SHA-256 is the expected one where that is given."""

    def __init__(
        self, path: str | None, device: torch.device | str = "cpu", sha256: str | None = None
    ):
        self.size = 320
        self.takes_bytes = False  # whether the network takes bytes and normalises them itself
        self.device = device
        self.file = Path(path or "")
        with user_errors(f"sscd: cannot read '{path}'", SSCD_ADVICE):
            content = self.file.read_bytes()
        self.sha256 = hashlib.sha256(content).hexdigest()
        if sha256 is not None and sha256.strip().lower() != self.sha256:
            raise UserError(
                f"sscd: embedder_sha256 is {sha256}, but '{path}' has {self.sha256}; not loaded"
            )
        if self.file.suffix == ".onnx":
            with user_errors(f"sscd: '{path}' is not an ONNX file of this network", SSCD_ADVICE):
                self.model = OnnxNetwork(content, device)
            self.size = self.model.size or self.size
            self.takes_bytes = self.model.takes_bytes
            return
        failed = f"sscd: '{path}' is not a TorchScript file"
        with warnings.catch_warnings(), user_errors(failed, SSCD_ADVICE):
            warnings.simplefilter("ignore")  # what torch says about torch.jit
            network = torch.jit.load(io.BytesIO(content), map_location=device).eval()
        check_finite(network, f"sscd: cannot load '{path}'")
        self.model = network

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        pixels = resize(images.to(self.device), (self.size, self.size))
        if not self.takes_bytes:
            mean, deviation = (pixels.new_tensor(levels).view(3, 1, 1) for levels in IMAGENET)
            pixels = (pixels - mean) / deviation
        return F.normalize(self.model(pixels).float(), dim=-1)

    def describe(self) -> str:
        scaled = "bytes" if self.takes_bytes else "ImageNet mean and deviation"
        return (
            f"sscd: {self.file.name}, {self.size}x{self.size} squashed, bilinear antialiased, "
            f"{scaled}, cosine, SHA-256 {self.sha256}"
        )


class OnnxNetwork:
    """An ONNX file's network of one input, (B,3,H,W) or bytes (B,H,W,3), and one output (B,D),
    called with (B,3,H,W) as a module is."""

    def __init__(self, content: bytes, device: torch.device | str):
        try:
            import onnxruntime
        except ImportError:
            raise UserError("an .onnx file needs onnxruntime: pip install '.[sscd]'") from None
        self.device = torch.device(device)
        available = onnxruntime.get_available_providers()
        wanted = ["CUDAExecutionProvider"] if self.device.type == "cuda" else []
        providers = [name for name in (*wanted, "CPUExecutionProvider") if name in available]
        self.session = onnxruntime.InferenceSession(content, providers=providers)
        (network_input,) = self.session.get_inputs()
        self.name = network_input.name
        self.takes_bytes = network_input.type == "tensor(uint8)"
        batch, _, side, _ = network_input.shape
        self.size: int | None = side if isinstance(side, int) else None
        self.one_by_one = batch == 1  # many exporters fix the batch size at 1

    def __call__(self, images: Tensor) -> Tensor:
        pixels = images.cpu()
        if self.takes_bytes:
            pixels = pixels.mul(255).round().byte().permute(0, 2, 3, 1).contiguous()
        parts = pixels.split(1 if self.one_by_one else len(pixels))
        features = [self.session.run(None, {self.name: part.numpy()})[0] for part in parts]
        return torch.cat([torch.from_numpy(part) for part in features]).to(self.device)


class Transformer(Embedder):
    """An image model of transformers with its own image processor, by a folder or Hub id."""

    name: str
    default: str

    def __init__(self, path: str | None, device: torch.device | str, kind: Any):
        from transformers import AutoImageProcessor

        self.path = path or self.default
        self.device = device
        self.failed = (
            f"{self.name}: cannot load '{self.path}'; {advice(self.path, type(self).__name__)}"
        )
        self.processor = loaded(AutoImageProcessor, self.failed, self.path)
        model = load_model(kind, self.failed, self.path, extras=True, use_safetensors=True)
        self.model = model.to(device).eval()

    def pixels(self, images: Tensor) -> Tensor:
        """Images (B,3,H,W) in [0,1] as the model takes them."""
        batch = self.processor(list(images.float().cpu()), do_rescale=False, return_tensors="pt")
        return batch["pixel_values"].to(self.device)


class CLIP(Transformer):
    """Image features of a CLIP model; `text` embeds prompts, for CLIPScore."""

    name = "clip"
    default = "openai/clip-vit-base-patch32"

    def __init__(self, path: str | None, device: torch.device | str = "cpu"):
        from transformers import AutoTokenizer, CLIPModel

        super().__init__(path, device, CLIPModel)
        self.tokenizer = loaded(AutoTokenizer, self.failed, self.path)

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        hidden = self.model.vision_model(pixel_values=self.pixels(images)).pooler_output
        return F.normalize(self.model.visual_projection(hidden).float(), dim=-1)

    @torch.no_grad()
    def text(self, prompts: list[str]) -> Tensor:
        """Prompts -> (B,D)."""
        tokens = self.tokenizer(
            prompts,
            padding=True,
            truncation=True,
            return_tensors="pt",
            max_length=self.model.config.text_config.max_position_embeddings,
        ).to(self.device)
        hidden = self.model.text_model(**tokens).pooler_output
        return F.normalize(self.model.text_projection(hidden).float(), dim=-1)

    def describe(self) -> str:
        return f"clip: {self.path}, {processor_text(self.processor)}, cosine"


class DINOv2(Transformer):
    """Class-token features of a DINOv2 model, arXiv 2304.07193."""

    name = "dinov2"
    default = "facebook/dinov2-base"

    def __init__(self, path: str | None, device: torch.device | str = "cpu"):
        from transformers import AutoModel

        super().__init__(path, device, AutoModel)
        if not (kind := self.model.config.model_type).startswith("dinov2"):
            raise UserError(
                f"dinov2: '{self.path}' holds a model of type {kind}; give DINOv2's weights"
            )

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        hidden = self.model(pixel_values=self.pixels(images)).last_hidden_state
        return F.normalize(hidden[:, 0].float(), dim=-1)

    def describe(self) -> str:
        return f"dinov2: {self.path}, class token, {processor_text(self.processor)}, cosine"


class SSIM(Embedder):
    """Structural similarity (Wang 2004) in grey at one small size; needs no weights."""

    def __init__(self, path: str | None = None, device: torch.device | str = "cpu"):
        self.device = device

    def embed(self, images: Tensor) -> Tensor:
        return resize(images.to(self.device), (64, 64)).mean(1, keepdim=True)

    def paired(self, a: Tensor, b: Tensor) -> Tensor:
        return ssim(a, b)

    def describe(self) -> str:
        return "ssim: 64x64 squashed, bilinear antialiased, grey, window 11, sigma 1.5"


EMBEDDERS = Parts(
    {
        "micro": Micro,
        "copy": Copy,
        "sscd": SSCD,
        "clip": CLIP,
        "dinov2": DINOv2,
        "ssim": SSIM,
    },
    key="validation.embedder",
    takes="path device",
)


def embedder_of(config: Any, device: torch.device | str, redraws: bool) -> Embedder:
    """The embedder that validation settings name; `auto` is micro where the targets have
    redraws, and copy elsewhere."""
    name = config.embedder
    if name == "auto":
        name = "micro" if redraws else "copy"
    return load_embedder(name, config.embedder_path, device, config.embedder_sha256)


def embedder_of_targets(
    config: Any, targets: Sequence[Target], device: torch.device | str
) -> Embedder:
    """`embedder_of` a validation of these targets."""
    return embedder_of(config, device, bool(load_redraws(config.targets, targets)))


def load_embedder(
    name: str, path: str | None, device: torch.device | str, sha256: str | None = None
) -> Embedder:
    """Load an embedder by its name in EMBEDDERS, or by PATH.py:NAME, and try it on two pictures.
    `sha256` is that of sscd's file."""
    if user_code.is_place(name):
        return own_embedder(name, path, device)
    options = {"sha256": sha256} if name == "sscd" else {}
    embedder = EMBEDDERS[name](path, device, **options)
    try_embedder(embedder, f"{name}: '{path or 'the bundled weights'}' is no embedder")
    return embedder


def own_embedder(place: str, path: str | None, device: torch.device | str) -> Embedder:
    """An embedder from a user's file. Its description holds the file's SHA-256, so that scores of
    different files are not compared."""
    kind = EMBEDDERS[place]
    failed = f"validation.embedder: {place}"
    if not (isinstance(kind, type) and issubclass(kind, Embedder)):
        raise UserError(f"{failed} is no subclass of silentbad.measure.embedders.Embedder")
    with user_errors(f"{failed} fails"):
        embedder: Embedder = kind(path, device)  # type: ignore[call-arg]
        of_file = user_code.record([place])[place]["sha256"]
        described = f"{embedder.describe()}, {user_code.short(place)} of SHA-256 {of_file}"
    embedder.describe = lambda: described  # type: ignore[method-assign]
    try_embedder(embedder, f"{failed} cannot be used")
    return embedder


def try_embedder(embedder: Embedder, failed: str) -> None:
    """Refuse an embedder whose features (2,...) of two pictures are not a row each, finite, not
    zero and not the same for both: from such features nothing could be concluded."""
    ramp = torch.linspace(0, 1, 64).expand(3, 64, 64)
    noise = torch.rand(3, 64, 64, generator=generator("embedder", 0))
    pictures = torch.stack([ramp, noise])
    with user_errors(failed):
        features = embedder.embed(pictures)
        first, second = features
        lengths = features.flatten(1).norm(dim=1)
    faults = {
        "are not finite": not features.isfinite().all(),
        "are zero": (lengths == 0).any(),
        "are the same for every picture": torch.equal(first, second),
    }
    for what, wrong in faults.items():
        if wrong:
            raise UserError(f"{failed} (its features {what})")


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Mean SSIM (N,) of (N,C,H,W) and (N or 1,C,H,W) in [0,1], at least 6 pixels wide and high.

    The mean is over the places where the window (11, sigma 1.5) lies inside the picture, as in Wang
    2004; in a picture of less than 11 pixels all count. The window is separable, so two matrix
    products blur: on a CPU in a fiftieth of the time of a convolution with 11 x 11 weights."""
    # in fp32, rounding gives errors of 2e-4 at flat places
    wide = torch.float32 if a.device.type == "mps" else torch.float64
    a, b = (x.to(wide) for x in torch.broadcast_tensors(a, b))
    inside = min(a.shape[-2:]) >= WINDOW
    rows, columns = (gaussian_windows(side, inside).to(a) for side in a.shape[-2:])

    def blurred(x: Tensor) -> Tensor:
        return rows @ x @ columns.mT

    mean_a = blurred(a)
    mean_b = blurred(b)
    variance_a = (blurred(a * a) - mean_a**2).clamp(min=0)
    variance_b = (blurred(b * b) - mean_b**2).clamp(min=0)
    covariance = blurred(a * b) - mean_a * mean_b

    # SSIM's stabilising constants, for values up to 1
    c1 = 0.01**2
    c2 = 0.03**2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure_of_places = (2 * covariance + c2) / (variance_a + variance_b + c2)
    return (luminance * structure_of_places).flatten(1).mean(1).float()


@cache
def gaussian_windows(side: int, inside: bool) -> Tensor:
    """(places, side): the weights of SSIM's window at each place of a line, where it lies inside
    the picture or, reflected at the edges, everywhere."""
    reach = WINDOW // 2
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.softmax(-((offsets / 1.5) ** 2).double() / 2, 0)
    centres = torch.arange(reach, side - reach) if inside else torch.arange(side)
    pixels = (centres[:, None] + offsets).abs()
    pixels = torch.where(pixels < side, pixels, 2 * (side - 1) - pixels)
    windows = torch.zeros(len(centres), side, dtype=weights.dtype)
    return windows.scatter_add_(1, pixels, weights.expand(pixels.shape))


def advice(path: str, kind: str) -> str:
    """Advice for the error where a model cannot be loaded."""
    if os.path.exists(path) or names_folder(path):
        return f"give the folder or Hub id of a {kind}"
    return f"give a local folder or Hub id, fetched for instance with `hf download {path}`"


def processor_text(processor: Any) -> str:
    """Preprocessing of a transformers image processor in words."""

    def side(value: Any) -> str:
        sizes = {key: size for key, size in dict(value or {}).items() if size}
        edge = sizes.get("shortest_edge")
        return f"shortest edge {edge}" if edge else "x".join(map(str, sizes.values()))

    resample = int(getattr(processor, "resample", 2) or 2)
    crop = ""
    if getattr(processor, "do_center_crop", False):
        crop = f"centre crop {side(processor.crop_size)}, "
    levels = f"mean {list(processor.image_mean)}, deviation {list(processor.image_std)}"
    return f"resize {side(processor.size)} (resample {resample}), {crop}{levels}"
