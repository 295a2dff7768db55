"""Of random cases: some in every run, more in `make test-all`."""

import pytest


def seeds(everyday: int, thorough: int) -> list[object]:
    """The first `everyday` of `thorough` seeds, and the others marked so."""
    return [*range(everyday), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(everyday, thorough))]
