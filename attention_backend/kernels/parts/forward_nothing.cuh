// The Hopper forward's rows that see no key, as padding on the left leaves them under a causal mask: no tile is drawn for
// them, and while a tile of their sequence and head is computed, the warp that has loaded its queries writes theirs.
#pragma once

#include "forward_rings.cuh"

// All 32 lanes of a warp call, which has few registers: what a row needs is read again for every row. The tiles of a head that
// see nothing are dealt out to those that are drawn. Two lanes write 32 bytes of a row at a time: a sector of the L2.
__device__ __forceinline__ void write_nothing(const Tile& tile, const HopperParams& p) {
#pragma unroll 1
  for (int i = tile.first_row / BLOCK_M - tile.skipped; i < tile.skipped; i += tile.drawn) {
#pragma unroll 1
    for (int r = threadIdx.x % 32; r < BLOCK_M; r += 32) {
      asm volatile("" ::: "memory");
      const ForwardParams& f = p.forward;
      float* lse = f.lse + (tile.seq.q_begin + i * BLOCK_M + r);
      if (!f.sequence.cu_seqlens_q) lse += tile.batch * f.lse_batch;
      lse[tile.head * f.lse_head] = -kInfinity;
    }
#pragma unroll 1
    for (int r = threadIdx.x % 32 / 2; r < BLOCK_M; r += 16) {
      asm volatile("" ::: "memory");
      const ForwardParams& f = p.forward;
      auto* out = f.out + (tile.seq.q_begin + i * BLOCK_M + r) * f.out_row;
      if (!f.sequence.cu_seqlens_q) out += tile.batch * f.out_batch;
      out += tile.head * f.out_head;
#pragma unroll 1
      for (int column = threadIdx.x % 2 * 8; column < f.head_dim_v; column += 16)
        *reinterpret_cast<uint4*>(out + column) = make_uint4(0, 0, 0, 0);
    }
  }
}
