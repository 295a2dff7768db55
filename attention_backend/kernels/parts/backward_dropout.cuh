// Which probabilities the forward dropped, for scores that lie with keys as rows (parts/dropout.cuh has the rule).
#pragma once

#include "parts/backward_sizes.cuh"

// Of a thread's scores of a step, a bit each. Without dropout there is nothing in it.
struct Kept {
#if DROPOUT
  uint32 bits[kRows / 64] = {};

  __device__ __forceinline__ bool operator()(int x) const { return bits[x / 32] >> x % 32 & 1; }

  // `key_block` is key / 16 of the warp's first key, `row_block` row / 16 of the step's first row. All lanes must call.
  __device__ __forceinline__ Kept(const Dropout& dropout, uint32 threshold, int row_block, int key_block) {
    const int lane = threadIdx.x % 32, odd = lane / 4 % 2;
    // A call serves the lanes of an even and of the next odd row, which are keys here: each makes one block of two.
#pragma unroll
    for (int i = 0; i < kRows / 16; i += 2) {
      const uint4 made = dropout.bytes((row_block + i + odd) * 4 + lane % 4, key_block * 4 + lane / 8);
      const uint32 words[4] = {made.x, made.y, made.z, made.w};
      uint32 mine = 0, other = 0;  // 8 bits each: scores 0 to 7 of the block, as this lane and as its partner hold them
#pragma unroll
      for (int w = 0; w < 4; w++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int x = w / 2 * 4 + half * 2 + w % 2;
          const uint32 pair = words[w] >> 16 * half;
          const uint32 even_kept = (pair & 255) >= threshold, odd_kept = (pair >> 8 & 255) >= threshold;
          mine |= (odd ? odd_kept : even_kept) << x;
          other |= (odd ? even_kept : odd_kept) << x;
        }
      const uint32 given = __shfl_xor_sync(~0u, other, 4);
      bits[i / 4] |= ((odd ? given : mine) | (odd ? mine : given) << 8) << i % 4 * 8;
    }
  }
#else
  __device__ __forceinline__ bool operator()(int) const { return true; }
#endif
};
