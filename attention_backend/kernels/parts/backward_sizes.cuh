// Sizes of the Hopper backward's tiles in shared memory, and places in rings of them. Included by the backward kernels for
// Hopper, whose macros it needs.
#pragma once

#include "parts/bulk_copies.cuh"
#include "parts/backward_tiles.cuh"

constexpr int kConsumers = 2;  // warpgroups
constexpr int kSlabsK = (HEAD_DIM + 63) / 64, kSlabsV = (HEAD_DIM_V + 63) / 64;  // of 64 columns, 128 swizzled bytes a row
constexpr int kSlabQ = BLOCK_M * 128, kSlabKv = BLOCK_N * 128;
constexpr int kBytesK = kSlabsK * kSlabKv, kBytesV = kSlabsV * kSlabKv;
constexpr int kBytesQ = kSlabsK * kSlabQ, kBytesO = kSlabsV * kSlabQ;
constexpr int kBytesDs = BLOCK_N * (APART ? kRows : BLOCK_M) * 2, kBytesTerms = BLOCK_M * 4;
constexpr int kChunk = 4096;  // floats of 64 x 64 of dQ

// A place in a ring of SIZE, and the parity of its barriers' phase.
template <int SIZE>
struct RingPlace {
  int at = 0;
  uint32 parity = 0;

  __device__ __forceinline__ void next() {
    if (++at == SIZE) {
      at = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void wait_full(uint32 barriers) const { barrier_wait(barriers + 8 * at, parity); }
  __device__ __forceinline__ void wait_empty(uint32 barriers) const { barrier_wait(barriers + 8 * at, parity ^ 1); }
};
