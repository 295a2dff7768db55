// wgmma of 8-bit floats (Hopper, PTX ISA 9.7.15): m64 x N x k32, e4m3 operands, both K-major, float32 accumulators.
//
// The accumulator of thread t (warp w = t / 32 of the warpgroup, lane l = t % 32): d[4 j + 0, 1] is row 16 w + l / 4,
// columns 8 j + 2 (l % 4) and the next; d[4 j + 2, 3] the same columns of row + 8. The first operand from registers:
// a[0] is columns 4 (l % 4) .. + 3 of row 16 w + l / 4, a[1] of row + 8, a[2] and a[3] the same 16 columns further. An
// accumulator's pairs are therefore packed into operand columns in another order (attention_backend/reference/fp8.py:
// KEY_ORDER), and the second operand of the next product has its rows in that order.
#pragma once

#include "parts/element.cuh"

// Shared memory operand, K-major: slabs of `width` (32, 64 or 128) bytes of K, in the swizzle of that width. A descriptor
// plus bytes / 16 is that of what lies so many bytes further on.
template <int width>
__device__ __forceinline__ uint64 fp8_descriptor(uint32 address) {
  constexpr uint64 mode = width == 128 ? 1 : width == 64 ? 2 : 3;
  return static_cast<uint64>((address & 0x3FFFF) >> 4) | 1ull << 16 | static_cast<uint64>(8 * width >> 4) << 32 |
         mode << 62;
}

__device__ __forceinline__ void fp8_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void fp8_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` committed groups of this warpgroup are still under way.
template <int pending>
__device__ __forceinline__ void fp8_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// The instruction wants every accumulator register named: operands 0 .. N / 2 - 1, eight to a piece.
// clang-format off
#define NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define VALUES_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define NAMES_OF_8 NAMES_0
#define VALUES_OF_8 VALUES_8(0)
#define NAMES_OF_16 NAMES_OF_8 ", " NAMES_8
#define VALUES_OF_16 VALUES_OF_8, VALUES_8(8)
#define NAMES_OF_24 NAMES_OF_16 ", " NAMES_16
#define VALUES_OF_24 VALUES_OF_16, VALUES_8(16)
#define NAMES_OF_32 NAMES_OF_24 ", " NAMES_24
#define VALUES_OF_32 VALUES_OF_24, VALUES_8(24)
#define NAMES_OF_36 NAMES_OF_32 ", %32, %33, %34, %35"
#define VALUES_OF_36 VALUES_OF_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define NAMES_OF_40 NAMES_OF_32 ", " NAMES_32
#define VALUES_OF_40 VALUES_OF_32, VALUES_8(32)
#define NAMES_OF_48 NAMES_OF_40 ", " NAMES_40
#define VALUES_OF_48 VALUES_OF_40, VALUES_8(40)
#define NAMES_OF_56 NAMES_OF_48 ", " NAMES_48
#define VALUES_OF_56 VALUES_OF_48, VALUES_8(48)
#define NAMES_OF_64 NAMES_OF_56 ", " NAMES_56
#define VALUES_OF_64 VALUES_OF_56, VALUES_8(56)
#define NAMES_OF_72 NAMES_OF_64 ", " NAMES_64
#define VALUES_OF_72 VALUES_OF_64, VALUES_8(64)
#define NAMES_OF_80 NAMES_OF_72 ", " NAMES_72
#define VALUES_OF_80 VALUES_OF_72, VALUES_8(72)
#define NAMES_OF_88 NAMES_OF_80 ", " NAMES_80
#define VALUES_OF_88 VALUES_OF_80, VALUES_8(80)
#define NAMES_OF_96 NAMES_OF_88 ", " NAMES_88
#define VALUES_OF_96 VALUES_OF_88, VALUES_8(88)
// clang-format on

// Fp8Wgmma<N>::shared: d = a * b (+ d), both operands in shared memory.
// Fp8Wgmma<N>::registers: the same, a in registers.
template <int N>
struct Fp8Wgmma;

// R = N / 2 accumulator registers; i0 .. i5 are the operand numbers R .. R + 5.
#define FP8_WGMMA(N, R, i0, i1, i2, i3, i4, i5)                                                           \
  template <>                                                                                             \
  struct Fp8Wgmma<N> {                                                                                    \
    static __device__ __forceinline__ void shared(float (&d)[R], uint64 a, uint64 b, int accumulate) {    \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i2 ", 0;\n"                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES_OF_##R "}, %" #i0    \
                   ", %" #i1 ", p, 1, 1;}"                                                                 \
                   : VALUES_OF_##R                                                                        \
                   : "l"(a), "l"(b), "r"(accumulate));                                                    \
    }                                                                                                     \
    static __device__ __forceinline__ void registers(float (&d)[R], const uint32 (&a)[4], uint64 b,       \
                                                     int accumulate) {                                    \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i5 ", 0;\n"                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES_OF_##R "}, {%" #i0   \
                   ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1;}"                                  \
                   : VALUES_OF_##R                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                \
    }                                                                                                     \
  };

FP8_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
FP8_WGMMA(72, 36, 36, 37, 38, 39, 40, 41)
FP8_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
FP8_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
FP8_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
