// What options do to the scores of the generic backward.
//
// Compile-time: KEY_MASK, SOFTCAP.
#pragma once

#include "parts/backward_sm80_tiles.cuh"

// The mask of keys of a batch, if there is one.
struct KeyMask {
  const uint8* mask;

  __device__ __forceinline__ KeyMask(const BackwardParams& p, int batch)
      : mask(KEY_MASK ? p.score.key_mask + batch * p.score.key_mask_batch : nullptr) {}
  __device__ __forceinline__ bool sees(int key) const { return !KEY_MASK || mask[key] != 0; }
};

#if SOFTCAP
__device__ __forceinline__ void cap_scores(float (&s)[kScoreRows][kScoreKeys * 2][4], const Score& score) {
#pragma unroll
  for (int x = 0; x < kScoreRows; x++)
#pragma unroll
    for (int i = 0; i < kScoreKeys * 2; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) s[x][i][j] = score.capped(s[x][i][j]);
}
#endif
