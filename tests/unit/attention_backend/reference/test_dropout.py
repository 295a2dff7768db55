"""Dropout: the published random numbers, a mask that depends on position only, and the mathematics around it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_problems import dense, descriptor, integers, paged, varlen
from torch import Tensor

from attention_backend import attention_with_lse
from attention_backend.problem import AttentionArgs
from attention_backend.reference import cpu, standard, tiles
from attention_backend.reference.dropout import keep_mask, kept, philox, random_bytes

CPU = torch.device("cpu")
#: Random123's kat_vectors for philox4x32: rounds, counter, key, result.
KNOWN_ANSWERS = (
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def words(text: str) -> Any:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


def new_seed(*numbers: int) -> Tensor:
    return torch.tensor(numbers) if numbers else torch.randint(-(2**63), 2**63 - 1, (2,))


def with_dropout(args: AttentionArgs, p: float = 0.3, **changes: Any) -> AttentionArgs:
    return replace(args, dropout_p=p, dropout_seed=new_seed(), **changes)


def problems(dtype: torch.dtype) -> dict[str, AttentionArgs]:
    base = dense(dtype)
    sinks = torch.randn(base.num_heads).to(dtype)
    decode = paged(dtype, lengths=(1, 31, 130, 0), new=(1, 1, 1, 1))
    return {
        "full": base,
        "causal": replace(base, window_right=0),
        "lengths": replace(base, seqused_k=integers([65, 20, 0]), leftpad_k=integers([0, 7, 60]), window_right=0),
        "descriptor": replace(base, mask_desc=descriptor()),
        "everything": replace(
            base, softcap=2.0, sinks=sinks, bias=torch.randn(3, 1, 37, 65).to(dtype), window_left=20, window_right=3
        ),
        "row-tiles": replace(dense(dtype, 1, 130, 700), window_right=0),
        "varlen": replace(varlen(dtype), window_right=0),
        "paged": paged(dtype),
        "paged-decode": replace(decode, q=decode.q.unsqueeze(1), cu_seqlens_q=None, max_seqlen_q=0),
    }


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_numbers(rounds: int, counter: str, key: str, answer: str) -> None:
    assert [f"{int(word):08x}" for word in philox(words(counter), words(key), rounds)] == answer.split()


def test_a_scores_byte_stands_where_tensor_cores_hold_it() -> None:
    seed, plane = new_seed(-3, 5 << 40 | 9), 7
    drawn = random_bytes(seed, torch.tensor([plane]), slice(3, 40), slice(20, 90))[0]
    key = (torch.tensor((2**64 - 3) % 2**32), torch.tensor((2**64 - 3) // 2**32 ^ 5 << 8))
    for i, j in ((3, 20), (8, 31), (15, 48), (17, 57), (26, 64), (39, 89)):
        row, column = [[0, 1, 8, 9].index(x % 16 - x % 8 // 2 * 2) for x in (i, j)]
        counter = (i // 16 * 4 + i % 8 // 2, j // 16 * 4 + j % 8 // 2, plane, 9)
        word = int(philox(tuple(map(torch.tensor, counter)), key)[row])  # type: ignore[arg-type]
        assert int(drawn[i - 3, j - 20]) == word.to_bytes(4, "little")[column]


def test_a_part_of_the_mask_is_the_mask_of_the_part() -> None:
    seed = new_seed()
    whole = keep_mask(seed, 3, 2, 90, 150, 70, CPU)
    for rows, keys in ((slice(0, 16), slice(0, 16)), (slice(5, 90), slice(33, 35)), (slice(70, 71), slice(0, 150))):
        part = kept(seed, torch.tensor([2, 0]), 2, rows, keys, 70)
        assert torch.equal(part, whole[[2, 0], :, rows, keys])


@pytest.mark.parametrize("threshold", [1, 26, 128, 200, 255])
def test_as_many_are_dropped_as_asked_for_in_every_plane(threshold: int) -> None:
    dropped = ~keep_mask(new_seed(), 2, 3, 160, 400, threshold, CPU)
    p = threshold / 256
    share = dropped.double().mean((2, 3))
    assert bool(((share - p).abs() < 6 * (p * (1 - p) / (160 * 400)) ** 0.5).all())


def test_masks_of_other_seeds_offsets_heads_sequences_and_neighbours_are_independent() -> None:
    first = keep_mask(new_seed(1, 2), 2, 2, 128, 256, 128, CPU)
    others = [keep_mask(new_seed(*s), 2, 2, 128, 256, 128, CPU)[0, 0] for s in ((2, 2), (1, 3), (1 + 2**32, 2))]
    shifted = [first[0, 0].roll(1, 0), first[0, 0].roll(1, 1), first[0, 0].roll(8, 0), first[0, 0].roll(8, 1)]
    for other in (*others, *shifted, first[0, 1], first[1, 0]):
        agreement = (first[0, 0] == other).double().mean().item()
        assert abs(agreement - 0.5) < 6 * 0.5 / (128 * 256) ** 0.5


@pytest.mark.parametrize("name", problems(torch.float64))
def test_dropped_attention_is_standard_attention_with_the_same_mask(name: str) -> None:
    args = with_dropout(problems(torch.float64)[name])
    out, lse = cpu.forward(args)
    truth, truth_lse = standard.attention(args)
    torch.testing.assert_close(out, truth, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, truth_lse, atol=1e-12, rtol=1e-12)
    assert torch.equal(lse, cpu.forward(replace(args, dropout_p=0.0))[1])
    if args.q.numel() > 2000:
        assert not torch.equal(out, cpu.forward(replace(args, dropout_seed=new_seed()))[0])


@pytest.mark.parametrize("name", problems(torch.float64))
def test_gradients_are_autograds_through_the_same_mask(name: str) -> None:
    args = with_dropout(problems(torch.float64)[name])
    names = [n for n in ("q", "k", "v", "bias", "sinks") if getattr(args, n) is not None]
    leaves: dict[str, Any] = {n: getattr(args, n).detach().requires_grad_() for n in names}
    out, lse = standard.attention(replace(args, **leaves))
    grad_out = torch.randn_like(out)
    truth = torch.autograd.grad((out * grad_out).sum(), list(leaves.values()))
    ours = cpu.backward(args, out.detach(), lse.detach(), grad_out)
    for n, gradient in zip(names, truth, strict=True):
        torch.testing.assert_close(getattr(ours, f"d{n}"), gradient, atol=1e-10, rtol=1e-10)


def test_gradients_pass_gradcheck_with_one_seed() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(1, n, h, 8, dtype=torch.float64).requires_grad_() for n, h in ((5, 4), (19, 2), (19, 2))]
    seed = new_seed()

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention_with_lse(AttentionArgs(q, k, v, 0.3, window_right=3, dropout_p=0.4, dropout_seed=seed))

    assert torch.autograd.gradcheck(call, leaves)


def test_the_mask_of_the_output_does_not_depend_on_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = 200
    q, k = torch.randn(2, 70, 4, 16), torch.randn(2, keys, 2, 16)
    v = torch.eye(keys).view(1, keys, 1, keys).expand(2, keys, 2, keys)  # the output is the dropped probabilities
    args = with_dropout(AttentionArgs(q, k, v, 0.25))
    assert args.dropout_seed is not None
    want = keep_mask(args.dropout_seed, 2, 4, 70, keys, args.dropout_threshold, CPU)
    for rows, scores in ((64, 1 << 20), (7, 1 << 12), (33, 1)):
        monkeypatch.setattr(tiles, "TILE_ROWS", rows)
        monkeypatch.setattr(tiles, "_TILE_ELEMENTS", scores)
        monkeypatch.setattr(tiles, "_MIN_TILE_KEYS", 17)
        assert torch.equal(cpu.forward(args)[0].transpose(1, 2) != 0, want)


@pytest.mark.parametrize(("p", "threshold"), [(0.0, 0), (0.001, 0), (0.1, 26), (0.5, 128), (0.999, 255)])
def test_probabilities_are_rounded_to_256ths(p: float, threshold: int) -> None:
    args = with_dropout(dense(torch.float32), p)
    assert args.dropout_threshold == threshold
    assert args.dropout_scale == pytest.approx(1 / (1 - threshold / 256))
    same = torch.equal(cpu.forward(args)[0], cpu.forward(replace(args, dropout_p=0.0))[0])
    assert same == (threshold == 0)


@pytest.mark.parametrize("make", [dense, varlen, paged])
def test_float8_keys_and_values_are_their_scaled_selves(make: Any) -> None:
    args = make(torch.float32)
    k, v = args.k.to(torch.float8_e4m3fn), args.v.to(torch.float8_e4m3fn)
    k_scale, v_scale = (torch.rand(args.num_kv_heads) + 0.5 for _ in range(2))
    small = replace(args, k=k, v=v, k_scale=k_scale, v_scale=v_scale)
    large = replace(args, k=k.float() * k_scale[:, None], v=v.float() * v_scale[:, None])
    for ours, want, truth in zip(cpu.forward(small), cpu.forward(large), standard.attention(large), strict=True):
        torch.testing.assert_close(ours, want, atol=5e-6, rtol=5e-6)  # what is in float32 goes through torch's kernel
        torch.testing.assert_close(ours.double(), truth, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(standard.attention(small), standard.attention(large), atol=1e-6, rtol=1e-6)
