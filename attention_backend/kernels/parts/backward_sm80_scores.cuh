// Probabilities and dS of the generic backward: a warp's part of a tile of scores.
//
// Compile-time: KEY_MASK, SOFTCAP, ALIBI, DROPOUT, SCORE_WARPS_M, SCORE_WARPS_N.
#pragma once

#include "parts/backward_sm80_tiles.cuh"
#include "parts/warp_gemm_sm80.cuh"

__device__ __forceinline__ void store_shared(uint32 address, uint32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Whether what makes dS of dP - delta is not the probabilities.
constexpr bool kOwnWeights = SOFTCAP || DROPOUT;

// The mask of keys of a batch, if there is one.
struct KeyMask {
  const uint8* mask;

  __device__ __forceinline__ KeyMask(const BackwardParams& p, int batch)
      : mask(KEY_MASK ? p.score.key_mask + batch * p.score.key_mask_batch : nullptr) {}
  __device__ __forceinline__ bool sees(int key) const { return !KEY_MASK || mask[key] != 0; }
};

// A tile of rows of a query head, before the block's keys.
struct Tile {
  const BackwardParams& p;
  volatile Walk& walk;
  const Shared& shared;
  const Sequence& seq;
  const KeyMask& keys;
#if DROPOUT
  const DropoutParams& dropout;
#endif
  int head, m;
  uint32 stage;
};

// What of a tile's scores a warp takes, and this thread's first pair of it. A pair is two keys of a row: `x` counts tiles of
// 16 rows, `half` the thread's two rows of one, `i` its 8 keys.
struct ScorePart {
  int row, key;        // of the warp
  uint32 pair;         // of the thread, in bytes of a tile of probabilities or dS
  const float* terms;  // lse2 of the thread's first row

  __device__ __forceinline__ ScorePart(const Tile& tile, int lane, int warp)
      : row(warp / SCORE_WARPS_N * kScoreRows * 16),
        key(warp % SCORE_WARPS_N * kScoreKeys * 16),
        pair((row + lane / 4) * kPitchP + (key + lane % 4 * 2) * 2),
        terms(tile.shared.terms(tile.stage) + row + lane / 4) {}
  __device__ __forceinline__ uint32 at(int x, int half, int i) const { return pair + (x * 16 + half * 8) * kPitchP + i * 16; }
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

// Calls `put(x, half, i, probabilities, weights)` for each pair: the probabilities packed, those that dropout keeps, and
// what dP - delta is multiplied by to become dS, in float32, with the sign set where the probability was dropped.
template <class Put>
__device__ __forceinline__ void for_probabilities(float (&s)[kScoreRows][kScoreKeys * 2][4], const Tile& tile,
                                                  const ScorePart& part, int lane, Put put) {
  const BackwardParams& p = tile.p;
  const int first_row = tile.m * BLOCK_M;
  const Score score(p.score, tile.walk.batch, tile.head);
#if DROPOUT
  const Dropout dropout(tile.dropout, tile.walk.batch * p.kv_heads * p.group + tile.head);
#endif
  clear(s);
  warp_gemm<HEAD_DIM / 16, false, kPitch, false, kPitch>(
      s, Operand::by_rows(lane, tile.stage, kPitch, part.row, 0),
      Operand::by_columns(lane, tile.shared.k, kPitch, part.key, 0));

  const int row0 = first_row + part.row + lane / 4, key0 = first_key_of_block() + part.key + lane % 4 * 2;
#if SOFTCAP
  cap_scores(s, score);
#endif
  if (KEY_MASK || tile.m < tile.walk.first_whole || tile.m >= tile.walk.end_whole) {
    const Sequence again(p.sequence, tile.walk.batch);
#pragma unroll
    for (int x = 0; x < kScoreRows; x++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int low = again.low(row0 + x * 16 + half * 8);
        const uint32 count = max(again.high(row0 + x * 16 + half * 8) - low, 0);
#pragma unroll
        for (int i = 0; i < kScoreKeys * 2; i++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const int key = key0 + i * 8 + j;
            if (!(static_cast<uint32>(key - low) < count && tile.keys.sees(key))) s[x][i][half * 2 + j] = -kInfinity;
          }
      }
  }
#pragma unroll
  for (int x = 0; x < kScoreRows; x++) {
#if DROPOUT
    uint32 kept[kScoreKeys][4];
#pragma unroll
    for (int i = 0; i < kScoreKeys; i++) kept[i][0] = kept[i][1] = kept[i][2] = kept[i][3] = ~0u;
    dropout(kept, (first_row + part.row) / 16 + x, key0 / 16);
#endif
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float lse2 = part.terms[x * 16 + half * 8];
#pragma unroll
      for (int i = 0; i < kScoreKeys * 2; i++) {
        float prob[2], slope[2] = {1.f, 1.f};
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float t = s[x][i][half * 2 + j];
#if SOFTCAP
          // Of a hidden score too, which is -inf.
          slope[j] = fmaxf(1.f - t * score.per_softcap * (t * score.per_softcap), 0.f);
#elif SCORE_CHANGES
          t = score.capped(t);
#endif
#if SCORE_CHANGES
          t = score.biased(t, row0 + x * 16 + half * 8, key0 + i * 8 + j, tile.seq);
#endif
          prob[j] = exp2_approx(fmaf(t, score.scale_log2, -lse2));
        }
        uint32 word = pack2(prob[0], prob[1]);
#if DROPOUT
        const uint32 mask = kept[i / 2][i % 2 * 2 + half];
        word &= mask;
        if (!(mask & 0xffffu)) slope[0] = -slope[0];
        if (!(mask >> 16)) slope[1] = -slope[1];
#endif
        if (kOwnWeights) prob[0] *= slope[0], prob[1] *= slope[1];
        put(x, half, i, word, make_float2(prob[0], prob[1]));
      }
    }
  }
}

// dP = dO * V^T of the warp's part.
__device__ __forceinline__ void multiply_dp(float (&dp)[kScoreRows][kScoreKeys * 2][4], const Tile& tile,
                                            const ScorePart& part, int lane) {
  clear(dp);
  warp_gemm<HEAD_DIM_V / 16, false, kPitchV, false, kPitchV>(
      dp, Operand::by_rows(lane, tile.stage + kStageGrad, kPitchV, part.row, 0),
      Operand::by_columns(lane, tile.shared.v, kPitchV, part.key, 0));
}

// Stores dS, of the weights that `weights(x, half, i)` gives.
template <class Weights>
__device__ __forceinline__ void store_ds(const float (&dp)[kScoreRows][kScoreKeys * 2][4], const Tile& tile,
                                         const ScorePart& part, Weights weights) {
#pragma unroll
  for (int x = 0; x < kScoreRows; x++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float delta = part.terms[BLOCK_M + x * 16 + half * 8];
#pragma unroll
      for (int i = 0; i < kScoreKeys * 2; i++) {
        const float2 weight = weights(x, half, i);
        float ds[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float w = j ? weight.y : weight.x, gradient = dp[x][i][half * 2 + j];
#if DROPOUT
          ds[j] = fabsf(w) * fmaf(gradient, __float_as_int(w) < 0 ? 0.f : tile.dropout.scale, -delta);
#else
          ds[j] = w * (gradient - delta);
#endif
        }
        store_shared(tile.shared.ds + part.at(x, half, i), pack2(ds[0], ds[1]));
      }
    }
}
