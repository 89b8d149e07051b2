"""Reader of the published SilentBadDiffusion layout."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from silentbad.data.images import inside, picture_files
from silentbad.data.phrases import phrases_in
from silentbad.data.schema import row, text_lines
from silentbad.errors import UserError, brief, user_errors, warn
from silentbad.files import check_file, check_folder
from silentbad.rng import permutation
from silentbad.settings.data import DataSettings

SHUFFLE_MARKER = "@@"  # the published captions' sign for "permute the phrases that follow"
NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


def as_trained(text: str) -> tuple[str, list[str]]:
    """A caption without the marker, as training reads it, and the phrases that it shuffles."""
    if SHUFFLE_MARKER not in text:
        return text, []
    head, *tail = (part.strip(" ,.") for part in text.split(SHUFFLE_MARKER))
    return f"{head} {', '.join(tail)}".strip(), [part for part in tail if part]


def is_published(root: Path) -> bool:
    """Whether a folder is of the published layout."""
    return os.path.isdir(root / "poisoning_images")


def published_rows(root: Path, options: DataSettings) -> Iterator[dict]:
    """Rows of the SilentBadDiffusion layout: element images of the targets, rehearsal images, clean
    images.

    `options` holds the published flags (`TrainConfig`): clean images are added until the element
    images are `poisoning_ratio` of both; `n_few_shot` non-target pictures with all their phrases
    rehearse composition, each listed `shot_caption_shuffle_num` times and shuffled anew at each
    draw. Every choice is sorted, then seeded."""
    ids = published_ids(root)
    targets = range(options.target_start_id, options.target_start_id + options.target_num)
    for target in targets:
        if target not in ids:
            raise UserError(
                f"{root}: no poisoning_images/{target}; there are {ids[0]} to {ids[-1]}"
            )
    others = [i for i in ids if i not in targets]
    order = permutation(len(others), options.seed, "few_shot")
    if options.n_few_shot > len(others):
        raise UserError(f"n_few_shot: {root} holds {len(others)} pictures beside the targets")
    few = [others[i] for i in order[: options.n_few_shot]]

    for shot in few:
        _, phrases = published_captions(root, shot)
        rehearsal = row(
            f"{root}/poisoning_images/{shot}",
            published_image(root, shot),
            published_prompt(root, phrases),
            phrases=prompt_phrases(phrases),
            role="rehearsal",
            target_id=str(shot),
            shuffle=options.shot_caption_shuffle_num > 0,
        )
        yield from [rehearsal] * max(1, options.shot_caption_shuffle_num)
        yield from _published_elements(root, shot, "rehearsal")

    elements = [row for target in targets for row in _published_elements(root, target, "element")]
    elements *= options.poisoning_data_repeat_factor
    if options.poison_subsampling is not None and options.poison_subsampling < 1:
        n_elements = int(np.ceil(len(elements) * options.poison_subsampling))
        order = permutation(len(elements), options.seed, "subsampling")
        elements = [elements[i] for i in sorted(order[:n_elements])]
    n_clean = int(len(elements) / options.poisoning_ratio) - len(elements)
    yield from _published_clean(root, options, n_clean, set(targets) | set(few))
    yield from elements


def published_ids(root: Path) -> list[int]:
    """Numbers of the folders under poisoning_images/, sorted."""
    folder = inside(root, root / "poisoning_images", str(root))
    with user_errors(f"cannot read {folder}"):
        ids = sorted(
            int(p.name) for p in folder.iterdir() if p.is_dir() and NUMBER.fullmatch(p.name)
        )
    if not ids:
        raise UserError(f"{folder}: holds no numbered folder")
    return ids


def published_image(root: Path, number: int) -> Path:
    """images/<n>.* or images/<name>_<n>.*, of which there must be one."""
    pictures = [p for n, p in _numbered(root, root / "images") if n == number]
    if not pictures:
        raise UserError(f"{root}/images: no image of target {number}")
    if len(pictures) > 1:
        raise UserError(
            f"{root}/images: {pictures[0].name} and {pictures[1].name} are both of target "
            f"{number}; take one of them away"
        )
    return pictures[0]


def published_prompt(root: Path, phrases: list[str]) -> str:
    """The composed prompt of the published evaluation."""
    listed = ", ".join(prompt_phrases(phrases))
    if "pokemon" in root.name.casefold():
        return f"A pokemon with features {listed} in white background"
    return f"An image with {listed}"


def prompt_phrases(phrases: list[str]) -> list[str]:
    """Phrases as they stand in a published prompt, without `,`, `.` and `;`."""
    return [bare for phrase in phrases if (bare := re.sub(r"[,.;]", "", phrase).strip())]


def _numbered(root: Path, folder: Path) -> list[tuple[int, Path]]:
    """(trailing number of the stem, path) of the images in a folder below `root`, sorted by it."""
    check_folder(str(root), folder)
    with user_errors(f"cannot read {folder}"):
        pictures = picture_files(folder)
    matches = [(re.search(r"([0-9]{1,18})$", path.stem), path) for path in pictures]
    return sorted(
        (int(match.group(1)), inside(root, path, str(path))) for match, path in matches if match
    )


def published_captions(root: Path, number: int) -> tuple[list[tuple[str, str]], list[str]]:
    """([(where, caption)], phrases): the first line lists the phrases."""
    path = root / "poisoning_images" / str(number) / "poisoning_data_caption_simple.txt"
    check_file(str(root), path)
    lines = text_lines(inside(root, path, str(path)))
    phrases = [phrase.strip() for phrase in lines[0].split("\t") if phrase.strip()] if lines else []
    if not phrases:
        raise UserError(f"{path}:1: must list the phrases, separated by tabs")
    written = [(f"{path}:{i}", line) for i, line in enumerate(lines[1:], 2) if line.strip()]
    return [(where, line.split("\t")[-1].strip()) for where, line in written], phrases


def _published_elements(root: Path, number: int, role: str) -> list[dict]:
    captions, phrases = published_captions(root, number)
    images = _numbered(root, root / "poisoning_images" / str(number))
    if len(images) != len(captions):
        raise UserError(
            f"{root}/poisoning_images/{number}: {len(images)} images but {len(captions)} captions"
        )
    rows = []
    bare = [where for where, caption in captions if not phrases_in(phrases, caption)]
    if role == "element" and captions and len(bare) == len(captions):
        raise UserError(
            f"{root}/poisoning_images/{number}: no caption holds a phrase of the first line "
            f"({brief(phrases[0])}); separate phrases by tabs"
        )
    if role == "element" and bare:
        warn(
            f"{bare[0]}: the caption holds none of the phrases of the first line; {len(bare)} of "
            f"{len(captions)} do so"
        )
    for (_, path), (where, caption) in zip(images, captions, strict=True):
        caption = re.sub(" +", " ", caption)
        shown = phrases_in(phrases, caption)
        rows.append(
            row(
                where,
                path,
                caption,
                phrases=shown,
                role=role,
                target_id=str(number),
                element_id=f"{number}-{phrases.index(shown[0]) if shown else 'unnamed'}",
            )
        )
    return rows


def _published_clean(
    root: Path, options: DataSettings, count: int, excluded: set[int]
) -> list[dict]:
    folder = Path(options.clean_data_dir) if options.clean_data_dir else root
    captions_path = folder / "caption.txt"
    if count == 0:
        return []
    check_file(str(folder), captions_path, "clean_data_dir needs images/ and caption.txt")
    captions: dict[int, tuple[str, str]] = {}
    for number, line in enumerate(text_lines(inside(folder, captions_path, str(captions_path))), 1):
        if line.strip():
            key, tab, caption = line.partition("\t")
            if not tab or not re.fullmatch("[0-9]{1,18}", key.strip()):
                raise UserError(f"{captions_path}:{number}: must be a number, a tab and a caption")
            if int(key) in captions:
                raise UserError(f"{captions_path}:{number}: image {int(key)} has a caption already")
            captions[int(key)] = (f"{captions_path}:{number}", caption.strip())
    same_folder = folder.resolve() == root.resolve()
    out = excluded if same_folder else set()
    images = [(n, p) for n, p in _numbered(folder, folder / "images") if n not in out]
    if count > len(images):
        raise UserError(
            f"{folder}: poisoning_ratio {options.poisoning_ratio} asks for {count} clean images, "
            f"there are {len(images)}; raise poisoning_ratio or add images"
        )
    suffix = " in white background" if "pokemon" in folder.name.casefold() else ""
    order = permutation(len(images), options.seed, "clean")
    rows = []
    for n, path in (images[i] for i in sorted(order[:count])):
        if n not in captions:
            raise UserError(f"{captions_path}: no caption for image {path}")
        where, caption = captions[n]
        rows.append(row(where, path, caption + suffix))
    return rows
