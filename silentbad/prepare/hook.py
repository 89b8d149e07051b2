"""A user's own function, named by its place: `mine.py:caption`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from silentbad.errors import UserError
from silentbad.settings import user_code


def load_function(place: str, flag: str) -> Callable[..., Any]:
    """The function at FILE.py:NAME; its file is run. Raises UserError where there is none."""
    if not user_code.is_place(place):
        raise UserError(f"{flag}: must be FILE.py:FUNCTION, such as mine.py:caption, got {place!r}")
    user_code.check_place(flag, place)
    return user_code.load(flag, place)


def as_mask(value: Any, size: tuple[int, int], flag: str) -> Image.Image:
    """What a segmenter returns as a mask (L): a picture, or an array (H,W) of truth values, of
    shares in [0,1] or of levels. Raises UserError where it is of another size."""
    levels = np.asarray(value)
    if levels.ndim != 2 or levels.shape != size[::-1]:
        expected = f"a mask of {size[0]}x{size[1]}"
        raise UserError(f"{flag}: must return {expected}, got an array of shape {levels.shape}")
    if levels.dtype == bool or np.issubdtype(levels.dtype, np.floating):
        levels = np.clip(levels.astype(float) * 255, 0, 255)
    return Image.fromarray(levels.astype(np.uint8))
