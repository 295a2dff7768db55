// e4m3 to and from wider floats, on sm_89 and up. Every e4m3 is exactly an fp16.
#pragma once

#include "parts/element.cuh"

// Two e4m3 (the low 16 bits) -> two fp16, the lower byte in the low half.
__device__ __forceinline__ uint32 fp8_to_half2(uint32 x) {
  uint32 r;
  asm("{\n.reg .b16 low;\ncvt.u16.u32 low, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(r) : "r"(x));
  return r;
}

// Four e4m3 -> four fp16, in two instructions.
__device__ __forceinline__ void fp8_to_halves(uint32& low, uint32& high, uint32 x) {
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}"
      : "=r"(low), "=r"(high)
      : "r"(x));
}

// Two floats -> two fp16, `lo` in the low half.
__device__ __forceinline__ uint32 pack_half2(float lo, float hi) {
  uint32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// Two floats -> two e4m3, `lo` in the low byte; what is beyond +-448 becomes +-448.
__device__ __forceinline__ uint32 pack_fp8(float lo, float hi) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}
