"""Randomness with an address: a draw depends on where it is used, never on what was drawn before
it.

Every random number of a run comes from a generator seeded by (seed, stream, draw, position).
`position` is the sample's index in the draw's effective batch over all ranks and micro-batches, so
neither a resume, nor validation, nor another number of processes shifts a draw. torch is imported
only in the functions that draw, since a scan does not need it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def addressed_seed(*address: int | str) -> int:
    """63-bit seed of an address: the first 8 bytes of BLAKE2b over the parts joined by "/", top
    bit cleared."""
    text = "/".join(str(part) for part in address)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def generator(*address: int | str) -> torch.Generator:
    """A CPU generator seeded by `addressed_seed(*address)`."""
    import torch

    return torch.Generator().manual_seed(addressed_seed(*address))


def permutation(count: int, *address: int | str) -> np.ndarray:
    """The numbers below `count` in a random order."""
    import torch

    return torch.randperm(count, generator=generator(*address)).numpy()


def noise(
    shape: tuple[int, ...], seed: int, stream: str, draw: int, positions: list[int]
) -> torch.Tensor:
    """Standard normal noise (len(positions), *shape), each row from the generator of its own
    address."""
    import torch

    return torch.stack(
        [torch.randn(shape, generator=generator(seed, stream, draw, int(p))) for p in positions]
    )
