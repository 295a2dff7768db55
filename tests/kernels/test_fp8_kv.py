"""float8_e4m3fn keys and values with a scale per head: decode and storing, against what the bytes stand for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_backend.problem import AttentionArgs
from attention_backend.reference import cpu, kv_cache

from . import oracle
from .error_rule import assert_lse_close, assert_out_close, poisoned_memory
from .problems import block_table, generator, randn, seen_slots

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
NAN_BYTE = 0x7F


def forward(args: AttentionArgs, *, tma: bool = True) -> tuple[Tensor, Tensor]:
    """The implementation for the tensors' device; what is not written comes back as NaN."""
    if not args.q.is_cuda:
        return cpu.forward(args)
    from attention_backend.kernels import flash_decode

    with poisoned_memory():
        return flash_decode.forward(args, tma=tma)


def problem(
    lens: list[int],
    device: torch.device,
    *,
    group: int = 4,
    kv_heads: int = 2,
    rows: int = 1,
    page: int = 64,
    dim: int = 128,
    dim_v: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    splits: int = 0,
) -> AttentionArgs:
    """A causal step over shuffled pages; page 0 is a dense cache. NaN in every slot out of sight."""
    name = ("fp8", lens[:8], group, rows, page, dim, dtype)
    g = generator(name, device)
    longest = max(lens)
    num_blocks = sum(-(-n // page) for n in lens) + 1 if page else len(lens)
    k, v = (
        randn((num_blocks, kv_heads, page or longest, d), torch.float32, g).to(FP8).transpose(1, 2)
        for d in (dim, dim_v or dim)
    )
    table = block_table(lens, page, num_blocks, generator(name, CPU)).to(device) if page else None
    args = AttentionArgs(
        randn((len(lens), rows, kv_heads * group, dim), dtype, g),
        k,
        v,
        dim**-0.5,
        max_seqlen_k=longest,
        seqused_k=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=table,
        window_right=0,
        num_splits=splits,
        k_scale=0.1 + torch.rand(kv_heads, device=device, generator=g),
        v_scale=0.1 + torch.rand(kv_heads, device=device, generator=g),
    )
    unseen = ~seen_slots(args)
    args.k.view(torch.uint8)[unseen] = NAN_BYTE
    args.v.view(torch.uint8)[unseen] = NAN_BYTE
    return args


def dequantised(args: AttentionArgs, dtype: torch.dtype) -> AttentionArgs:
    assert args.k_scale is not None
    assert args.v_scale is not None
    k, v = (
        (x.to(torch.float64) * scale.double()[:, None]).to(dtype)
        for x, scale in ((args.k, args.k_scale), (args.v, args.v_scale))
    )
    return replace(args, q=args.q.to(dtype), k=k, v=v, k_scale=None, v_scale=None)


def check(args: AttentionArgs, *, tma: bool = True) -> None:
    out, lse = forward(args, tma=tma)
    truth, truth_lse = oracle.attention(dequantised(args, torch.float64))
    same_dtype, _ = oracle.attention(dequantised(args, args.dtype), args.dtype, reorder=True)
    assert out.dtype == args.dtype
    assert_out_close(out, truth, same_dtype)
    assert_lse_close(lse, truth_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [True, False], ids=["tma", "generic"])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_head_dim_meets_the_error_rule(dim: int, dtype: torch.dtype, tma: bool, device: torch.device) -> None:
    check(problem([777, 64, 1, 0, 129], device, dim=dim, dtype=dtype), tma=tma)


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [True, False], ids=["tma", "generic"])
@pytest.mark.parametrize("page", [0, 1, 16, 48, 64, 256])
@pytest.mark.parametrize(("group", "rows"), [(1, 1), (4, 1), (8, 1), (5, 3), (16, 1), (8, 4), (16, 4)])
def test_every_page_and_group_meets_the_error_rule(
    group: int, rows: int, page: int, tma: bool, device: torch.device
) -> None:
    check(problem([1000, 8, 0, 129], device, group=group, rows=rows, page=page), tma=tma)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 1, 7])
