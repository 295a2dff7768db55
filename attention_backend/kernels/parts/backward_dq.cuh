// dQ = dS K of the Hopper backward for narrow heads, and the warpgroup that computes it where consumers do not.
#pragma once

#include "parts/backward_shared.cuh"
#include "parts/backward_wgmma.cuh"
#include "parts/rows_of_dq.cuh"
#include "parts/uniform.cuh"

// 64 rows, by SLABS x 64 columns: as many chunks. `ds`: dS^T of the rows, by all keys; `k`: the columns of those.
template <int SLABS>
__device__ __forceinline__ void start_dq(float (&dq)[SLABS * 32], uint32 ds, uint32 k) {
  const uint64 a = wgmma_descriptor(uniform(ds), kSlabKv), b = wgmma_descriptor(uniform(k), kSlabKv);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; i++) wgmma_transposed(dq, a + i * 128, b + i * 128, i != 0);
  wgmma_commit();
}

// Apart, so that compute-sanitizer's racecheck names it (tests/kernels/sanitize.py).
__device__ __forceinline__ void store_sums(uint32 address, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// A chunk, as sums lie in memory, to the warp that adds it; the chunk's space is free. `parity`: of the step.
__device__ __forceinline__ void hand_over_dq(const float* dq, const Shared& shared, int chunk, uint32 parity) {
  const uint32 space = shared.handover + (chunk * kChunk + first_in_chunk()) * 4;
#pragma unroll
  for (int j = 0; j < 8; j++) store_sums(space + nth_in_chunk(j) * 4, dq + j * 4);
  named_arrive(handed_over(chunk, kAdders == 2 ? parity : 0), 160);
}

#if APART
static_assert(kTileChunks == 2, "a step's dQ is one chunk");
// All of dQ, in one warpgroup.
__device__ __forceinline__ void sum_dq(const Shared& shared) {
  RingPlace<TILE_SLOTS> slot;
  RingPlace<DS_STAGES> ds;
  RingPlace<1> space;
  RingPlace<KEY_STAGES> keys;
  const bool first_thread = threadIdx.x % 128 == 0;
#pragma unroll 1
  for (;; slot.next()) {
    slot.wait_full(shared.full_tile);
    const int tiles = uniform(shared.tiles[uniform(slot.at)].tiles);
    if (tiles < 0) return;
    if (tiles > 0) keys.wait_full(shared.full_k);
#pragma unroll 1
    for (int left = tiles; left > 0; left--) {
#pragma unroll 1
      for (int chunk = 0; chunk < HANDOVER; chunk++) {
        ds.wait_full(shared.full_ds);
        fence_async_proxy();  // here, where nobody waits for it, instead of behind the stores
        float dq[32];
        start_dq<1>(dq, shared.ds + ds.at * kBytesDs, shared.k + keys.at * kBytesK);
        wgmma_wait<0>();
        if (first_thread) barrier_arrive(shared.empty_ds + 8 * ds.at);
        ds.next();
        if (left == 1 && chunk == HANDOVER - 1 && first_thread) barrier_arrive(shared.empty_k + 8 * keys.at);
        space.wait_empty(shared.free_space + 8 * chunk);
        hand_over_dq(dq, shared, chunk, space.parity);
      }
      space.next();
    }
    if (tiles > 0) keys.next();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_tile + 8 * slot.at);
  }
}
#endif
