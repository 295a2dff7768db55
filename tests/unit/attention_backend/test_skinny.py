"""Linear layers with few rows: what is refused, what the compiler sees, and configurations that fit every GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attention_backend
from attention_backend import skinny_linear
from attention_backend.heuristics.skinny import COLUMNS, TILE_ROWS, skinny_config, skinny_configs
from attention_backend.heuristics.sm80 import SHARED_MEMORY
from attention_backend.jit import ARCHS
from attention_backend.kernels.skinny_linear import SkinnyParams, covering_set, skinny_variant


def test_the_function_is_public() -> None:
    assert "skinny_linear" in attention_backend.__all__


@pytest.mark.parametrize(
    ("x", "weight", "bias", "error", "words"),
    [
        ((3,), (4, 3), None, ValueError, r"x must be \[m, k\]"),
        ((2, 3), (4, 5), None, ValueError, r"weight must have shape \[any, 3\]"),
        ((2, 3), (4, 3), (5,), ValueError, r"bias must have shape \[4\]"),
    ],
)
def test_what_is_no_product_is_refused(
    x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        skinny_linear(torch.zeros(x), torch.zeros(weight), None if bias is None else torch.zeros(bias))


def test_two_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"weight must be torch\.float32, got torch\.bfloat16"):
        skinny_linear(torch.zeros(1, 8), torch.zeros(4, 8, dtype=torch.bfloat16))


def test_the_compiler_sees_shapes_without_values() -> None:
    with FakeTensorMode():
        out = skinny_linear(torch.empty(3, 16, dtype=torch.bfloat16), torch.empty(40, 16, dtype=torch.bfloat16))
    assert out.shape == (3, 40)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_weight_gets_a_configuration_that_fits_and_is_compiled_ahead(arch: str, columns: int) -> None:
    ahead = set(covering_set(arch))
    for sms in (16, 84, 132):
        for n in (1, 16, 576, 4096, 6144, 28672, 128256):
            config = skinny_config(arch, n, columns, sms)
            assert config in skinny_configs(arch, columns)
            assert skinny_variant(torch.float16, columns, config, arch) in ahead
            blocks = config.blocks_per_sm if config.ring else 1
            assert blocks * (config.smem_bytes(columns) + 1024) <= SHARED_MEMORY[arch] + 1024


def test_parameters_lie_as_the_kernel_reads_them() -> None:
    """Seven words of eight bytes, then six ints."""
    assert SkinnyParams.m.offset == 56
    assert SkinnyParams.prefetch.offset == 76


def test_tiles_are_the_rows_of_a_tensor_core_operand() -> None:
    assert TILE_ROWS == 16
