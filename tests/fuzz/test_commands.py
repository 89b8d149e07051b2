"""Generated inputs through each command's own `main`: a right result, or one line, exit code 2 and nothing left."""

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.judge import tally
from tests.fuzz.kinds import KINDS, copied

QUICK, LONG = 1, 300  # cases of each kind


@pytest.mark.parametrize("name", KINDS)
def test_generated_inputs_are_used_or_refused(name, good, tmp_path, fuzz):
    kind, found = KINDS[name], tally(name)

    @seed(fuzz.start)
    @settings(
        max_examples=fuzz.count(QUICK, LONG),
        deadline=None,
        database=None,
        phases=[Phase.generate],  # all ways to fall short are collected, so nothing is shrunk
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.cases)
    def each(case):
        kind.give(found, case, copied(good, tmp_path / "inputs"))

    each()
    found.settle()
