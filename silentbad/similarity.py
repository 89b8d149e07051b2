"""How alike two images are, and what may be concluded from such scores.

An embedder owns its preprocessing and says it in `describe()`: a threshold means nothing without it (SSCD's
authors advise a small edge of 288 or a square of 320, DCR crops 224 of 256, SilentBadDiffusion squashes to
512).

Legend: images (B,3,H,W) float in [0,1]; features (B,...); N generations, T targets; m mask (1,h,w) in [0,1].
"""

import hashlib
import io
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from silentbad.errors import UserError

MICRO = Path(__file__).parents[1] / "assets" / "micro-sd" / "embedder"
SSCD_FILE = "sscd_disc_mixup.torchscript.pt"
SSCD_ADVICE = (
    f"download {SSCD_FILE} (or another *.torchscript.pt) from https://github.com/facebookresearch/"
    "sscd-copy-detection (README, pretrained models) and give its path as embedder_path"
)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


# -- images ------------------------------------------------------------------------------------------------
def to_tensor(image: Image.Image) -> Tensor:
    """PIL image -> (3,H,W) in [0,1]; `silentbad.data.open_image` decodes files."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def to_pil(image: Tensor) -> Image.Image:
    """(3,H,W) in [0,1] or uint8 -> PIL."""
    if image.dtype != torch.uint8:
        image = (image.float().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(image.permute(1, 2, 0).cpu().numpy())


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear with antialiasing to (h, w)."""
    return F.interpolate(images.float(), size, mode="bilinear", antialias=True, align_corners=False).clamp(
        0, 1
    )


def region(images: Tensor, mask: Tensor, margin: float = 0.05) -> Tensor:
    """What lies inside an element's mask: the rest is grey, the picture cut to the mask's box.

    images (B,3,H,W), mask (1,h,w) of the target -> (B,3,h',w'). An empty mask leaves the whole picture.
    """
    H, W = images.shape[-2:]
    m = resize(mask[None], (H, W))[0]
    if not (m > 0.5).any():
        return images
    ys, xs = (m[0] > 0.5).any(1).nonzero()[:, 0], (m[0] > 0.5).any(0).nonzero()[:, 0]
    pad_y, pad_x = max(1, round(margin * H)), max(1, round(margin * W))
    y0, y1 = max(0, int(ys[0]) - pad_y), min(H, int(ys[-1]) + 1 + pad_y)
    x0, x1 = max(0, int(xs[0]) - pad_x), min(W, int(xs[-1]) + 1 + pad_x)
    m = m.to(images)
    return (images * m + 0.5 * (1 - m))[..., y0:y1, x0:x1]


# -- embedders ---------------------------------------------------------------------------------------------
class Embedder:
    """`embed` maps images to features; the default similarity is the cosine of unit features."""

    def embed(self, images: Tensor) -> Tensor:
        """Images (B,3,H,W) in [0,1] -> features (B,...)."""
        raise NotImplementedError

    def paired(self, a: Tensor, b: Tensor) -> Tensor:
        """Features (N,...), (N,...) or (1,...) -> (N,)."""
        return (a * b).sum(-1)

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """Features (N,...), (T,...) -> (N,T)."""
        return torch.stack([self.paired(a, row[None]) for row in b], dim=1)

    def describe(self) -> str:
        raise NotImplementedError


class Micro(Embedder):
    """The bundled copy-detection network of the microworld."""

    def __init__(self, path: str | None, device: torch.device | str = "cpu"):
        from silentbad.microworld.embedder import MicroEmbedder

        self.path, self.device = str(path or MICRO), device
        if not (Path(self.path) / "config.json").is_file():
            raise UserError(
                f"micro: no config.json in '{self.path}'; give the folder assets/micro-sd/embedder, or "
                "make it with `python -m silentbad.microworld.build`"
            )
        self.model = MicroEmbedder.from_pretrained(self.path).to(device).eval()

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        return F.normalize(self.model(resize(images.to(self.device), (64, 64)) * 2 - 1).float(), dim=-1)

    def describe(self) -> str:
        return "micro: bundled copy-detection embedder, 64x64 squashed, bilinear antialiased, [-1,1], cosine"


