// CUDA's built-in types and arithmetic, as far as the kernels use them, on a CPU.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct dim3 { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emu {
template <class To, class From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline float from_bf16(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }
inline uint16_t to_bf16(float x) {
  const uint32_t u = bits<uint32_t>(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float from_half(uint16_t x) { return bits<_Float16>(x); }
inline uint16_t to_half(float x) { return x != x ? 0x7fff : bits<uint16_t>(static_cast<_Float16>(x)); }
inline float from_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if ((x & 0x7f) == 0x7f) return NAN;
  const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return x & 0x80 ? -size : size;
}
inline uint8_t to_e4m3(float x) {  // to nearest even; beyond +-448: +-448
  if (x != x) return 0x7f;
  const uint8_t sign = __builtin_signbit(x) ? 0x80 : 0;
  const float size = fabsf(x);
  if (size >= 448.f) return sign | 0x7e;
  int exponent = size < ldexpf(1, -6) ? -6 : ilogbf(size);
  int units = static_cast<int>(nearbyintf(ldexpf(size, 3 - exponent)));
  if (units == 16) units = 8, exponent++;
  return sign | (units < 8 ? units : (exponent + 7) << 3 | (units - 8));
}
}  // namespace emu

struct __half { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };
struct __nv_bfloat16 { uint16_t bits; };
inline float __half2float(__half x) { return emu::from_half(x.bits); }
inline __half __float2half_rn(float x) { return {emu::to_half(x)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float __bfloat162float(__nv_bfloat16 x) { return emu::from_bf16(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {emu::to_bf16(x)}; }

inline float __int_as_float(int x) { return emu::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
inline int __float_as_int(float x) { return emu::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return fabsf(b) > 0x1p126f && fabsf(b) < INFINITY ? a * 0.f : a / b; }
inline float __expf(float x) { return expf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned s = selector >> 4 * i & 15;
    unsigned byte = static_cast<unsigned>(both >> 8 * (s & 7)) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << 8 * i;
  }
  return r;
}
template <class A, class B>
inline auto min(A a, B b) {
  using T = decltype(a + b);
  if constexpr (T(0.5f) != T(0)) return fminf(a, b);
  else return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
inline auto max(A a, B b) {
  using T = decltype(a + b);
  if constexpr (T(0.5f) != T(0)) return fmaxf(a, b);
  else return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
