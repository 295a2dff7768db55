"""FP8 attention: its rotation, its scales, the layouts of its tiles, what it refuses, and how accurate it is."""

import itertools

import pytest
import torch
from torch import Tensor

from attention_backend import UnsupportedError
from attention_backend.fp8 import flash_attn_fp8_func, fp8_attention_op
from attention_backend.heuristics.fp8 import HEAD_DIMS, fp8_config, section_heads, splits_of_last_round, value_parts
from attention_backend.reference import fp8
from attention_backend.reference.fp8 import E4M3, KEY_ORDER, LARGEST, image, quantize, rotate, round_to

_SHARED_MEMORY = 227 * 1024


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = flash_attn_fp8_func(q, k, v)
    assert isinstance(out, Tensor)
    return out


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64; k and v have as many heads as q."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        rows, keys = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows), -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2), scores.logsumexp(-1)


def rms(x: Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_rotation_is_orthonormal(head_dim: int) -> None:
    matrix = rotate(torch.eye(head_dim)) * head_dim**-0.5

    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim))
    assert set(rotate(torch.eye(head_dim)).flatten().tolist()) == {-1.0, 1.0}


def test_the_rotation_spreads_an_outlier_over_the_row() -> None:
    row = torch.zeros(128)
    row[77] = 100.0

    assert rotate(row).abs().unique().tolist() == [100.0]


def test_scales_use_the_whole_range_and_undo_it() -> None:
    x = randn(5, 64) * torch.tensor([1e-3, 1.0, 1e3, 1e6, 0.0])[:, None]

    rounded, scale = round_to(x, x.abs().amax(-1, keepdim=True))

    assert rounded.float().abs().amax(-1).tolist() == [LARGEST] * 4 + [0.0]
    smallest_normal = 2.0**-6 * scale
    error = (rounded.float() * scale - x).abs()
    assert bool((error <= torch.maximum(x.abs(), smallest_normal) * 2.0**-4 * 1.0001).all())


def test_queries_have_a_scale_a_row_keys_a_tile_values_a_channel() -> None:
    q, k, v = randn(2, 70, 4, 64), randn(2, 200, 2, 64, seed=1), randn(2, 200, 2, 64, seed=2)

    x = quantize(q, k, v, 0.1, 96, hadamard=True)

    assert x.q_scale.shape == (2, 4, 70)
    assert x.k_scale.shape == (2, 2, 3)
    assert x.v_scale.shape == (2, 2, 64)
    k_scale = x.k_scale.repeat_interleave(96, 2)[:, :, :200]
    scores = torch.einsum("bihd,bjhd->bhij", x.q[:, :, :2].float(), x.k.float())
    scores = scores * x.q_scale[:, :2, :, None] * k_scale[:, :, None]
    want = torch.einsum("bihd,bjhd->bhij", q[:, :, :2], k) * 0.1 * 1.4426950408889634
    assert rms(scores - want) < 0.05 * rms(want)
    values = x.v.float() * x.v_scale[:, None]
    assert rms(values - v) < 0.03 * rms(v)