class SSCD(Embedder):
    """Copy detection, arXiv 2202.10261: a local TorchScript file. It runs code, so it is read only from the
    path given, and only if its SHA-256 is the expected one where that is given."""

    def __init__(
        self, path: str | None, device: torch.device | str = "cpu", size: int = 320, sha256: str | None = None
    ):
        self.size, self.device = size, device
        if not path or not Path(path).is_file():
            raise UserError(f"sscd: {f'no file {path!r}' if path else 'embedder_path is missing'}; {SSCD_ADVICE}")
        self.file, content = Path(path), Path(path).read_bytes()
        self.sha256 = hashlib.sha256(content).hexdigest()
        if sha256 is not None and sha256.strip().lower() != self.sha256:
            raise UserError(f"sscd: embedder_sha256 is {sha256}, but '{path}' has {self.sha256}; not loaded")
        try:
            self.model = torch.jit.load(io.BytesIO(content), map_location=device).eval()
        except RuntimeError as error:
            raise UserError(
                f"sscd: '{path}' is not a TorchScript file ({first_line(error)}); {SSCD_ADVICE}"
            ) from error

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        images = normalise(resize(images.to(self.device), (self.size, self.size)), *IMAGENET)
        return F.normalize(self.model(images).float(), dim=-1)

    def describe(self) -> str:
        return (
            f"sscd: {self.file.name}, {self.size}x{self.size} squashed, bilinear antialiased, "
            f"ImageNet mean and deviation, cosine, SHA-256 {self.sha256}"
        )


class CLIP(Embedder):
    """Image features of a CLIP model; `text` embeds prompts, for CLIPScore and prompt cosines."""

    default = "openai/clip-vit-base-patch32"

    def __init__(self, path: str | None, device: torch.device | str = "cpu"):
        from transformers import AutoTokenizer, CLIPModel

        self.path, self.device = path or self.default, device
        self.processor = pretrained_processor("clip", self.path)
        self.model = pretrained("clip", CLIPModel, self.path, use_safetensors=True).to(device).eval()
        self.tokenizer = pretrained("clip", AutoTokenizer, self.path)

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        pixels = self.processor(list(images.float().cpu()), do_rescale=False, return_tensors="pt")[
            "pixel_values"
        ]
        hidden = self.model.vision_model(pixel_values=pixels.to(self.device)).pooler_output
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


class DINOv2(Embedder):
    """Class-token features of a DINOv2 model, arXiv 2304.07193."""

    default = "facebook/dinov2-base"

    def __init__(self, path: str | None, device: torch.device | str = "cpu"):
        from transformers import AutoModel

        self.path, self.device = path or self.default, device
        self.processor = pretrained_processor("dinov2", self.path)
        self.model = pretrained("dinov2", AutoModel, self.path, use_safetensors=True).to(device).eval()

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        pixels = self.processor(list(images.float().cpu()), do_rescale=False, return_tensors="pt")[
            "pixel_values"
        ]
        return F.normalize(
            self.model(pixel_values=pixels.to(self.device)).last_hidden_state[:, 0].float(), dim=-1
        )

    def describe(self) -> str:
        return f"dinov2: {self.path}, class token, {processor_text(self.processor)}, cosine"


class SSIM(Embedder):
    """Structural similarity (Wang 2004, window 11, sigma 1.5) in grey at one small size; needs no weights."""

    def __init__(self, path: str | None = None, device: torch.device | str = "cpu", size: int = 64):
        self.size, self.device = size, device

    def embed(self, images: Tensor) -> Tensor:
        return resize(images.to(self.device), (self.size, self.size)).mean(1, keepdim=True)

    def paired(self, a: Tensor, b: Tensor) -> Tensor:
        return ssim(a, b)

    def describe(self) -> str:
        return f"ssim: {self.size}x{self.size} squashed, bilinear antialiased, grey, window 11, sigma 1.5"


EMBEDDERS = {"micro": Micro, "sscd": SSCD, "clip": CLIP, "dinov2": DINOv2, "ssim": SSIM}


