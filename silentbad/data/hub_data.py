"""Readers of a data set of the Hub, or of one that `datasets` saved: its table and its rows."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets

from silentbad import hub
from silentbad.data.schema import element_fields, row
from silentbad.errors import UserError, iterate_reader, user_errors, warn
from silentbad.files import check_file, is_utf8
from silentbad.settings.data import DataSettings

FILES = {".parquet": "parquet", ".arrow": "arrow"}  # a data set in one file -> its builder
SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk writes


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the log of `datasets`: faults of a data set are reported here, in one line."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def hub_table(config: DataSettings) -> datasets.Dataset:
    """The train split of `dataset_name`; its fingerprint changes with the data set's revision."""
    name = config.dataset_name or ""
    if Path(name).suffix in FILES or os.path.isfile(name):
        return _of_file(name, config)
    with hub.fetching(name, f"dataset_name {name}: cannot load it"), quietly():
        if any(os.path.isfile(os.path.join(name, file)) for file in SAVED):
            data_set = datasets.load_from_disk(name)
            return data_set["train"] if isinstance(data_set, datasets.DatasetDict) else data_set
        return datasets.load_dataset(
            name, config.dataset_config_name, split="train", cache_dir=config.cache_dir
        )


def _of_file(name: str, config: DataSettings) -> datasets.Dataset:
    """The table of a Parquet or Arrow file, whose pictures are {"bytes", "path"}."""
    check_file("dataset_name", name)
    builder = FILES.get(Path(name).suffix)
    if builder is None:
        raise UserError(
            f"dataset_name: {name} is a file of another kind; "
            "give a folder, a .parquet or .arrow file, or the name of a Hub data set"
        )
    with user_errors(f"dataset_name {name}: cannot load it"), quietly():
        table = datasets.load_dataset(
            builder, data_files=name, split="train", cache_dir=config.cache_dir
        )
    image = config.image_column or "image"
    kind = table.features.get(image)
    if isinstance(kind, dict) and kind.keys() == {"bytes", "path"}:
        table = table.cast_column(image, datasets.Image(decode=False))
    return table


def hub_rows(table: datasets.Dataset, config: DataSettings) -> Iterator[dict]:
    """Rows of a Hub data set's table; extra record columns are used where present."""
    name = config.dataset_name
    columns = table.column_names
    image = config.image_column or "image"
    caption = config.caption_column or "text"
    for key, column in (("image_column", image), ("caption_column", caption)):
        if column not in columns:
            raise UserError(
                f"{key}: {name} has no column {column!r}; there are: {', '.join(columns)}"
            )
    if not isinstance(table.features[image], datasets.Image):
        raise UserError(f"image_column: {name}.{image} holds no images")
    table = table.cast_column(image, datasets.Image(decode=False))
    if isinstance(table.features[caption], datasets.List):
        warn(f"caption_column: {name}.{caption} holds lists; the first caption of each is used")
    rows = iterate_reader(table, f"dataset_name {name}: cannot read its rows")
    for number, entry in enumerate(rows):
        where = f"{name}:{number}"
        text = entry[caption]
        yield row(
            where,
            hub_image(entry[image], config, where),
            text[0] if isinstance(text, list) and text else text,
            **element_fields(entry),
        )


def hub_image(image: dict, config: DataSettings, where: str) -> dict:
    """The bytes of an image, or its path in the data set or the caches."""
    if image is None:
        raise UserError(f"{where}: no image")
    if not is_utf8(image.get("path") or "") or "\0" in (image.get("path") or ""):
        raise UserError(f"{where}: no file can have the name {image['path']!r}")
    if image.get("bytes") is None and image.get("path"):
        path = Path(image["path"]).resolve()
        caches = (datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE)
        homes = filter(None, (config.dataset_name, config.cache_dir, *caches))
        if not any(path.is_relative_to(Path(home).resolve()) for home in homes):
            raise UserError(
                f"{where}: image path {image['path']!r} leaves the data set and the caches; refused"
            )
    return {"path": image.get("path"), "bytes": image.get("bytes")}
