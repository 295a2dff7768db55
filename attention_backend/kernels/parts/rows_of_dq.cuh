// From the float32 sums of dQ, which lie as fragments of wgmma do, to rows of elements.
#pragma once

#include "parts/transpose_quad.cuh"

// 16 rows x 64 columns, one warp's.
struct DqRows {
  uint32 x[2][8];  // of rows lane / 4 and 8 further: columns 8 j + lane % 4 * 2 and the next

  // sums[j]: two floats of each of those rows.
  __device__ __forceinline__ void pack(const float4 (&sums)[8], float scale) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      x[0][j] = pack2(sums[j].x * scale, sums[j].y * scale);
      x[1][j] = pack2(sums[j].z * scale, sums[j].w * scale);
    }
  }

  // Once. `to` is where the first row begins; `rows` and `columns` are how many of them there are.
  __device__ __forceinline__ void store(element* to, int64 row_stride, int rows, int columns) {
    const int lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = lane / 4 + half * 8;
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        transpose_quad(x[half] + i, c);  // lane c holds the 8 columns of group i + c
        if (row < rows && (i + c) * 8 < columns)
          *reinterpret_cast<uint4*>(to + row * row_stride + (i + c) * 8) =
              make_uint4(x[half][i], x[half][i + 1], x[half][i + 2], x[half][i + 3]);
      }
    }
  }
};
