// What the kernels of linear attention share: parameters, the feature map, and tiles of rows in and out of memory.
//
// A state is what attention knows of the keys behind it: S = sum_j phi(k_j) v_j^T, [HEAD_DIM, HEAD_DIM] with one row per
// element of phi(k), and z = sum_j phi(k_j), [HEAD_DIM]; float32, z right after S.
//
// Compile-time: BF16, HEAD_DIM (a multiple of 16, keys and values alike), FEATURES (0: none, 1: elu + 1, 2: relu).
#pragma once

#include "parts/copy_sm80.cuh"
#include "parts/element.cuh"

// The same fields, in the same order, as attention_backend/kernels/linear_attention.py: LinearParams. Strides are in
// elements.
struct LinearParams {
  const element* q;  // [batch, seqlen_q, num_heads, HEAD_DIM]
  const element* k;  // [batch, seqlen_k, num_kv_heads, HEAD_DIM]
  const element* v;
  element* out;   // like q
  float* states;  // [batch, num_kv_heads, segments, kStateFloats]
  int64 q_batch, q_row, q_head;
  int64 k_batch, k_row, k_head;
  int64 v_batch, v_row, v_head;
  int64 out_batch, out_row, out_head;
  int batch, num_heads, num_kv_heads, group;  // group: query heads per key head
  int seqlen_q, seqlen_k;
  int segments, segment_length;  // of the keys; the length is a multiple of kChunk
  int row_blocks, block_rows;    // of the queries, for linear_full
};

constexpr int kChunk = 64;                 // tokens of a tile
constexpr int kPitch = HEAD_DIM * 2 + 16;  // bytes of a padded row: ldmatrix has no bank conflict
constexpr int kMatrixFloats = HEAD_DIM * HEAD_DIM;
constexpr int kStateFloats = kMatrixFloats + HEAD_DIM;
constexpr uint32 kOnes = BF16 ? 0x3f803f80u : 0x3c003c00u;  // two elements of 1

__device__ __forceinline__ int64 state_offset(const LinearParams& p, int batch, int kv_head, int segment) {
  return ((static_cast<int64>(batch) * p.num_kv_heads + kv_head) * p.segments + segment) * kStateFloats;
}

__device__ __forceinline__ float feature(float x) {
#if FEATURES == 1
  return x > 0.f ? x + 1.f : exp2_approx(x * kLog2e);
#elif FEATURES == 2
  return x < 0.f ? 0.f : x;  // so that NaN stays NaN
#else
  return x;
#endif
}

// phi of two elements.
__device__ __forceinline__ uint32 features2(uint32 x) {
#if FEATURES
  const float2 f = unpack2(x);
  return pack2(feature(f.x), feature(f.y));
#else
  return x;
#endif
}

// A power of two near 1 / count. A state times that is about a mean, so it fits into float16 at any length.
__device__ __forceinline__ float state_scale(int count) { return __int_as_float((127 - (32 - __clz(count))) << 23); }
__device__ __forceinline__ float inverse_state_scale(int count) {
  return __int_as_float((127 + (32 - __clz(count))) << 23);
}

// The high and low parts of two floats: their sum is exact to 16 (bfloat16) or 22 (float16) bits.
__device__ __forceinline__ void split2(float x, float y, uint32& high, uint32& low) {
  high = pack2(x, y);
  const float2 h = unpack2(high);
  low = pack2(x - h.x, y - h.y);
}

// ROWS rows of HEAD_DIM elements into padded rows at `tile` by THREADS threads; rows from `limit` on become zeros.
template <int THREADS, int ROWS>
__device__ __forceinline__ void copy_rows(uint32 tile, const element* base, int64 stride, int limit, int thread) {
  constexpr int kVectors = HEAD_DIM / 8, kCount = ROWS * kVectors / THREADS;
  static_assert(kCount * THREADS == ROWS * kVectors, "every thread copies the same number of vectors");
  if constexpr (THREADS % kVectors == 0) {  // each thread stays in its column: one running address
    constexpr int kStep = THREADS / kVectors;
    const int r = thread / kVectors, c = thread % kVectors;
    const element* from = base + r * stride + c * 8;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      copy16(tile + (r + i * kStep) * kPitch + c * 16, from, r + i * kStep < limit);
      from += kStep * stride;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const int at = thread + i * THREADS, r = at / kVectors, c = at % kVectors;
      copy16(tile + r * kPitch + c * 16, base + r * stride + c * 8, r < limit);
    }
  }
}

// Two rows of a 16 x 16 block of accumulators (left and right 16x8 tiles, rows g and g + 8 of lane 4 g + t), times a
// factor each, as elements to global memory: neighbours swap halves, so that a row's 32 bytes are one sector.
__device__ __forceinline__ void store_block(element* row0, element* row1, bool valid0, bool valid1,
                                            const float (&left)[4], const float (&right)[4], float factor0,
                                            float factor1, int lane) {
  const bool odd = lane & 1;
  const int column = odd ? 6 + lane % 4 * 2 : lane % 4 * 2;  // t: 0 -> 0, 1 -> 8, 2 -> 4, 3 -> 12
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float factor = half ? factor1 : factor0;
    const uint32 x = pack2(left[half * 2] * factor, left[half * 2 + 1] * factor);
    const uint32 y = pack2(right[half * 2] * factor, right[half * 2 + 1] * factor);
    const uint32 got = __shfl_xor_sync(~0u, odd ? x : y, 1);
    if (half ? valid1 : valid0)
      *reinterpret_cast<uint2*>((half ? row1 : row0) + column) = odd ? make_uint2(got, y) : make_uint2(x, got);
  }
}
