// Chunks of the float32 sums of dQ, 64 rows x 64 columns: how they lie in memory, and how they become rows of elements.
//
// A chunk is four pieces of 16 rows, a warp's. Of two floats of a row and of the one 8 further, which a thread of wgmma has
// side by side, a piece has [half of the 64 columns][pair of 8][8 columns of 4][row of 8]. So whoever makes rows of them
// reads four pairs, 8 columns of two rows, as neighbours read theirs, and exchanges nothing. Rows are turned by two a pair:
// threads of eight rows of one pair, as of two rows of four, are in different banks of shared memory.
#pragma once

#include "parts/bulk_copies.cuh"

constexpr int kPiece = 1024;  // floats

// What a thread of a warpgroup with 64 x 64 sums in fragment order adds to: its first four floats, and its j-th.
__device__ __forceinline__ int first_in_chunk() {
  const int lane = threadIdx.x % 32, pair = lane % 4, row = lane / 4;
  return threadIdx.x % 128 / 32 * kPiece + pair * 128 + (row + 2 * pair) % 8 * 4;
}
__device__ __forceinline__ constexpr int nth_in_chunk(int j) { return j / 4 * 512 + j % 4 * 32; }

// Four floats that others have added to: from the L2.
__device__ __forceinline__ float4 load_sums(const float* from) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from));
  return x;
}

// A piece, one warp's: of each half of the columns a thread has 8 of rows lane % 8 and 8 further.
struct DqRows {
  uint32 x[2][2][4];  // [row][half of the columns]

  static __device__ __forceinline__ void load(float4 (&sums)[8], const float* piece) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      const float* from = piece + lane / 8 * 32 + (lane + 2 * pair) % 8 * 4 + pair * 128;
#pragma unroll
      for (int half = 0; half < 2; half++) sums[half * 4 + pair] = load_sums(from + half * 512);
    }
  }

  __device__ __forceinline__ void pack(const float4 (&sums)[8], float scale) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      x[0][i / 4][i % 4] = pack2(sums[i].x * scale, sums[i].y * scale);
      x[1][i / 4][i % 4] = pack2(sums[i].z * scale, sums[i].w * scale);
    }
  }

  // `to` is where the first row begins; `rows` and `columns` are how many of them there are.
  __device__ __forceinline__ void store(element* to, int64 row_stride, int rows, int columns) const {
    const int lane = threadIdx.x % 32, row = lane % 8, column = lane / 8 * 8;
    element* const first = to + row * row_stride + column;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (row + i * 8 < rows && column + half * 32 < columns)
          store_global4(first + i * 8 * row_stride + half * 32, x[i][half]);
  }
};
