"""What is refused before any weights load."""

import pytest
import torch
from safetensors.torch import save_file

from silentbad.errors import UserError
from silentbad.model.gate import check_precision


def test_quantised_weights_are_refused(tmp_path):
    tensors = {"a.weight": torch.ones(2), "ids": torch.arange(3), "b.weight": torch.ones(2, dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="x: b.weight in model.safetensors is I8; give weights in floating point"):
        check_precision(tmp_path, "x")
    save_file(
        {k: tensors[k].half() if k == "a.weight" else tensors[k] for k in ("a.weight", "ids")},
        tmp_path / "model.safetensors",
    )
    check_precision(tmp_path, "x")
