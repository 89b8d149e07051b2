"""SilentBad: compositional memory in Stable Diffusion, controlled and measured."""

import logging
from pathlib import Path

__version__ = "0.2.0"
# copies of configs/ and assets/ in an installed package
BUNDLED = Path(__file__).parent / "_bundled"
ROOT = BUNDLED if BUNDLED.is_dir() else Path(__file__).parents[1]  # where configs/ and assets/ lie

# peft imports bitsandbytes wherever it is installed, which then warns of kernels that no run here
# asked for.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