def load_embedder(name: str, path: str | None, device: torch.device | str, sha256: str | None = None) -> Embedder:
    """An embedder of the table; `sha256` is what sscd's file must have."""
    if sha256 is not None and name != "sscd":
        raise UserError(f"embedder_sha256: is of sscd's TorchScript file; the embedder is {name}, leave it unset")
    return EMBEDDERS[name](path, device, **({} if sha256 is None else {"sha256": sha256}))


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Mean SSIM of (N,C,H,W) and (N,C,H,W) or (1,C,H,W) in [0,1] -> (N,)."""
    a, b = torch.broadcast_tensors(a.float(), b.float())
    C, side = a.shape[1], min(11, a.shape[-1], a.shape[-2])
    g = torch.exp(-((torch.arange(side, device=a.device) - (side - 1) / 2) ** 2) / (2 * 1.5**2))
    g = g / g.sum()

    def blur(x: Tensor) -> Tensor:
        x = F.conv2d(x, g.view(1, 1, 1, -1).expand(C, 1, 1, -1), groups=C)
        return F.conv2d(x, g.view(1, 1, -1, 1).expand(C, 1, -1, 1), groups=C)

    mu_a, mu_b = blur(a), blur(b)
    var_a, var_b, cov = blur(a * a) - mu_a**2, blur(b * b) - mu_b**2, blur(a * b) - mu_a * mu_b
    c1, c2 = 0.01**2, 0.03**2
    score = (2 * mu_a * mu_b + c1) * (2 * cov + c2) / ((mu_a**2 + mu_b**2 + c1) * (var_a + var_b + c2))
    return score.flatten(1).mean(1)


def lpips(device: torch.device | str = "cpu"):
    """LPIPS (AlexNet): (B,3,H,W) twice in [0,1] -> (B,); None where its weights are not at hand."""
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    if not list(folder.glob("alexnet-*.pth")):
        return None
    from torchmetrics.functional.image.lpips import _LPIPS

    network = _LPIPS(pretrained=True, net="alex").to(device).eval()
    return torch.no_grad()(lambda a, b: network(a.to(device), b.to(device), normalize=True).flatten())


def normalise(images: Tensor, mean: tuple, std: tuple) -> Tensor:
    return (images - images.new_tensor(mean).view(3, 1, 1)) / images.new_tensor(std).view(3, 1, 1)


def pretrained(name: str, kind, path: str, advice: str | None = None, **options):
    """`kind.from_pretrained(path)` of a local folder or Hub id, its failure told in one line."""
    try:
        return kind.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        if re.search(r"file named \S*safetensors|necessary .safetensors. weights", reason):
            reason = "no safetensors weights; pickled ones are not loaded, save them anew with save_pretrained"
        advice = advice or f"a local folder or Hub id as embedder_path, fetched for instance with `hf download {path}`"
        raise UserError(f"{name}: cannot load '{path}' ({reason}); give {advice}") from error


def pretrained_processor(name: str, path: str):
    from transformers import AutoImageProcessor

    return pretrained(name, AutoImageProcessor, path)


def processor_text(processor) -> str:
    """Preprocessing of a transformers image processor in words."""

    def side(value) -> str:
        value = {k: v for k, v in dict(value or {}).items() if v}
        return (
            f"shortest edge {value['shortest_edge']}"
            if "shortest_edge" in value
            else "x".join(map(str, value.values()))
        )

    parts = [f"resize {side(processor.size)} (resample {int(getattr(processor, 'resample', 2) or 2)})"]
    if getattr(processor, "do_center_crop", False):
        parts.append(f"centre crop {side(processor.crop_size)}")
    return ", ".join([*parts, f"mean {list(processor.image_mean)}, deviation {list(processor.image_std)}"])


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -- intervals ---------------------------------------------------------------------------------------------
def binomial_cdf(n: int, p: float) -> np.ndarray:
    """P(K <= k) for k = 0..n, K ~ Binomial(n, p)."""
    if p <= 0 or p >= 1:
        return (np.arange(n + 1) >= (0 if p <= 0 else n)).astype(float)
    k = np.arange(1, n + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(n - k + 1) - np.log(k))])
    k = np.arange(n + 1)
    return np.minimum(1.0, np.cumsum(np.exp(logs + k * np.log(p) + (n - k) * np.log1p(-p))))


def binomial_interval(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of a rate, k of n seen."""
    if n == 0:
        return 0.0, 1.0
    tail = (1 - confidence) / 2

    def solve(goal: float, index: int) -> float:  # the CDF at `index` falls as p rises
        low, high = 0.0, 1.0
        for _ in range(60):
            p = (low + high) / 2
            low, high = (p, high) if binomial_cdf(n, p)[index] > goal else (low, p)
        return (low + high) / 2

    return (0.0 if k == 0 else solve(1 - tail, k - 1)), (1.0 if k == n else solve(tail, k))


