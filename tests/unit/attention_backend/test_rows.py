"""Which tensors kernels can read 16 bytes at a time, and which the TMA: by their strides alone."""

import pytest
import torch

from attention_backend.errors import UnsupportedError
from attention_backend.kernels.rows import begins_vectors, check_rows, is_expanded


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def test_views_of_a_packed_projection_begin_at_vectors() -> None:
    for part in rows(5, 96).split([64, 16, 16], dim=1):
        assert begins_vectors(part, 8)
        assert begins_vectors(part.unflatten(1, (-1, 16)), 8)
        check_rows(part=part)


@pytest.mark.parametrize(
    "x", [rows(4, 20)[:, :16], rows(3, 5, 4, 8).transpose(0, 3), rows(64)[1:33].view(4, 8), rows(4, 2, 12)[..., :8]]
)
def test_rows_apart_by_other_than_vectors_are_seen(x: torch.Tensor) -> None:
    assert not begins_vectors(x, 8)
    with pytest.raises(UnsupportedError, match=r"x of shape .* strides"):
        check_rows(x=x)


def test_vectors_are_as_many_elements_as_asked() -> None:
    assert begins_vectors(rows(4, 24), 8)
    assert not begins_vectors(rows(4, 24), 16)


def test_a_dimension_of_one_element_may_have_any_stride() -> None:
    x = torch.as_strided(rows(64), (1, 2, 16), (3, 16, 1))
    assert begins_vectors(x, 8)
    assert not begins_vectors(torch.as_strided(rows(64), (2, 2, 16), (3, 16, 1)), 8)
    assert not is_expanded(torch.as_strided(rows(64), (1, 2, 16), (0, 16, 1)))


def test_expanded_dimensions_are_seen_wherever_they_are() -> None:
    assert is_expanded(rows(1, 2, 16).expand(3, 2, 16))
    assert is_expanded(rows(3, 2, 1).expand(3, 2, 16))
    assert not is_expanded(rows(3, 2, 16).transpose(0, 1))


def test_rows_that_end_within_a_vector_or_are_not_contiguous_are_refused() -> None:
    for x in (rows(4, 24)[:, :12], rows(4, 32)[:, ::2]):
        with pytest.raises(UnsupportedError, match="contiguous"):
            check_rows(y=rows(4, 8), x=x)
    with pytest.raises(UnsupportedError, match=r"x is torch\.float32"):
        check_rows(x=rows(4, 8).float())
