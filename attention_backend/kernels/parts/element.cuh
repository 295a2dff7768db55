// The element type of a kernel (BF16 = 1: bfloat16, 0: float16; FP32 = 1: float) and the conversions kernels share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef BF16
#define BF16 1
#endif

typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

#ifndef FP32
#define FP32 0
#endif

#if FP32
typedef float element;
__device__ __forceinline__ float to_float(element x) { return x; }
__device__ __forceinline__ element from_float(float x) { return x; }
#elif BF16
typedef __nv_bfloat16 element;
__device__ __forceinline__ float to_float(element x) { return __bfloat162float(x); }
__device__ __forceinline__ element from_float(float x) { return __float2bfloat16_rn(x); }
#else
typedef __half element;
__device__ __forceinline__ float to_float(element x) { return __half2float(x); }
__device__ __forceinline__ element from_float(float x) { return __float2half_rn(x); }
#endif

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
#define kInfinity (__int_as_float(0x7f800000))

// Two floats -> one register of two elements, `lo` in the low half.
__device__ __forceinline__ uint32 pack2(float lo, float hi) {
  uint32 r;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#elif __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
  __half2 h = __floats2half2_rn(lo, hi);
  r = *reinterpret_cast<uint32*>(&h);
#endif
  return r;
}

#if !FP32
// The two elements of such a register.
__device__ __forceinline__ float2 unpack2(uint32 x) {
#if BF16
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
#else
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
#endif
}
#endif

// 2^x by the special function unit; subnormal results are flushed to zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) by the special function unit, within 2^-22 or, beyond 0.5 to 2, 2^-22 of it.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x by the special function unit, within one unit in the last place; subnormal results are flushed to zero.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32 shared_address(const void* p) {
  return static_cast<uint32>(__cvta_generic_to_shared(p));
}