@pytest.mark.parametrize(("rows", "columns", "width"), [(64, 64, 64), (128, 256, 128), (64, 96, 32)])
def test_an_image_is_what_the_tensor_cores_read(rows: int, columns: int, width: int) -> None:
    """The address of row r, byte k: eight rows make a group, and bits 4.. are flipped by bits 7.. of the address."""
    x = torch.arange(rows * columns).view(rows, columns)

    memory = image(x, width)

    for r, k in itertools.product(range(rows), range(columns)):
        slab, within = divmod(k, width)
        address = slab * rows * width + r // 8 * 8 * width + r % 8 * width + within
        address ^= (address >> 7) % (width // 16) << 4
        assert memory[address] == x[r, k]


def test_packed_scores_meet_values_in_the_order_of_keys() -> None:
    """A warpgroup's fragments, register by register: accumulators, packed operand, product with reordered values."""
    keys = 96
    p, v = torch.randint(0, 100, (64, keys)), torch.randint(0, 100, (keys, 8))
    operand = torch.full((64, keys), -1)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        g, c = divmod(lane, 4)
        rows = (16 * warp + g, 16 * warp + g + 8)
        # The accumulator layout of m64nNk32: pairs of columns, row g and row g + 8 by turns.
        s = [p[rows[i // 2 % 2], i // 4 * 8 + 2 * c + i % 2] for i in range(keys // 2)]
        for i, j in itertools.product(range(keys // 32), range(4)):
            at = i * 16 + j // 2 * 8 + j % 2 * 2  # pack_tile of parts/forward_fp8_rows.cuh
            packed = [s[at], s[at + 1], s[at + 4], s[at + 5]]
            # The operand layout: register j is row g (even) or g + 8 (odd), columns 4c .. 4c + 3 of half j / 2.
            for byte, value in enumerate(packed):
                operand[rows[j % 2], i * 32 + j // 2 * 16 + 4 * c + byte] = value
    order = torch.tensor([group * 32 + slot for group in range(keys // 32) for slot in KEY_ORDER])

    assert sorted(KEY_ORDER) == list(range(32))
    assert torch.equal(operand, p[:, order])
    assert torch.equal(operand @ v[order], p @ v)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_emulation_is_close_to_attention(head_dim: int, causal: bool) -> None:
    q, k, v = randn(2, 130, 4, head_dim), randn(2, 300, 2, head_dim, seed=1), randn(2, 300, 2, head_dim, seed=2)
    want, want_lse = exact(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), causal=causal)

    out, lse = flash_attn_fp8_func(q.half(), k.half(), v.half(), causal=causal, return_lse=True)

    assert out.shape == q.shape
    assert out.dtype == torch.float16
    assert rms(out - want) < 0.07 * rms(want)
    assert (lse - want_lse).abs().max() < 0.1


def test_rows_that_see_nothing_give_zero() -> None:
    q, k = randn(1, 9, 2, 64).bfloat16(), randn(1, 4, 2, 64, seed=1).bfloat16()

    out, lse = flash_attn_fp8_func(q, k, k, causal=True, return_lse=True)

    assert not out[:, :5].any()
    assert bool((lse[:, :, :5] == -torch.inf).all())
    assert bool(out.isfinite().all())
    assert bool(lse[:, :, 5:].isfinite().all())


def test_zeros_and_no_keys_are_attention_too() -> None:
    q, v = torch.zeros(1, 3, 2, 64).half(), randn(1, 5, 2, 64).half()
    out, lse = flash_attn_fp8_func(q, torch.zeros_like(v), v, return_lse=True)

    torch.testing.assert_close(out.float(), v.float().mean(1, keepdim=True).expand_as(out), rtol=0.1, atol=0.05)
    torch.testing.assert_close(lse, torch.full_like(lse, 5.0).log())
    out, lse = flash_attn_fp8_func(q, v[:, :0], v[:, :0], return_lse=True)
    assert not out.any()
    assert bool((lse == -torch.inf).all())


def outliers(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """FlashAttention-3's table 3: N(0, 1) + N(0, 100) * Bernoulli(0.001)."""
    large = torch.randn(shape, generator=g) * 10 * (torch.rand(shape, generator=g) < 0.001)
    return torch.randn(shape, generator=g) + large


def per_tensor_fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What FP8 attention is without all this: one scale a tensor, probabilities rounded as well."""

    def rounded(x: Tensor) -> Tensor:
        x8, scale = round_to(x, x.abs().amax())
        return x8.float() * scale

    q, k, v = (rounded(x).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return ((p * 256).to(E4M3).float() @ v / 256 / p.sum(-1, keepdim=True)).transpose(1, 2)


def test_outliers_cost_at_most_half_of_what_they_cost_per_tensor_fp8() -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (outliers((1, n, 4, 128), g).bfloat16() for n in (512, 8192, 8192))
    truth = exact(q, k, v)[0]

    error = rms(attend(q, k, v) - truth)
    baseline = rms(per_tensor_fp8(q, k, v) - truth)

    assert error <= 0.5 * baseline


def test_the_operator_is_a_sound_one() -> None:
    q, k, v = (randn(1, n, 2, 64, seed=n).bfloat16() for n in (7, 9, 9))

    torch.library.opcheck(fp8_attention_op.overload, (q, k, v, 0.125, True, True))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 4, 2, 96), torch.bfloat16, "head_dim is 96/96"),
        ((1, 4, 2, 64), torch.float32, "the tensors are torch.float32"),
    ],
)
def test_what_is_not_served_is_refused_by_name(shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    q = torch.zeros(shape, dtype=dtype)

    with pytest.raises(UnsupportedError, match=f"{message}.*It serves bfloat16 and float16"):
        flash_attn_fp8_func(q, q, q)


def test_a_gradient_is_refused() -> None:
    q = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16, requires_grad=True)

    with pytest.raises(UnsupportedError, match="a gradient is asked for"):
        flash_attn_fp8_func(q, q, q)
    with torch.no_grad():
        assert attend(q, q, q).shape == q.shape


def test_packed_sequences_are_refused() -> None:
    q = torch.zeros(4, 2, 64, dtype=torch.bfloat16)

    with pytest.raises(ValueError, match="must be \\[batch, seqlen, heads, dim\\]"):
        flash_attn_fp8_func(q, q, q)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_fit_the_machine(head_dim: int) -> None:
    config = fp8_config(head_dim)

    assert config.smem_bytes(head_dim) <= _SHARED_MEMORY
    assert config.block_n % 32 == 0
    assert config.block_n * head_dim // 64 <= 640  # threads of quantize_fp8.cuh


def test_every_value_row_is_in_a_part_and_every_head_in_a_section() -> None:
    for seqlen in (1, 255, 256, 1000, 8191, 8192, 100_003):
        parts, rows = value_parts(seqlen)
        assert parts * rows >= seqlen
    assert section_heads(16, 1, 16384, 128) == 4
    assert section_heads(32, 4, 1 << 20, 128) == 1
    assert section_heads(4, 1, 100, 64) == 4


def test_tiles_of_the_last_round_are_cut_into_as_many_parts_as_there_are_sms_for() -> None:
    assert splits_of_last_round(1376, 103, 132) == 2  # 56 are left
    assert splits_of_last_round(1320, 103, 132) == 1  # none
    assert splits_of_last_round(2100, 103, 132) == 1  # 120
    assert splits_of_last_round(3, 103, 132) == 12  # of no fewer than 8 steps
    assert splits_of_last_round(3, 7, 132) == 1


def test_the_probabilities_stay_below_the_largest_number() -> None:
    assert 2.0 ** (fp8.OFFSET + fp8.THRESHOLD) < LARGEST
