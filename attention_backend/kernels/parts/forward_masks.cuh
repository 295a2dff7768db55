// The Hopper forward's masks, on the scores that a thread of a consumer warpgroup holds, and on values that nobody sees.
#pragma once

#include "forward_rings.cuh"

// The query and the head of a row.
__device__ __forceinline__ int query_of(int row, const HopperParams& p) { return row / rows_packed(p); }
__device__ __forceinline__ int head_of(int row, const Tile& tile, const HopperParams& p) {
  return tile.head * rows_packed(p) + row % rows_packed(p);
}

#if KEY_MASK
// Of this thread's keys (columns 8 i + column, + 1), those that the mask shows, as bits 2 i and 2 i + 1.
struct KeyBits {
  uint32 words[(BLOCK_N / 4 + 31) / 32];

  __device__ __forceinline__ KeyBits(const uint8* mask, int first_key, int stop) {
#pragma unroll
    for (int w = 0; w < (BLOCK_N / 4 + 31) / 32; w++) words[w] = 0;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int key = first_key + i * 8 + j;
        if (key < stop && mask[key]) words[i / 16] |= 1u << (i % 16 * 2 + j);
      }
  }
  __device__ __forceinline__ bool sees(int i, int j) const { return words[i / 16] >> (i % 16 * 2 + j) & 1; }
};
#endif

// Of a thread's keys (8 i + 0, 1, from its first column on) those below `end`, as bits 2 i and 2 i + 1.
__device__ __forceinline__ uint32 keys_below(int end) {
  const int bits = max(end, 0) / 8 * 2 + min(max(end, 0) % 8, 2);
  return bits >= 32 ? ~0u : (1u << bits) - 1;
}

// Hides the keys outside the rows' intervals; `row0` is the thread's first row, `key0` the tile's first key. Bits take two
// instructions a score, to compare a key with both ends three.
template <int SCORES>
__device__ __forceinline__ void mask_scores(float (&s)[SCORES], const Tile& tile, const HopperParams& p, int row0, int key0,
                                            int column) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query = query_of(row0 + half * 8, p);
    const int low = LEFT_BOUNDS ? tile.seq.low(query) - key0 - column : 0, high = tile.seq.high(query) - key0 - column;
#pragma unroll
    for (int w = 0; w < (SCORES + 63) / 64; w++) {  // words of 32 keys
      uint32 seen = keys_below(high - w * 128);
      if (LEFT_BOUNDS) seen &= ~keys_below(low - w * 128);
#pragma unroll
      for (int bit = 0; bit < min(32, SCORES / 2 - w * 32); bit++)
        if (!(seen >> bit & 1)) s[w * 64 + bit / 2 * 4 + half * 2 + bit % 2] = -kInfinity;
    }
  }
}

#if SPARSE
// Hides what the bits of a listed block hide; a tile is the block's 128 keys or, if narrower, a part of them.
__device__ __forceinline__ void mask_listed(float (&s)[BLOCK_N / 2], const uint4* bits, int row0, int key0, int column) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint2* row = reinterpret_cast<const uint2*>(bits + (row0 + half * 8) % 128) + key0 % 128 / 64;
    uint32 words[BLOCK_N / 32];
#pragma unroll
    for (int w = 0; w < BLOCK_N / 64; w++) words[2 * w] = row[w].x, words[2 * w + 1] = row[w].y;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (!(words[i / 4] >> (i % 4 * 8 + column + j) & 1)) s[i * 4 + half * 2 + j] = -kInfinity;
  }
}
#endif

// Slots that no row of the sequence sees may hold anything, and zero times NaN is NaN: their values become zeros. Each
// warpgroup does so for itself; both write the same.
__device__ __forceinline__ void clear_values(uint32 tile_v, int key0, const Tile& tile, const HopperParams& p) {
  const int thread = threadIdx.x % 128;
  const int low = tile.held_low - key0, high = tile.held_high == kNoEnd ? BLOCK_N : tile.held_high - key0;
  for (int i = thread; i < kSlabsV * BLOCK_N * 8; i += 128) {
    const int r = i / 8 % BLOCK_N;
    bool held = r >= low && r < high;
#if KEY_MASK
    held = held && key0 + r < tile.seq.stop && p.forward.score.key_mask[tile.batch * p.forward.score.key_mask_batch + key0 + r];
#endif
    if (!held)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile_v + i / 8 / BLOCK_N * kSlabKv + r * 128 + i % 8 * 16),
                   "r"(0)
                   : "memory");
  }
  fence_async_proxy();
  named_sync(1 + kConsumers + threadIdx.x / 128, 128);
}
