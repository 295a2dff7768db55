// The product of two tiles in shared memory, a part of which every warp takes. Operands may lie either way round.
#pragma once

#include "parts/mma_sm80.cuh"

// Where this thread's ldmatrix reads an operand whose tile begins at `tile`, rows `pitch` bytes apart: rows and columns
// are those of the memory, `row` and `column` (in elements) those of the warp's part.
struct Operand {
  // A as m x k, or B as k x n with n contiguous, which is B transposed as ldmatrix sees it.
  static __device__ __forceinline__ uint32 by_rows(int lane, uint32 tile, int pitch, int row, int column) {
    return tile + (row + lane % 16) * pitch + (column + lane / 16 * 8) * 2;
  }
  // B as n x k, or A as k x m with m contiguous.
  static __device__ __forceinline__ uint32 by_columns(int lane, uint32 tile, int pitch, int row, int column) {
    return tile + (row + lane % 8 + lane / 16 * 8) * pitch + (column + lane / 8 % 2 * 8) * 2;
  }
};

// acc += A * B over STEPS steps of 16. `a` and `b` are addresses of Operand; an operand of PITCH bytes a row moves by
// 32 bytes or by 16 rows from step to step, and the other way from tile to tile.
//   A_TRANSPOSED: A lies as k x m (Operand::by_columns), else as m x k (by_rows).
//   B_TRANSPOSED: B lies as k x n (Operand::by_rows), else as n x k (by_columns).
template <int STEPS, bool A_TRANSPOSED, int A_PITCH, bool B_TRANSPOSED, int B_PITCH, int ROW_TILES, int COLUMNS8>
__device__ __forceinline__ void warp_gemm(float (&acc)[ROW_TILES][COLUMNS8][4], uint32 a, uint32 b) {
  constexpr int kTiles = COLUMNS8 / 2;
  constexpr int kStepA = A_TRANSPOSED ? 16 * A_PITCH : 32, kTileA = A_TRANSPOSED ? 32 : 16 * A_PITCH;
  constexpr int kStepB = B_TRANSPOSED ? 16 * B_PITCH : 32, kTileB = B_TRANSPOSED ? 32 : 16 * B_PITCH;
  auto load_a = [&](uint32(&fragment)[4], int step, int x) {
    const uint32 address = a + step * kStepA + x * kTileA;
    A_TRANSPOSED ? ldmatrix_x4_trans(fragment, address) : ldmatrix_x4(fragment, address);
  };
  auto load_b = [&](uint32(&fragment)[4], int at) {
    const uint32 address = b + at / kTiles * kStepB + at % kTiles * kTileB;
    B_TRANSPOSED ? ldmatrix_x4_trans(fragment, address) : ldmatrix_x4(fragment, address);
  };
  uint32 fa[2][ROW_TILES][4], fb[2][4];
#pragma unroll
  for (int x = 0; x < ROW_TILES; x++) load_a(fa[0][x], 0, x);
  load_b(fb[0], 0);
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    if (step + 1 < STEPS)
#pragma unroll
      for (int x = 0; x < ROW_TILES; x++) load_a(fa[(step + 1) % 2][x], step + 1, x);
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      const int at = step * kTiles + i;
      if (at + 1 < STEPS * kTiles) load_b(fb[(at + 1) % 2], at + 1);
#pragma unroll
      for (int x = 0; x < ROW_TILES; x++) {
        mma_16x8x16(acc[x][2 * i], fa[step % 2][x], fb[at % 2][0], fb[at % 2][1]);
        mma_16x8x16(acc[x][2 * i + 1], fa[step % 2][x], fb[at % 2][2], fb[at % 2][3]);
      }
    }
  }
}

template <int ROW_TILES, int COLUMNS8>
__device__ __forceinline__ void clear(float (&acc)[ROW_TILES][COLUMNS8][4]) {
#pragma unroll
  for (int x = 0; x < ROW_TILES; x++)
#pragma unroll
    for (int i = 0; i < COLUMNS8; i++) acc[x][i][0] = acc[x][i][1] = acc[x][i][2] = acc[x][i][3] = 0.f;
}
