// The products of the Hopper backward with another layout than the forward's, dQ = dS K from dS^T; waits between blocks.
#pragma once

#include "parts/wgmma_sm90.cuh"

// d = a * b (+ d) of m64 n64 k16; a lies with M contiguous, b with N.
__device__ __forceinline__ void wgmma_transposed(float (&d)[32], uint64 a, uint64 b, int accumulate) {
  // clang-format off
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_TYPES " {" LIST_4 "}, %32, %33, p, 1, 1, 1, 1;}"
               : OUT_4 : "l"(a), "l"(b), "r"(accumulate));
  // clang-format on
}

// The same of m64 n128 k16, `b` in slabs of 64 columns.
__device__ __forceinline__ void wgmma_transposed(float (&d)[64], uint64 a, uint64 b, int accumulate) {
  // clang-format off
  asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPES " {" LIST_8 "}, %64, %65, p, 1, 1, 1, 1;}"
               : OUT_8 : "l"(a), "l"(b), "r"(accumulate));
  // clang-format on
}

// As wgmma_wait, behind a branch on a condition that is the same in all threads of the block but that the compiler does not
// know: neither does what comes after move in front of the wait (it would need registers that operands still hold), nor the
// wait in front of what comes before.
template <int pending>
__device__ __forceinline__ void wgmma_wait_between(bool condition) {
  if (condition)
    asm volatile("wgmma.wait_group.sync.aligned %0;  // true" ::"n"(pending) : "memory");
  else
    asm volatile("wgmma.wait_group.sync.aligned %0;  // false" ::"n"(pending) : "memory");
}
