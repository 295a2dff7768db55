// The Hopper forward's rows that see no key, as padding on the left leaves them under a causal mask: no tile is drawn for
// them, and while a tile of their sequence and head is computed, the warp that has loaded its queries writes theirs.
#pragma once

#include "forward_rings.cuh"

// All 32 lanes of a warp call, which has few registers: what a row needs is read again for every row. The tiles of a head that
// see nothing are dealt out to those that are drawn.
__device__ __forceinline__ void write_nothing(const Tile& tile, const HopperParams& p) {
#pragma unroll 1
  for (int i = tile.first_row / BLOCK_M - tile.skipped; i < tile.skipped; i += tile.drawn) {
#pragma unroll 1
    for (int r = 0; r < BLOCK_M; r++) {
      asm volatile("" ::: "memory");
      const ForwardParams& f = p.forward;
      const int row = tile.seq.q_begin + i * BLOCK_M + r, column = threadIdx.x % 32 * 8;
      const int batch = f.sequence.cu_seqlens_q ? 0 : tile.batch;
      if (column < f.head_dim_v)
        *reinterpret_cast<uint4*>(f.out + batch * f.out_batch + row * f.out_row + tile.head * f.out_head + column) =
            make_uint4(0, 0, 0, 0);
      if (column == 0) f.lse[batch * f.lse_batch + tile.head * f.lse_head + row] = -kInfinity;
    }
  }
}
