"""The FP8 forward on a Hopper: its tiles byte for byte, its results beside the emulation's and float64's."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention_backend.fp8 import flash_attn_fp8_func
from attention_backend.heuristics.fp8 import Fp8Config, fp8_config, splits_of_last_round, summed_by_product
from attention_backend.kernels import flash_fwd_fp8_sm90
from attention_backend.kernels.device import num_sms
from attention_backend.reference import fp8 as emulation

from .error_rule import poisoned_memory
from .problems import generator, randn
from .test_graphs import captured

pytestmark = pytest.mark.gpu
Problem = tuple[Tensor, Tensor, Tensor]

_LENGTHS = (1, 63, 64, 65, 127, 129, 1000, 2048 + 17)
_HEAD_DIMS = (64, 128, 256)


@pytest.fixture(autouse=True)
def _hopper(cuda: torch.device) -> None:
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("needs a Hopper")


def problem(
    name: str,
    rows: int,
    keys: int,
    head_dim: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Problem:
    """Two sequences of fresh random values: q `[2, rows, heads, head_dim]`, k, v `[2, keys, kv_heads, head_dim]`."""
    g = generator((name, rows, keys, head_dim), device or torch.device("cuda"))
    shapes = ((2, rows, heads[0], head_dim), *[(2, keys, heads[1], head_dim)] * 2)
    q, k, v = (randn(shape, dtype or torch.bfloat16, g) for shape in shapes)
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, the size of the largest score) in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    largest = scores.abs().amax(-1)
    if causal:
        rows, keys = scores.shape[-2:]
        visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(0.0), v), scores.logsumexp(-1), largest


def rms(x: Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


def public(x: Problem, *, causal: bool, hadamard: bool) -> tuple[Tensor, Tensor]:
    result = flash_attn_fp8_func(*x, causal=causal, hadamard=hadamard, return_lse=True)
    assert isinstance(result, tuple)
    return result


def kernels(x: Problem, *, causal: bool, hadamard: bool) -> tuple[Tensor, Tensor]:
    return flash_fwd_fp8_sm90.forward(*x, x[0].shape[-1] ** -0.5, causal=causal, hadamard=hadamard)


def run(
    x: Problem, *, causal: bool, hadamard: bool = True, attend: Callable[..., tuple[Tensor, Tensor]] = public
) -> tuple[Tensor, Tensor]:
    with poisoned_memory():
        return attend(x, causal=causal, hadamard=hadamard)


def _parts(q: Tensor, k: Tensor, config: Fp8Config) -> int:
    """Of the keys, where tiles are left for the last round; one on a CPU, whose emulation knows no tiles."""
    if not q.is_cuda:
        return 1
    tiles = -(-q.shape[1] // config.block_m) * q.shape[0] * q.shape[2]
    return splits_of_last_round(tiles, -(-k.shape[1] // config.block_n), num_sms(q.device.index or 0))


def check(
    x: Problem,
    *,
    causal: bool,
    hadamard: bool = True,
    limit: float = 0.08,
    attend: Callable[..., tuple[Tensor, Tensor]] = public,
) -> None:
    """`limit`: the error beside float64, as a share of the output."""
    q, k, v = x
    config = fp8_config(q.shape[-1])
    out, lse = run(x, causal=causal, hadamard=hadamard, attend=attend)
    want, want_lse = emulation.attention(q, k, v, q.shape[-1] ** -0.5, causal=causal, hadamard=hadamard)
    truth, truth_lse, largest = exact(q, k, v, causal=causal)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    seen = truth_lse != -torch.inf
    assert torch.equal(lse != -torch.inf, seen), "lse is -inf in the wrong rows"
    rows = seen.transpose(1, 2)
    assert not out[~rows].any(), "a row that sees nothing is not zero"
    # Row by row, so that one wrong row is not lost among many. Here and there a probability is rounded the other way.
    size = truth[rows].norm(dim=-1)
    apart = (out.double() - want.double())[rows].norm(dim=-1) / size
    assert apart.max() < 0.15, f"{apart.max():.3f} from the emulation at seen row {int(apart.argmax())}"
    error, emulated = rms(out - truth), rms(want - truth)
    slack = 2.0**-8 * rms(truth)
    # A part of a tile's keys has a stabiliser of its own, so its probabilities are rounded elsewhere.
    cut = not causal and _parts(q, k, config) > 1
    assert rms(out.double() - want.double()) <= (1.5 if cut else 0.4) * emulated + slack
    assert error <= 1.1 * emulated + slack, f"error {error:.3e}, emulated {emulated:.3e}"
    assert error <= limit * rms(truth), f"error {error:.3e} of {rms(truth):.3e}"
    # The tensor cores cut each of a score's products to 13 bits below the largest; the emulation adds exactly. The loss
    # is a share of the scores: lse can be small where they are not. Where it is of rounded probabilities, one that is
    # rounded the other way moves it by a sixteenth of its share, and sums lose as much a key as other products do.
    rounded = summed_by_product(q.shape[-1])
    apart = ((lse - want_lse).abs() - 2e-3 * largest)[seen]
    assert apart.max() < 1e-3 + rounded / 16, f"lse is {apart.max():.1e} further away than 13 bits explain"
    if rounded:
        lost = config.block_n / 50_000
        assert rms(apart.clamp(min=0)) <= (1.5 if cut else 0.4) * rms((want_lse - truth_lse)[seen]) + lost
    assert (lse - truth_lse)[seen].abs().max() < 4 * limit


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
def test_tiles_are_the_emulations_byte_for_byte(head_dim: int, hadamard: bool) -> None:
    from attention_backend.kernels.quantize_fp8 import quantize

    config = fp8_config(head_dim)
    q, k, v = problem("tiles", 333, 1111, head_dim)
    want = emulation.quantize(q, k, v, 0.3, config.block_n, hadamard=hadamard)
    with poisoned_memory():
        tiles = quantize(q, k, v, 0.3, config, hadamard=hadamard)
    torch.cuda.synchronize()
    width = 128 if head_dim % 128 == 0 else 64
    for name, got, x, rows in (("q", tiles.q, want.q, config.block_m), ("k", tiles.k, want.k, config.block_n)):
        same = _same(got, emulation.image(_tiled(x, rows), width))
        assert bool(same.all()), f"{name}: {int((~same).sum())} of {same.numel()} bytes differ"
    order = torch.tensor(emulation.KEY_ORDER, device=q.device)
    values = _tiled(want.v, config.block_n).transpose(3, 4)  # [batch, heads, tiles, head_dim, keys]
    values = values.unflatten(-1, (-1, 32))[..., order].flatten(-2)
    same = _same(tiles.v, emulation.image(values, 32))
    assert bool(same.all()), f"v: {int((~same).sum())} of {same.numel()} bytes differ"
    torch.testing.assert_close(tiles.q_scale[..., :333], want.q_scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(tiles.k_scale, want.k_scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(tiles.v_scale, want.v_scale, rtol=1e-6, atol=0)


def _same(got: Tensor, want: Tensor) -> Tensor:
    """Byte for byte; the two zeros are one."""
    return (got == want) | ((got | want) & 0x7F == 0)


def _tiled(x: Tensor, rows: int) -> Tensor:
    """e4m3 `[batch, n, heads, head_dim]` -> bytes `[batch, heads, tiles, rows, head_dim]`, zeros at the end."""
    padded = torch.nn.functional.pad(x.view(torch.uint8), (0, 0, 0, 0, 0, -x.shape[1] % rows))
    return padded.transpose(1, 2).unflatten(2, (-1, rows))


@pytest.mark.parametrize("length", _LENGTHS)
@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_what_the_emulation_says(causal: bool, head_dim: int, length: int) -> None:
    check(problem("square", length, length, head_dim), causal=causal)


@pytest.mark.parametrize(("rows", "keys"), [(1, 700), (100, 3000), (200, 100), (513, 7), (7, 513)])
@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_differ_in_number(causal: bool, head_dim: int, rows: int, keys: int) -> None:
    check(problem("rectangle", rows, keys, head_dim), causal=causal)


@pytest.mark.parametrize("heads", [(6, 6), (6, 1), (32, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_share_keys(causal: bool, heads: tuple[int, int]) -> None:
    check(problem("heads", 300, 500, 128, heads=heads), causal=causal)


@pytest.mark.parametrize(("rows", "keys"), [(700, 900), (300, 6000)])
@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_take_tile_after_tile(causal: bool, head_dim: int, rows: int, keys: int) -> None:
    """More tiles than a Hopper has SMs; without a mask the last ones are cut into parts of their keys."""
    check(problem("many", rows, keys, head_dim, heads=(40, 8)), causal=causal)


@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
def test_float16_and_no_rotation(head_dim: int) -> None:
    check(problem("half", 400, 400, head_dim, dtype=torch.float16), causal=True, hadamard=False)


def test_any_strides() -> None:
    q, k, v = problem("strides", 300, 300, 128)
    want = run((q, k, v), causal=False)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    memory = [torch.full((*x.shape[:-1], 131), math.nan, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    for x, room in zip((q, k, v), memory, strict=True):
        room[..., 3:] = x
    for layout in (heads_first, [room[..., 3:] for room in memory]):
        got = run((layout[0], layout[1], layout[2]), causal=False)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
def test_growing_scores_rescale_what_came_before(head_dim: int) -> None:
    """Keys are walked from the last to the first; the first ones here score highest, tile after tile."""
    q, k, v = problem("growing", 150, 3000, head_dim)
    q = q.abs()
    k = k.abs() * torch.linspace(3.0, 0.0, 3000, device=k.device)[:, None, None]
    check((q, k.to(q.dtype), v), causal=False, limit=0.4)


@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_scores_may_all_be_negative(causal: bool, head_dim: int) -> None:
    """In every second row: the kernel compares scores as integers, which serves those only that are not."""
    q, k, v = problem("negative", 500, 700, head_dim)
    q, k = q.abs(), k.abs()
    q[:, ::2] *= -1
    check((q, k, v), causal=causal)


def check_rows_that_see_nothing(head_dim: int, device: torch.device) -> None:
    """Zeros, though a value is infinite."""
    q, k, v = problem("nothing", 300, 100, head_dim, device=device)
    v[:, 50, :, 3] = torch.inf
    out, lse = run((q, k, v), causal=True, attend=kernels)
    assert not out[:, :200].any()
    assert bool((lse[:, :, :200] == -torch.inf).all())


@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
def test_rows_that_see_nothing(head_dim: int, cuda: torch.device) -> None:
    check_rows_that_see_nothing(head_dim, cuda)


def negative_and_rising(head_dim: int, device: torch.device) -> Problem:
    """No score above zero, and they rise from tile to tile, as keys are walked, by more than a stabiliser lets them."""
    q, k, v = problem("negative and rising", 70, 900, head_dim, device=device)
    k = k.abs() * torch.linspace(0.0, 3.0, 900, device=device)[:, None, None]
    return -q.abs(), k.to(q.dtype), v


@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
def test_negative_scores_may_rise(head_dim: int, cuda: torch.device) -> None:
    check(negative_and_rising(head_dim, cuda), causal=False, limit=0.4)


@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
def test_long_sums_keep_their_precision(head_dim: int) -> None:
    """Values of one sign, 20,000 keys: what the tensor cores lose per addition must not add up (it would be 30 %)."""
    q, k, v = problem("long", 128, 20_000, head_dim)
    v = (v * 0.1 + 1.0).to(v.dtype)
    out, _ = run((q, k, v), causal=False)
    want, _ = emulation.attention(q, k, v, head_dim**-0.5, causal=False, hadamard=True)
    loss = 1.0 - (out.double() / want.double()).mean().item()
    assert abs(loss) < 0.01, f"sums are short by {loss:.2%}"


@pytest.mark.parametrize(("rows", "keys"), [(1500, 1500), (150, 3000)])
@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_thousand_repeats_are_bitwise_equal(causal: bool, head_dim: int, rows: int, keys: int) -> None:
    """Also of parts of keys, whoever comes last."""
    x = problem("repeats", rows, keys, head_dim, heads=(8, 4))
    want, want_lse = run(x, causal=causal)
    differing = torch.zeros((), dtype=torch.int64, device=want.device)
    for _ in range(1000):
        out, lse = flash_attn_fp8_func(*x, causal=causal, return_lse=True)
        differing += (out != want).any() | (lse != want_lse).any()
    assert int(differing) == 0


@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_graph_is_replayed_with_other_tensors(causal: bool, head_dim: int) -> None:
    """The counters that tiles are drawn by, and parts joined, are zeros again when a replay ends."""
    x = problem("graph", 150, 3000, head_dim, heads=(8, 4))
    graph, out = captured(lambda: public(x, causal=causal, hadamard=True)[0])
    for replay in range(3):
        for tensor, new in zip(x, problem(f"replay {replay}", 150, 3000, head_dim, heads=(8, 4)), strict=True):
            tensor.copy_(new)
        graph.replay()
        assert torch.equal(out, run(x, causal=causal)[0])


def test_outliers_cost_at_most_half_of_what_they_cost_per_tensor_fp8() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    shape = (1, 8192, 2, 128)

    def outliers() -> Tensor:
        large = torch.randn(shape, device="cuda", generator=g) * 10
        held = torch.rand(shape, device="cuda", generator=g) < 0.001
        return (torch.randn(shape, device="cuda", generator=g) + large * held).bfloat16()

    def rounded(x: Tensor) -> Tensor:
        x8, scale = emulation.round_to(x, x.float().abs().amax())
        return x8.float() * scale

    x = (outliers(), outliers(), outliers())
    rows = slice(0, 2048)
    truth = exact(x[0][:, rows], x[1], x[2], causal=False)[0]
    q, k, v = map(rounded, x)
    scores = torch.einsum("bihd,bjhd->bhij", q[:, rows], k) * 128**-0.5
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    out = torch.einsum("bhij,bjhd->bihd", (p * 256).to(emulation.E4M3).float() / 256 / p.sum(-1, keepdim=True), v)
    error, baseline = rms(run(x, causal=False)[0][:, rows] - truth), rms(out - truth)
    assert error <= 0.5 * baseline, f"RMSE {error:.2e}, per-tensor {baseline:.2e}"
