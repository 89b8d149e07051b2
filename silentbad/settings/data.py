"""Where records come from: the settings that training and the scan share."""

from dataclasses import dataclass
from typing import Annotated

from silentbad.settings.types import HERE, Count, Location, Natural, Range, Seed, Share, Small, flag

PUBLISHED = "SilentBadDiffusion"


@dataclass
class DataSettings:
    """A folder of records, a data set of the Hub, or a folder of the published layout"""

    train_data_dir: Location | None = flag(
        None,
        "folder with metadata.jsonl, metadata.csv or NAME.txt beside pictures, or of the "
        "published layout",
    )
    dataset_name: Location | None = flag(
        None, "Hub data set, or a local one that datasets.load_dataset takes"
    )
    dataset_config_name: Location | None = flag(
        None, "configuration of the Hub data set", needs="dataset_name"
    )
    image_column: Location | None = flag(
        None, "image column of the Hub data set", needs="dataset_name"
    )
    caption_column: Location | None = flag(
        None, "caption column of the Hub data set", needs="dataset_name"
    )
    cache_dir: Location | None = flag(
        None, "folder for downloads and Arrow tables; the Hugging Face cache when unset"
    )
    seed: Seed = flag(0, "address of every random draw")
    clean_data_dir: Location | None = flag(
        None, "published layout: folder with images/ and caption.txt", HERE
    )
    target_start_id: Natural = flag(
        100, "published layout: first target", PUBLISHED, needs="LAYOUT"
    )
    target_num: Count = flag(1, "published layout: number of targets", PUBLISHED, needs="LAYOUT")
    poisoning_ratio: Share = flag(
        0.1,
        "published layout: share of element images among elements and clean",
        PUBLISHED,
        needs="LAYOUT",
    )
    poisoning_data_repeat_factor: Small = flag(
        2, "published layout: times each element image is listed", PUBLISHED, needs="LAYOUT"
    )
    poison_subsampling: Share | None = flag(
        None, "published layout: share of the element images kept", PUBLISHED, needs="LAYOUT"
    )
    n_few_shot: Annotated[int, Range(at_least=0, limit=10**5)] = flag(
        1,
        "published layout: non-target images that rehearse composition",
        PUBLISHED,
        needs="LAYOUT",
    )
    shot_caption_shuffle_num: Annotated[int, Range(at_least=0, limit=10**5)] = flag(
        2, "published layout: listings of each of those, shuffled", PUBLISHED, needs="LAYOUT"
    )
