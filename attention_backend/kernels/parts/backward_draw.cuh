// How the Hopper backward's blocks, or pairs of them, share out tiles of keys: each draws the next one.
#pragma once

#include "parts/backward_sizes.cuh"

// Whether blocks wait for what others do with tiles in front of theirs. Then a block's first tile is drawn too, so that no
// tile belongs to a block that does not run yet, as the GPU may have other work.
constexpr bool kWaitsForOthers = DETERMINISTIC || FINISHES;

// With how many tiles of rows left to load the next tile of keys is asked for. Drawn earlier, it would be one that no other
// block can take, and in deterministic mode one that others wait for.
constexpr int kDrawAhead = 2;

__device__ __forceinline__ int drawers() { return gridDim.x / CLUSTER; }

// By one thread: the first place in the order of work.
__device__ __forceinline__ int draw_first(const BackwardParams& p) {
  return kWaitsForOthers ? atomicAdd(p.counters, 1) : blockIdx.x / CLUSTER;
}
// By all lanes of one warp: another one.
__device__ __forceinline__ int draw(const BackwardParams& p) {
  int index = 0;
  if (threadIdx.x % 32 == 0) index = (kWaitsForOthers ? 0 : drawers()) + atomicAdd(p.counters, 1);
  return __shfl_sync(~0u, index, 0);
}

// Describes the tile at a place but for its rows, by all lanes of one warp.
__device__ __forceinline__ void describe_by_warp(KeyTile& tile, const BackwardParams& p, int index) {
  __syncwarp();  // all lanes have read what was there
  if (threadIdx.x % 32 == 0) describe(tile, p, index);
  __syncwarp();
}
// The same of that tile or, as a shorter sequence does not have it, of the first one drawn that there is. Its place.
__device__ __forceinline__ int describe_next(KeyTile& tile, const BackwardParams& p, int index) {
#pragma unroll 1
  for (;; index = draw(p)) {
    describe_by_warp(tile, p, index);
    if (tile.tiles < 0 || tile.first_key < tile.seqlen_k) return index;
  }
}

// By one thread, when its block draws no more: the last one leaves the counters as it found them.
__device__ __forceinline__ void stop_drawing(const BackwardParams& p) {
  __threadfence();
  if (atomicAdd(p.counters + 1, 1) == drawers() - 1) {
    p.counters[0] = 0;
    p.counters[1] = 0;
  }
}
