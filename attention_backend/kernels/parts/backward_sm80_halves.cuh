// A step of the generic backward in two halves of the block: the first has the probabilities and dV, the second dP, dS and
// dK. A warp's part of each product is twice as large, so less is read from shared memory for it, which is what bounds the
// kernel at wide heads. The second half takes the probabilities in 16 bits, as the first has left them. dQ is shared out
// among all warps.
#pragma once

#include "parts/backward_sm80_scores.cuh"
#include "parts/named_barriers.cuh"

static_assert(kScoreWarps == kSumWarps && HEAD_DIM == HEAD_DIM_V, "halves take equal parts");

// Named barriers: a half tells the other, or meets itself.
constexpr int kProbabilitiesStored = 1, kDsStored = 2, kProbabilitiesWhole = 3, kDsWhole = 4;

__device__ __forceinline__ float2 load_pair(uint32 address) {
  uint32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return unpack2(x);
}

struct KeySums {
  float sum[kKeys][kWidth * 2][4];  // of dV in the first half, of dK in the second

  __device__ __forceinline__ KeySums() { clear(sum); }

  // Stores dS of the tile, and adds the tile to dK and dV. Ends where dS is there.
  __device__ __forceinline__ void add(const Tile& tile) {
    // Weights of their own wait for dP where dS will lie.
    const uint32 thread = thread_index();
    const int lane = thread % 32, warp = thread / 32 % kSumWarps;
    const ScorePart part(tile, lane, warp);
    if (thread < kThreads / 2) {
      float s[kScoreRows][kScoreKeys * 2][4];
      for_probabilities(s, tile, part, lane, [&](int x, int half, int i, uint32 probabilities, float2 weights) {
        if (kOwnWeights) store_shared(tile.shared.ds + part.at(x, half, i), pack2(weights.x, weights.y));
        store_shared(tile.shared.probs + part.at(x, half, i), probabilities);
      });
      named_arrive(kProbabilitiesStored, kThreads);
      named_sync(kProbabilitiesWhole, kThreads / 2);
      add_rows(lane, warp, tile.shared.probs, tile.stage + kStageGrad);
      named_sync(kDsStored, kThreads);
    } else {
      float dp[kScoreRows][kScoreKeys * 2][4];
      multiply_dp(dp, tile, part, lane);
      named_sync(kProbabilitiesStored, kThreads);
      const uint32 weights = kOwnWeights ? tile.shared.ds : tile.shared.probs;
      store_ds(dp, tile, part, [&](int x, int half, int i) { return load_pair(weights + part.at(x, half, i)); });
      named_arrive(kDsStored, kThreads);
      named_sync(kDsWhole, kThreads / 2);
      add_rows(lane, warp, tile.shared.ds, tile.stage);
    }
  }

  // Calls `put(sum, is_dk, first key, first column)` for the warp's part of one of both.
  template <class Put>
  __device__ __forceinline__ void for_both(Put put) const {
    const uint32 thread = thread_index();
    const int warp = thread / 32 % kSumWarps;
    put(sum, thread >= kThreads / 2, warp / kWidthWarps * kKeys * 16, warp % kWidthWarps * kWidth * 16);
  }

 private:
  // Read again here, the thread's index costs 4 % at head_dim 128: ptxas orders what comes before it otherwise.
  __device__ __forceinline__ void add_rows(int lane, int warp, uint32 scores, uint32 rows) {
    warp_gemm<BLOCK_M / 16, true, kPitchP, true, kPitch>(
        sum, Operand::by_columns(lane, scores, kPitchP, 0, warp / kWidthWarps * kKeys * 16),
        Operand::by_rows(lane, rows, kPitch, 0, warp % kWidthWarps * kWidth * 16));
  }
};
