"""One attention call, as data: what the public functions make and what every implementation takes.

Every mask that is not a tensor is one interval of keys per query row, so an implementation needs one mask rule only.
Knows no device and no kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Columns of a mask descriptor (`AttentionArgs.mask_desc`), int32 `[batch, 8]`.
#: All positions count keys from key 0 of the tensors handed in. A START below 0 is 0, also as the origin of chunks.
DESC_START, DESC_STOP, DESC_Q_OFFSET, DESC_LEFT, DESC_RIGHT, DESC_CHUNK = range(6)
DESC_COLUMNS = 8
#: The most that LEFT, RIGHT and CHUNK may be, which is further than any key: with positions they sum within int32.
FURTHEST = 1 << 30
#: "no bound" in the LEFT and RIGHT columns of a descriptor and in `window_left` / `window_right`.
UNBOUNDED = -1


@dataclass(frozen=True, slots=True, eq=False)
class AttentionArgs:
    """Arguments of one forward call.

    Shapes (strides are free except that the last dimension is contiguous):

    * dense: q `[batch, seqlen_q, num_heads, head_dim]`, k `[batch, seqlen_k, num_kv_heads, head_dim]`,
      v `[batch, seqlen_k, num_kv_heads, head_dim_v]`
    * varlen: q `[total_q, num_heads, head_dim]` with `cu_seqlens_q`;
      k, v `[total_k, num_kv_heads, *]` with `cu_seqlens_k`
    * paged: k, v `[num_blocks, block_size, num_kv_heads, *]` with `block_table` and `seqused_k`; q dense or varlen.
      (The engine's pool is `[num_blocks, num_kv_heads, block_size, head_dim]`; it is handed in as a transposed view.)

    The rule of visibility. Row i of sequence b stands at position `p = i + q_offset[b]`, where q_offset defaults to
    `stop[b] - seqlen_q[b]` (bottom-right alignment; stop = the sequence's number of keys, or seqused_k where less).
    It sees key j iff

    * `start[b] <= j < stop[b]`                     (start = leftpad_k, default 0)
    * `j >= p - window_left`  when window_left  >= 0
    * `j <= p + window_right` when window_right >= 0 (causal is window_right = 0)
    * `(j - start[b]) // chunk_size == (p - start[b]) // chunk_size` when chunk_size > 0 (Llama 4's chunked attention)
    * `key_mask[b, j]` when a key mask is given

    Varlen query rows past `cu_seqlens_q[-1]` belong to no sequence: what stands there afterwards is undefined.
    A row that sees nothing gives output 0, lse -inf and gradient 0. Slots that no row may see can hold NaN or Inf.

    A score is `softcap * tanh(q.k * softmax_scale / softcap)` (or `q.k * softmax_scale` when softcap is 0),
    plus `-alibi_slope * |p - j|`, plus `bias`. A sink is a logit per head that joins the denominator (and lse) only.

    Dropout acts on the softmax's probabilities, in steps of 1/256: `dropout_threshold / 256` of them become 0, the rest
    are multiplied by `dropout_scale`; lse is that without dropout. Which ones is a function of `dropout_seed` and of
    (sequence, query head, query row i, key j) only: see reference/dropout.py.

    k and v may be float8_e4m3fn, with a scale per head: the true key is `k * k_scale[head]`, the true value
    `v * v_scale[head]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    cu_seqlens_q: Tensor | None = None  # int32 [batch + 1]
    cu_seqlens_k: Tensor | None = None  # int32 [batch + 1]
    max_seqlen_q: int = 0  # required with cu_seqlens_q; an upper bound is allowed
    max_seqlen_k: int = 0  # required with cu_seqlens_k or block_table; an upper bound is allowed
    seqused_k: Tensor | None = None  # int32 [batch]: keys in use (for paged: the whole context, new tokens included)
    leftpad_k: Tensor | None = None  # int32 [batch]: first key in use
    block_table: Tensor | None = None  # int32 [batch, max_blocks_per_seq]
    mask_desc: Tensor | None = None  # int32 [batch, 8]: replaces start, stop, q_offset, window, causal and chunk
    key_mask: Tensor | None = None  # bool [batch, max_seqlen_k], or wider; paged: as wide as a table's pages
    bias: Tensor | None = None  # float [1 or batch, 1 or num_heads, 1 or seqlen_q, seqlen_k], dense only
    alibi_slopes: Tensor | None = None  # float32 [num_heads] or [batch, num_heads]
    sinks: Tensor | None = None  # [num_heads], any float dtype
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    chunk_size: int = 0
    softcap: float = 0.0
    num_splits: int = 0  # 0: the heuristic decides
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None  # int64 [2]: Philox seed and offset, on the tensors' device
    k_scale: Tensor | None = None  # float32 [num_kv_heads], given exactly when k and v are float8_e4m3fn
    v_scale: Tensor | None = None
    deterministic: bool = False  # the gradients' sums in one order, so that repeated calls give the same bits

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def seqlen_q(self) -> int:
        """The largest number of query rows of a sequence."""
        return self.q.shape[1] if self.cu_seqlens_q is None else self.max_seqlen_q

    @property
    def num_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def dropout_threshold(self) -> int:
        """A probability is dropped iff its random byte is below this; 0 is no dropout."""
        return min(round(self.dropout_p * 256), 255)

    @property
    def dropout_scale(self) -> float:
        return 256 / (256 - self.dropout_threshold)

    @property
    def left_bounds(self) -> bool:
        """Whether rows may see keys from some key on only."""
        descriptors = self.leftpad_k is not None or self.mask_desc is not None
        return self.window_left >= 0 or self.chunk_size > 0 or descriptors

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """FlashAttention's: `[batch, num_heads, seqlen_q]` for dense queries, `[num_heads, total_q]` for varlen."""
        if self.cu_seqlens_q is None:
            return (self.q.shape[0], self.num_heads, self.q.shape[1])
        return (self.num_heads, self.q.shape[0])
