// Floats -> e4m3 (8 bits: 4 of exponent, 3 of mantissa; sm_89 and up).
#pragma once

#include "parts/element.cuh"

constexpr float kE4m3Largest = 448.f;

// Four floats -> four bytes, the first lowest; rounded to nearest, larger ones become the largest.
__device__ __forceinline__ uint32 pack_e4m3(float a, float b, float c, float d) {
  uint32 r;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
