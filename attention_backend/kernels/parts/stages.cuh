// Rings of stages in shared memory, of a power of two, whose elements are counted from the start of the kernel on; each stage
// has a barrier for full and one for empty.
#pragma once

#include "parts/tma.cuh"

// Place of element n of a ring of SIZE: its stage (times 8: of its barrier), and the parity of that barrier's phase.
template <int SIZE>
__device__ __forceinline__ int stage(int n) {
  static_assert((SIZE & (SIZE - 1)) == 0, "rings are of a power of two");
  return n & (SIZE - 1);
}
template <int SIZE>
__device__ __forceinline__ uint32 parity(int n) {
  return static_cast<uint32>(n) / SIZE & 1;
}
template <int SIZE>
__device__ __forceinline__ void wait_full(uint32 barriers, int n) {
  barrier_wait(barriers + 8 * stage<SIZE>(n), parity<SIZE>(n));
}
template <int SIZE>
__device__ __forceinline__ void wait_empty(uint32 barriers, int n) {  // the first round finds all stages empty
  barrier_wait(barriers + 8 * stage<SIZE>(n), parity<SIZE>(n) ^ 1);
}
