"""What a contender's output must be: some rows of some sequences of a cell, in float32. Knows no contender.

Up to 64 rows, spread evenly, of up to 4 sequences (the first, the last, the shortest and the longest): the truth of
whole cells would take longer than their timing. Of a backward the gradients of so many queries, and of so many keys and
values, each a sum over all rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import BLOCK, Tensors, block_pattern
from benchmarks.attention_masks import ALIBI, SINKS, SOFTCAP, sees
from benchmarks.attention_registry import Output

_ROWS = 64
_SCORES_AT_ONCE = 1 << 26  # of a sum over all rows: what is in memory is four times as many float32
_TOLERANCE = 1e-2  # relative; two bf16 implementations differ by about 3e-3
_BACKWARD_TOLERANCE = 2e-2  # a score's gradient is a difference of two numbers of its own size
_FLOAT8_TOLERANCE = 0.15  # float8 keeps 3 bits of a mantissa: about 0.03 a factor


@dataclass(frozen=True)
class Truth:
    """`rows[i]` of sequence `sequences[i]` should be `values[i]`, `[rows, heads, head_dim]` in float32; of a backward
    the gradients of its keys and values should be `of_keys[i]` at the keys `keys[i]`."""

    cell: Cell
    sequences: list[int]
    rows: list[Tensor]
    values: list[Tensor]
    keys: list[Tensor]
    of_keys: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, cell: Cell, t: Tensors) -> "Truth":
        sequences = sampled_sequences(cell)
        rows = [sampled_rows(cell, b).to(t.q.device) for b in sequences]
        values = [_attention(cell, t, b, r) for b, r in zip(sequences, rows, strict=True)]
        if cell.section != "backward":
            return cls(cell, sequences, rows, values, [], [])
        keys = [_spread(0, cell.seqlen_k).to(t.q.device) for _ in sequences]
        of_keys = [_gradients_of_keys(cell, t, b, k) for b, k in zip(sequences, keys, strict=True)]
        return cls(cell, sequences, rows, values, keys, of_keys)

    def error(self, out: Output) -> float:
        """The worst sequence's |out - truth| / |truth| (Frobenius norms); NaN when any is NaN, sampled or not. Of a
        backward the worst gradient's; a tensor alone is that of the queries.

        Rows that see nothing are not looked at: softmax over nothing is NaN in some implementations.
        """
        first, *others = out if isinstance(out, tuple) else (out,)
        if self.cell.section != "padding" and not all(bool(x.isfinite().all()) for x in (first, *others)):
            return math.nan
        pairs = [
            (rows_of(self.cell, first, b)[rows], value)
            for b, rows, value in zip(self.sequences, self.rows, self.values, strict=True)
        ]
        if others:
            for b, keys, truths in zip(self.sequences, self.keys, self.of_keys, strict=True):
                pairs += [(x[b][keys], truth) for x, truth in zip(others, truths, strict=True)]
        worst = torch.stack([(found.float() - truth).norm() / truth.norm() for found, truth in pairs])
        return math.nan if bool(worst.isnan().any()) else float(worst.max())


def acceptable(cell: Cell, error: float) -> bool:
    """Dropping scores of a row at random moves its output by sqrt(p / (1 - p)), so too small an error is wrong too."""
    if cell.dropout:
        expected = math.sqrt(cell.dropout / (1 - cell.dropout))
        return 0.5 * expected <= error <= 1.5 * expected
    if cell.section == "fp8_error":
        return not math.isnan(error)
    return error <= {"fp8_forward": _FLOAT8_TOLERANCE, "backward": _BACKWARD_TOLERANCE}.get(cell.section, _TOLERANCE)


def rows_of(cell: Cell, x: Tensor, b: int) -> Tensor:
    """The rows of sequence b of a tensor shaped like q, `[rows, heads, head_dim]`."""
    if cell.section != "varlen":
        return x[b]
    begin = sum(cell.lengths[:b])
    return x[begin : begin + cell.lengths[b]]


def sampled_sequences(cell: Cell) -> list[int]:
    lengths = cell.lengths or (cell.seqlen_k,) * cell.batch
    return sorted({0, cell.batch - 1, lengths.index(min(lengths)), lengths.index(max(lengths))})


def sampled_rows(cell: Cell, b: int) -> Tensor:
    """Rows that see something, the first and the last among them; of dropout, rows that see many keys: what is left of
    the first ones, whose outputs are the largest, is all or nothing."""
    count = cell.lengths[b] if cell.section == "varlen" else cell.seqlen_q
    first = cell.seqlen_q - cell.lengths[b] if cell.section == "padding" and cell.causal else 0
    if cell.dropout and cell.causal:
        first = cell.seqlen_q // 8
    return _spread(first, count)


def _spread(first: int, end: int) -> Tensor:
    """Up to _ROWS numbers from `first` on and below `end`, both ends among them."""
    return torch.linspace(first, end - 1, min(_ROWS, end - first)).round().long().unique()


def visible(cell: Cell, b: int, rows: Tensor, num_keys: int) -> Tensor:
    """bool `[rows, num_keys]`."""
    row, key = rows[:, None], torch.arange(num_keys, device=rows.device)[None, :]
    if cell.density < 1:
        return block_pattern(cell).to(rows.device)[row // BLOCK, key // BLOCK]
    if cell.option:
        return sees(cell.option, cell.amount, cell.seqlen_k, rows.device)(row, key)
    if cell.section == "padding":
        if cell.causal:
            return (key >= cell.seqlen_k - cell.lengths[b]) & (key <= row)
        return (key < cell.lengths[b]).expand(len(rows), -1)
    num_rows = cell.lengths[b] if cell.section == "varlen" else cell.seqlen_q
    return key <= row + num_keys - num_rows if cell.causal else torch.ones_like(key <= row)


def changed(cell: Cell, t: Tensors, kv_head: int, rows: Tensor, scores: Tensor) -> Tensor:
    """Scores `[rows, group, keys]` of a key head under the cell's option."""
    if cell.option == SOFTCAP:
        return cell.amount * (scores / cell.amount).tanh()
    if cell.option == ALIBI:
        distance = (rows[:, None] - torch.arange(scores.shape[2], device=rows.device)).abs()
        return scores - t.slopes.view(cell.kv_heads, -1)[kv_head][:, None] * distance[:, None]
    return scores


