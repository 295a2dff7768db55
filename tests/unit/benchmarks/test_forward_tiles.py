"""The benchmark of the Hopper forward's tiles without a GPU: who races, what is compared."""

import pytest
import torch

from benchmarks import forward_tiles as bench
from benchmarks import tile_race

OWN = "own"


def names_of(head_dim: int, only: list[str] | None = None) -> list[str]:
    return [contender.name for contender in bench.contenders_of(head_dim, only)]


def test_each_cells_default_is_the_first_and_every_other_tile_races() -> None:
    assert names_of(64) == ["longwave", "longwave-own", "longwave-tall", "longwave-together"]
    assert names_of(80) == ["longwave", "longwave-tall", "longwave-together"]
    assert names_of(128) == ["longwave", "longwave-own", "longwave-tall", "longwave-cluster", "longwave-together"]
    assert names_of(192) == ["longwave"]
    assert names_of(256) == ["longwave", "longwave-own", "longwave-cluster", "longwave-together"]


def test_tiles_are_chosen_by_their_names_beside_the_default() -> None:
    assert names_of(64, [OWN]) == ["longwave", f"longwave-{OWN}"]


def test_lse_is_compared() -> None:
    lse = torch.randn(64)
    bench.compare(lse, lse)
    for other in (lse + 1, lse * torch.nan):
        with pytest.raises(ValueError, match="lse"):
            bench.compare(other, lse)


def test_peers_are_those_that_are_installed() -> None:
    assert tile_race.peers(("cudnn",))[0].name == "cudnn"
