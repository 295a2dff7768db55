// The weights that a warp of skinny_linear has under way: SLOTS items of GROUP tiles, in registers or in shared memory. A
// lane's part of an item is 16 bytes of each of 2 * GROUP rows, 8 rows apart; no other lane reads them.
#pragma once

#include "parts/copy_sm80.cuh"

constexpr int kItemBytes = 512 * 2 * GROUP;

// 16 bytes that are read once: past L1, first to leave L2. Zeros, and no access, unless `valid`.
__device__ __forceinline__ uint4 read_once(const element* from, bool valid) {
  uint4 x;
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n.reg .pred valid;\n"
      "setp.ne.b32 valid, %6, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@valid ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;\n}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "l"(evict_first_policy()), "r"(static_cast<int>(valid)));
#else
  asm volatile(
      "{\n.reg .pred valid;\n"
      "setp.ne.b32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "r"(static_cast<int>(valid)));
#endif
  return x;
}

// 16 bytes that the previous kernel may have written, and that other warps read too. Stays behind the wait for it.
__device__ __forceinline__ uint4 read_cached(const element* from, bool valid) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred valid;\n"
      "setp.ne.b32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@valid ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
  return x;
}

// Copies 16 bytes, or zeros where not `inside`; nothing at all unless `wanted`. (Without a cache policy: a predicated
// cp.async with one is an illegal instruction on an H200, CUDA 13.0.)
__device__ __forceinline__ void copy16_if(uint32 destination, const void* source, bool wanted, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n.reg .pred wanted;\n"
      "setp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n}" ::"r"(destination),
      "l"(source), "r"(inside ? 16 : 0), "r"(static_cast<int>(wanted))
      : "memory");
#else
  if (wanted) copy16(destination, source, inside);
#endif
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
  int at = 0;      // bytes behind both: the slot, whose number is for the other kind
  __device__ __forceinline__ Weights(const char* ring, int warp, int lane)
      : own(ring + kItemBytes * SLOTS * warp + 16 * lane), address(shared_address(own)) {}
  // Asks for the lane's part of an item: rows `stride` elements apart, as many as lie in `rows`; zeros where not `inside`.
  __device__ __forceinline__ void ask(int, const element* from, int64 stride, int rows, bool inside) {
#pragma unroll
    for (int i = 0; i < 2 * GROUP; i++)
      copy16_if(address + at + 512 * i, from + i * stride, 8 * i < rows, inside);
    copy_commit();
  }
  __device__ __forceinline__ void wait() { copy_wait<SLOTS - 1>(); }
  __device__ __forceinline__ uint4 take(int, int i) const {
    return *reinterpret_cast<const uint4*>(own + at + 512 * i);
  }
  __device__ __forceinline__ void advance() {
    at += kItemBytes;
    if (at == SLOTS * kItemBytes) at = 0;
  }
  __device__ __forceinline__ void finish() { copy_wait<0>(); }
};
#else
struct Weights {
  uint4 held[SLOTS][2 * GROUP];
  __device__ __forceinline__ Weights(const char*, int, int) {}
  __device__ __forceinline__ void ask(int slot, const element* from, int64 stride, int rows, bool inside) {
#pragma unroll
    for (int i = 0; i < 2 * GROUP; i++) held[slot][i] = read_once(from + i * stride, inside && 8 * i < rows);
  }
  __device__ __forceinline__ void wait() {}
  __device__ __forceinline__ uint4 take(int slot, int i) const { return held[slot][i]; }
  __device__ __forceinline__ void advance() {}
  __device__ __forceinline__ void finish() {}
};
#endif
