// The weights that a warp of skinny_linear has under way: SLOTS items of GROUP tiles of 16 rows.
//
// RING = 0, in registers, and 1, in shared memory: an item is a step, 64 bytes of each row. A lane asks for 16 bytes of
// rows that are 8 apart, and no other lane reads them. RING = 2, in shared memory: an item is a line, 128 bytes of each
// row, eight lanes a row: whole lines of L2, for a meeting of the warp before and after it is read.
#pragma once

#include "parts/copy_sm80.cuh"

constexpr int kItemSteps = RING == 2 ? 2 : 1;
constexpr int kRowsApart = RING == 2 ? 4 : 8;  // of a lane's copies
constexpr int kCopies = 16 * GROUP / kRowsApart;
constexpr int kItemBytes = 512 * kCopies;

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
  uint32 address;  // where the lane's copies go
  int at = 0;      // bytes behind both: the slot, whose number is for registers
  // Steps are [16 rows][64 bytes]; the second of a line has its rows exchanged in pairs, so that no banks collide when
  // a row of both is written.
  __device__ __forceinline__ Weights(const char* ring, int warp, int lane)
      : own(ring + kItemBytes * SLOTS * warp + 16 * lane), address(shared_address(own)) {
#if RING == 2
    const int second = lane / 4 % 2;
    address += 1024 * second + 64 * (lane / 8 ^ second) + 16 * (lane % 4) - 16 * lane;
#endif
  }
  // Asks for the lane's part of an item: rows `stride` elements apart, as many as lie in `rows`; zeros unless `inside`.
  __device__ __forceinline__ void ask(int, const element* from, int64 stride, int rows, bool inside) {
#pragma unroll
    for (int i = 0; i < kCopies; i++) {
      const int row = kRowsApart * i, to = 1024 * kItemSteps * (row / 16) + 64 * (row % 16);
      copy16_if(address + at + to, from + i * stride, row < rows, inside);
    }
    copy_commit();
  }
  // The oldest item is there.
  __device__ __forceinline__ void wait() {
    copy_wait<SLOTS - 1>();
    if (RING == 2) __syncwarp();
  }
  // The lane's 16 bytes in a step of the item, of one of a tile's halves of 8 rows.
  __device__ __forceinline__ uint4 take(int, int step, int tile, int half) const {
    const char* from = step ? own + 1024 + ((threadIdx.x & 4) ? -64 : 64) : own;
    return *reinterpret_cast<const uint4*>(from + at + 1024 * kItemSteps * tile + 512 * half);
  }
  // The item is read.
  __device__ __forceinline__ void release() {
    if (RING == 2) __syncwarp();
  }
  __device__ __forceinline__ void advance() {
    at += kItemBytes;
    if (at == SLOTS * kItemBytes) at = 0;
  }
  __device__ __forceinline__ void finish() { copy_wait<0>(); }
};
#else
struct Weights {
  uint4 held[SLOTS][kCopies];
  __device__ __forceinline__ Weights(const char*, int, int) {}
  __device__ __forceinline__ void ask(int slot, const element* from, int64 stride, int rows, bool inside) {
#pragma unroll
    for (int i = 0; i < kCopies; i++) held[slot][i] = read_once(from + i * stride, inside && 8 * i < rows);
  }
  __device__ __forceinline__ void wait() {}
  __device__ __forceinline__ uint4 take(int slot, int, int tile, int half) const { return held[slot][2 * tile + half]; }
  __device__ __forceinline__ void release() {}
  __device__ __forceinline__ void advance() {}
  __device__ __forceinline__ void finish() {}
};
#endif
