// Dropout: which probabilities become 0 is a function of (sequence, query head, row, key) and a seed, so that any order
// of tiles finds the same ones. Philox4x32-7 (Salmon et al., SC11); the rule in Python: reference/dropout.py.
//
// One call gives a byte to each of 16 scores: those of the 16x16 block (row / 16, key / 16) in rows {2a, 2a + 1, 2a + 8,
// 2a + 9} and keys {2c, 2c + 1, 2c + 8, 2c + 9}. Its words are the rows, their bytes the keys, in that order. Two threads
// hold these scores as a fragment of mma or wgmma (rows g and g + 8, lane = 4 * g + c), so of two blocks each of the two
// computes one, and they swap halves.
#pragma once

#include "parts/element.cuh"

// The same fields, in the same order, as attention_backend/kernels/dropout_params.py: DropoutParams.
struct DropoutParams {
  const int64* seed;  // [2]: seed, offset
  uint32 threshold;   // 1..255: a score is dropped iff its byte is below
  float scale;        // 256 / (256 - threshold)
};

struct Dropout {
  float scale;  // what the kept ones, or the sum of their values, are multiplied by

  // `plane` is batch * num_heads + head.
  __device__ __forceinline__ Dropout(const DropoutParams& p, int plane) : scale(p.scale), plane(plane) {
    const uint64 seed = p.seed[0];
    const uint64 offset_64 = p.seed[1];
    key0 = static_cast<uint32>(seed);
    key1 = static_cast<uint32>(seed >> 32) ^ static_cast<uint32>(offset_64 >> 32);
    offset = static_cast<uint32>(offset_64);
    any_of_both = p.threshold > 128 ? 0u : ~0u;
    addend = ((p.threshold > 128 ? 256u : 128u) - p.threshold) * 0x01010101u;
  }

  // Both in quarters of a 16x16 block: row / 16 * 4 + a, key / 16 * 4 + c.
  __device__ __forceinline__ uint4 bytes(int row_block4, int key_block4) const {
    uint4 x = make_uint4(row_block4, key_block4, plane, offset);
    uint32 k0 = key0, k1 = key1;
#pragma unroll
    for (int round = 0; round < 7; round++) {
      const uint64 a = static_cast<uint64>(0xD2511F53u) * x.x, b = static_cast<uint64>(0xCD9E8D57u) * x.z;
      x = make_uint4(static_cast<uint32>(b >> 32) ^ x.y ^ k0, static_cast<uint32>(b),
                     static_cast<uint32>(a >> 32) ^ x.w ^ k1, static_cast<uint32>(a));
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return x;
  }

  // Zeroes the dropped ones of a warp's 16 rows x 16 * BLOCKS keys, packed as the A fragments of the next product: per
  // block (g, 2c..), (g + 8, 2c..), (g, 2c + 8..), (g + 8, 2c + 8..). `row_block` is row / 16 of row 0, `key_block`
  // key / 16 of the first block's key 0. All lanes must call.
  template <int BLOCKS>
  __device__ __forceinline__ void operator()(uint32 (&probs)[BLOCKS][4], int row_block, int key_block) const {
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 4;
#pragma unroll
    for (int i = 0; i + 1 < BLOCKS; i += 2) {
      const uint4 x = bytes(row_block * 4 + lane / 8, (key_block + i + odd) * 4 + lane % 4);
      // Words x and z belong to an even g, y and w to an odd one.
      const uint32 low = odd ? x.y : x.x, high = odd ? x.w : x.z;
      const uint32 other_low = __shfl_xor_sync(~0u, odd ? x.x : x.y, 4);
      const uint32 other_high = __shfl_xor_sync(~0u, odd ? x.z : x.w, 4);
      drop(probs[i], odd ? other_low : low, odd ? other_high : high);
      drop(probs[i + 1], odd ? low : other_low, odd ? high : other_high);
    }
    if (BLOCKS % 2) {
      const uint4 x = bytes(row_block * 4 + lane / 8, (key_block + BLOCKS - 1) * 4 + lane % 4);
      drop(probs[BLOCKS - 1], odd ? x.y : x.x, odd ? x.w : x.z);
    }
  }

 private:
  uint32 key0, key1, offset;
  uint32 addend, any_of_both;
  int plane;

  // The top bit of every byte: whether it is at least the threshold t. The lower seven bits plus 128 - t (256 - t for a
  // t above 128) carry into it; with the byte's own top bit one of both is enough, above 128 it takes both.
  __device__ __forceinline__ uint32 kept(uint32 word) const {
    const uint32 carried = (word & 0x7f7f7f7fu) + addend;
    return (carried & word) | ((carried | word) & any_of_both);
  }

  // Four bytes of ones or zeros after the top bits of the bytes that the selector names (PTX prmt, sign replication).
  static __device__ __forceinline__ uint32 spread(uint32 x, uint32 selector) {
    uint32 r;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "r"(selector));
    return r;
  }

  __device__ __forceinline__ void drop(uint32 (&p)[4], uint32 word_low, uint32 word_high) const {
    const uint32 low = kept(word_low), high = kept(word_high);
    p[0] &= spread(low, 0x9988);
    p[1] &= spread(high, 0x9988);
    p[2] &= spread(low, 0xbbaa);
    p[3] &= spread(high, 0xbbaa);
  }
};
