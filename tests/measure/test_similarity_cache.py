"""Similarities of null pictures in the cache: computed once, anew where the file is damaged."""

from types import SimpleNamespace

import pytest
import torch

from silentbad.errors import UserError
from silentbad.measure import similarity_cache

ALONE = SimpleNamespace(is_main_process=True)
ROWS = [{"sim": 0.1 + 0.2, "elements": [None, 1 / 3]}]  # numbers come back to the bit


def test_rows_are_computed_once_and_anew_where_the_file_is_damaged(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return ROWS

    for _ in range(2):
        assert similarity_cache.remembered(tmp_path / "cache", "a", 1, ALONE, compute) == ROWS
    assert len(calls) == 1
    (tmp_path / "cache" / "nulls-a.json").write_text('[{"sim": 0.')
    assert similarity_cache.remembered(tmp_path / "cache", "a", 1, ALONE, compute) == ROWS and len(calls) == 2
    assert similarity_cache.remembered(tmp_path / "cache", "b", 1, ALONE, compute) == ROWS and len(calls) == 3


def test_the_key_is_of_values_and_files(tmp_path):
    device = torch.device("cpu")
    file = tmp_path / "a.png"
    file.write_bytes(b"one")
    first = similarity_cache.key([torch.ones(2), None, 3, file], device)
    assert first == similarity_cache.key([torch.ones(2), None, 3, file], device)
    others = [[torch.ones(2, 1), None, 3, file], [torch.zeros(2), None, 3, file], [torch.ones(2), 3, file]]
    assert first not in [similarity_cache.key(facts, device) for facts in others]
    file.write_bytes(b"two")
    assert first != similarity_cache.key([torch.ones(2), None, 3, file], device)


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="cache_dir .*cache: cannot write similarities of null pictures"):
        similarity_cache.remembered(tmp_path / "cache", "a", 1, ALONE, lambda: ROWS)