@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 4096, 131_071])
def test_every_length_meets_the_error_rule(length: int, splits: int, device: torch.device) -> None:
    check(problem([length, length // 2], device, splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [True, False], ids=["tma", "generic"])
def test_keys_and_values_of_other_widths_meet_the_error_rule(tma: bool, device: torch.device) -> None:
    check(problem([300, 1, 2000], device, dim=192, dim_v=128), tma=tma)


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [True, False], ids=["tma", "generic"])
@pytest.mark.parametrize("splits", [0, 3])
def test_a_thousand_repeats_are_bitwise_equal(splits: int, tma: bool, device: torch.device) -> None:
    from attention_backend.kernels import flash_decode

    args = problem([5000, 1, 777, 16_384], device, splits=splits)
    want, want_lse = forward(args, tma=tma)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        out, lse = flash_decode.forward(args, tma=tma)
        differing += (out != want).any() | (lse != want_lse).any()
    assert int(differing) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [True, False], ids=["tma", "generic"])
@pytest.mark.parametrize("power", [-60, 40])
def test_queries_beyond_the_range_of_fp16_lose_nothing(power: int, tma: bool, device: torch.device) -> None:
    """A power of two on the queries, taken back by the softmax scale, changes no bit."""
    args = problem([500, 77], device)
    far = replace(args, q=args.q * 2.0**power, softmax_scale=args.softmax_scale * 2.0**-power)
    for a, b in zip(forward(args, tma=tma), forward(far, tma=tma), strict=True):
        assert torch.equal(a, b)


def check_store(device: torch.device, *, rotary: bool) -> None:
    """The bytes are those of the reference, saturated ones included; no other byte changes."""
    g = generator(("fp8 store", rotary), CPU)
    tokens, heads, dims, page, num_blocks = 100, 3, (64, 128), 16, 12
    k, v = (randn((tokens, heads, d), torch.bfloat16, g) for d in dims)
    k[3], v[5, 1] = 1e6, -1e30
    scales = [0.01 + torch.rand(heads, generator=g) for _ in dims]
    slots = torch.randperm(num_blocks * page, generator=g)[:tokens]
    slots[::7] = -1
    want, got = (
        [torch.full((num_blocks, heads, page, d), NAN_BYTE, dtype=torch.uint8).view(FP8) for d in dims] for _ in "wg"
    )
    if rotary:
        angles = torch.rand((200, 16), generator=g)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        positions = torch.randint(0, 200, (tokens,), generator=g, dtype=torch.int32)
        from attention_backend.reference import rotary as embedding

        kv_cache.store(embedding.apply(k, cos, sin, positions, False), v, want[0], want[1], slots, scales[0], scales[1])
    else:
        kv_cache.store(k, v, want[0], want[1], slots, scales[0], scales[1])
    if device.type == "cpu":
        assert (want[0].view(torch.uint8) != NAN_BYTE).sum() == int((slots >= 0).sum()) * heads * dims[0]
        assert want[0].float().nan_to_num().abs().max() == torch.finfo(FP8).max
        return
    from attention_backend.kernels import kv_cache_store

    got, scales = [x.to(device) for x in got], [x.to(device) for x in scales]
    k, v, slots = k.to(device), v.to(device), slots.to(device)
    if rotary:
        at = positions.to(device)
        kv_cache_store.rotate_and_store(
            k, k, v, got[0], got[1], slots, at, at, cos.to(device), sin.to(device), False, scales[0], scales[1]
        )
    else:
        kv_cache_store.store(k, v, got[0], got[1], slots, scales[0], scales[1])
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
def test_stored_bytes_are_the_reference_s(rotary: bool, device: torch.device) -> None:
    check_store(device, rotary=rotary)


def test_stored_values_saturate_on_cpu() -> None:
    check_store(CPU, rotary=False)


@pytest.mark.parametrize("page", [16, 64])
def test_small_decodes_meet_the_error_rule_on_cpu(page: int) -> None:
    check(problem([40, 0, 17, 1], CPU, page=page, dim=32))


def test_float8_caches_need_their_scales() -> None:
    cache = torch.zeros((2, 1, 16, 16), dtype=torch.uint8).view(FP8)
    new = torch.zeros((1, 1, 16))
    with pytest.raises(ValueError, match="k_scale"):
        kv_cache.store(new, new, cache, cache.clone(), torch.tensor([0]))
