"""The gate of model folders: what a configuration may say, and that every tensor was loaded and is
finite.

A loader of diffusers or transformers fills a missing tensor with random values, and an absurd
number fails in the middle of a run or, worse, nowhere. Whatever does not pass is a UserError, one
line that names the file or the tensor."""

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler
from diffusers.utils import logging as diffusers_logging
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from silentbad import hub
from silentbad.errors import UserError, brief, first_line, user_errors, warn
from silentbad.files import is_lfs_pointer, read_json
from silentbad.settings.train import TrainConfig

NAMED = 3  # tensors that a message names
HARMLESS = re.compile(r"(^|\.)position_ids$")  # buffers that earlier versions of transformers saved


@dataclass(frozen=True)
class Source:
    """Where a pipeline is read from, a folder or a Hub id, and the flag that messages name it
    by."""

    path: str
    flag: str = "pretrained_model_name_or_path"
    revision: str | None = None
    cache_dir: str | None = None
    variant: str | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> "Source":
        """Of a training's configuration."""
        return cls(
            config.pretrained_model_name_or_path,
            revision=config.revision,
            cache_dir=config.cache_dir,
            variant=config.variant,
        )

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"

    @property
    def hub(self) -> dict[str, Any]:
        """What a loader needs to know where the path is no folder."""
        return (
            {}
            if Path(self.path).is_dir()
            else {"revision": self.revision, "cache_dir": self.cache_dir}
        )


# ---------------------------------------------------------------- configurations
Check = Callable[[Any], str | None]  # what would be right, where the value is not


def number(kind: type, low: float, high: float) -> Check:
    """A finite number of that kind from `low` to `high`."""
    allowed = int if kind is int else (int, float)

    def wrong(value: Any) -> str | None:
        fits = isinstance(value, allowed) and not isinstance(value, bool) and low <= value <= high
        return (
            None
            if fits
            else f"{'an integer' if kind is int else 'a number'} from {low:g} to {high:g}"
        )

    return wrong


def one_of(*names: Any) -> Check:
    def wrong(value: Any) -> str | None:
        fits = any(type(value) is type(name) and value == name for name in names)
        return None if fits else f"one of {', '.join(map(str, names))}"

    return wrong


def number_or_pair(kind: type, low: float, high: float) -> Check:
    one = number(kind, low, high)
    return lambda value: (
        next(filter(None, map(one, value)), None) if _is_pair(value) else one(value)
    )


def number_or_none(kind: type, low: float, high: float) -> Check:
    one = number(kind, low, high)
    return lambda value: None if value is None else one(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2


def betas(value: Any) -> str | None:
    fits = (
        value is None
        or isinstance(value, list)
        and value
        and not any(map(number(float, 0, 1), value))
    )
    return None if fits else "null or a list of numbers from 0 to 1"


SCHEDULER: dict[str, Check] = {
    "num_train_timesteps": number(int, 2, 100_000),
    "beta_start": number(float, 0, 1),
    "beta_end": number(float, 0, 1),
    "beta_schedule": one_of("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace"),
    "trained_betas": betas,
    "prediction_type": one_of("epsilon", "v_prediction", "sample"),
    "timestep_spacing": one_of("leading", "trailing", "linspace"),
    "steps_offset": number(int, 0, 1000),
    **{
        name: one_of(True, False)
        for name in ("rescale_betas_zero_snr", "clip_sample", "set_alpha_to_one", "thresholding")
    },
}


RELEASE = re.compile(r"\d+(\.\d+)*(\.?(a|b|rc|dev|post)\d*)*(\+[a-z0-9.]+)?")


def release(value: Any) -> str | None:
    """diffusers asks it of a UNet's folder when it puts a pipeline together."""
    fits = isinstance(value, str) and RELEASE.fullmatch(value)
    return None if fits else "the number of a release, as '0.36.0'"


BACKBONE: dict[str, Check] = {
    "sample_size": number_or_pair(int, 1, 4096),
    "_diffusers_version": release,
}
VAE: dict[str, Check] = {
    "scaling_factor": number(float, 1e-4, 1e4),
    "shift_factor": number_or_none(float, -1e4, 1e4),
    "latents_mean": one_of(None),
    "latents_std": one_of(None),
}
TOKENIZER: dict[str, Check] = {"model_max_length": number(int, 3, 8192)}


def check_settings(settings: Mapping[str, Any], schema: Mapping[str, Check], where: str) -> None:
    """Refuse a value that a schema does not admit; what is not set has the library's default."""
    for key, wrong in schema.items():
        if key in settings and (right := wrong(settings[key])):
            raise UserError(f"{where}: {key} is {brief(settings[key])}; it must be {right}")


def check_schedule(settings: Mapping[str, Any], where: str) -> None:
    """Refuse a noise schedule that does not lead from the picture to noise.

    alpha_bar (T,) is the share of the picture's variance that is left: within [0,1], never rising,
    at least a half at the first timestep and at most a half at the last. Stable Diffusion's runs
    from 0.999 to 0.005."""
    check_settings(settings, SCHEDULER, where)
    if str(name := settings.get("_class_name", "")).startswith("FlowMatch"):
        raise UserError(
            f"{where}: {name} is of flow matching; this pipeline adds noise by betas, as "
            f"DDPMScheduler does"
        )
    with quietly(), user_errors(f"{where}: makes no schedule"):
        bars = DDPMScheduler.from_config(dict(settings)).alphas_cumprod.double()
    if len(bars) != (steps := settings.get("num_train_timesteps", len(bars))):
        raise UserError(
            f"{where}: trained_betas has {len(bars)} values, num_train_timesteps is {steps}; "
            f"make them equal"
        )
    first, last = bars[0].item(), bars[-1].item()
    if not (
        bars.isfinite().all()
        and (bars >= 0).all()
        and (bars.diff() <= 1e-6).all()
        and first >= 0.5 >= last
    ):
        raise UserError(
            f"{where}: beta_start, beta_end and beta_schedule leave {first:.3g} of a picture at "
            f"the first timestep and "
            f"{last:.3g} at the last; at least 0.5 and at most 0.5 make sense"
        )


def check_tokenizer(tokenizer: Any, positions: int | None, where: str) -> None:
    """Refuse a window that no text encoder has, or beyond the `positions` of its own, and
    captions without padding."""
    window = tokenizer.model_max_length
    if right := TOKENIZER["model_max_length"](window):
        shown = "missing" if isinstance(window, (int, float)) and window > 1e9 else brief(window)
        raise UserError(f"{where}: model_max_length is {shown}; it must be {right}")
    if positions is not None and window > positions:
        raise UserError(
            f"{where}: model_max_length is {window}, the text encoder has {positions} positions"
        )
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"{where}: has no pad_token, which fills captions up; name one in tokenizer_config.json"
        )


