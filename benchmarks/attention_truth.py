"""What a contender's output must be: some rows of some sequences of a cell, in float32. Knows no contender.

Up to 64 rows, spread evenly, of up to 4 sequences (the first, the last, the shortest and the longest): the truth of
whole cells would take longer than their timing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.attention_cells import Cell
from benchmarks.attention_inputs import BLOCK, Tensors, block_pattern
from benchmarks.attention_masks import ALIBI, SINKS, SOFTCAP, sees

_ROWS = 64
_TOLERANCE = 1e-2  # relative; two bf16 implementations differ by about 3e-3
_BACKWARD_TOLERANCE = 2e-2  # a score's gradient is a difference of two numbers of its own size
_FLOAT8_TOLERANCE = 0.15  # float8 keeps 3 bits of a mantissa: about 0.03 a factor


@dataclass(frozen=True)
class Truth:
    """`rows[i]` of sequence `sequences[i]` should be `values[i]`, `[rows, heads, head_dim]` in float32."""

    cell: Cell
    sequences: list[int]
    rows: list[Tensor]
    values: list[Tensor]

    @classmethod
    def of(cls, cell: Cell, t: Tensors) -> "Truth":
        sequences = sampled_sequences(cell)
        rows = [sampled_rows(cell, b).to(t.q.device) for b in sequences]
        return cls(cell, sequences, rows, [_attention(cell, t, b, r) for b, r in zip(sequences, rows, strict=True)])

    def error(self, out: Tensor) -> float:
        """The worst sequence's |out - truth| / |truth| (Frobenius norms); NaN when any is NaN, sampled or not.

        Rows that see nothing are not looked at: softmax over nothing is NaN in some implementations.
        """
        if self.cell.section != "padding" and not bool(out.isfinite().all()):
            return math.nan
        errors = []
        for b, rows, value in zip(self.sequences, self.rows, self.values, strict=True):
            difference = rows_of(self.cell, out, b)[rows].float() - value
            errors.append(difference.norm() / value.norm())
        worst = torch.stack(errors)
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
    return torch.linspace(first, count - 1, min(_ROWS, count - first)).round().long().unique()


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
