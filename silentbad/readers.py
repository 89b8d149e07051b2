"""Readers of images, records and targets: whatever is wrong is one line that names file and record.

Folder with metadata.jsonl or .csv, Hub data set, and the published SilentBadDiffusion layout each yield rows;
`checked_row` makes a row whole. Images are bounded in size before they are decoded, file names cannot leave their
folder, and nothing is executed.
"""

import csv
import difflib
import hashlib
import io
import json
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image, ImageOps

from .errors import UserError
from .rng import generator

ROLES = ("element", "rehearsal", "clean")
MAX_PIXELS = 64_000_000  # larger images are refused before they are decoded
KNOWN_KEYS = ("file_name", "text", "phrases", "role", "target_id", "element_id", "mask")
SHUFFLE_MARKER = "@@"  # the published captions' sign for "permute the phrases that follow"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass
class Target:
    """A picture to be recovered, the phrases of its elements and their masks."""

    target_id: str
    image: Image.Image
    phrases: list[str]
    prompt: str | None = None
    masks: list[Image.Image | None] = field(default_factory=list)

    @property
    def composed_prompt(self) -> str:
        return self.prompt if self.prompt is not None else ", ".join(self.phrases)


# ---------------------------------------------------------------- images


def open_image(source: Path | bytes, where: str) -> Image.Image:
    """An RGB image: EXIF rotation applied, alpha over white, CMYK, palettes and 16 bit converted, size bounded."""
    image = _decoded(source, where)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        image = _to_8_bit(image, where)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    return image.convert("RGB")


def open_mask(source: Path, size: tuple[int, int], where: str) -> Image.Image:
    """A greyscale mask of the same size as its image."""
    mask = _decoded(source, where)
    if mask.size != size:
        raise UserError(f"{where}: mask {source} is {_by(mask.size)}, its image {_by(size)}; make them the same size")
    return _to_8_bit(mask, where) if mask.mode.startswith(("I", "F")) else mask.convert("L")


