// The end of the Hopper backward: dQ, summed in float32 in chunks of 64 x 64, becomes rows of elements times the softmax
// scale. One block takes 64 rows x 64 columns of a head, a warp 16 rows; lines of blocks behind the last row of a
// varlen sequence, and those of heads that the main kernel has finished, end at once.
//
// Compile-time: BF16, SLABS (of 64 columns).
#include "parts/padded_rows.cuh"
#include "parts/rows_of_dq.cuh"

// The same fields, in the same order, as attention_backend/kernels/hopper_backward_params.py: RowsOfDqParams.
struct RowsOfDqParams {
  const int* cu_seqlens_q;  // [batch + 1] or null
  const float* sums;        // as BackwardParams'
  element* dq;
  int64 dq_batch, dq_row, dq_head;
  int64 sums_head;
  int held_heads, first_head;  // dense: of all sequences, one after another; those before first_head are finished
  int seqlen_q, head_dim;
  float scale;
  int heads;
};

extern "C" __global__ void __launch_bounds__(128) flash_bwd_postprocess_sm90(const RowsOfDqParams p) {
  const bool dense = p.cu_seqlens_q == nullptr;
  const int batch = (dense ? p.first_head / p.heads : 0) + blockIdx.z;
  const int head = blockIdx.y % p.heads, slab = blockIdx.y / p.heads;
  const int q_begin = dense ? 0 : p.cu_seqlens_q[batch];
  const int seqlen_q = dense ? p.seqlen_q : p.cu_seqlens_q[batch + 1] - q_begin;
  const int first = blockIdx.x * 64, row = first + threadIdx.x / 32 * 16, any_head = batch * p.heads + head;
  if (first >= seqlen_q || (dense && any_head < p.first_head)) return;
  const int64 padded = (dense ? any_head % p.held_heads : head) * p.sums_head + first +
                       (dense ? 0 : padded_begin(p.cu_seqlens_q, p.seqlen_q, batch));
  const float* sums = p.sums + (padded / 64 * SLABS + slab) * 4096 + threadIdx.x / 32 * kPiece;
  element* dq = p.dq + (dense ? batch * p.dq_batch : 0) + head * p.dq_head +
                (static_cast<int64>(q_begin) + row) * p.dq_row + slab * 64;
  float4 x[8];
  DqRows::load(x, sums);
  DqRows rows;
  rows.pack(x, p.scale);
  rows.store(dq, p.dq_row, seqlen_q - row, p.head_dim - slab * 64);
}