def _attention(cell: Cell, t: Tensors, b: int, rows: Tensor) -> Tensor:
    """The formula, key head by key head, so that the scores of a long context fit; of the backward, q's gradient."""
    q = rows_of(cell, t.q, b)[rows].float().unflatten(1, (cell.kv_heads, -1))  # [rows, kv_heads, group, head_dim]
    k, v = t.keys_of(cell, b)
    hidden = ~visible(cell, b, rows, k.shape[0])
    heads = []
    for h in range(cell.kv_heads):
        scores = q[:, h] @ k[:, h].float().T * cell.head_dim**-0.5  # [rows, group, keys]
        scores = changed(cell, t, h, rows, scores).masked_fill_(hidden[:, None], -torch.inf)
        if cell.option == SINKS:  # a column that has no value
            sink = t.sinks.view(cell.kv_heads, -1)[h].expand(len(rows), -1)
            scores = torch.cat([scores, sink[:, :, None]], dim=2)
        weights = scores.softmax(-1)[..., : k.shape[0]]
        if cell.section == "backward":
            grad = rows_of(cell, t.grad_out, b)[rows].float().unflatten(1, (cell.kv_heads, -1))[:, h]
            change = grad @ v[:, h].float().T
            change = weights * (change - (weights * change).sum(-1, keepdim=True))
            heads.append(change @ k[:, h].float() * cell.head_dim**-0.5)
            continue
        heads.append(weights @ v[:, h].float())
    return torch.cat(heads, dim=1)


def _gradients_of_keys(cell: Cell, t: Tensors, b: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Of some keys and their values, `[keys, kv_heads, head_dim]` each: all rows that see them, some at a time."""
    q, grad = (x[b].float().unflatten(1, (cell.kv_heads, -1)) for x in (t.q, t.grad_out))
    k, v = (x.float() for x in t.keys_of(cell, b))
    scale, at_once = cell.head_dim**-0.5, max(1, _SCORES_AT_ONCE // (q.shape[2] * k.shape[0]))
    dk, dv = (x.new_zeros(len(keys), cell.kv_heads, cell.head_dim) for x in (k, v))
    for rows in torch.arange(cell.seqlen_q, device=t.q.device).split(at_once):
        hidden = ~visible(cell, b, rows, k.shape[0])[:, None]
        for h in range(cell.kv_heads):
            weights = (q[rows, h] @ k[:, h].T * scale).masked_fill_(hidden, -torch.inf).softmax(-1)
            change = grad[rows, h] @ v[:, h].T
            mean = (weights * change).sum(-1, keepdim=True)
            weights, change = (x[..., keys] for x in (weights, change))  # [rows, group, keys]
            dv[:, h] += torch.einsum("rgk,rgd->kd", weights, grad[rows, h])
            dk[:, h] += torch.einsum("rgk,rgd->kd", weights * (change - mean), q[rows, h]) * scale
    return dk, dv
