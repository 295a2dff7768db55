// The Hopper forward's rows that see no key, as padding on the left leaves them under a causal mask: they are in no tile. The
// warp that loads queries writes them between its loads, every block a like share of each sequence's.
#pragma once

#include "forward_rings.cuh"

// All 32 lanes of one warp call.
class Nothing {
 public:
  // Writes up to `most` rows, of all heads. Looking at 32 sequences counts as one.
  __device__ __forceinline__ void write(int most, const HopperParams& p) {
#pragma unroll 1
    for (; most > 0 && batch < p.work.batch; most--) {
      const int b = batch + static_cast<int>(threadIdx.x % 32);
      const int rows = b < p.work.batch ? rows_without_keys(Sequence(p.forward.sequence, b)) : 0;
      const uint32 some = __ballot_sync(~0u, rows > (b == batch ? row : static_cast<int>(blockIdx.x)));
      if (!(some & 1)) row = blockIdx.x;  // another sequence's
      batch += some ? __ffs(some) - 1 : 32;
      if (!some) continue;
      const int end = __shfl_sync(~0u, rows, __ffs(some) - 1);
#pragma unroll 1
      for (; row < end; row += gridDim.x) {
        if (most-- == 0) return;
        write_row(batch, row, p);
      }
    }
  }

 private:
  int batch = 0, row = blockIdx.x;  // where the next row may be

  static __device__ __forceinline__ void write_row(int b, int row, const HopperParams& p) {
    const ForwardParams& f = p.forward;
    const int64 at = row + (f.sequence.cu_seqlens_q ? f.sequence.cu_seqlens_q[b] : 0);
    float* lse = f.lse + at;
    element* out = f.out + at * f.out_row;
    if (!f.sequence.cu_seqlens_q) lse += b * f.lse_batch, out += b * f.out_batch;
    const int lane = threadIdx.x % 32, heads = p.work.heads;
#pragma unroll 1
    for (int head = lane; head < heads; head += 32) lse[head * f.lse_head] = -kInfinity;
    // 16 bytes a lane, of as many heads at once as there are lanes for.
    const int vectors = f.head_dim_v / 8, together = 32 / vectors;
    if (lane >= together * vectors) return;
    out += lane % vectors * 8;
#pragma unroll 1
    for (int head = lane / vectors; head < heads; head += together)
      *reinterpret_cast<uint4*>(out + head * f.out_head) = make_uint4(0, 0, 0, 0);
  }
};
