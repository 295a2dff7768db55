// threadIdx.x and blockIdx, read again at each call. For kernels that are short of registers: what follows from the
// built-in variables the compiler keeps over a loop, what follows from these it computes again.
#pragma once

#define FRESH_INDEX(name, special)                      \
  __device__ __forceinline__ unsigned name() {          \
    unsigned x;                                         \
    asm volatile("mov.u32 %0, %%" special ";" : "=r"(x)); \
    return x;                                           \
  }

FRESH_INDEX(thread_index, "tid.x")
FRESH_INDEX(block_x, "ctaid.x")
FRESH_INDEX(block_y, "ctaid.y")
FRESH_INDEX(block_z, "ctaid.z")

#undef FRESH_INDEX
