"""Where records come from: the settings that training and the scan share."""

from dataclasses import dataclass
from typing import Any

from silentbad.settings.types import Count, Location, Natural, Seed, Share, Small, flag, ours

PUBLISHED = "SilentBadDiffusion"


def published(default: Any, help: str) -> Any:
    """A flag of the published layout, by its published name."""
    return flag(default, f"published layout: {help}", source=PUBLISHED, needs="LAYOUT")


@dataclass
class DataSettings:
    """A folder of records, a data set of the Hub, or a folder of the published layout"""

    train_data_dir: Location | None = flag(
        None,
        "folder with metadata.jsonl or .csv (also in train/), NAME.txt or NAME.caption beside "
        "pictures, N_name/ of such pictures, or of the published layout",
    )
    dataset_name: Location | None = flag(
        None, "Hub data set, a local one that datasets.load_dataset takes, or a .parquet file"
    )
    dataset_config_name: Location | None = flag(
        None, "configuration of the Hub data set", needs="dataset_name"
    )
    image_column: Location | None = flag(
        None, "column of the picture (file_name in metadata, image in a data set)"
    )
    caption_column: Location | None = flag(None, "column of the caption (text)")
    cache_dir: Location | None = flag(
        None, "folder for downloads and Arrow tables; the Hugging Face cache when unset"
    )
    seed: Seed = flag(0, "address of every random draw")
    clean_data_dir: Location | None = ours(
        None, "published layout: folder with images/ and caption.txt"
    )
    target_start_id: Natural = published(100, "first target")
    target_num: Count = published(1, "number of targets")
    poisoning_ratio: Share = published(0.1, "share of element images among elements and clean")
    poisoning_data_repeat_factor: Small = published(2, "times each element image is listed")
    poison_subsampling: Share | None = published(None, "share of the element images kept")
    n_few_shot: Natural = published(1, "non-target images that rehearse composition")
    shot_caption_shuffle_num: Natural = published(2, "listings of each of those, shuffled")
