"""Ready-made `BlockSparsity` patterns, built block by block: memory follows the listed blocks and the length.

Row i stands at position p = i + seqlen_k - seqlen_q (bottom-right, as everywhere here). A block that is not known to be
visible whole is evaluated pair by pair, so lists are exact. Knows no kernel.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_backend.block_candidates import Candidates, by_block, intervals, pairs, sharing_blocks
from attention_backend.block_lists import BLOCK, Grid
from attention_backend.block_sparsity import BlockSparsity
from attention_backend.checks import check_is_tensor, check_whole_numbers, check_window_size
from attention_backend.problem import UNBOUNDED

Device = torch.device | str | None
#: (batch, head, positions, keys), broadcast against each other -> bool: which pairs are visible.
_Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(seqlen_q: int, seqlen_k: int | None = None, *, device: Device = None) -> BlockSparsity:
    """Row p sees keys j <= p."""
    return sliding_window(seqlen_q, seqlen_k, window=(UNBOUNDED, 0), device=device)


def sliding_window(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    window: tuple[int, int],
    causal: bool = False,
    global_tokens: int | Tensor = 0,
    device: Device = None,
) -> BlockSparsity:
    """Row p sees keys p - window[0] to p + window[1] (-1: no bound). Global tokens see all and are seen by all: the
    first so many, or int64 positions `[g]`. With `causal` nobody sees a key past its own position.

    Longformer (https://arxiv.org/abs/2004.05150, section 3.1).
    """
    grid = Grid(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k)
    check_window_size(window, "window")
    left, right = window
    if min(left, right) < UNBOUNDED:
        raise ValueError(f"window must be (left, right), each -1 or at least 0, got {window}")
    shift, is_global = grid.seqlen_k - seqlen_q, _global_tokens(global_tokens, grid.seqlen_k, device)
    if causal:
        right = 0
    p = torch.arange(shift, grid.seqlen_k, device=is_global.device)
    low = torch.zeros_like(p) if left == UNBOUNDED else p - left
    high = torch.full_like(p, grid.seqlen_k) if right == UNBOUNDED else p + right + 1

    def visible(_b: Tensor, _h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        band = torch.ones_like(p == j) if left == UNBOUNDED else j >= p - left
        if right != UNBOUNDED:
            band = band & (j <= p + right)
        # A row before key 0 (more rows than keys) is no token, so it is not a global one.
        seen = band | is_global[j] | ((p >= 0) & is_global[p.clamp_min(0)])
        return seen & (j <= p) if causal else seen

    places = is_global.nonzero().squeeze(1)
    rows, columns = (places - shift)[places >= shift] // BLOCK, places // BLOCK
    lines = pairs(grid, rows.unique(), _arange(grid.columns, rows))
    return _build(
        grid, [intervals(grid, low, high), lines, pairs(grid, _arange(grid.rows, rows), columns.unique())], visible
    )


def dilated_window(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    window: tuple[int, int],
    dilation: int | Sequence[int],
    device: Device = None,
) -> BlockSparsity:
    """Row p sees keys p + m * dilation for m from -window[0] to window[1]: so many keys to a side, with gaps.
    A sequence of dilations is one for each query head.

    Longformer's dilated sliding window. Blocks of 128 hold all gaps of a dilation below 128: fewer keys than a plain
    window of the same reach, but the same blocks, so the same cost.
    """
    gaps = torch.tensor([dilation] if isinstance(dilation, int) else list(dilation), device=device)
    check_window_size(window, "window")
    check_whole_numbers("dilation", gaps)
    if min(window) < 0 or gaps.numel() == 0 or int(gaps.min()) < 1:
        raise ValueError(f"window must be at least (0, 0) and dilation at least 1, got {window} and {dilation}")
    grid = Grid(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, heads=gaps.numel())
    p = torch.arange(grid.seqlen_k - seqlen_q, grid.seqlen_k, device=gaps.device)

    def visible(_b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        gap, distance = gaps[h], j - p
        return (distance % gap == 0) & (distance >= -window[0] * gap) & (distance <= window[1] * gap)

    low, high = p - window[0] * gaps[:, None], p + window[1] * gaps[:, None] + 1
    numbers, full = intervals(grid, low, high)
    return _build(grid, [(numbers, full & (gaps[grid.split(numbers)[1]] == 1))], visible)


def prefix_lm(
    prefix_lengths: Tensor | Sequence[int], seqlen_q: int, seqlen_k: int | None = None, *, device: Device = None
) -> BlockSparsity:
    """Sequence b sees its first `prefix_lengths[b]` keys from everywhere, and the others causally: int `[batch]`."""
    lengths = _whole_numbers("prefix_lengths", "batch", prefix_lengths, device)
    grid = Grid(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, batch=lengths.shape[0])
    p = torch.arange(grid.seqlen_k - seqlen_q, grid.seqlen_k, device=lengths.device)

    def visible(b: Tensor, _h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        return (j <= p) | (j < lengths[b])

    high = torch.maximum(lengths[:, None], p + 1)
    return _build(grid, [intervals(grid, torch.zeros_like(high), high)], visible)


def documents(document_ids: Tensor, *, causal: bool = True) -> BlockSparsity:
    """Tokens of one document see each other, with `causal` only backwards: ids int `[seqlen]`, or `[batch, seqlen]`.
    Ids need no order; tokens of a negative id (padding) see nothing and are seen by none."""
    check_is_tensor("document_ids", document_ids)
    if document_ids.dim() not in (1, 2):
        raise ValueError(f"document_ids must be [seqlen] or [batch, seqlen], got {tuple(document_ids.shape)}")
    check_whole_numbers("document_ids", document_ids)
    ids = document_ids.long()
    ids = ids[None] if ids.dim() == 1 else ids
    grid = Grid(ids.shape[1], ids.shape[1], batch=ids.shape[0])

    def visible(b: Tensor, _h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        own = ids[b, p]
        same = (own == ids[b, j]) & (own >= 0)
        return same & (j <= p) if causal else same

    # Whole blocks: one document in the row block, the same one in the column block.
    first, last = (by_block(grid, ids, fill).unflatten(1, (-1, BLOCK)) for fill in (_LARGE, -1))
    least, most = first.amin(-1), last.amax(-1)  # [batch, blocks]
    batch, row, column = sharing_blocks(ids)
    if causal:
        batch, row, column = (x[column <= row] for x in (batch, row, column))
    full = (most[batch, row] == least[batch, column]) & (least[batch, row] == most[batch, column])
    full &= (least[batch, row] >= 0) & ((column < row) if causal else True)
    return _build(grid, [(grid.number(batch, row, column), full)], visible)


def document_lengths(
    lengths: Sequence[int] | Tensor, seqlen: int | None = None, *, causal: bool = True, device: Device = None
) -> BlockSparsity:
    """`documents` of one sequence in which they follow each other; tokens of `seqlen` past the last see nothing."""
    lens = _whole_numbers("lengths", "documents", lengths, device)
    if lens.numel() and int(lens.min()) < 0:
        raise ValueError(f"lengths must be at least 0, got {int(lens.min())}")
    ids = torch.repeat_interleave(torch.arange(lens.numel(), device=lens.device), lens)
    rest = 0 if seqlen is None else seqlen - ids.numel()
    if rest < 0:
        raise ValueError(f"the documents have {ids.numel()} tokens, seqlen is {seqlen}")
    return documents(F.pad(ids, (0, rest), value=-1), causal=causal)


def fixed(seqlen: int, *, stride: int, summary: int, device: Device = None) -> BlockSparsity:
    """The Sparse Transformer's fixed pattern, causal: row p sees its own stretch of `stride` positions, and the last
    `summary` positions of every stretch before it (https://arxiv.org/abs/1904.10509, section 4.3)."""
    if not 1 <= summary <= stride:
        raise ValueError(f"summary must be from 1 to stride, got {summary} and {stride}")
    grid = Grid(seqlen, seqlen)
    p = torch.arange(seqlen, device=device)

    def visible(_b: Tensor, _h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        return (j <= p) & ((j // stride == p // stride) | (j % stride >= stride - summary))

    per_block = torch.bincount(p[p % stride >= stride - summary] // BLOCK, minlength=grid.columns)
    numbers, _ = pairs(grid, _arange(grid.rows, p), per_block.nonzero().squeeze(1))
    _, _, row, column = grid.split(numbers)
    full = (per_block[column] == BLOCK) & (column < row)
    below = column <= row
    return _build(grid, [intervals(grid, p // stride * stride, p + 1), (numbers[below], full[below])], visible)


def butterfly(
    seqlen_q: int, seqlen_k: int | None = None, *, causal: bool = False, device: Device = None
) -> BlockSparsity:
    """Block-sparse FlashAttention's pattern: row block a sees key blocks a and a xor 2^s, so log2 of the blocks a row
    (https://arxiv.org/abs/2205.14135, section 3.3, after https://arxiv.org/abs/2112.00029)."""
    grid = Grid(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k)
    shift = grid.seqlen_k - seqlen_q
    row = torch.arange(grid.rows, device=device)
    steps = torch.tensor([0, *(1 << s for s in range(max(grid.rows, grid.columns).bit_length()))], device=row.device)

    def visible(_b: Tensor, _h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        step = ((p - shift) // BLOCK) ^ (j // BLOCK)
        listed = (step & (step - 1)) == 0
        return listed & (j <= p) if causal else listed

    rows, columns = row[:, None].expand(-1, steps.numel()).flatten(), (row[:, None] ^ steps).flatten()
    rows, columns = rows[columns < grid.columns], columns[columns < grid.columns]
    full = (columns + 1) * BLOCK <= rows * BLOCK + shift + 1 if causal else torch.ones_like(rows, dtype=torch.bool)
    return _build(grid, [(grid.number(0, rows, columns), full)], visible)


_LARGE = 1 << 62  # exact as a float, which F.pad makes of it


def _build(grid: Grid, candidates: list[Candidates], visible: _Visible) -> BlockSparsity:
    shift = grid.seqlen_k - grid.seqlen_q

    def evaluate(b: Tensor, h: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        return visible(b[:, None, None], h[:, None, None], rows[:, :, None] + shift, keys[:, None, :])

    numbers, full = (torch.cat(parts) for parts in zip(*candidates, strict=True))
    return BlockSparsity.build(grid, numbers, full, evaluate)


def _global_tokens(tokens: int | Tensor, seqlen_k: int, device: Device) -> Tensor:
    """bool `[seqlen_k]`"""
    if isinstance(tokens, int):
        if not 0 <= tokens <= seqlen_k:
            raise ValueError(f"global_tokens must be from 0 to {seqlen_k}, got {tokens}")
        return torch.arange(seqlen_k, device=device) < tokens
    check_is_tensor("global_tokens", tokens)
    check_whole_numbers("global_tokens", tokens)
    if tokens.dim() != 1 or bool(((tokens < 0) | (tokens >= seqlen_k)).any()):
        raise ValueError(f"global_tokens must be positions [g] from 0 to {seqlen_k - 1}")
    found = torch.zeros(seqlen_k, dtype=torch.bool, device=tokens.device if device is None else device)
    found[tokens.long().to(found.device)] = True
    return found


def _whole_numbers(name: str, size: str, numbers: Tensor | Sequence[int], device: Device) -> Tensor:
    """int64 `[size]`"""
    found = torch.as_tensor(numbers, device=device)
    if found.dim() != 1:
        raise ValueError(f"{name} must be [{size}], got {tuple(found.shape)}")
    if found.numel():  # a list of nothing is of floats
        check_whole_numbers(name, found)
    return found.long()


def _arange(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device)
