"""Randomness has an address."""

import hashlib

import torch

from silentbad.rng import addressed_seed, generator, noise


def test_the_seed_formula_by_hand():
    digest = hashlib.blake2b(b"7/noise/3/0", digest_size=8).digest()
    by_hand = sum(byte << (8 * i) for i, byte in enumerate(digest)) % 2**63
    assert addressed_seed(7, "noise", 3, 0) == by_hand == 6118162174777817990


def test_addresses_do_not_collide():
    seeds = {addressed_seed(s, n, t, p) for s in range(4) for n in ("a", "b") for t in range(50) for p in range(50)}
    assert len(seeds) == 4 * 2 * 50 * 50


def test_noise_of_a_position_does_not_depend_on_its_neighbours():
    together = noise((2, 3), 0, "noise", 5, [0, 1, 2, 3])
    in_parts = torch.cat([noise((2, 3), 0, "noise", 5, [2, 3]), noise((2, 3), 0, "noise", 5, [0, 1])])
    assert torch.equal(together[[2, 3, 0, 1]], in_parts)


def test_noise_does_not_touch_the_global_stream():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    noise((4,), 0, "noise", 0, [0])
    generator("anything")
    assert torch.equal(before, torch.get_rng_state())