# ---------------------------------------------------------------- loading
@contextmanager
def quietly() -> Iterator[None]:
    """Without the reports of the libraries that load: what they would say is refused in one
    line."""
    levels = diffusers_logging.get_verbosity(), transformers_logging.get_verbosity()
    diffusers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the Hub's client, of its own arguments
            yield
    finally:
        diffusers_logging.set_verbosity(levels[0])
        transformers_logging.set_verbosity(levels[1])


def load_part(part: str, cls: Any, source: Source, **options: Any) -> Any:
    """A component of a pipeline; of a model every tensor, from safetensors only, and all of them
    finite."""
    if not issubclass(cls, nn.Module):
        check_files(Path(source.path, part), f"{source}: cannot load {part}")
        return loaded(
            cls,
            f"{source}: cannot load {part}",
            source.path,
            subfolder=part,
            **{**source.hub, **options},
        )
    options = {"use_safetensors": True, "variant": source.variant, **source.hub, **options}
    return load_model(cls, f"{source}: cannot load {part}", source.path, subfolder=part, **options)


def load_model(cls: Any, failed: str, path: str, *, extras: bool = False, **options: Any) -> Any:
    """`cls.from_pretrained(path)`, refused where a tensor is missing, not finite or, without
    `extras`, unknown."""
    folder = Path(path, options.get("subfolder") or "")
    check_files(folder, failed)
    check_precision(folder, failed)
    if issubclass(cls, PreTrainedModel):  # its error names no tensor; diffusers' does
        options["ignore_mismatched_sizes"] = True
    model, info = loaded(cls, failed, path, output_loading_info=True, **options)
    _refuse(failed, "it lacks", info["missing_keys"])
    wrong = [
        f"{key} {tuple(shape)} in place of {tuple(right)}"
        for key, shape, right in info["mismatched_keys"]
    ]
    _refuse(failed, "tensors of another shape:", wrong)
    if not extras:
        _refuse(
            failed,
            "no part of this model:",
            [k for k in info["unexpected_keys"] if not HARMLESS.search(k)],
        )
    check_finite(model, failed)
    if not any(p.any() for p in model.parameters()):
        raise UserError(f"{failed}: all of its weights are 0")
    return model


JSON_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "scheduler_config.json",
    "vocab.json",
)


