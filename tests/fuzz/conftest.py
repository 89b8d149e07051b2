"""What the fuzzers share: how much they do, and the table of what they found."""

from dataclasses import dataclass

import pytest

from tests.fuzz.judge import MEMORY, TALLIES, largest
from tests.mistakes import good as good  # a fixture, one for all of them


@dataclass(frozen=True)
class Fuzz:
    """How many cases, of seeds from `start` on."""

    factor: float
    start: int

    def count(self, quick: int, long: int) -> int:
        """The number of cases in `make test`, or in `make test-fuzz`."""
        return round(long * self.factor) or quick

    def seeds(self, quick: int, long: int) -> range:
        return range(self.start, self.start + self.count(quick, long))


@pytest.fixture(scope="session")
def fuzz(pytestconfig) -> Fuzz:
    return Fuzz(pytestconfig.getoption("fuzz"), pytestconfig.getoption("fuzz_seed"))


def pytest_terminal_summary(terminalreporter):
    """Time and counts by kind of input, in the long run."""
    if not TALLIES or terminalreporter.config.getoption("fuzz") == 0:
        return
    terminalreporter.section(f"inputs by kind, seeds from {terminalreporter.config.getoption('fuzz_seed')}")
    for counts in TALLIES:
        terminalreporter.write_line(str(counts))
    total = {
        key: sum(getattr(counts, key) for counts in TALLIES) for key in ("accepted", "refused", "mutated", "seconds")
    }
    short = sum(len(cases) for counts in TALLIES for cases in counts.short.values())
    terminalreporter.write_line(
        f"{total['accepted'] + total['refused'] + short:,} inputs: {total['accepted']:,} accepted, "
        f"{total['refused']:,} refused, {short} fell short; {total['mutated']:,} bytes mutated; "
        f"{total['seconds']:.0f} s; slowest {max(counts.slowest for counts in TALLIES):.1f} s; "
        f"memory of a process at most {largest() / 2**30:.2f} GiB, {MEMORY / 2**30:.1f} more allowed to an input"
    )
