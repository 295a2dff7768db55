// Joins the partial results of flash_decode: one block per pair (sequence, key head), one warp per row at a time.
// out = sum_s 2^(lse_s - lse) out_s with lse = log2 sum_s 2^lse_s (Flash-Decoding, second step).
//
// Compile-time: BF16.
#include "parts/element.cuh"
#include "parts/seqlen.cuh"
#include "parts/softmax.cuh"

// The same fields, in the same order, as attention_backend/kernels/params.py: CombineParams.
struct CombineParams {
  SequenceParams sequence;
  const float* partial_out;  // [slots, group_rows, head_dim_v], normalised
  const float* partial_lse;  // [slots, group_rows], log2
  const int* segments;       // [pairs, 2]
  const float* sinks;        // [num_heads] or null
  element* out;
  float* lse;
  int64 out_batch, out_row, out_head;
  int64 lse_batch, lse_head;
  int num_kv_heads, group, group_rows, head_dim_v;
};

extern "C" __global__ void __launch_bounds__(256) flash_combine(const CombineParams p) {
  const int pair = blockIdx.x, batch = pair / p.num_kv_heads, kv_head = pair % p.num_kv_heads;
  const int first_slot = p.segments[2 * pair], count = p.segments[2 * pair + 1];
  if (count <= 1) return;
  const Sequence seq(p.sequence, batch);
  const bool packed = p.sequence.cu_seqlens_q != nullptr;
  const int lane = threadIdx.x % 32;
  for (int r = blockIdx.y * 8 + threadIdx.x / 32; r < p.group_rows; r += gridDim.y * 8) {
    const int query = r / p.group, head = kv_head * p.group + r % p.group;
    if (query >= seq.seqlen_q) continue;
    const float* lse = p.partial_lse + static_cast<int64>(first_slot) * p.group_rows + r;
    const float* out = p.partial_out + (static_cast<int64>(first_slot) * p.group_rows + r) * p.head_dim_v;
    float m = -kInfinity, l = 0.f;
    for (int s = lane; s < count; s += 32) m = fmaxf(m, lse[static_cast<int64>(s) * p.group_rows]);
#pragma unroll
    for (int d = 16; d; d /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    const bool sees = m != -kInfinity;
    if (sees)
      for (int s = lane; s < count; s += 32) l += exp2_approx(lse[static_cast<int64>(s) * p.group_rows] - m);
#pragma unroll
    for (int d = 16; d; d /= 2) l += __shfl_xor_sync(~0u, l, d);
    const RowEnd end = end_row(m, l, p.sinks ? p.sinks + head : nullptr);
    element* to = p.out + (packed ? 0 : batch * p.out_batch) + static_cast<int64>(seq.q_begin + query) * p.out_row +
                  head * p.out_head;
    for (int d = lane; d < p.head_dim_v; d += 32) {
      float o = 0.f;
      if (sees)
#pragma unroll 4
        for (int s = 0; s < count; s++)
          o += exp2_approx(lse[static_cast<int64>(s) * p.group_rows] - m) *
               out[static_cast<int64>(s) * p.group_rows * p.head_dim_v + d];
      to[d] = from_float(o * end.factor);
    }
    if (lane == 0)
      p.lse[(packed ? seq.q_begin : batch * p.lse_batch) + head * p.lse_head + query] = end.lse * kLn2;
  }
}
