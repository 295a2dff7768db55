// The weights that a warp of skinny_linear has under way: SLOTS steps of TILES tiles, in registers or in shared memory.
// A lane's part of a step is 16 bytes of each of 2 * TILES rows, 8 rows apart; no other lane reads them.
#pragma once

#include "parts/copy_sm80.cuh"

// 16 bytes that are read once: past L1, first to leave L2. Waited for when they are used.
__device__ __forceinline__ uint4 read_once(const element* from) {
  uint4 x;
#if __CUDA_ARCH__ >= 800
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from), "l"(evict_first_policy()));
#else
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
#endif
  return x;
}

// 16 bytes that the previous kernel may have written, and that other warps read too. Volatile: stays behind the wait.
__device__ __forceinline__ uint4 read_cached(const element* from) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}

// `bytes` and the address are multiples of 16.
__device__ __forceinline__ void prefetch_to_l2(const void* from, uint32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

#if RING
struct Weights {
  const char* own;
  uint32 address;  // of `own`
  uint64 policy;
  __device__ __forceinline__ Weights(const char* ring, int warp, int lane)
      : own(ring + 512 * 2 * TILES * SLOTS * warp + 16 * lane),
        address(shared_address(own)),
        policy(evict_first_policy()) {}
  // Asks for the lane's part of a step: rows `stride` elements apart, as many as lie in `rows`; zeros where not `inside`.
  __device__ __forceinline__ void ask(int slot, const element* from, int64 stride, int rows, bool inside) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++)
      if (8 * i < rows) copy16(address + 512 * (2 * TILES * slot + i), from + i * stride, inside, policy);
  }
  __device__ __forceinline__ void asked() { copy_commit(); }
  __device__ __forceinline__ void arrived(int) { copy_wait<SLOTS - 1>(); }
  __device__ __forceinline__ uint4 take(int slot, int i) const {
    return *reinterpret_cast<const uint4*>(own + 512 * (2 * TILES * slot + i));
  }
  __device__ __forceinline__ void finish() { copy_wait<0>(); }
};
#else
struct Weights {
  uint4 held[SLOTS][2 * TILES];
  __device__ __forceinline__ Weights(const char*, int, int) {
#pragma unroll
    for (int i = 0; i < SLOTS * 2 * TILES; i++) (&held[0][0])[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void ask(int slot, const element* from, int64 stride, int rows, bool inside) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++)
      if (8 * i < rows) held[slot][i] = inside ? read_once(from + i * stride) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void asked() {}
  __device__ __forceinline__ void arrived(int) {}
  __device__ __forceinline__ uint4 take(int slot, int i) const { return held[slot][i]; }
  __device__ __forceinline__ void finish() {}
};
#endif
