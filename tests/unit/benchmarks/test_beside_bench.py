"""The comparison of shares of the multiprocessors for decodes beside a chunk, without a GPU."""

from typing import Any
from unittest import mock

import pytest
import torch

from attention_backend.heuristics.decode import beside_blocks
from attention_backend.kernels import beside, flash_decode, flash_fwd_sm90
from benchmarks import beside as bench
from benchmarks.arguments import numbers

Call = tuple[str, int | None]


def test_each_way_launches_the_blocks_that_its_name_says() -> None:
    counts, launched = numbers(bench.BLOCKS), []

    def decode(few: Any, blocks: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        launched.append(("decode", blocks))
        return few.q, few.q

    def forward(many: Any, beside: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        launched.append(("chunk", None if beside is None else beside()))
        return many.q, many.q

    with (
        mock.patch.object(flash_decode, "forward", decode),
        mock.patch.object(flash_decode, "most_counters", return_value=7),
        mock.patch.object(flash_fwd_sm90, "forward", forward),
    ):
        for call in bench.Step(8, 40, 2, 70).ways(torch.device("cpu"), counts).values():
            call()
    in_turn: list[Call] = [("decode", None), ("chunk", None)]
    assert launched == in_turn + [one for count in counts for one in (("decode", count), ("chunk", 7))]


def test_what_is_chosen_is_among_what_is_timed() -> None:
    assert beside_blocks(132, bench.KEY_HEADS) in numbers(bench.BLOCKS)


def test_a_way_that_computes_something_else_is_not_timed() -> None:
    right, wrong = torch.randn(2, 8, 128), torch.randn(2, 8, 128)
    ways: bench.Ways = {
        bench.IN_TURN: lambda: ((right, right), (right, right)),
        "80": lambda: ((right, right), (wrong, right)),
    }
    with pytest.raises(ArithmeticError, match="80 is not what in turn is"):
        bench.check(bench.Step(8, 40, 2, 70), ways)


def test_beside_has_its_share_where_nobody_says_how_many_blocks() -> None:
    few = mock.Mock(num_kv_heads=8)
    with (
        mock.patch.object(beside.device, "num_sms", return_value=132),
        mock.patch.object(flash_decode, "forward") as decode,
        mock.patch.object(flash_fwd_sm90, "forward", side_effect=lambda _, beside: beside()),
        mock.patch.object(flash_decode, "most_counters"),
    ):
        beside.forward(few, mock.Mock())
    assert decode.call_args == mock.call(few, blocks=80)
