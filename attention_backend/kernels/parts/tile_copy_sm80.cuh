// Tiles of rows on their way into shared memory, whose rows are padded by 16 bytes: no bank conflict for ldmatrix.
//
// Compile-time: EVEN (the tensors are as wide as the tiles).
#pragma once

#include "parts/copy_sm80.cuh"

// Moves a tile of rows of WIDTH elements from global memory into padded shared memory rows.
template <int WIDTH, int THREADS>
struct TileCopy {
  static constexpr int kChunks = WIDTH / 8;  // 16-byte chunks of a row
  static constexpr int kLanes = kChunks % 16 == 0 ? 16 : kChunks % 8 == 0 ? 8 : 4;  // threads that share a row
  static constexpr int kChunksPerThread = kChunks / kLanes;
  static constexpr int kRowsPerPass = THREADS / kLanes;
  static constexpr int kPitch = WIDTH * 2 + 16;  // bytes

  int lane, row;
  __device__ __forceinline__ explicit TileCopy(uint32 thread = threadIdx.x) : lane(thread % kLanes), row(thread / kLanes) {}

  // Row r of the tile is read at offset(r) when ok(r), and is zero otherwise.
  template <int ROWS, class Offset, class Ok>
  __device__ __forceinline__ void operator()(uint32 tile, const element* base, int width, Offset offset, Ok ok) const {
    uint32 destination = tile + row * kPitch + lane * 16;
#pragma unroll
    for (int i = 0; i < (ROWS + kRowsPerPass - 1) / kRowsPerPass; i++) {
      int r = row + i * kRowsPerPass;
      if (ROWS % kRowsPerPass == 0 || r < ROWS) {
        bool valid = ok(r);
        const element* source = base + (valid ? offset(r) : 0) + lane * 8;
#pragma unroll
        for (int c = 0; c < kChunksPerThread; c++) {
          bool inside = EVEN || (lane + c * kLanes) * 8 < width;
          copy16(destination + i * kRowsPerPass * kPitch + c * kLanes * 16, source + c * kLanes * 8, valid && inside);
        }
      }
    }
  }

  // The same of rows that lie `stride` elements apart, with fewer registers.
  template <int ROWS, class Ok>
  __device__ __forceinline__ void strided(uint32 tile, const element* base, int width, int64 stride, Ok ok) const {
    const element* source = base + row * stride + lane * 8;
    const uint32 destination = tile + row * kPitch + lane * 16;
#pragma unroll
    for (int i = 0; i < (ROWS + kRowsPerPass - 1) / kRowsPerPass; i++) {
      const int r = row + i * kRowsPerPass;
      if (ROWS % kRowsPerPass == 0 || r < ROWS) {
        const bool valid = ok(r);
#pragma unroll
        for (int c = 0; c < kChunksPerThread; c++) {
          const bool inside = EVEN || (lane + c * kLanes) * 8 < width;
          copy16(destination + i * kRowsPerPass * kPitch + c * kLanes * 16, source + c * kLanes * 8, valid && inside);
        }
      }
      source += kRowsPerPass * stride;
    }
  }
};
