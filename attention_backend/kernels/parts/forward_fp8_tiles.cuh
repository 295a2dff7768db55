// What the 8-bit forward is launched with, its tiles, and the products of two of them.
//
// Compile-time: BF16, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES.
#pragma once

#include "parts/element.cuh"
#include "parts/tma.cuh"
#include "parts/uniform.cuh"
#include "parts/wgmma_fp8_sm90.cuh"

// The same fields, in the same order, as attention_backend/kernels/flash_fwd_fp8_sm90.py: Fp8Params.
struct Fp8Params {
  const uint8* q;        // images [batch, num_heads, q_tiles][BLOCK_M * HEAD_DIM], zeros beyond the last row
  const uint8* k;        // images [batch, num_kv_heads, k_tiles][BLOCK_N * HEAD_DIM], zeros beyond the last key
  const uint8* v;        // as k, transposed
  const float* q_scale;  // [batch, num_heads, q_tiles * BLOCK_M]
  const float* k_scale;  // [batch, num_kv_heads, k_tiles]
  const float* v_scale;  // [batch, num_kv_heads, HEAD_DIM]
  element* out;          // [batch, seqlen_q, num_heads, HEAD_DIM]
  float* lse;            // [batch, num_heads, seqlen_q]
  float* parts;          // [(units - whole), kPartFloats]
  int* counters;         // zeros: 2, and one of each warp of each tile that is cut into parts
  int seqlen_q, seqlen_k;
  int num_heads, group;
  int q_tiles, k_tiles;
  int section;  // heads whose tiles are worked on together, longest first: their keys and values fit the L2 cache
  int causal;   // bottom-right aligned
  int whole, cut, splits;  // tiles that are worked on whole, those after them, and how many parts each of these is cut into
};

constexpr int kConsumers = BLOCK_M / 64;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kWidth = HEAD_DIM % 128 ? 64 : 128;  // bytes of a row in a slab of queries or keys; 32 of values
constexpr int kBytesQ = BLOCK_M * HEAD_DIM, kBytesKv = BLOCK_N * HEAD_DIM;
constexpr int kSteps = BLOCK_N / 32;  // k-steps of the second product
constexpr int kSumColumns = HEAD_DIM == 64 ? 64 : HEAD_DIM / 2;  // of the output, added up at a time
// Behind the channels of each slab of values lie channels of ones where shared memory has room (summed_by_product in
// heuristics/fp8.py): the product with them is the sum of a row's probabilities, which threads need not add up.
constexpr int kOnes = HEAD_DIM == 256 ? 0 : 8;
constexpr int kSlab = (HEAD_DIM + kOnes) * 32, kStageV = kSteps * kSlab;  // bytes
// Whether earlier sums are corrected before a tile's are added, seldom, or as they are: what is faster (docs/log.md).
constexpr bool kCorrectFirst = HEAD_DIM == 256;
constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32, kConsumerRegisters = kConsumers == 2 ? 240 : 160;
// A block has what all its threads are launched with, a multiple of 8 each: who asks for more than is given back waits for
// ever.
static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= kThreads * (65536 / kThreads / 8 * 8),
              "registers of a block");

// One contiguous copy to shared memory; its bytes count on `barrier`.
__device__ __forceinline__ void bulk_load(uint32 destination, const void* source, uint32 bytes, uint32 barrier,
                                          uint64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          destination),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Starts s = q k^T of one tile; descriptors of its queries and keys.
__device__ __forceinline__ void start_scores(float (&s)[BLOCK_N / 2], uint64 q, uint64 k) {
  fp8_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) {
    const int slab = i * 32 / kWidth, within = i * 32 % kWidth;
    Fp8Wgmma<BLOCK_N>::shared(s, q + (slab * BLOCK_M * kWidth + within) / 16, k + (slab * BLOCK_N * kWidth + within) / 16,
                              i != 0);
  }
  fp8_commit();
}

// Starts sums = p v of one tile, for the columns that begin at `v`, a descriptor.
template <int COLUMNS>
__device__ __forceinline__ void start_sums(float (&sums)[COLUMNS / 2], const uint32 (&p)[kSteps][4], uint64 v) {
  fp8_fence();
#pragma unroll
  for (int i = 0; i < kSteps; i++) Fp8Wgmma<COLUMNS>::registers(sums, p[i], v + i * kSlab / 16, i != 0);
  fp8_commit();
}
