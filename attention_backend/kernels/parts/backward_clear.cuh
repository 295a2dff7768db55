// The Hopper backward's sums of dQ become zeros just before they are added to: cleared by a kernel in front of it, they would
// be written to memory and fetched again, as all of them together are more than the L2 holds. Whoever draws a tile clears
// a share of what the tile of the same number adds to a section later. A tile is drawn by a block that runs, and
// its share is cleared once what the block drew before it is done, of which nothing waits for shares of later tiles.
#pragma once

#include "parts/backward_shared.cuh"
#include "parts/turns.cuh"

// All lanes of one warp: the share that goes with tile `index` of the order of work. Only of dense sequences.
__device__ __forceinline__ void clear_share(const BackwardParams& p, int index) {
  if (!p.cleared || index >= all_tiles(p)) return;
  const Place place(p, index);
  const int unit = place.unit + p.section;  // a section later
  if (unit >= p.kv_heads * p.batch * p.parts) return;
  const int heads = p.group / p.parts, first_head = unit * heads;  // of all sequences, one after another
  const int batch = first_head / (p.group * p.kv_heads);
  const int64 rows = padded_begin(nullptr, p.sequence.seqlen_q, 1);
  const int64 vectors = rows * (kSlabsK * 16);
  const int64 begin = vectors * place.number / p.key_tiles, end = vectors * (place.number + 1) / p.key_tiles;
#pragma unroll 1
  for (int h = 0; h < heads; h++) {
    const int64 row = (first_head + h - batch * p.group * p.kv_heads) * p.padded_rows + batch * rows;
    float4* const sums = reinterpret_cast<float4*>(p.dq) + row * (kSlabsK * 16);
#pragma unroll 1
    for (int64 i = begin + threadIdx.x % 32; i < end; i += 32) sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) pass_turn(p.cleared + unit);
}

// One thread waits until all that the tile adds to has been cleared.
__device__ __forceinline__ void await_cleared(const BackwardParams& p, const KeyTile& tile) {
  const int unit = (tile.batch * p.kv_heads + tile.kv_head) * p.parts + tile.part;
  if (p.cleared && unit >= p.section) await_turn(p.cleared + unit, p.key_tiles);
}
