"""The judge of inputs: what one input takes is told from what its process held before."""

import subprocess
import sys

import pytest

FILLS = """
from tests.fuzz import judge

held_before = b"x" * {before}
judge.MEMORY = 2**27
tally = judge.tally("memory")
with judge.timed(tally, "an input"):
    taken = b"x" * {taken}
tally.settle()
"""


@pytest.mark.parametrize(
    ("before", "taken", "short"), [(2**28, 2**20, False), (2**20, 2**28, True)], ids=["of the process", "of the input"]
)
def test_memory_that_an_input_takes(before, taken, short):
    ran = subprocess.run(
        [sys.executable, "-c", FILLS.format(before=before, taken=taken)], capture_output=True, text=True, check=False
    )
    assert (ran.returncode != 0) == short, ran.stderr
    assert ("GiB of memory" in ran.stderr) == short