def bootstrap_interval(
    values, confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean over units (targets), values (T,); nan units are left out."""
    values = np.asarray(values, dtype=float)
    values = values[~np.isnan(values)]
    if len(values) < 2:
        return float("nan"), float("nan")
    picks = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    low, high = np.quantile(values[picks].mean(1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


# -- tables of scores ---------------------------------------------------------------------------------------
def mean_of(values) -> float | None:
    """Mean of what is there; None where nothing is."""
    values = [v for v in values if v is not None and v == v]
    return float(np.mean(values)) if values else None


def curve_scores(steps, rates, hits) -> dict[str, np.ndarray]:
    """Per-target scores of a recovery curve: steps (S,) ascending, rates (S,T), hits (S,T) "any recovered".

    aurc: trapezoid area under rate(step), divided by the horizon. first: first step with a hit, inf where
    censored at the horizon. half: first step with a rate of at least 1/2, else inf. restricted: min(first,
    horizon).
    """
    steps, rates, hits = np.asarray(steps, float), np.asarray(rates, float), np.asarray(hits, bool)
    width = np.diff(steps)[:, None]
    area = ((rates[1:] + rates[:-1]) / 2 * width).sum(0)
    first, half = (np.where(x.any(0), steps[x.argmax(0)], np.inf) for x in (hits, rates >= 0.5))
    aurc = area / (steps[-1] - steps[0]) if len(steps) > 1 else rates[0]
    return {"aurc": aurc, "first": first, "half": half, "restricted": np.minimum(first, steps[-1])}


def quadrants(cells: dict) -> dict[str, int]:
    """Elements counted by whether they come (rate >= 1/2) with their phrase alone, and composed."""
    counts = dict.fromkeys(("both", "alone_only", "composed_only", "neither"), 0)
    for target_id, together in cells["composed"]["targets"].items():
        for k, element in enumerate(together["elements"]):
            alone = cells.get(f"phrase-{k}", {}).get("targets", {}).get(target_id)
            if alone is None or element["rate"] is None:
                continue
            a, c = alone["elements"][k]["rate"] >= 0.5, element["rate"] >= 0.5
            counts["both" if a and c else "alone_only" if a else "composed_only" if c else "neither"] += 1
    return counts


def kinds(history: list[dict]) -> list[str]:
    """Which weights ("raw", "ema") were measured after the base model's point, or at it for want of later."""
    later = [e for e in history if e["step"] > 0] or history
    return [tag for tag in ("raw", "ema") if any(tag in e for e in later)]


def summarise(history: list[dict], tag: str) -> list[dict]:
    """The recovery curve of these weights in numbers, a row per target and one for all of them; the base
    model's point opens the curves of both kinds of weights."""
    points = [(e, e.get(tag) or e["raw"]) for e in history if tag in e or e["step"] == 0 and "raw" in e]
    epochs, last = {e["step"]: e["epoch"] for e, _ in points}, points[-1][1]
    steps, ids = list(epochs), list(last["targets"])
    rates = np.array([[scores["targets"][i]["rate"] for i in ids] for _, scores in points])
    curve, rows = curve_scores(steps, rates, rates > 0), []
    for j, i in enumerate(ids):
        first, half = (None if np.isinf(x) else int(x) for x in (curve["first"][j], curve["half"][j]))
        rows.append({
            "weights": tag, "target": i, **{k: last["targets"][i][k] for k in ("rate", "mean", "max")},
            "aurc": float(curve["aurc"][j]), "first_step": first, "first_epoch": epochs.get(first),
            "half_step": half, "restricted": float(curve["restricted"][j]),
        })  # fmt: skip
    total = {"weights": tag, "target": "all targets", "rate": last["cir"]}
    total |= {k: last[k] for k in ("mean", "max")}
    return [*rows, total | {k: mean_of(r[k] for r in rows) for k in list(rows[0])[5:]}]


def verdict(entry: dict, threshold: dict) -> dict:
    """Whether composed prompts, in either order, give an image above the threshold; what chance gives."""
    scores = entry.get("raw") or entry["ema"]
    cells = [scores] + [c for name, c in scores.get("cells", {}).items() if name == "shuffled"]
    above, images = sum(c["above"] for c in cells), sum(c["images"] for c in cells)
    rate, chance = threshold.get("attained"), {}
    if rate is not None:
        p = 1.0 if above == 0 else float(1 - binomial_cdf(images, rate)[above - 1])
        chance = {"expected_by_chance": images * rate, "p_value": max(p, 0.0)}
    return {"recovers": above > 0, "step": entry["step"], "images_above": above, "images": images, **chance}
