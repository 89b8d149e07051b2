"""The stream of draws and the loader."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silentbad.data import draws
from silentbad.data.loader import Loader, Stream, collate
from silentbad.errors import UserError
from tests.folders import records


def test_collate(data):
    sampler = draws.Draws(draws.Reader(records(data), draws.Transform(16), seed=0))
    batch = collate([sampler(0, 0, 4), sampler(12, 0, 5)])
    assert batch["pixel_values"].shape == (2, 3, 16, 16) and batch["pixel_values"].abs().max() <= 1
    assert batch["has_mask"].tolist() == [True, False] and batch["mask"][1].min() == 1
    assert batch["position"].tolist() == [4, 5]
    assert batch["role"] == ["element", "clean"] and batch["phrases"][0] == ["a red cat"]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), st.integers(1, 5))
def test_a_stream_is_one_sequence_however_it_is_cut(cuts, length):
    order = lambda epoch: np.arange(length) + 100 * epoch  # noqa: E731
    total = sum(cuts)
    expected = np.concatenate([order(e) for e in range(total // length + 1)])[:total]
    stream, parts = Stream(order), []
    for n in cuts:
        ahead = stream.peek(n)
        parts.append(stream.take(n))
        assert ahead is None or np.array_equal(ahead, parts[-1])
        state, stream = stream.state_dict(), Stream(order)
        stream.load_state_dict(state)
    assert np.array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_does_not_depend_on_the_number_of_processes(data, workers):
    read = records(data)

    def seen(world, size, accumulation):
        """{position: (index, text)} of three steps."""
        indices = {}
        for rank in range(world):
            sampler = draws.Draws(draws.Reader(read, draws.Transform(16), seed=0))
            stream = Stream(lambda epoch: np.random.default_rng(epoch).permutation(16))
            loader = Loader(
                sampler, stream, batch_size=size, accumulation=accumulation, rank=rank, world=world, workers=workers
            )
            for draw in range(3):
                for batch in loader.draw(draw):
                    where = zip(batch["position"].tolist(), batch["index"].tolist(), strict=True)
                    indices |= {(draw, position): index for position, index in where}
        return indices

    assert seen(1, 12, 1) == seen(2, 3, 2) == seen(4, 3, 1) == seen(1, 4, 3)


def test_an_empty_epoch_is_refused():
    with pytest.raises(UserError, match="empty epoch"):
        Stream(lambda epoch: np.zeros(0, dtype=np.int64)).take(1)
