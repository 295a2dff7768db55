"""Linear layers as steps call them are torch's formulas; which sizes a kernel serves; wrong calls raise."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attention_backend import UnsupportedError, layers
from attention_backend.heuristics.gated_linear import CONFIGS, FEWEST_COLUMNS, FEWEST_ROWS, gated_config
from attention_backend.heuristics.skinny_linear import SkinnyConfig, skinny_config
from attention_backend.kernels import device, skinny_linear
from attention_backend.kernels import gated_linear as gated_kernel
from attention_backend.linears import gated_linear, linear, refuses_many
from attention_backend.preparation import LinearStep, linear_kernels
from attention_backend.reference import layers as reference

#: Rows of weights, columns, gated: Llama-3.1-8B's, Qwen2.5-7B's and -32B's.
SIZES = (
    (6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False),
    (3584, 3584, False), (18944, 3584, True), (3584, 18944, False), (27648, 5120, True),
)  # fmt: skip
H200 = 132  # multiprocessors


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device, "arch", lambda _: "sm_90a")
    monkeypatch.setattr(device, "num_sms", lambda _: H200)
    skinny_linear._config_of_sizes.cache_clear()
    yield
    skinny_linear._config_of_sizes.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_torchs_formulas(dtype: torch.dtype) -> None:
    x, weight, bias = randn(7, 24, dtype=dtype), randn(32, 24, dtype=dtype), randn(32, dtype=dtype)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    gate, up = F.linear(x, weight).chunk(2, dim=1)
    for activation in layers.ACTIVATIONS:
        expected = reference.gated_activation(gate, up, activation)
        torch.testing.assert_close(gated_linear(x, weight, activation), expected)


def test_the_compiler_knows_their_results() -> None:
    x, weight = randn(3, 8), randn(6, 8)
    for function in (lambda: linear(x, weight), lambda: gated_linear(x, weight, "silu")):
        with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            fake = function()
        assert fake.shape == function().shape


def test_wrong_calls_raise() -> None:
    x, weight = randn(3, 8), randn(6, 8)
    with pytest.raises(ValueError, match="must be"):
        linear(x, randn(6, 7))
    with pytest.raises(ValueError, match="does not fit a weight"):
        linear(x, weight, randn(5))
    with pytest.raises(TypeError, match=r"its weight torch\.bfloat16"):
        linear(x, weight.bfloat16())
    with pytest.raises(ValueError, match="is not one of silu"):
        gated_linear(x, weight, "relu")
    with pytest.raises(ValueError, match="no gate and as many rows"):
        gated_linear(x, randn(5, 8), "silu")
    with pytest.raises(UnsupportedError, match="has no gradient"):
        linear(x.requires_grad_(), weight)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_blocks_have_nearly_as_many_weights_as_each_other(size: tuple[int, int, bool]) -> None:
    width, depth, gated = size
    config = skinny_config(width, depth, H200, gated=gated)
    assert config is not None
    tiles = -(-width // config.outputs)
    rounds = -(-tiles // (H200 // config.cluster))
    assert rounds == 1 or config.cluster == 1, "a cluster has room for the sums of one tile"
    rows = 2 * width if gated else width
    assert rounds * config.columns / config.cluster <= 1.2 * rows / H200
    assert config.stages >= 3
    assert config.smem_bytes <= 227 * 1024


def test_small_or_uneven_layers_are_torchs() -> None:
    assert skinny_config(1024, 1024, H200) is None  # 2 MiB, which the L2 holds
    assert skinny_config(16384, 512, H200) is not None
    assert skinny_config(1 << 20, 8, H200) is None  # too few columns to share out


def test_what_the_kernel_does_not_read_is_torchs(hopper: None) -> None:
    def served(x: Tensor, weight: Tensor, *, gated: bool = False) -> bool:
        return skinny_linear.config_of(x, weight, gated=gated) is not None

    x, weight = randn(8, 4096, dtype=torch.bfloat16), randn(4096, 4096, dtype=torch.bfloat16)
    assert served(x, weight)
    assert served(x, weight, gated=True)
    assert served(torch.cat([x, x], dim=1)[:, :4096], weight)
    assert not served(x[:4], weight)  # a chain's
    assert not served(x.repeat(9, 1), weight)
    assert not served(x.float(), weight.float())
    assert not served(x.t().contiguous().t(), weight)
    assert not served(torch.cat([x, x], dim=1)[:, 1:4097], weight)
    assert not served(x[:1].expand(8, 4096), weight)
    assert not served(x, weight.t())
    bias = randn(8192, dtype=torch.bfloat16)
    assert skinny_linear.config_of(x, weight, bias[:4096], gated=False) is not None
    assert skinny_linear.config_of(x, weight, bias[::2], gated=False) is None
    assert not served(x, weight[:4093])

    class Quantised(Tensor):
        pass

    assert not served(x, weight.as_subclass(Quantised))


def test_kernels_of_a_models_layers_are_prepared_once(hopper: None) -> None:
    assert linear_kernels([LinearStep(4096, 4096)], torch.bfloat16, torch.device("cpu")) == []
    steps = [LinearStep(4096, 4096), LinearStep(4096, 14336), LinearStep(28672, 4096, "silu")]
    found = [list(skinny_linear.step_variants(torch.bfloat16, *step, index=0)) for step in steps]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len({variant for each in found for variant in each}) == 2  # both of 4,096 rows have one tile
    assert not list(skinny_linear.step_variants(torch.bfloat16, 64, 64, None, index=0))


def test_gates_of_many_rows_have_a_kernel_where_they_fill_its_tiles() -> None:
    for rows, width, served in (
        (1024, 14336, (2, 128)), (2048, 14336, (2, 128)), (8192, 14336, (2, 128)), (8191, 14336, (2, 128)),
        (256, 14336, (2, 112)), (512, 14336, (2, 112)), (768, 14336, (2, 112)), (512, 11008, (2, 112)),
        (384, 14336, (1, 112)), (640, 14336, (1, 112)), (896, 14336, (1, 128)), (384, 11008, (1, 128)),
        (320, 14336, None), (1025, 1024, None), (8448, 1024, (2, 128)), (1024, 18944, (2, 128)),
    ):  # fmt: skip
        config = gated_config(rows, width, 4096, H200)
        assert (config and (config.cluster, config.outputs)) == served, (rows, width)
    assert gated_config(FEWEST_ROWS - 1, 1 << 20, 4096, H200) is None
    assert gated_config(FEWEST_ROWS, 1 << 20, 4096, H200) is not None
    assert gated_config(FEWEST_ROWS, 1 << 20, FEWEST_COLUMNS, H200) is not None
    assert gated_config(FEWEST_ROWS, 1 << 20, FEWEST_COLUMNS - 64, H200) is None
    assert all(config.smem_bytes <= 227 * 1024 for config in CONFIGS)


def test_which_gates_have_a_kernel(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def served(x: Tensor, weight: Tensor) -> bool:
        return gated_kernel.config_of(x, weight) is not None

    x, weight = randn(1024, 1024, dtype=torch.bfloat16), randn(2 * 14336, 1024, dtype=torch.bfloat16)
    assert served(x, weight)
    assert served(torch.cat([x, x], dim=1)[:, 1024:], weight)
    assert not served(x[:320], weight)
    assert not served(x[:, :512], weight[:, :512].contiguous())
    assert not served(x[:, :0], weight[:, :0])
    assert not served(x, weight[:0])
    assert not served(x.float(), weight.float())
    assert not served(x.t().contiguous().t(), weight)
    assert not served(x[:1].expand(1024, 1024), weight)
    assert not served(x, weight[:28664])  # a gate of 14,332 rows ends within 16 bytes of a row of the result
    cuda, step = torch.device("cuda"), LinearStep(2 * 14336, 1024, "silu")
    assert refuses_many(cuda, torch.bfloat16, step) is None
    assert "takes bfloat16 and float16" in str(refuses_many(cuda, torch.float32, step))
    assert "8 elements at a time" in str(refuses_many(cuda, torch.bfloat16, step._replace(width=28680)))
    assert "have a bias" in str(refuses_many(cuda, torch.bfloat16, step._replace(activation=None)))
    assert "for Hopper" in str(refuses_many(torch.device("cpu"), torch.bfloat16, step))
    found = list(gated_kernel.step_variants(torch.bfloat16, *step, index=0))
    assert found == [gated_kernel.variant(torch.bfloat16, config, "silu") for config in CONFIGS]
    assert not list(gated_kernel.step_variants(torch.bfloat16, *step._replace(activation=None), index=0))
    monkeypatch.setattr(device, "arch", lambda _: "sm_80")
    assert not served(x, weight)
    assert "for sm_90a, not for sm_80" in str(refuses_many(cuda, torch.bfloat16, step))


def test_a_ring_fills_the_memory_that_there_is() -> None:
    for columns in (64, 96, 128, 192, 256):
        for cluster in (1, 2, 4, 8):
            config = SkinnyConfig(columns, cluster)
            sent = 2048 * columns // 8 if cluster > 1 else 0
            tiles = config.stages * (columns + 64) * 256
            assert config.stages >= 2
            assert tiles + sent + 16 * config.stages + 8 <= config.smem_bytes - 1024 <= 226 * 1024


def test_what_a_tile_cannot_do_is_refused() -> None:
    x, weight = randn(8, 512, dtype=torch.bfloat16), randn(256, 512, dtype=torch.bfloat16)
    for rows, depth, config, blocks in (
        (65, 512, SkinnyConfig(64), 4),
        (8, 64, SkinnyConfig(64, 2), 8),
        (8, 512, SkinnyConfig(64, 2), 6),
    ):
        with pytest.raises(ValueError, match="not with SkinnyConfig"):
            skinny_linear.skinny_linear(x[:1, :depth].repeat(rows, 1), weight[:, :depth], None, config, blocks=blocks)
