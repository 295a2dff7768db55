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
  // Of dQ, zeros: [heads, sums_head / 64, slabs, 4096]: 64 rows x 64 columns (parts/rows_of_dq.cuh). Of dense sequences
  // the heads of all, one after another, as many as are held at a time; else the query heads, sums_head = padded_rows.
  float* sums;
  int* counters;  // [2], zero before and after: tiles drawn, blocks that have finished
  int* turns;   // deterministic: zeros [num_heads, padded_rows / 64, slabs]
  int* progress;  // with FINISHES: zeros, [units of the order of work]: see parts/backward_finish.cuh
  element* dq;    // with FINISHES
  void* dk;     // elements; float32 where a key head's query heads are shared out
  void* dv;
  int64 dk_batch, dk_row, dk_head, dk_part;
  int64 dv_batch, dv_row, dv_head, dv_part;
  int64 dq_batch, dq_row, dq_head;
  int64 padded_rows, sums_head;
  int head_dim, head_dim_v;
  int group;      // query heads of a key head
  int parts;      // that they are shared out to
  int kv_heads;
  int batch;
  int key_tiles;  // of the longest sequence
  int section;    // key heads, of all sequences, whose tiles lie side by side in the order of work
  int held_units, lag;  // units that sums are of; how many units later a unit is finished
  int unit_heads, share_chunks;  // query heads of a unit; chunks of its sums of dQ that are finished with a tile
};
