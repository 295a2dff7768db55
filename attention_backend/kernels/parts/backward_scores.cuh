// The Hopper backward between its products: S^T becomes P^T and, with dP^T, dS^T. A thread holds two keys of the tile, 8
// apart, and two neighbouring query rows of every eight (parts/wgmma_sm90.cuh, rows and columns swapped).
#pragma once

#include "parts/backward_dropout.cuh"
#include "parts/backward_sizes.cuh"

// Where a thread's scores lie in the tile.
struct Lane {
  int key, row;

  __device__ __forceinline__ explicit Lane(int first_key)
      : key(first_key + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4), row(threadIdx.x % 4 * 2) {}
};

// Makes nothing of the scores of rows that do not see the key. `rows`: of the tile's keys.
__device__ __forceinline__ void hide_unseen(float (&s)[kRows / 2], const KeyRows* rows, int m, const Lane& lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const KeyRows seen = rows[lane.key + half * 8];
    const uint32 first = m * kRows + lane.row - seen.first;
#pragma unroll
    for (int i = 0; i < kRows / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (first + i * 8 + j >= static_cast<uint32>(seen.count)) s[i * 4 + half * 2 + j] = -kInfinity;
  }
}

// Gives `value` to rows that see nothing, whose numbers may be NaN, and to rows of padding.
__device__ __forceinline__ void hide_dead(float (&x)[kRows / 2], float value, uint32 lse2, const Lane& lane) {
#pragma unroll
  for (int i = 0; i < kRows / 8; i++) {
    const float2 l = load_shared2(lse2 + (i * 8 + lane.row) * 4);
#pragma unroll
    for (int j = 0; j < 4; j++)
      if ((j % 2 ? l.y : l.x) == kInfinity) x[i * 4 + j] = value;
  }
}

// What a product is added to: each row's term, times `factor`.
__device__ __forceinline__ void begin_with_terms(float (&x)[kRows / 2], uint32 terms, float factor, const Lane& lane) {
#pragma unroll
  for (int i = 0; i < kRows / 8; i++) {
    const float2 term = load_shared2(terms + (i * 8 + lane.row) * 4);
    x[i * 4] = x[i * 4 + 2] = term.x * factor;
    x[i * 4 + 1] = x[i * 4 + 3] = term.y * factor;
  }
  // Copied now: behind a product's start the compiler would have to wait for it.
#pragma unroll
  for (int i = 0; i < kRows / 2; i++) asm volatile("" : "+f"(x[i]));
}

// Turns a score into an exponent of two. It is divided by, so not so small that there is no number left for lse over it; a
// scale that is has exponents that are all 0, as with this one.
__device__ __forceinline__ float score_scale_log2(const BackwardParams& p) {
  return fmaxf(p.score.softmax_scale, 1e-30f) * kLog2e;
}

// A term of each of a thread's rows, where a product is not added to them.
struct Terms {
  float2 of[TERMS_FIRST ? 1 : kRows / 8];

  __device__ __forceinline__ void load(uint32 terms, const Lane& lane) {
#pragma unroll
    for (int i = 0; i < kRows / 8 && !TERMS_FIRST; i++) of[i] = load_shared2(terms + (i * 8 + lane.row) * 4);
  }
};

// Scores, as the product left them, become probabilities. `masked`: not every row sees every key; `dead`: some see none.
__device__ __forceinline__ void to_probabilities(float (&s)[kRows / 2], const KeyTile& tile, const KeyRows* rows,
                                                 const BackwardParams& p, uint32 lse2, const Terms& terms,
                                                 const Step& step, bool masked, bool dead, const Lane& lane) {
  const Score score(p.score, tile.batch, step.head);
#if SCORE_CHANGES
#pragma unroll
  for (int x = 0; x < kRows / 2; x++)
    s[x] = score(s[x], step.m * kRows + x / 4 * 8 + lane.row + x % 2, tile.first_key + lane.key + x / 2 % 2 * 8, tile.seq);
#endif
  if (masked) hide_unseen(s, rows, step.m, lane);
  if (dead) hide_dead(s, -kInfinity, lse2, lane);
#pragma unroll
  for (int x = 0; x < kRows / 2; x++) {
#if TERMS_FIRST
    s[x] = exp2_approx(s[x] * score_scale_log2(p));
#else
    s[x] = exp2_approx(fmaf(s[x], score.scale_log2, x % 2 ? -terms.of[x / 4].y : -terms.of[x / 4].x));
#endif
  }
}

// dP becomes dS, times what turns a gradient of scores into one of q k^T but for the softmax scale. Where a row does not see
// a key its probability is 0, so dP is hidden only where it may not be a number.
__device__ __forceinline__ void to_score_gradients(float (&dp)[kRows / 2], const float (&probs)[kRows / 2],
                                                   const KeyTile& tile, const BackwardParams& p, const Kept& kept,
                                                   uint32 lse2, uint32 delta, const Step& step, bool dead,
                                                   const Lane& lane) {
#if DROPOUT
#pragma unroll
  for (int x = 0; x < kRows / 2; x++) dp[x] = kept(x) ? dp[x] * p.dropout.scale : 0.f;
#endif
  if (dead) hide_dead(dp, 0.f, lse2, lane);
#if TERMS_FIRST
#pragma unroll
  for (int x = 0; x < kRows / 2; x++) dp[x] *= probs[x];
#else
  Terms terms;
  terms.load(delta, lane);
#pragma unroll
  for (int x = 0; x < kRows / 2; x++) dp[x] = probs[x] * (dp[x] - (x % 2 ? terms.of[x / 4].y : terms.of[x / 4].x));
#endif
#if SOFTCAP
  // The capped score comes back from its probability, which costs less than keeping it. Where that is 0, so is dS.
  const Score score(p.score, tile.batch, step.head);
#pragma unroll
  for (int i = 0; i < kRows / 8; i++) {
    const float2 l = load_shared2(lse2 + (i * 8 + lane.row) * 4);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int x = i * 4 + j;
      float capped = (__log2f(probs[x]) + (j % 2 ? l.y : l.x)) * kLn2;
#if ALIBI
      const int row = step.m * kRows + i * 8 + lane.row + j % 2, key = tile.first_key + lane.key + j / 2 * 8;
      capped += score.slope * fabsf(static_cast<float>(row + tile.seq.q_offset - key));
#endif
      const float tanh = capped * score.per_softcap;
      dp[x] = probs[x] > 0.f ? dp[x] * fmaxf(1.f - tanh * tanh, 0.f) : 0.f;
    }
  }
