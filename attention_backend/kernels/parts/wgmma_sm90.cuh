// wgmma (Hopper's warpgroup matrix instruction, PTX ISA 9.7.15): m64 x N x k16, 16-bit operands, float32 accumulators.
//
// The accumulator of thread t (warp w = t / 32 of the warpgroup, lane l = t % 32): d[4 j + 0, 1] is row 16 w + l / 4,
// columns 8 j + 2 (l % 4) and the next; d[4 j + 2, 3] the same columns of row + 8. The first operand from registers is
// laid out like an mma.sync A fragment, so packed accumulators of one product feed the next without a shuffle.
#pragma once

#include "parts/element.cuh"

#if BF16 && !FP8_PAGES  // those are multiplied as fp16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` committed groups of this warpgroup are still under way.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Waits for all committed groups, behind a branch on a condition that is the same in all threads of the block but that the
// compiler does not know. ptxas moves a plain wait up to the start of its basic block, in front of arithmetic that was
// meant to run meanwhile; past a branch it does not.
__device__ __forceinline__ void wgmma_wait_behind(bool condition) {
  if (condition)
    asm volatile("wgmma.wait_group.sync.aligned 0;  // true" ::: "memory");  // two texts: equal ones would be merged
  else
    asm volatile("wgmma.wait_group.sync.aligned 0;  // false" ::: "memory");
}

// Shared memory operand in 128-byte swizzle. `leading` is the stride in bytes between 64-column slabs where they run
// along N (transposed operand), and is ignored otherwise; eight rows are 1,024 bytes apart.
__device__ __forceinline__ uint64 wgmma_descriptor(uint32 address, uint32 leading) {
  return static_cast<uint64>((address & 0x3FFFF) >> 4) | static_cast<uint64>((leading & 0x3FFFF) >> 4) << 16 |
         static_cast<uint64>(1024 >> 4) << 32 | 1ull << 62;
}

// Wgmma<N>::shared: d = a * b (+ d), both operands in shared memory, K-major.
// Wgmma<N>::registers: d = a * b (+ d), a in registers, b in shared memory with N contiguous (transposed).
// Wgmma<N>::both: the same, a in shared memory, K-major.
// Wgmma<N>::mixed: as shared, a in registers.
template <int N>
struct Wgmma;

// The instruction wants every accumulator register named: N / 2 of them, here in blocks of eight.
// clang-format off
#define NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                 "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define LIST_1 NAMES_0
#define OUT_1 EIGHT(0)
#define LIST_2 LIST_1 ", " NAMES_1
#define OUT_2 OUT_1, EIGHT(8)
#define LIST_3 LIST_2 ", " NAMES_2
#define OUT_3 OUT_2, EIGHT(16)
#define LIST_4 LIST_3 ", " NAMES_3
#define OUT_4 OUT_3, EIGHT(24)
#define LIST_5 LIST_4 ", " NAMES_4
#define OUT_5 OUT_4, EIGHT(32)
#define LIST_6 LIST_5 ", " NAMES_5
#define OUT_6 OUT_5, EIGHT(40)
#define LIST_7 LIST_6 ", " NAMES_6
#define OUT_7 OUT_6, EIGHT(48)
#define LIST_8 LIST_7 ", " NAMES_7
#define OUT_8 OUT_7, EIGHT(56)
#define LIST_9 LIST_8 ", " NAMES_8
#define OUT_9 OUT_8, EIGHT(64)
#define LIST_10 LIST_9 ", " NAMES_9
#define OUT_10 OUT_9, EIGHT(72)
#define LIST_11 LIST_10 ", " NAMES_10
#define OUT_11 OUT_10, EIGHT(80)
#define LIST_12 LIST_11 ", " NAMES_11
#define OUT_12 OUT_11, EIGHT(88)
#define LIST_13 LIST_12 ", " NAMES_12
#define OUT_13 OUT_12, EIGHT(96)
#define LIST_14 LIST_13 ", " NAMES_13
#define OUT_14 OUT_13, EIGHT(104)
#define LIST_15 LIST_14 ", " NAMES_14
#define OUT_15 OUT_14, EIGHT(112)
#define LIST_16 LIST_15 ", " NAMES_15
#define OUT_16 OUT_15, EIGHT(120)

// X0 to X5 name the operands behind the accumulators.
#define WGMMA_SHAPE(N, LIST, OUT, X0, X1, X2, X3, X4, X5)                                                      \
  template <>                                                                                                  \
  struct Wgmma<N> {                                                                                            \
    static __device__ __forceinline__ void shared(float (&d)[N / 2], uint64 a, uint64 b, int accumulate) {     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " X2 ", 0;\n"                                                \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPES " {" LIST "}, " X0 ", " X1    \
                   ", p, 1, 1, 0, 0;}"                                                                         \
                   : OUT : "l"(a), "l"(b), "r"(accumulate));                                                   \
    }                                                                                                          \
    static __device__ __forceinline__ void registers(float (&d)[N / 2], const uint32 (&a)[4], uint64 b,        \
                                                     int accumulate = 1) {                                     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " X5 ", 0;\n"                                                \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPES " {" LIST "}, {" X0 ", " X1   \
                   ", " X2 ", " X3 "}, " X4 ", p, 1, 1, 1;}"                                                   \
                   : OUT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));               \
    }                                                                                                          \
    static __device__ __forceinline__ void both(float (&d)[N / 2], uint64 a, uint64 b) {                       \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPES " {" LIST "}, " X0 ", " X1    \
                   ", 1, 1, 1, 0, 1;"                                                                          \
                   : OUT : "l"(a), "l"(b));                                                                    \
    }                                                                                                          \
    static __device__ __forceinline__ void mixed(float (&d)[N / 2], const uint32 (&a)[4], uint64 b,            \
                                                 int accumulate) {                                             \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " X5 ", 0;\n"                                                \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPES " {" LIST "}, {" X0 ", " X1   \
                   ", " X2 ", " X3 "}, " X4 ", p, 1, 1, 0;}"                                                   \
                   : OUT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));               \
    }                                                                                                          \
  };

WGMMA_SHAPE(64, LIST_4, OUT_4, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_SHAPE(80, LIST_5, OUT_5, "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA_SHAPE(96, LIST_6, OUT_6, "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA_SHAPE(112, LIST_7, OUT_7, "%56", "%57", "%58", "%59", "%60", "%61")
WGMMA_SHAPE(128, LIST_8, OUT_8, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA_SHAPE(144, LIST_9, OUT_9, "%72", "%73", "%74", "%75", "%76", "%77")
WGMMA_SHAPE(160, LIST_10, OUT_10, "%80", "%81", "%82", "%83", "%84", "%85")
WGMMA_SHAPE(176, LIST_11, OUT_11, "%88", "%89", "%90", "%91", "%92", "%93")
WGMMA_SHAPE(192, LIST_12, OUT_12, "%96", "%97", "%98", "%99", "%100", "%101")
WGMMA_SHAPE(208, LIST_13, OUT_13, "%104", "%105", "%106", "%107", "%108", "%109")
WGMMA_SHAPE(224, LIST_14, OUT_14, "%112", "%113", "%114", "%115", "%116", "%117")
WGMMA_SHAPE(256, LIST_16, OUT_16, "%128", "%129", "%130", "%131", "%132", "%133")
// clang-format on
