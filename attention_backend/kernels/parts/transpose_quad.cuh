// From the columns that a wgmma accumulator gives a thread to columns that lie together in memory.
#pragma once

#include "parts/element.cuh"

// A 4 x 4 transpose of x[0..3] among the four lanes of a row, of which this is lane c: afterwards x[i] is what lane i held
// in x[c].
__device__ __forceinline__ void transpose_quad(uint32* x, int c) {
#pragma unroll
  for (int b = 1; b <= 2; b *= 2)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (!(j & b)) {
        const uint32 y = __shfl_xor_sync(~0u, c & b ? x[j] : x[j | b], b);
        if (c & b)
          x[j] = y;
        else
          x[j | b] = y;
      }
}
