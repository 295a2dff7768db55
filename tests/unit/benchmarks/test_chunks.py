"""The comparison of forms that may serve a chunk, without a GPU."""

from typing import Any
from unittest import mock

import pytest
import torch

from attention_backend.kernels import device, flash_fwd_sm90
from benchmarks import chunks
from benchmarks.arguments import numbers
from benchmarks.power import Load
from benchmarks.shared_keys import PAGE, Cell


def test_each_form_is_the_one_that_its_name_says() -> None:
    args = Cell(128, 32, 8, 249, 12_256, PAGE).problem(torch.device("cpu"))
    asked = []

    def plan(*given: Any) -> None:
        with mock.patch.object(device, "num_sms", return_value=132):
            asked.append(planned(*given))
        raise InterruptedError

    planned = flash_fwd_sm90._plan
    for call in chunks.ways(args).values():
        with mock.patch.object(flash_fwd_sm90, "_plan", plan):
            try:
                call()
            except InterruptedError:
                continue
    found = dict(zip(chunks.ways(args), asked, strict=True))

    assert found[chunks.WHOLE][1].num_splits == 1
    for name, (tall, pack, cluster) in chunks.FORMS.items():
        which, laid_out = found[name]
        assert (which.tall, which.cluster, which.own, laid_out.pack) == (tall, cluster, False, pack)
    chosen = found[chunks.CHOSEN]
    assert chosen in [found[name] for name in chunks.FORMS]


def test_a_form_that_leaves_out_a_tenth_is_not_timed() -> None:
    """Of many keys outputs are small: a hundredth is more than they are."""
    out = torch.randn(8, 4, 128) / 200
    calls = {chunks.CHOSEN: lambda: (out, out), chunks.WHOLE: lambda: (0.9 * out, out)}
    watch = mock.Mock(device=torch.device("cpu"))
    with mock.patch.object(chunks, "ways", return_value=calls), pytest.raises(ArithmeticError, match="whole keys is"):
        chunks.measure(Cell(128, 4, 1, 8, 64, PAGE), watch)


def test_under_steady_load_a_form_is_the_mean_of_two_turns() -> None:
    turns = iter([Load(500, 1600, 690, 1.0, 1.4), Load(600, 1600, 690, 1.0, 1.2), Load(400, 1500, 700, 1.2, 1.8)] * 2)
    calls = {chunks.CHOSEN: mock.Mock(), chunks.WHOLE: mock.Mock()}
    with (
        mock.patch.object(chunks, "checked_ways", return_value=calls),
        mock.patch.object(chunks.power, "measure", side_effect=lambda *_: next(turns)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(multi_processor_count=132)),
    ):
        found = chunks.measure_steadily(Cell(128, 4, 1, 8, 64, PAGE), torch.device("cpu"), 0.1)
    assert (found[chunks.CHOSEN].tflops, found[chunks.WHOLE].tflops) == (500, 500)  # 1st and 4th, 2nd and 3rd
    assert found[chunks.WHOLE] == Load(500, 1550, 695, 1.1, 1.5)


def test_chunks_have_any_number_of_rows() -> None:
    assert len({rows % 64 for rows in numbers(chunks.ROWS)}) > 1