#endif
}

// As the first operand of the next product.
__device__ __forceinline__ void pack_tile(uint32 (&to)[kRows / 16][4], const float (&x)[kRows / 2]) {
#pragma unroll
  for (int i = 0; i < kRows / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) to[i][j] = pack2(x[i * 8 + j * 2], x[i * 8 + j * 2 + 1]);
}

// And back.
__device__ __forceinline__ void unpack_tile(float (&to)[kRows / 2], const uint32 (&x)[kRows / 16][4]) {
#pragma unroll
  for (int i = 0; i < kRows / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 pair = unpack2(x[i][j]);
      to[i * 8 + j * 2] = pair.x, to[i * 8 + j * 2 + 1] = pair.y;
    }
}

// Of packed probabilities, those that were dropped become 0.
__device__ __forceinline__ void keep(uint32 (&x)[kRows / 16][4], const Kept& kept) {
#if DROPOUT
#pragma unroll
  for (int i = 0; i < kRows / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int at = i * 8 + j * 2;
      x[i][j] &= (kept(at) ? 0xffffu : 0u) | (kept(at + 1) ? 0xffff0000u : 0u);
    }
#endif
}

// The same of probabilities, without those that were dropped.
__device__ __forceinline__ void pack_kept(uint32 (&to)[kRows / 16][4], const float (&x)[kRows / 2], const Kept& kept) {
#pragma unroll
  for (int i = 0; i < kRows / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int at = i * 8 + j * 2;
      to[i][j] = pack2(kept(at) ? x[at] : 0.f, kept(at + 1) ? x[at + 1] : 0.f);
    }
}

// Where a thread has 16 bytes of a warpgroup's 64 keys, rows of 128 swizzled bytes, for four 8 x 8 matrices of a warp's keys
// and their first 16 columns; and for columns 16 i further, in memory that is aligned as a row is.
__device__ __forceinline__ uint32 place_of_key() {
  const int lane = threadIdx.x % 32, r = threadIdx.x % 128 / 32 * 16 + lane % 16;
  return r * 128 + ((lane / 16 ^ r & 7) << 4);
}
__device__ __forceinline__ uint32 columns_of_key(uint32 place, int i) { return place ^ i << 5; }

// Writes dS^T: a row of 64 query rows per key, those of the next 64 a slab further.
__device__ __forceinline__ void store_ds(uint32 ds, const uint32 (&x)[kRows / 16][4], int first_key) {
  const uint32 first = ds + first_key * 128 + place_of_key();
#pragma unroll
  for (int i = 0; i < kRows / 16; i++) store_matrices(columns_of_key(first, i % 4) + i / 4 * kSlabKv, x[i]);
}

__device__ __forceinline__ void clear_row(uint32 tile, int slabs, int slab_bytes, int row) {
  for (int c = 0; c < slabs * 8; c++) store_shared4(tile + c / 8 * slab_bytes + row * 128 + c % 8 * 16, 0.f, 0.f, 0.f, 0.f);
}

// Zero times NaN is NaN: query rows that see nothing, and keys that nobody sees, become zeros where they are summed over.
// Called by all threads of a warpgroup, which has the barrier of its number; where several do so, they write the same.
__device__ __forceinline__ void clear_dead_rows(uint32 tile, int slabs, uint32 lse2) {
  const int row = threadIdx.x % 128;
  if (row < kRows && load_shared(lse2 + row * 4) == kInfinity) clear_row(tile, slabs, kSlabQ, row);
  fence_async_proxy();
  named_sync(threadIdx.x / 128, 128);
}
// Whether there are any; all warps find the same. Without, dP is a number where the mask hides it, and times P, which is 0
// there, no gradient.
__device__ __forceinline__ bool has_dead_rows(uint32 lse2) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < kRows / 32; i++) found |= load_shared(lse2 + (i * 32 + threadIdx.x % 32) * 4) == kInfinity;
  return __any_sync(~0u, found);
}
__device__ __forceinline__ bool has_dead_keys(const SeenKeyTile& tile) {
  return KEY_MASK || tile.rows[0].count == 0 || tile.rows[BLOCK_N - 1].count == 0;
}
// Of the 64 keys from `first` on, which the warpgroup may then read.
__device__ __forceinline__ void clear_dead_keys(uint32 k, uint32 v, const SeenKeyTile& tile, int first) {
  const int row = first + threadIdx.x % 64;
  if (tile.rows[row].count == 0) {
    if (threadIdx.x % 128 < 64)
      clear_row(k, kSlabsK, kSlabKv, row);
    else
      clear_row(v, kSlabsV, kSlabKv, row);
  }
  fence_async_proxy();
  named_sync(threadIdx.x / 128, 128);
}
