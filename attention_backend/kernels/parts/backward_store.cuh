// The ends of the Hopper backward: a consumer's keys of dK or dV on their way to global memory.
#pragma once

#include "parts/backward_scores.cuh"
#include "parts/transpose_quad.cuh"

constexpr int kBytesOfGradient = PARTS ? 4 : 2;

// Writes 64 keys of a gradient of WIDTH columns, 16 bytes at a time: the four threads of a key swap their pairs of columns.
// `to` is the tile's first key, `keys` how many keys of the tile the sequence has, `width` how many columns.
template <int WIDTH>
__device__ __forceinline__ void store_keys(const float (&acc)[WIDTH / 2], void* to, int64 row_stride, const Lane& lane,
                                           int keys, int width, float factor) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = lane.key + half * 8;
#if PARTS
    float* row = static_cast<float*>(to) + key * row_stride;
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++)
      if (key < keys && i * 8 < width)
        *reinterpret_cast<float2*>(row + i * 8 + c * 2) =
            make_float2(acc[i * 4 + half * 2] * factor, acc[i * 4 + half * 2 + 1] * factor);
#else
    element* row = static_cast<element*>(to) + key * row_stride;
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i += 4) {
      uint32 x[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        x[j] = i + j < WIDTH / 8
                   ? pack2(acc[(i + j) * 4 + half * 2] * factor, acc[(i + j) * 4 + half * 2 + 1] * factor)
                   : 0;
      transpose_quad(x, c);  // lane c holds the 8 columns of group i + c
      if (key < keys && (i + c) * 8 < width)
        *reinterpret_cast<uint4*>(row + (i + c) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
    }
#endif
  }
}

#if !PARTS
// The same 64 keys to `space`, which has a row of 128 swizzled bytes for each of them, the next 64 columns SLAB bytes
// further. From there send_keys takes them, once all of the warpgroup are through.
template <int WIDTH, int SLAB>
__device__ __forceinline__ void stage_keys(const float (&acc)[WIDTH / 2], uint32 space, float factor) {
  const uint32 first = space + place_of_key();
#pragma unroll
  for (int i = 0; i < WIDTH / 16; i++) {
    uint32 x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = pack2(acc[i * 8 + j * 2] * factor, acc[i * 8 + j * 2 + 1] * factor);
    store_matrices(columns_of_key(first, i % 4) + i / 4 * SLAB, x);
  }
  fence_async_proxy();
}

// One thread's: the tile's keys from `first` on. What lies past the tensor's last key or column is not written.
template <int SLABS, int SLAB>
__device__ __forceinline__ void send_keys(const TensorMap* map, uint32 space, const KeyTile& tile, int first,
                                          const BackwardParams& p) {
#pragma unroll
  for (int c = 0; c < SLABS; c++)
    tma_store(map, space + c * SLAB, c * 64, tile.seq.k_begin + tile.first_key + first, tile.kv_head,
              p.sequence.cu_seqlens_k ? 0 : tile.batch);
}
#endif

template <int WIDTH>
__device__ __forceinline__ void zero(float (&acc)[WIDTH]) {
#pragma unroll
  for (int i = 0; i < WIDTH; i++) acc[i] = 0.f;
}

__device__ __forceinline__ float dk_factor(const BackwardParams& p) { return p.score.softmax_scale; }
__device__ __forceinline__ float dv_factor(const BackwardParams& p) { return DROPOUT ? p.dropout.scale : 1.f; }

// Where the gradients of a tile's first key begin.
__device__ __forceinline__ char* dk_of(const KeyTile& tile, const BackwardParams& p) {
  const int64 first = (p.sequence.cu_seqlens_k ? 0 : tile.batch * p.dk_batch) + (PARTS ? tile.part * p.dk_part : 0) +
                      (static_cast<int64>(tile.seq.k_begin) + tile.first_key) * p.dk_row + tile.kv_head * p.dk_head;
  return static_cast<char*>(p.dk) + first * kBytesOfGradient;
}
__device__ __forceinline__ char* dv_of(const KeyTile& tile, const BackwardParams& p) {
  const int64 first = (p.sequence.cu_seqlens_k ? 0 : tile.batch * p.dv_batch) + (PARTS ? tile.part * p.dv_part : 0) +
                      (static_cast<int64>(tile.seq.k_begin) + tile.first_key) * p.dv_row + tile.kv_head * p.dv_head;
  return static_cast<char*>(p.dv) + first * kBytesOfGradient;
}

__device__ __forceinline__ void store_dk(const float (&dk)[HEAD_DIM / 2], const KeyTile& tile, const BackwardParams& p,
                                         const Lane& lane) {
  store_keys<HEAD_DIM>(dk, dk_of(tile, p), p.dk_row, lane, tile.seqlen_k - tile.first_key, p.head_dim, dk_factor(p));
}
__device__ __forceinline__ void store_dv(const float (&dv)[HEAD_DIM_V / 2], const KeyTile& tile, const BackwardParams& p,
                                         const Lane& lane) {
  store_keys<HEAD_DIM_V>(dv, dv_of(tile, p), p.dv_row, lane, tile.seqlen_k - tile.first_key, p.head_dim_v, dv_factor(p));
}

// Zeros for a warpgroup's keys, the tile's from `first` on.
template <int WIDTH>
__device__ __forceinline__ void zero_keys(char* to, int64 row_stride, int first, int keys, int width) {
  constexpr int kVectors = WIDTH * kBytesOfGradient / 16, kOfEach = 16 / kBytesOfGradient;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < 64 * kVectors; i += 128) {
    const int key = first + i / kVectors, column = i % kVectors * kOfEach;
    if (key < keys && column < width)
      *reinterpret_cast<uint4*>(to + (key * row_stride + column) * kBytesOfGradient) = make_uint4(0, 0, 0, 0);
  }
}
