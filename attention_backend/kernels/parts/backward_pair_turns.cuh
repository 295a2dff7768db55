// Turns at tiles of rows of dQ, in the deterministic mode of the Hopper backward for wide heads.
#pragma once

#include "parts/backward_pair_shared.cuh"

#if DETERMINISTIC
// Whether a barrier's phase of this parity is over.
__device__ __forceinline__ bool barrier_test(uint32 barrier, uint32 parity) {
  uint32 done;
  asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

// Takes turns at tiles of rows of dQ for the warpgroups, one lane each, so that they wait for no memory: a lane never waits
// either, but looks again for whichever comes first, its next turn or the end of the one that its warpgroup has.
template <int RANK>
__device__ __forceinline__ void take_turns(const Shared& shared, const BackwardParams& p) {
  constexpr int kSlabs = RANK == 0 ? kSlabsHere : kSlabsThere;
  const int group = threadIdx.x % 32;
  if (group >= kSlabs) return;
  RingPlace<TILE_SLOTS> slot;
  uint32 parity = 0;  // of the turn that begins next
  int turn = -1;      // the warpgroup's: an index of turns, as the next one
#pragma unroll 1
  for (;; slot.next()) {
    slot.wait_full(shared.full_tile);
    const KeyTile& tile = shared.tiles[slot.at];
    int left = tile.tiles;
    if (left < 0) return;
    Step step(tile);
#pragma unroll 1
    while (left > 0 || turn >= 0) {
      // Found again each time: a producer has few registers.
      const int rows = step.head * static_cast<int>(p.padded_rows / kRows) + tile.padded_row / kRows;
      const int next = (rows + step.m) * kSlabsK + RANK * kSlabsHere + group;
      const bool begins = left > 0 && is_turn(p.turns + next, turn_of(tile, step.m));
      int over = -1;
      if (turn >= 0 && barrier_test(shared.turn_ends + 8 * group, parity ^ 1)) {
        over = turn;
        turn = -1;
      }
      if (begins && turn < 0) {
        barrier_arrive(shared.turn_begins + 8 * group);
        turn = next;
        parity ^= 1;
        left--;
        step.next(kTileSteps, tile);
      }
      if (over >= 0) pass_turn(p.turns + over);
    }
    __syncwarp((1 << kSlabs) - 1);
    if (group == 0) barrier_arrive(shared.empty_tile + 8 * slot.at);
  }
}
#endif
