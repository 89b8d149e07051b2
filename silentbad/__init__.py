"""SilentBad: compositional memory in Stable Diffusion, controlled and measured."""

import logging
import os
import time
from pathlib import Path

__version__ = "0.2.0"
BEGAN = time.perf_counter()  # when a command began: this module is its first import
# copies of configs/ and assets/ in an installed package
BUNDLED = Path(__file__).parent / "_bundled"
ROOT = BUNDLED if BUNDLED.is_dir() else Path(__file__).parents[1]  # where configs/ and assets/ lie

# peft imports bitsandbytes wherever it is installed, which then warns of kernels that no run here
# asked for.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def bundled(path: str) -> str:
    """The path of configs/... or assets/...: in the current folder, or else in the package."""
    in_package = str(ROOT / path)
    ours = (
        path.startswith(("configs/", "assets/"))
        and not os.path.exists(path)
        and os.path.exists(in_package)
    )
    return in_package if ours else path