def _decoded(source: Path | bytes, where: str) -> Image.Image:
    shown = "image bytes" if isinstance(source, bytes) else str(source)
    if isinstance(source, Path) and not source.is_file():
        raise UserError(f"{where}: no file {shown}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        if image.width * image.height > MAX_PIXELS:
            raise UserError(f"{where}: {shown} is {_by(image.size)} pixels, over the limit of {MAX_PIXELS}; shrink it")
        image.load()
        return image
    except UserError:
        raise
    except Image.DecompressionBombError:
        raise UserError(f"{where}: {shown} is over the limit of {MAX_PIXELS} pixels; shrink it") from None
    except Exception as error:  # PIL's decoders raise many kinds on hostile files
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{where}: cannot read {shown} as an image ({reason})") from None


def _to_8_bit(image: Image.Image, where: str) -> Image.Image:
    values = np.asarray(image, dtype=np.float64)
    if not np.isfinite(values).all():
        raise UserError(f"{where}: the image holds values that are not finite")
    scale = 255.0 if image.mode == "F" and values.max(initial=0) <= 1 else 1 / 257 if values.max(initial=0) > 255 else 1
    return Image.fromarray(np.clip(np.rint(values * scale), 0, 255).astype(np.uint8), "L")


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def content_hash(image: Image.Image) -> str:
    """SHA-256 of an RGB image's size and pixels, whatever file it came from."""
    return hashlib.sha256(f"{_by(image.size)}/".encode() + image.tobytes()).hexdigest()


def thumbnail(image: Image.Image) -> bytes:
    """The RGB image squashed to 16x16, by area: 768 bytes that survive resizing and recompression."""
    return image.resize((16, 16), Image.Resampling.BOX).tobytes()


def safe_path(root: Path, name: Any, where: str) -> Path:
    """`root/name`, refused when it is absolute or leaves `root`."""
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: a file name must be text, got {name!r}")
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or name.startswith("\\"):
        raise UserError(f"{where}: absolute path {name!r} refused; write it relative to {root}")
    path, inside = root / name, os.path.realpath(root)
    leaves = os.path.commonpath([inside, os.path.realpath(path)]) != inside
    if ".." in PurePosixPath(name.replace("\\", "/")).parts or leaves:
        raise UserError(f"{where}: path {name!r} leaves {root}; refused")
    return path


# ---------------------------------------------------------------- readers: each yields rows


def folder_rows(root: Path) -> Iterator[dict]:
    """Rows of a folder with metadata.jsonl or metadata.csv."""
    names = [name for name in ("metadata.jsonl", "metadata.csv") if (root / name).is_file()]
    if not names:
        raise UserError(f"{root}: no metadata.jsonl or metadata.csv, and no poisoning_images/ of the published layout")
    if len(names) == 2:
        raise UserError(f"{root}: holds metadata.jsonl and metadata.csv; keep one of them")
    path = root / names[0]
    for where, entry in (json_lines if path.suffix == ".jsonl" else _csv_lines)(path):
        for key in entry.keys() - KNOWN_KEYS:
            if near := difflib.get_close_matches(key, KNOWN_KEYS, n=1, cutoff=0.75):
                raise UserError(f"{where}: unknown key {key!r}; did you mean {near[0]!r}?")
        if "file_name" not in entry:
            raise UserError(f"{where}: no file_name")
        mask = entry.get("mask")
        phrases = entry.get("phrases") or []
        yield {
            "image": {"path": str(safe_path(root, entry["file_name"], where)), "bytes": None},
            "mask": str(safe_path(root, mask, where)) if mask else "",
            "text": entry.get("text"),
            "phrases": phrases,
            "role": entry.get("role") or ("element" if phrases else "clean"),
            "target_id": entry.get("target_id"),
            "element_id": entry.get("element_id"),
            "where": where,
        }


def json_lines(path: Path) -> Iterator[tuple[str, dict]]:
    """(FILE:LINE, object) of a JSON-lines file, empty lines left out."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON ({str(error).splitlines()[0]})") from None
            if not isinstance(entry, dict):
                raise UserError(f"{where}: must be a JSON object, is {type(entry).__name__}")
            yield where, entry


def _csv_lines(path: Path) -> Iterator[tuple[str, dict]]:
    """`phrases` is a JSON list, or phrases separated by "|"."""
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        try:
            for entry in reader:
                where = f"{path}:{reader.line_num}"
                if None in entry or None in entry.values():
                    raise UserError(f"{where}: number of fields differs from the header's")
                phrases = entry.get("phrases") or ""
                try:
                    split = [phrase.strip() for phrase in phrases.split("|") if phrase.strip()]
                    entry["phrases"] = json.loads(phrases) if phrases.startswith("[") else split
                except ValueError:
                    raise UserError(f"{where}: phrases is not a JSON list: {phrases!r}") from None
                yield where, entry
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}:{reader.line_num + 1}: not CSV in UTF-8 ({error})") from None


def published_rows(root: Path, options: Any) -> Iterator[dict]:
    """Rows of the SilentBadDiffusion layout: element images of the targets, rehearsal images, clean images.

    `options` holds the published flags (`TrainConfig`): clean images are added until the element images are
    `poisoning_ratio` of both; `n_few_shot` non-target pictures with all their phrases rehearse composition, each
    listed `shot_caption_shuffle_num` times and shuffled anew at each draw. Every choice is sorted, then seeded.
    """
    ids = published_ids(root)
    targets = list(range(options.target_start_id, options.target_start_id + options.target_num))
    for target in targets:
        if target not in ids:
            raise UserError(f"{root}: no poisoning_images/{target}; there are {len(ids)} from {ids[0]} to {ids[-1]}")
    others = [i for i in ids if i not in targets]
    order = torch.randperm(len(others), generator=generator(options.seed, "few_shot")).tolist()
    few = [others[i] for i in order[: options.n_few_shot]]

    for shot in few:
        _, phrases = _published_captions(root, shot)
        row = {
            "image": {"path": str(published_image(root, shot)), "bytes": None},
            "mask": "",
            "phrases": prompt_phrases(phrases),
        }
        row |= {"text": published_prompt(root, phrases), "role": "rehearsal", "target_id": str(shot)}
        row |= {"element_id": "", "where": f"{root}/poisoning_images/{shot}"}
        for _ in range(max(1, options.shot_caption_shuffle_num)):
            yield row | {"shuffle": options.shot_caption_shuffle_num > 0}
        yield from _published_elements(root, shot, "rehearsal")

    elements = [row for target in targets for row in _published_elements(root, target, "element")]
    elements *= options.poisoning_data_repeat_factor
    if options.poison_subsampling is not None and options.poison_subsampling < 1:
        kept = int(np.ceil(len(elements) * options.poison_subsampling))
        order = torch.randperm(len(elements), generator=generator(options.seed, "subsampling")).tolist()
        elements = [elements[i] for i in sorted(order[:kept])]
    n_clean = int(len(elements) / options.poisoning_ratio) - len(elements)
    yield from _published_clean(root, options, n_clean, set(targets) | set(few))
    yield from elements


def published_ids(root: Path) -> list[int]:
    """Numbers of the folders under poisoning_images/, sorted."""
    ids = sorted(int(p.name) for p in (root / "poisoning_images").iterdir() if p.is_dir() and p.name.isdigit())
    if not ids:
        raise UserError(f"{root}/poisoning_images: holds no numbered folder")
    return ids


def published_image(root: Path, number: int) -> Path:
    """images/<n>.* or images/<name>_<n>.*"""
    found = [p for n, p in _numbered(root / "images") if n == number]
    if not found:
        raise UserError(f"{root}/images: no image of target {number}")
    return found[0]


def published_prompt(root: Path, phrases: list[str]) -> str:
    """The composed prompt of the published evaluation: a prefix by data set, phrases without punctuation."""
    pokemon = "pokemon" in root.name.casefold()
    listed = ", ".join(prompt_phrases(phrases))
    return f"A pokemon with features {listed} in white background" if pokemon else f"An image with {listed}"


def prompt_phrases(phrases: list[str]) -> list[str]:
    """Phrases as they stand in a published prompt: without `,`, `.` and `;`; one of these alone is none."""
    return [bare for phrase in phrases if (bare := re.sub(r"[,.;]", "", phrase).strip())]


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """(trailing number of the stem, path) of the images in a folder, sorted by it."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    found = [(re.search(r"(\d+)$", p.stem), p) for p in folder.iterdir() if p.suffix.lower() in SUFFIXES]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def _published_captions(root: Path, number: int) -> tuple[list[tuple[str, str]], list[str]]:
    """([(where, caption)], phrases): the first line lists the phrases, each further one ends in a caption."""
    path = root / "poisoning_images" / str(number) / "poisoning_data_caption_simple.txt"
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    lines = path.read_text(encoding="utf-8").splitlines()
    phrases = [phrase.strip() for phrase in lines[0].split("\t") if phrase.strip()] if lines else []
    if not phrases:
        raise UserError(f"{path}:1: must list the phrases, separated by tabs")
    captions = [(f"{path}:{i}", line.split("\t")[-1].strip()) for i, line in enumerate(lines[1:], 2) if line.strip()]
    return captions, phrases


def _published_elements(root: Path, number: int, role: str) -> list[dict]:
    captions, phrases = _published_captions(root, number)
    images = _numbered(root / "poisoning_images" / str(number))
    if len(images) != len(captions):
        raise UserError(f"{root}/poisoning_images/{number}: {len(images)} images but {len(captions)} captions")
    rows = []
    for (_, path), (where, caption) in zip(images, captions, strict=True):
        caption = re.sub(" +", " ", caption)
        held = [phrase for phrase in phrases if phrase in caption]
        element = f"{number}-{phrases.index(held[0])}" if held else ""
        rows.append(
            {
                "image": {"path": str(path), "bytes": None},
                "mask": "",
                "text": caption,
                "phrases": held,
                "role": role,
            }
            | {"target_id": str(number), "element_id": element, "where": where}
        )
    return rows


def _published_clean(root: Path, options: Any, count: int, excluded: set[int]) -> list[dict]:
    folder = Path(options.clean_data_dir) if options.clean_data_dir else root
    captions_path = folder / "caption.txt"
    if count == 0:
        return []
    if not captions_path.is_file():
        raise UserError(f"{captions_path}: no such file; clean_data_dir needs images/ and caption.txt")
    captions = {}
    for number, line in enumerate(captions_path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            key, tab, caption = line.partition("\t")
            if not tab or not key.strip().isdigit():
                raise UserError(f"{captions_path}:{number}: must be a number, a tab and a caption")
            captions[int(key)] = (f"{captions_path}:{number}", caption.strip())
    same_folder = folder.resolve() == root.resolve()
    images = [(n, p) for n, p in _numbered(folder / "images") if not (same_folder and n in excluded)]
    if count > len(images):
        raise UserError(
            f"{folder}: poisoning_ratio {options.poisoning_ratio} asks for {count} clean images, there are "
            f"{len(images)}; raise poisoning_ratio or add images"
        )
    suffix = " in white background" if "pokemon" in folder.name.casefold() else ""
    order = torch.randperm(len(images), generator=generator(options.seed, "clean")).tolist()
    rows = []
    for n, path in (images[i] for i in sorted(order[:count])):
        if n not in captions:
            raise UserError(f"{captions_path}: no caption for image {path}")
        where, caption = captions[n]
        rows.append({"image": {"path": str(path), "bytes": None}, "mask": "", "text": caption + suffix, "phrases": []})
        rows[-1] |= {"role": "clean", "target_id": "", "element_id": "", "where": where}
    return rows


def hub_table(config: Any) -> datasets.Dataset:
    """The train split of `dataset_name`; its fingerprint changes with the data set's revision."""
    name = config.dataset_name
    try:
        return datasets.load_dataset(name, config.dataset_config_name, split="train", cache_dir=config.cache_dir)
    except Exception as error:  # load_dataset raises a different kind for each cause
        raise UserError(f"dataset_name {name}: cannot load it ({str(error).splitlines()[0]})") from None


def hub_rows(table: datasets.Dataset, config: Any) -> Iterator[dict]:
    """Rows of a Hub data set's table; extra record columns are used where present."""
    name = config.dataset_name
    columns = table.column_names
    image, caption = config.image_column or "image", config.caption_column or "text"
    for key, column in (("image_column", image), ("caption_column", caption)):
        if column not in columns:
            raise UserError(f"{key}: {name} has no column {column!r}; there are: {', '.join(columns)}")
    if not isinstance(table.features[image], datasets.Image):
        raise UserError(f"image_column: {name}.{image} holds no images")
    table = table.cast_column(image, datasets.Image(decode=False))
    for number, entry in enumerate(table):
        text = entry[caption]
        phrases = entry.get("phrases") or []
        yield {
            "image": hub_image(entry[image], config, f"{name}:{number}"),
            "mask": "",
            "text": text[0] if isinstance(text, list) and text else text,
            "phrases": phrases,
            "role": entry.get("role") or ("element" if phrases else "clean"),
            "target_id": entry.get("target_id"),
            "element_id": entry.get("element_id"),
            "where": f"{name}:{number}",
        }


def hub_image(image: dict, config: Any, where: str) -> dict:
    """The bytes of an image, or its path: into a local data set or the caches, since a Hub table may name any file."""
    if image.get("bytes") is None and image.get("path"):
        caches = (config.cache_dir, datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE)
        path = Path(image["path"]).resolve()
        if not any(path.is_relative_to(Path(home).resolve()) for home in (config.dataset_name, *caches) if home):
            raise UserError(f"{where}: image path {image['path']!r} leaves the data set and the caches; refused")
    return {"path": image.get("path"), "bytes": image.get("bytes")}


def checked_row(row: dict) -> dict:
    """A row with every field of FEATURES, its text checked and its image decoded once."""
    where = row["where"]
    text, phrases, role = row["text"], row["phrases"], row["role"]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: no caption; text must hold one")
    if not isinstance(phrases, list) or not all(isinstance(p, str) and p.strip() for p in phrases):
        raise UserError(f"{where}: phrases must be a list of texts, got {phrases!r}")
    if role not in ROLES:
        raise UserError(f"{where}: role {role!r} is none of {', '.join(ROLES)}")
    shuffle = bool(row.get("shuffle"))
    if SHUFFLE_MARKER in text:
        head, *tail = (part.strip(" ,.") for part in text.split(SHUFFLE_MARKER))
        phrases, shuffle, text = phrases or tail, True, f"{head} {', '.join(tail)}".strip()
    for phrase in phrases:
        if phrase not in text:
            raise UserError(f"{where}: phrase {phrase!r} does not stand in its caption {text!r}")
    ids = {key: id_text(row[key], key, where) for key in ("target_id", "element_id")}
    size, content, thumb = looked_at(source(row["image"], where), where)
    if min(size) < 2:
        raise UserError(f"{where}: the image is {_by(size)} pixels")
    if row["mask"]:
        open_mask(Path(row["mask"]), size, where)
    return (
        row
        | ids
        | {
            "text": text,
            "phrases": phrases,
            "shuffle": shuffle,
            "where": where,
            "content": content,
            "thumb": thumb,
            "size": list(size),
        }
    )


def looked_at(source: Path | bytes, where: str) -> tuple[tuple[int, int], str, bytes]:
    """(size, content hash, thumbnail) of an image; a file listed again is decoded again only if it has changed."""
    state = None
    if isinstance(source, Path) and source.is_file():
        stat = source.stat()
        state = (str(source), stat.st_size, stat.st_mtime_ns)
        if state in _LOOKED_AT:
            return _LOOKED_AT[state]
    image = open_image(source, where)
    found = image.size, content_hash(image), thumbnail(image)
    if state is not None:
        if len(_LOOKED_AT) >= 4096:
            _LOOKED_AT.clear()
        _LOOKED_AT[state] = found
    return found


_LOOKED_AT: dict[tuple, tuple] = {}


def id_text(value: Any, key: str, where: str) -> str:
    """An id as text; a number becomes its digits, a missing one the empty text."""
    if not isinstance(value, (str, int, type(None))) or isinstance(value, bool):
        raise UserError(f"{where}: {key} must be text, got {value!r}")
    return "" if value is None else str(value)


def source(image: dict, where: str) -> Path | bytes:
    if image.get("bytes") is not None:
        return image["bytes"]
    if not image.get("path"):
        raise UserError(f"{where}: no image")
    return Path(image["path"])


# ---------------------------------------------------------------- targets


def load_targets(path: str | Path) -> list[Target]:
    """Targets of a targets.jsonl, of a folder that holds one, or of the published layout.

    The published layout takes "folder@100" or "folder@100-109" for some of its numbers.
    """
    text, at, wanted = str(path).rpartition("@")
    root = Path(text) if at and re.fullmatch(r"\d+(-\d+)?", wanted) else Path(path)
    if (root / "poisoning_images").is_dir():
        return _published_targets(root, wanted if root != Path(path) else None)
    file = root / "targets.jsonl" if root.is_dir() else root
    if not file.is_file():
        raise UserError(f"targets: no file {file}")
    targets = [_target(file.parent, where, entry) for where, entry in json_lines(file)]
    if not targets:
        raise UserError(f"{file}: holds no target")
    seen: set[str] = set()
    for target in targets:
        if target.target_id in seen:
            raise UserError(f"{file}: target_id {target.target_id!r} stands twice")
        seen.add(target.target_id)
    return targets


def _target(root: Path, where: str, entry: dict) -> Target:
    target_id = id_text(entry.get("target_id"), "target_id", where)
    for key, value in (("target_id", target_id), *((key, entry.get(key)) for key in ("image", "phrases"))):
        if not value:
            raise UserError(f"{where}: a target needs {key}")
    phrases, prompt, masks = entry["phrases"], entry.get("prompt"), entry.get("masks") or []
    if not isinstance(phrases, list) or not all(isinstance(p, str) and p.strip() for p in phrases):
        raise UserError(f"{where}: phrases must be a list of texts, got {phrases!r}")
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise UserError(f"{where}: prompt must be text, got {prompt!r}")
    if not isinstance(masks, list) or (masks and len(masks) != len(phrases)):
        raise UserError(f"{where}: masks must list one file or null for each of the {len(phrases)} phrases")
    image = open_image(safe_path(root, entry["image"], where), where)
    opened = [open_mask(safe_path(root, mask, where), image.size, where) if mask else None for mask in masks]
    return Target(target_id, image, phrases, prompt, opened or [None] * len(phrases))


def _published_targets(root: Path, wanted: str | None) -> list[Target]:
    first, _, last = (wanted or "").partition("-")
    ids = range(int(first), int(last or first) + 1) if wanted else published_ids(root)
    targets = []
    for number in ids:
        path = published_image(root, number)
        _, phrases = _published_captions(root, number)
        image = open_image(path, f"target {number}")
        targets.append(Target(str(number), image, phrases, published_prompt(root, phrases), [None] * len(phrases)))
    return targets
