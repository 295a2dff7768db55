"""Lists of blocks against the masks they come from: classification, bits, FlexAttention's BlockMask, refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, or_masks

from attention_backend.block_lists import Grid, pack, unpack
from attention_backend.block_sparsity import BlockSparsity
from attention_backend.errors import UnsupportedError

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def classes(mask: Tensor) -> dict[tuple[int, ...], tuple[list[int], list[int]]]:
    """(batch, head, row of blocks) -> partial and full key blocks, one block after another."""
    batch, heads, rows, keys = mask.shape
    found: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for b in range(batch):
        for h in range(heads):
            for i in range(0, rows, 128):
                blocks = [mask[b, h, i : i + 128, j : j + 128] for j in range(0, keys, 128)]
                partial = [j for j, block in enumerate(blocks) if block.any() and not block.all()]
                found[b, h, i // 128] = partial, [j for j, block in enumerate(blocks) if block.all()]
    return found


def assert_lists(sparsity: BlockSparsity, mask: Tensor) -> None:
    """Every block in its class and order, every bit right, nothing stored twice, nothing a kernel would misread."""
    for (b, h, row), (partial, full) in classes(mask).items():
        counts, blocks = sparsity.counts[b, h, row].tolist(), sparsity.blocks[b, h, row]
        assert counts == [len(partial), len(partial) + len(full)]
        assert blocks[: counts[1]].tolist() == partial + full
        assert not blocks[counts[1] :].any()
    assert torch.equal(sparsity.to_mask(), mask)
    assert sparsity.bits.unique(dim=0).shape == sparsity.bits.shape
    BlockSparsity.of(*sparsity.lists, sparsity.seqlen_q, sparsity.seqlen_k)
    listed = sum(len(partial) + len(full) for partial, full in classes(mask).values())
    assert sparsity.density == listed / (len(classes(mask)) * -(-mask.shape[3] // 128))


def blocky(seed: int, batch: int, heads: int, rows: int, keys: int) -> Tensor:
    """A mask with empty, partial and full blocks in it."""
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 3, (batch, heads, -(-rows // 128), -(-keys // 128)), generator=g)
    kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :rows, :keys]
    holes = torch.rand(batch, heads, rows, keys, generator=g) < torch.rand((), generator=g)
    return (kinds == 2) | ((kinds == 1) & holes)


LENGTH = st.one_of(st.integers(1, 400), st.sampled_from([128, 256, 384]))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 2), st.integers(1, 3), LENGTH, LENGTH)
def test_lists_of_any_mask_are_exact(seed: int, batch: int, heads: int, rows: int, keys: int) -> None:
    mask = blocky(seed, batch, heads, rows, keys)
    assert_lists(BlockSparsity.from_mask(mask), mask)


def test_bits_are_where_the_kernel_looks_for_them() -> None:
    visible = torch.rand(3, 128, 128) < 0.5
    bits = pack(visible)
    for n, r, j in torch.randint(0, 128, (200, 3)).tolist():
        word = int(bits[n % 3, r, j // 32]) & 0xFFFFFFFF
        assert (word >> (j % 32)) & 1 == int(visible[n % 3, r, j])
    assert torch.equal(unpack(bits), visible)


def test_equal_blocks_share_their_bits() -> None:
    mask = torch.ones(2, 3, 1024, 1024, dtype=torch.bool).tril()
    assert BlockSparsity.from_mask(mask).bits.shape[0] == 1


def test_a_mask_of_nothing_lists_nothing() -> None:
    sparsity = BlockSparsity.from_mask(torch.zeros(1, 2, 200, 300, dtype=torch.bool))
    assert not sparsity.counts.any()
    assert sparsity.density == 0
    assert [x.shape[-1] for x in (sparsity.blocks, sparsity.bit_rows)] == [1, 1]
    assert sparsity.bits.shape == (1, 128, 4)


DOCUMENTS = torch.arange(3).repeat_interleave(torch.tensor([100, 156, 444]))
OF_SEQUENCES = torch.stack([DOCUMENTS, DOCUMENTS.flip(0)])
SLOPES = torch.tensor([1.0, 0.5, 0.0, 3.0])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return OF_SEQUENCES[b, q] == OF_SEQUENCES[b, k]


def window_of_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() <= SLOPES[h] * 90


def listed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k == torch.tensor([3, 77, 500])).any()  # a reduction over what is no dimension of the mask


def everything(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return b.new_ones((), dtype=torch.bool)


MASK_MODS: dict[str, MaskMod] = {
    "causal": causal,
    "documents": documents,
    "window of each head": window_of_head,
    "causal documents": and_masks(causal, documents),
    "window or listed": or_masks(window_of_head, listed),
    "everything": everything,
}


@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("lengths", [(700, 700), (640, 512), (129, 700)], ids=str)
@pytest.mark.parametrize("separate", [True, False], ids=["full blocks apart", "all partial"])
@pytest.mark.parametrize("of", [(1, 1), (2, 4), (2, 1), (1, 4)], ids=["one", "each", "batch", "head"])
def test_a_block_mask_is_converted_to_what_create_mask_says(
    name: str, lengths: tuple[int, int], separate: bool, of: tuple[int, int]
) -> None:
    mod = MASK_MODS[name]
    block_mask = create_block_mask(mod, *of, *lengths, device="cpu", separate_full_blocks=separate)
    assert_lists(BlockSparsity.from_block_mask(block_mask), create_mask(mod, *of, *lengths, device="cpu"))


def test_mask_mod_is_evaluated_on_partial_blocks_only() -> None:
    block_mask = create_block_mask(causal, 1, 1, 512, 512, device="cpu")
    truth = torch.ones(512, 512, dtype=torch.bool).tril()
    diagonal = torch.block_diag(*[torch.ones(128, 128)] * 4).bool()
    only_there = truth & diagonal  # elsewhere it would say that nothing is visible

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return only_there[q, k]

    block_mask.mask_mod = mod
    assert torch.equal(BlockSparsity.from_block_mask(block_mask).to_mask()[0, 0], truth)


def test_a_block_mask_made_of_lists_alone_is_all_full() -> None:
    counts, indices = torch.tensor([[[2, 1]]], dtype=torch.int32), torch.tensor([[[[2, 0, 7], [1, 9, 9]]]])
    sparsity = BlockSparsity.from_block_mask(BlockMask.from_kv_blocks(counts, indices.int(), seq_lengths=(256, 384)))
    want = torch.zeros(1, 1, 256, 384, dtype=torch.bool)
    want[:, :, :128, :128] = want[:, :, :128, 256:] = want[:, :, 128:, 128:256] = True
    assert_lists(sparsity, want)


def test_another_block_size_is_refused_by_name() -> None:
    block_mask = create_block_mask(causal, 1, 1, 512, 512, device="cpu", BLOCK_SIZE=(64, 128))
    with pytest.raises(UnsupportedError, match=r"\(64, 128\) is not served, only \(128, 128\)"):
        BlockSparsity.from_block_mask(block_mask)


def changed(sparsity: BlockSparsity, name: str, value: Any) -> tuple[Any, ...]:
    other = replace(sparsity, **{name: value})
    return (*other.lists, other.seqlen_q, other.seqlen_k)


def test_lists_that_a_kernel_would_misread_are_refused() -> None:
    good = BlockSparsity.from_mask(blocky(1, 1, 2, 300, 500))
    BlockSparsity.of(*good.lists, 300, 500)
    bad: list[tuple[str, Any, type[Exception]]] = [
        ("counts", good.counts.long(), TypeError),
        ("counts", good.counts + 9, ValueError),
        ("counts", good.counts.flip(-1) - 1, ValueError),
        ("counts", good.counts[0], ValueError),
        ("blocks", good.blocks[:, :1], ValueError),
        ("blocks", good.blocks + 4, ValueError),
        ("blocks", torch.cat([good.blocks] * 2, 3)[..., ::2], ValueError),
        ("bit_rows", good.bit_rows - 100, ValueError),
        ("bit_rows", good.bit_rows[..., :0], ValueError),
        ("bits", good.bits[:0], ValueError),
        ("bits", good.bits[:, :64], ValueError),
        ("seqlen_q", 600, ValueError),
        ("seqlen_k", 128, ValueError),
    ]
    for name, value, error in bad:
        with pytest.raises(error):
            BlockSparsity.of(*changed(good, name, value))
    with pytest.raises(ValueError, match="at least 1"):
        Grid(0, 128)
    with pytest.raises(ValueError, match="bool"):
        BlockSparsity.from_mask(torch.ones(1, 1, 4, 4))


def of_two_columns(blocks: list[int], partial: int, bits: Tensor, seqlen_k: int) -> BlockSparsity:
    """One row of 128 queries."""
    counts = torch.tensor([[[[partial, len(blocks)]]]], dtype=torch.int32)
    numbers = torch.tensor(blocks, dtype=torch.int32).view(1, 1, 1, -1)
    return BlockSparsity.of(counts, numbers, torch.zeros_like(numbers), bits, 128, seqlen_k)


def test_a_block_that_is_listed_twice_is_refused() -> None:
    """Its keys would count twice."""
    some = pack(torch.rand(1, 128, 128) < 0.5)
    for partial in range(3):
        of_two_columns([1, 0], partial, some, 256)
        with pytest.raises(ValueError, match=r"blocks names block 1 more than once in a row of blocks"):
            of_two_columns([1, 1], partial, some, 256)


def test_bits_of_keys_that_are_not_there_are_refused() -> None:
    """A kernel masks a partial block by its bits alone."""
    shown, beyond = torch.zeros(2, 1, 128, 128, dtype=torch.bool)
    shown[..., :44], beyond[..., 44] = True, True
    of_two_columns([1, 0], 1, pack(shown), 172)
    of_two_columns([0, 1], 1, pack(beyond), 172)  # of the first block, which has all keys
    of_two_columns([1, 0], 0, pack(beyond), 172)  # bits that nothing names
    with pytest.raises(ValueError, match=r"bits of the last block show keys past seqlen_k, 172"):
        of_two_columns([1, 0], 1, pack(beyond), 172)
