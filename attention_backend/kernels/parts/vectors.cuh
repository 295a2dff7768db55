// Eight 16-bit elements, as a lane moves them, to and from floats.
#pragma once

#include "parts/element.cuh"

constexpr int kVector = 8;

__device__ __forceinline__ void unpack(const uint4& bits, float (&x)[kVector]) {
  const uint32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack2(words[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ uint4 pack(const float (&x)[kVector]) {
  return make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7]));
}

// To the element type and back: where plain torch would have written a tensor.
__device__ __forceinline__ void round_all(float (&x)[kVector]) { unpack(pack(x), x); }
