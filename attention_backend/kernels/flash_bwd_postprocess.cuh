// dQ of flash_bwd_sm80, from a float32 sum in the order of its accumulators' registers to 16-bit rows. A warp takes 16
// rows of a head: it reads them as they were added, and turns them round in shared memory.
//
// Compile-time: BF16, HEAD_DIM (a multiple of 32), SCATTERED (the four floats of a thread lie 32 apart).
#include "parts/padded_rows.cuh"

constexpr int kWarps = 4;
constexpr int kPitch = HEAD_DIM * 2 + 16;
constexpr int kChunks = HEAD_DIM / 8;

// The same fields, in the same order, as attention_backend/kernels/backward_params.py: QueryGradientParams.
struct QueryGradientParams {
  const int* cu_seqlens_q;  // [batch + 1] or null
  const float* dq_sums;     // [num_heads, padded_rows / 16, HEAD_DIM / 8, 128]
  element* dq;
  int64 dq_batch, dq_row, dq_head;
  int64 padded_rows;
  float scale;
  int seqlen_q, head_dim, reserved;
};

extern "C" __global__ void __launch_bounds__(kWarps * 32) flash_bwd_postprocess(const QueryGradientParams p) {
  __shared__ __align__(16) char tiles[kWarps][16 * kPitch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int q_begin = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : 0;
  const int seqlen_q = p.cu_seqlens_q ? p.cu_seqlens_q[batch + 1] - q_begin : p.seqlen_q;
  const int first_row = (blockIdx.x * kWarps + warp) * 16;
  if (first_row >= seqlen_q) return;

  char* const tile = tiles[warp];
  const int64 padded_row = head * p.padded_rows + padded_begin(p.cu_seqlens_q, p.seqlen_q, batch) + first_row;
  const float* sums = p.dq_sums + padded_row / 16 * kChunks * 128;
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    float x[4];
#if SCATTERED
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = sums[c * 128 + j * 32 + lane];
#else
    *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(sums + c * 128 + lane * 4);
#endif
#pragma unroll
    for (int half = 0; half < 2; half++)
      *reinterpret_cast<uint32*>(tile + (lane / 4 + half * 8) * kPitch + c * 16 + lane % 4 * 4) =
          pack2(x[half * 2] * p.scale, x[half * 2 + 1] * p.scale);
  }
  __syncwarp();
  element* dq = p.dq + (p.cu_seqlens_q ? 0 : batch * p.dq_batch) + head * p.dq_head;
#pragma unroll
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int row = first_row + i / kChunks, chunk = i % kChunks;
    if (row < seqlen_q && chunk * 8 < p.head_dim)
      *reinterpret_cast<uint4*>(dq + (q_begin + static_cast<int64>(row)) * p.dq_row + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + i / kChunks * kPitch + chunk * 16);
  }
}
