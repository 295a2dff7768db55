// What the Hopper backward is launched with.
#pragma once

#include "parts/dropout.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"

// The same fields, in the same order, as attention_backend/kernels/hopper_backward_params.py. Strides are in elements.
struct BackwardParams {
  SequenceParams sequence;
  ScoreParams score;
  DropoutParams dropout;
  float* dq;    // zeros: [num_heads, padded_rows / 64, slabs, 4096]: 64 rows x 64 columns as fragments of wgmma lie
  int* counters;  // [2], zero before and after: tiles drawn, blocks that have finished
  int* turns;   // deterministic: zeros [num_heads, padded_rows / 64, slabs]
  // null, or (head_dim up to 128) only the first section's part of dq is zeros, and this is [lines of the order of work],
  // zeros: how many shares of each line's part of dq have been cleared since
  int* cleared;
  void* dk;     // elements; float32 where a key head's query heads are shared out
  void* dv;
  int64 dk_batch, dk_row, dk_head, dk_part;
  int64 dv_batch, dv_row, dv_head, dv_part;
  int64 padded_rows;
  int head_dim, head_dim_v;
  int group;      // query heads of a key head
  int parts;      // that they are shared out to
  int kv_heads;
  int batch;
  int key_tiles;  // of the longest sequence
  int section;    // key heads, of all sequences, whose tiles lie side by side in the order of work
};