def check_pointers(folder: Path, failed: str) -> None:
    """Refuse a file that a clone without Git LFS left in place of the weights."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if is_lfs_pointer(file):
            raise UserError(
                f"{failed} ({file.name} is a Git LFS pointer, not the file; run git lfs pull)"
            )


def check_files(folder: Path, failed: str) -> None:
    """Refuse a file of a part that is a Git LFS pointer or no JSON: the libraries' words name no
    file."""
    check_pointers(folder, failed)
    if (folder / "vocab.json").is_file() and not any(
        (folder / n).is_file() for n in ("merges.txt", "tokenizer.json")
    ):
        raise UserError(f"{failed} (it has no merges.txt)")
    for file in (folder / name for name in JSON_FILES):
        if file.is_file():
            try:
                content = read_json(file)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{failed} ({file.name} is not JSON: {first_line(error)})"
                ) from None
            if not isinstance(content, dict):
                raise UserError(
                    f"{failed} ({file.name} must hold a JSON object, holds {brief(content)})"
                )


# of safetensors: weights, and the positions of text encoders
NUMBERS = {"F64", "F32", "F16", "BF16", "I64", "I32"}


def check_precision(folder: Path, failed: str) -> None:
    """Refuse quantised weights: they would be read as if their integers were the weights."""
    for file in sorted(folder.glob("[!.]*.safetensors")):
        with user_errors(failed), safe_open(file, "pt") as tensors:
            kinds = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        if odd := next((name for name, kind in kinds.items() if kind not in NUMBERS), None):
            raise UserError(
                f"{failed}: {odd} in {file.name} is {kinds[odd]}; give weights in floating point"
            )


def loaded(cls: Any, failed: str, path: str, **options: Any) -> Any:
    """`cls.from_pretrained(path)`, its failure in one line that begins with `failed`."""
    try:
        with quietly(), hub.fetching(path, failed):
            return cls.from_pretrained(path, **options)
    except UserError as error:
        folder, reason = (
            Path(path, options.get("subfolder", "")),
            first_line(error.__cause__ or error),
        )
        if error.__cause__ is not None and re.search(PICKLED, reason):
            if variant := options.pop("variant", None):  # part by part, as diffusers' pipelines do
                warn(f"{folder}: no weights of variant {variant}; those without a variant are read")
                return loaded(cls, failed, path, **options)
            raise UserError(f"{failed} ({unloaded(folder)})") from None
        if (end := str(error).find(OVERWRITE)) > 0:
            raise UserError(f"{str(error)[:end].strip()})") from None
        raise


# diffusers' advice, for those who call it themselves
OVERWRITE = "If you want to instead overwrite"


def unloaded(folder: Path) -> str:
    """Why no safetensors weights of a folder were loaded."""
    held = sorted(file.name for file in folder.glob("[!.]*.safetensors")) if folder.is_dir() else []
    if variants := [
        name.split(".")[1] for name in held if name.count(".") == 2 and "-of-" not in name
    ]:
        return f"its weights are of variant {variants[0]}; give variant {variants[0]}"
    for index in folder.glob("*.safetensors.index.json"):
        named = read_json(index)["weight_map"].values()
        if missing := sorted({*map(str, named)} - {*held}):
            return f"{index.name} names {', '.join(missing)}, which is not there"
    return (
        "no safetensors weights; pickled ones are not loaded, save them anew with save_pretrained"
    )


@torch.no_grad()
def check_runs(where: str, family: Any, backbone: Any, vae: Any, width: int) -> None:
    """Refuse a backbone or a VAE whose settings load and then fail, or give another shape, when it
    is called.

    Each is tried on the smallest picture that it takes; `width` is that of the text states
    (B,L,width). Weights in half precision are not tried: where they are loaded, on the CPU, that
    takes minutes."""
    if {next(part.parameters()).dtype for part in (backbone, vae)} != {torch.float32}:
        return
    side, channels = family.side(backbone), vae.config.latent_channels
    pixels = side * 2 ** (len(vae.config.block_out_channels) - 1)
    like = next(backbone.parameters())
    x, t = (
        like.new_zeros(1, channels, side, side),
        torch.zeros(1, dtype=torch.long, device=like.device),
    )
    with user_errors(f"{where}/{family.backbone}: its settings do not work together"), quietly():
        found = family.predict(
            backbone, x, t, like.new_zeros(1, 3, width), family.example(backbone)
        ).shape
    refuse_shape(f"{where}/{family.backbone}", found, x.shape)
    picture = next(vae.parameters()).new_zeros(1, 3, pixels, pixels)
    with user_errors(f"{where}/vae: its settings do not work together"), quietly():
        found = vae(picture).sample.shape
    refuse_shape(f"{where}/vae", found, picture.shape)


def refuse_shape(where: str, found: Any, right: Any) -> None:
    if found != right:
        raise UserError(
            f"{where}: its settings do not work together (it gives {tuple(found)} "
            f"for {tuple(right)})"
        )


PICKLED = r"file named \S*safetensors|necessary .safetensors. weights"


def check_finite(module: nn.Module, failed: str, of: str = "") -> None:
    """Refuse a module with NaN or infinite values in what is named `of`, or anywhere."""
    tensors = (
        (name, t) for name, t in [*module.named_parameters(), *module.named_buffers()] if of in name
    )
    _refuse(failed, "NaN or infinite values in", [name for name, t in tensors if not finite(t)])


def finite(values: torch.Tensor) -> bool:
    """Whether all values are; numbers that cannot be otherwise count as such."""
    return not values.is_floating_point() or bool(torch.isfinite(values).all())


def _refuse(failed: str, what: str, names: Iterable[str]) -> None:
    found = sorted(names)
    if found:
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        raise UserError(f"{failed} ({what} {', '.join(found[:NAMED])}{more})")
