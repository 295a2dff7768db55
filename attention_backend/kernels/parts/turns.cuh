// What several blocks add to one place in device memory: quickly, or in turns where the sum has to repeat bitwise.
#pragma once

#include "parts/element.cuh"

// The turns are a count in device memory that begins at 0. One thread waits until it is `mine`; a barrier then lets the
// other threads go.
__device__ __forceinline__ bool is_turn(const int* turn, int mine) {
  int now;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  return now == mine;
}
__device__ __forceinline__ void await_turn(const int* turn, int mine) {
  while (!is_turn(turn, mine)) {
  }
}

// The same until it is `least` or more.
__device__ __forceinline__ void await_turns(const int* turn, int least) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  } while (now < least);
}

// Lets the next block go: by one thread, after a barrier behind all that was added.
__device__ __forceinline__ void pass_turn(int* turn) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}

// The same of additions that the bulk copy engine has completed, which are atomic at the L2: there is nothing left for a
// fence to wait for but what else the SM has under way, which took longer than the additions.
__device__ __forceinline__ void await_turn_relaxed(const int* turn, int mine) {
  int now;
  do {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  } while (now != mine);
}
__device__ __forceinline__ void pass_turn_relaxed(int* turn) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Adds four floats at a 16-byte aligned address; each of them is added atomically.
__device__ __forceinline__ void add4(float* address, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
#endif
