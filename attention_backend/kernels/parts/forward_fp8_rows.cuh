// The running softmax of the 8-bit forward's rows, and their probabilities as bytes.
#pragma once

#include "parts/e4m3.cuh"
#include "parts/forward_fp8_tiles.cuh"

// A probability is at most 2^(kOffset + kThreshold) = 430: below e4m3's 448, and normal down to 2^-13 of the largest.
constexpr float kOffset = 7.f, kThreshold = 1.75f;

struct RowState {
  float max[2], sum[2];  // the stabiliser (log2), the sum of 2^(exponent + kOffset)
  float correction[2];   // what earlier sums are multiplied by
};

// The largest score of each of the thread's rows.
__device__ __forceinline__ void largest_scores(float (&largest)[2], const float (&s)[BLOCK_N / 2]) {
  // One instruction takes three integers. As integers, floats without a sign are in order and those with one are
  // negative: a result that is not negative is the largest.
  int top[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int x = max(__float_as_int(s[half * 2]), __float_as_int(s[half * 2 + 1]));
#pragma unroll
    for (int i = 1; i < BLOCK_N / 8; i++)
      x = max(max(x, __float_as_int(s[i * 4 + half * 2])), __float_as_int(s[i * 4 + half * 2 + 1]));
    x = max(x, __shfl_xor_sync(~0u, x, 1));
    top[half] = max(x, __shfl_xor_sync(~0u, x, 2));
    largest[half] = __int_as_float(top[half]);
  }
  if (!__any_sync(~0u, min(top[0], top[1]) < 0)) return;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float x = fmaxf(s[half * 2], s[half * 2 + 1]);
#pragma unroll
    for (int i = 1; i < BLOCK_N / 8; i++) x = fmaxf(x, fmaxf(s[i * 4 + half * 2], s[i * 4 + half * 2 + 1]));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    largest[half] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  }
}

// Turns scores into probabilities 2^(exponent + kOffset). Row `half` sees its first `visible[half]` keys of the tile
// (counted from this thread's first column).
template <bool MASKED>
__device__ __forceinline__ void softmax_tile(float (&s)[BLOCK_N / 2], RowState& row, const float (&scale)[2],
                                             const int (&visible)[2]) {
  if (MASKED) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++)
      if (i / 4 * 8 + i % 2 >= visible[i / 2 % 2]) s[i] = -kInfinity;
  }
  float largest[2];
  largest_scores(largest, s);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float top = largest[half] * scale[half];
    const bool higher = top > row.max[half] + kThreshold;
    row.correction[half] = higher ? exp2_approx(row.max[half] - top) : 1.f;
    if (higher) row.max[half] = top;
    const float shift = kOffset - (MASKED && row.max[half] == -kInfinity ? 0.f : row.max[half]);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float& x = s[i * 4 + half * 2 + j];
        x = exp2_approx(fmaf(x, scale[half], shift));
        sum += x;
      }
    row.sum[half] = row.sum[half] * row.correction[half] + sum;
  }
}

__device__ __forceinline__ void pack_tile(uint32 (&p)[kSteps][4], const float (&s)[BLOCK_N / 2]) {
#pragma unroll
  for (int i = 0; i < kSteps; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int at = i * 16 + j / 2 * 8 + j % 2 * 2;
      p[i][j] = pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
    }
}
