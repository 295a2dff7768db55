// dQ of the Hopper backward for narrow heads: what its consumers hand over, on its way to global memory.
#pragma once

#include "parts/backward_loads.cuh"

// Adds what the consumers hand over to dQ, in one warp: all steps, or where two warps add those of one parity.
template <int ADDER>
__device__ __forceinline__ void add_dq(const Shared& shared, const BackwardParams& p) {
  RingPlace<TILE_SLOTS> slot;
  int adder = kAdders - 1;  // whose the last step was
  const bool first_lane = threadIdx.x % 32 == 0;
#pragma unroll 1
  for (;; slot.next()) {
    slot.wait_full(shared.full_tile);
    const KeyTile& tile = shared.tiles[slot.at];
    if (tile.tiles < 0) break;
    Step step(tile);
    if (tile.tiles > 0 && first_lane) {
      await_zeros(p, tile);
      fence_bulk_copies();
    }
    __syncwarp();
#pragma unroll 1
    for (int left = tile.tiles; left > 0; left--, step.next(kTileSteps, tile)) {
      adder = kAdders - 1 - adder;
      if (adder != ADDER) continue;
      const int chunk = step.head * head_chunks(p) + tile.sums_chunk + step.m * (kRows / kChunkRows);
      float* const sums = p.sums + chunk * kSlabsK * static_cast<int64>(kChunk);
#if DETERMINISTIC
      const int rows = (step.head * p.padded_rows + tile.padded_row) / kChunkRows + step.m * (kRows / kChunkRows);
      int* const turns = p.turns + rows * static_cast<int64>(kSlabsK);
      if (first_lane) await_turn_relaxed(turns, turn_of(tile, step.m));  // mostly while the sums are computed
      __syncwarp();
      for (int w = 0; w < HANDOVER; w++) named_sync(handed_over(w, ADDER), 160);
      if (first_lane) {
        fence_async_proxy();  // here, where no consumer waits for it
        for (int w = 0; w < HANDOVER; w++) bulk_add(sums + w * kChunk, shared.handover + w * (kChunk * 4), kChunk * 4);
        bulk_wait_read();
        for (int w = 0; w < HANDOVER; w++) barrier_arrive(shared.free_space + 8 * w);
        bulk_wait_done();
        pass_turn_relaxed(turns);
      }
      __syncwarp();
#else
#pragma unroll 1
      for (int w = 0; w < HANDOVER; w++) {
        named_sync(handed_over(w, 0), 160);
        if (first_lane) {
          fence_async_proxy();  // here, where no consumer waits for it
          bulk_add(sums + w * kChunk, shared.handover + w * (kChunk * 4), kChunk * 4);
          bulk_wait_read();
          barrier_arrive(shared.free_space + 8 * w);
        }
        __syncwarp();
      }
#endif
    }
    __syncwarp();
    if (first_lane) {
      const int unit = unit_of(p, tile);
      barrier_arrive(shared.empty_tile + 8 * slot.at);
      if (FINISHES) {
        bulk_wait_done();  // whose fence orders the additions before the count
        pass_turn_relaxed(p.progress + unit);
      }
    }
  }
  if (first_lane) bulk_wait_done();
}
