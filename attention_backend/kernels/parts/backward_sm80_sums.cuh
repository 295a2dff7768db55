// Where the sums of the generic backward go: a tile of dQ, which other blocks add to, and a block's dK and dV.
#pragma once

#include "parts/backward_sm80_tiles.cuh"
#include "parts/turns.cuh"

// What the block added before a barrier comes before its turn's end.
__device__ __forceinline__ void end_turn(int* turn) {
  __threadfence();
  pass_turn(turn);
}

// Adds an accumulator to 128 consecutive floats, in an order that only the postprocess has to know.
__device__ __forceinline__ void add_tile(float* sums, const float (&acc)[4]) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  add4(sums + lane * 4, acc[0], acc[1], acc[2], acc[3]);
#else
#pragma unroll
  for (int j = 0; j < 4; j++) atomicAdd(sums + j * 32 + lane, acc[j]);
#endif
}

// Calls `put(row, column, low, high)` for the pairs of an accumulator, the warp's part of a tile.
template <int ROW_TILES, int COLUMNS8, class Put>
__device__ __forceinline__ void for_pairs(const float (&acc)[ROW_TILES][COLUMNS8][4], int row0, int column0, Put put) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int x = 0; x < ROW_TILES; x++)
#pragma unroll
    for (int i = 0; i < COLUMNS8; i++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        put(row0 + x * 16 + half * 8 + lane / 4, column0 + i * 8 + lane % 4 * 2, acc[x][i][half * 2],
            acc[x][i][half * 2 + 1]);
}

// Stores the rows of a tile in shared memory, 16 bytes a thread.
template <int WIDTH>
__device__ __forceinline__ void store_rows(const char* tile, int pitch, element* out, int64 out_row, int rows,
                                           int width) {
  constexpr int kChunks = WIDTH / 8;
  for (int i = threadIdx.x; i < BLOCK_N * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (row < rows && (EVEN || chunk * 8 < width))
      *reinterpret_cast<uint4*>(out + row * out_row + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + row * pitch + chunk * 16);
  }
}
