"""Checks of model folders: the configuration is valid, every tensor was loaded and is finite.

A loader of diffusers or transformers fills a missing tensor with random values, and an absurd
number fails in the middle of a run or, worse, never. A failed check is a UserError, one line that
names the file or the tensor."""

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
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
from silentbad.errors import UserError, first_line, user_errors, warn
from silentbad.files import is_lfs_pointer
from silentbad.settings.train import TrainConfig

NAMED = 3  # tensors that a message names
HARMLESS = re.compile(r"(^|\.)position_ids$")  # buffers that earlier versions of transformers saved


@dataclass(frozen=True)
class Source:
    """A pipeline's folder or Hub id, and the flag that messages name it by."""

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
        """The arguments of a loader for a path on the Hub."""
        return (
            {}
            if Path(self.path).is_dir()
            else {"revision": self.revision, "cache_dir": self.cache_dir}
        )


# ---------------------------------------------------------------- configurations
PREDICTIONS = ("epsilon", "v_prediction", "sample")


def check_schedule(settings: Mapping[str, Any], where: str) -> None:
    """Refuse a noise schedule that does not lead from the picture to noise.

    alpha_bar (T,), the share of the picture's variance that is left, never rises, from at least a
    half to at most a half. Stable Diffusion's runs from 0.999 to 0.005."""
    kind = settings.get("prediction_type", "epsilon")
    if str(settings.get("_class_name")).startswith("FlowMatch") or kind not in PREDICTIONS:
        raise UserError(
            f"{where}: {settings.get('_class_name')} predicts {kind}; this pipeline adds noise by "
            f"betas, as DDPMScheduler does, and predicts one of {', '.join(PREDICTIONS)}"
        )
    with quietly(), user_errors(f"{where}: makes no schedule"):
        bars = DDPMScheduler.from_config(dict(settings)).alphas_cumprod.double()
        first = bars[0].item()
        last = bars[-1].item()
    falls = bars.isfinite().all() and (bars >= 0).all() and (bars.diff() <= 1e-6).all()
    if not (falls and first >= 0.5 >= last):
        raise UserError(
            f"{where}: the betas leave {first:.3g} of a picture at the first timestep and "
            f"{last:.3g} at the last; it must fall steadily, from at least 0.5 to at most 0.5"
        )


def check_tokenizer(tokenizer: Any, positions: int | None, where: str) -> None:
    """Refuse a window beyond the `positions` of the text encoder, and captions without padding."""
    window = tokenizer.model_max_length
    if window > (positions or 8192):
        right = f"the text encoder has {positions} positions" if positions else "set its window"
        raise UserError(f"{where}: model_max_length is {window:g}; {right}")
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"{where}: has no pad_token, which fills captions up; name one in tokenizer_config.json"
        )


# ---------------------------------------------------------------- loading
@contextmanager
def quietly() -> Iterator[None]:
    """Without the reports of the libraries that load."""
    levels = diffusers_logging.get_verbosity(), transformers_logging.get_verbosity()
    diffusers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # for good: saving would draw one too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the Hub's client, of its own arguments
            yield
    finally:
        diffusers_logging.set_verbosity(levels[0])
        transformers_logging.set_verbosity(levels[1])


def load_part(part: str, cls: Any, source: Source, **options: Any) -> Any:
    """A component of a pipeline; a model as `load_model` reads it."""
    failed = f"{source}: cannot load {part}"
    options = {"subfolder": part, **source.hub, **options}
    if not issubclass(cls, nn.Module):
        check_files(Path(source.path, part), failed)
        return loaded(cls, failed, source.path, **options)
    weights: dict[str, Any] = {"use_safetensors": True, "variant": source.variant}
    return load_model(cls, failed, source.path, **weights, **options)


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
    wrong = [f"{key} {tuple(a)} in place of {tuple(b)}" for key, a, b in info["mismatched_keys"]]
    _refuse(failed, "tensors of another shape:", wrong)
    if not extras:
        unknown = [key for key in info["unexpected_keys"] if not HARMLESS.search(key)]
        _refuse(failed, "no part of this model:", unknown)
    check_finite(model, failed)
    return model


def check_files(folder: Path, failed: str) -> None:
    """Refuse what a clone without Git LFS left in place of a file, and a tokenizer without merges,
    which would cut captions into letters."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if is_lfs_pointer(file):
            raise UserError(
                f"{failed} ({file.name} is a Git LFS pointer, not the file; run git lfs pull)"
            )
    merges = (folder / name for name in ("merges.txt", "tokenizer.json"))
    if (folder / "vocab.json").is_file() and not any(file.is_file() for file in merges):
        raise UserError(f"{failed} (it has no merges.txt)")


# of safetensors: weights, and the positions of text encoders
NUMBERS = {"F64", "F32", "F16", "BF16", "I64", "I32"}


def check_precision(folder: Path, failed: str) -> None:
    """Refuse quantised weights: they would be read as if their integers were the weights."""
    for file in sorted(folder.glob("[!.]*.safetensors")):
        with user_errors(failed), safe_open(file, "pt") as tensors:
            names = tensors.keys()
            kinds = {name: tensors.get_slice(name).get_dtype() for name in names}
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
        if error.__cause__ is None or not re.search(NO_SAFETENSORS, first_line(error.__cause__)):
            raise
        folder = Path(path, options.get("subfolder", ""))
        if variant := options.pop("variant", None):  # part by part, as diffusers' pipelines do
            warn(f"{folder}: no weights of variant {variant}; those without a variant are read")
            return loaded(cls, failed, path, **options)
        raise UserError(f"{failed} ({why_no_weights(folder)})") from None


NO_SAFETENSORS = r"file named \S*safetensors|necessary .safetensors. weights"


def why_no_weights(folder: Path) -> str:
    """Why no safetensors weights of a folder were loaded."""
    names = [file.name.split(".") for file in folder.glob("[!.]*.safetensors")]
    variants = [parts[1].split("-")[0] for parts in names if len(parts) == 3]  # or of a shard
    if variants:
        return f"its weights are of variant {variants[0]}; give variant {variants[0]}"
    return (
        "no safetensors weights; pickled ones are not loaded, save them anew with save_pretrained"
    )


def check_finite(module: nn.Module, failed: str) -> None:
    """Refuse a module with NaN or infinite values."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    _refuse(failed, "NaN or infinite values in", [name for name, t in tensors if not finite(t)])


def finite(values: torch.Tensor) -> bool:
    """Whether all values are finite; integers always are."""
    return not values.is_floating_point() or bool(torch.isfinite(values).all())


def _refuse(failed: str, what: str, names: Iterable[str]) -> None:
    sorted_names = sorted(names)
    if sorted_names:
        more = f" and {len(sorted_names) - NAMED} more" if len(sorted_names) > NAMED else ""
        raise UserError(f"{failed} ({what} {', '.join(sorted_names[:NAMED])}{more})")
