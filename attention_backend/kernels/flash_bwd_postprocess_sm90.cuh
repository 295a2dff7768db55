// The end of the Hopper backward: dQ, summed in float32 as fragments of wgmma lie, becomes rows of elements times the
// softmax scale. One block takes 64 rows x 64 columns of a head, a warp 16 rows; lines of blocks behind the last row of a
// varlen sequence end at once.
//
// Compile-time: BF16, SLABS (of 64 columns).
#include "parts/padded_rows.cuh"
#include "parts/transpose_quad.cuh"

// The same fields, in the same order, as attention_backend/kernels/hopper_backward_params.py: RowsOfDqParams.
struct RowsOfDqParams {
  const int* cu_seqlens_q;  // [batch + 1] or null
  const float* sums;        // [num_heads, padded_rows / 64, SLABS, 4096]
  element* dq;
  int64 dq_batch, dq_row, dq_head;
  int64 padded_rows;
  int seqlen_q, head_dim;
  float scale;
  int heads;
};

extern "C" __global__ void __launch_bounds__(128) flash_bwd_postprocess_sm90(const RowsOfDqParams p) {
  const int batch = blockIdx.z, head = blockIdx.y % p.heads, slab = blockIdx.y / p.heads, thread = threadIdx.x;
  const int q_begin = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : 0;
  const int seqlen_q = p.cu_seqlens_q ? p.cu_seqlens_q[batch + 1] - q_begin : p.seqlen_q;
  const int first = blockIdx.x * 64;
  if (first >= seqlen_q) return;
  const int64 padded = head * p.padded_rows + padded_begin(p.cu_seqlens_q, p.seqlen_q, batch) + first;
  const float4* sums = reinterpret_cast<const float4*>(p.sums + (padded / 64 * SLABS + slab) * 4096) + thread;
  element* dq = p.dq + (p.cu_seqlens_q ? 0 : batch * p.dq_batch) + head * p.dq_head;
  const int c = thread % 4;
  uint32 x[2][8];  // of rows r and r + 8: columns 8 j + 2 c and the next
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float4 sum = sums[j * 128];
    x[0][j] = pack2(sum.x * p.scale, sum.y * p.scale);
    x[1][j] = pack2(sum.z * p.scale, sum.w * p.scale);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first + thread / 32 * 16 + thread % 32 / 4 + half * 8;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      transpose_quad(x[half] + i, c);  // lane c holds the 8 columns of group i + c
      const int column = slab * 64 + (i + c) * 8;
      if (row < seqlen_q && column < p.head_dim)
        *reinterpret_cast<uint4*>(dq + (static_cast<int64>(q_begin) + row) * p.dq_row + column) =
            make_uint4(x[half][i], x[half][i + 1], x[half][i + 2], x[half][i + 3]);
    }
  }
}
