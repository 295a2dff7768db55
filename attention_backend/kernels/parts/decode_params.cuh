// What a decode kernel is launched with, and the type of the cached keys and values.
#pragma once

#include "parts/element.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"

#if FP8_KV
typedef uint8 cached;  // e4m3
#else
typedef element cached;
#endif

// The same fields, in the same order, as attention_backend/kernels/decode_params.py: DecodeParams. Strides are in
// elements.
struct DecodeParams {
  SequenceParams sequence;
  ScoreParams score;
  const element* q;
  const cached* k;
  const cached* v;
  element* out;
  float* lse;
  const float* sinks;    // [num_heads] or null
  float* partial_out;    // [slots, group_rows, HEAD_DIM_V], normalised
  float* partial_lse;    // [slots, group_rows], log2
  int* counters;         // [pairs, row blocks]: segments that have arrived; zero before and after
  const float* k_scale;  // [num_kv_heads] with FP8_KV: what a cached key is multiplied by
  const float* v_scale;
  int64 q_batch, q_row, q_head;
  int64 k_batch, k_row, k_head;  // paged: k_batch is the stride of a page
  int64 v_batch, v_row, v_head;
  int64 out_batch, out_row, out_head;
  int64 lse_batch, lse_head;
  int batch;
  int head_dim, head_dim_v;
  int group;       // query heads per key head
  int group_rows;  // group * seqlen_q
  int min_tiles;
  int group_inverse;  // 2^16 / group, rounded up

  // Row r of a group is query r / group of head r % group. Right for fewer than 2^16 / group rows: decode has 64.
  __device__ __forceinline__ int query_of(int row) const { return row * group_inverse >> 16; }
  __device__ __forceinline__ int head_of(int row) const { return row - query_of(row) * group; }
};
