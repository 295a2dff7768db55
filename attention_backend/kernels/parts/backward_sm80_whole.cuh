// A step of the generic backward in which every warp has a part of each product.
#pragma once

#include "parts/backward_sm80_scores.cuh"

struct KeySums {
  float dk[kKeys][kWidth * 2][4], dv[kKeys][kWidthV * 2][4];

  __device__ __forceinline__ KeySums() {
    clear(dk);
    clear(dv);
  }

  // Stores dS of the tile, and adds the tile to dK and dV. Ends behind the barrier after which dS is there.
  __device__ __forceinline__ void add(const Tile& tile) {
    if (NUM_WARPS == kScoreWarps || threadIdx.x < kScoreWarps * 32) {
      const uint32 thread = thread_index();
      const int lane = thread % 32;
      const ScorePart part(tile, lane, thread / 32);
      float s[kScoreRows][kScoreKeys * 2][4], dp[kScoreRows][kScoreKeys * 2][4];
      for_probabilities(s, tile, part, lane, [&](int x, int half, int i, uint32 probabilities, float2 weights) {
        s[x][i][half * 2] = weights.x;
        s[x][i][half * 2 + 1] = weights.y;
        store_shared(tile.shared.probs + part.at(x, half, i), probabilities);
      });
      multiply_dp(dp, tile, part, lane);
      store_ds(dp, tile, part,
               [&](int x, int half, int i) { return make_float2(s[x][i][half * 2], s[x][i][half * 2 + 1]); });
    }
    __syncthreads();  // probabilities and dS are there

    const uint32 thread = thread_index();
    const int lane = thread % 32, warp = thread / 32;
    const int key = warp / kWidthWarps * kKeys * 16, width_part = warp % kWidthWarps;
    warp_gemm<BLOCK_M / 16, true, kPitchP, true, kPitchV>(
        dv, Operand::by_columns(lane, tile.shared.probs, kPitchP, 0, key),
        Operand::by_rows(lane, tile.stage + kStageGrad, kPitchV, 0, width_part * kWidthV * 16));
    warp_gemm<BLOCK_M / 16, true, kPitchP, true, kPitch>(
        dk, Operand::by_columns(lane, tile.shared.ds, kPitchP, 0, key),
        Operand::by_rows(lane, tile.stage, kPitch, 0, width_part * kWidth * 16));
  }

  // Calls `put(sum, is_dk, first key, first column)` for the warp's parts of both.
  template <class Put>
  __device__ __forceinline__ void for_both(Put put) const {
    const int warp = thread_index() / 32, key = warp / kWidthWarps * kKeys * 16, width_part = warp % kWidthWarps;
    put(dk, true, key, width_part * kWidth * 16);
    put(dv, false, key, width_part * kWidthV * 16);
  }
};
