// The running softmax of the 8-bit forward's rows, and their probabilities as bytes.
#pragma once

#include "parts/e4m3.cuh"
#include "parts/forward_fp8_tiles.cuh"

// A probability is at most 2^(kOffset + kThreshold) = 430: below e4m3's 448, and normal down to 2^-13 of the largest.
constexpr float kOffset = 7.f, kThreshold = 1.75f, kNothingSeen = 3.402823466e38f;

// A probability is 2^(score * scale + shift): shift is kOffset less the row's stabiliser. Before a row has seen a key it is
// the largest number: any score then is too large for it, and a masked one, -infinity, is still nothing.
struct RowState {
  float shift[2] = {kNothingSeen, kNothingSeen}, sum[2] = {};
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

// Has row `half` see its first `visible[half]` keys of a tile (counted from this thread's first column) and no others.
__device__ __forceinline__ void mask_tile(float (&s)[BLOCK_N / 2], const int (&visible)[2]) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; i++)
    if (i / 4 * 8 + i % 2 >= visible[i / 2 % 2]) s[i] = -kInfinity;
}

// Stabilisers follow the largest scores of a tile; `correction` is what earlier sums are to be multiplied by.
__device__ __forceinline__ void follow(float (&correction)[2], RowState& row, const float (&s)[BLOCK_N / 2],
                                       const float (&scale)[2]) {
  float largest[2];
  largest_scores(largest, s);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float exponent = fmaf(largest[half], scale[half], row.shift[half]);
    const bool higher = exponent > kOffset + kThreshold;
    correction[half] = higher ? exp2_approx(kOffset - exponent) : 1.f;
    if (higher) row.shift[half] = fmaf(-largest[half], scale[half], kOffset);
  }
}

// Scores -> probabilities as bytes, in the order of the next product's operand; their sums where the product has none.
__device__ __forceinline__ void probabilities(uint32 (&p)[kSteps][4], float (&sum)[2], const float (&s)[BLOCK_N / 2],
                                              const RowState& row, const float (&scale)[2]) {
  sum[0] = sum[1] = 0.f;
#pragma unroll
  for (int i = 0; i < kSteps; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int at = i * 16 + j / 2 * 8 + j % 2 * 2;
      float x[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        x[k] = exp2_approx(fmaf(s[at + k / 2 * 4 + k % 2], scale[j % 2], row.shift[j % 2]));
        if (!kOnes) sum[j % 2] += x[k];
      }
      p[i][j] = pack_e4m3(x[0], x[1], x[2], x[3]);
    }
}
