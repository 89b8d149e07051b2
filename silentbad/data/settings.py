"""What this package reads of a run's configuration, which it does not import: the fields are those of `TrainConfig` in
silentbad/settings/train.py."""

from typing import Protocol


class DataSettings(Protocol):
    """Where the records come from, and which of them are taken."""

    seed: int
    cache_dir: str | None
    max_train_samples: int | None
    # an image folder, or a data set of the Hub
    train_data_dir: str | None
    dataset_name: str | None
    dataset_config_name: str | None
    image_column: str | None
    caption_column: str | None
    # the published layout
    clean_data_dir: str | None
    target_start_id: int
    target_num: int
    poisoning_ratio: float
    poisoning_data_repeat_factor: int
    poison_subsampling: float | None
    n_few_shot: int
    shot_caption_shuffle_num: int


class ImageSettings(Protocol):
    """How a picture becomes what a step sees."""

    image_interpolation_mode: str
    center_crop: bool
    random_flip: bool
