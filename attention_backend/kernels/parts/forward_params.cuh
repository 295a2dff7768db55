// What a forward kernel is launched with.
#pragma once

#include "parts/score.cuh"
#include "parts/seqlen.cuh"

// The same fields, in the same order, as attention_backend/kernels/params.py: ForwardParams. Strides are in elements.
struct ForwardParams {
  SequenceParams sequence;
  ScoreParams score;
  const element* q;
  const element* k;
  const element* v;
  element* out;
  float* lse;
  const float* sinks;  // [num_heads] or null
  int64 q_batch, q_row, q_head;
  int64 k_batch, k_row, k_head;  // paged: k_batch is the stride of a page
  int64 v_batch, v_row, v_head;
  int64 out_batch, out_row, out_head;
  int64 lse_batch, lse_head;
  int head_dim, head_dim_v;
  int group;  // query heads per key head
  int reserved;
};
