// What the Hopper forward is launched with.
#pragma once

#include "parts/dropout.cuh"
#include "parts/forward_params.cuh"

// How the work is shared out. The same fields, in the same order, as attention_backend/kernels/hopper_params.py: WorkParams.
struct WorkParams {
  int* counters;   // [2], zero before and after: tiles drawn beyond each block's first, blocks that have finished
  int64 out_split;  // strides between the partial results of the parts of a row's keys
  int64 lse_split;
  int batch;
  int heads;       // of the queries, or of the keys when rows are packed
  int pack;        // query heads whose rows lie in one tile: 1, or all of a key head's group
  int tile_rows;   // rows of a tile: BLOCK_M, or the multiple of `pack` below
  int num_splits;  // parts that the keys of a tile are cut into,
  int key_heads;
  int heads_per_key;  // heads / key_heads
  int key_bytes;  // of a key and its value
  int chosen;     // at most: each sequence's number is chosen on the device
  int reserved;
};

// Lists of 128 x 128 blocks (attention_backend/block_sparsity.py: BlockSparsity); a row of lists per 128 query rows.
struct SparseParams {
  const int* counts;    // [lists, 2]: partial blocks, all blocks
  const int* blocks;    // [lists, blocks_row]: numbers of key blocks, the partial ones first
  const int* bit_rows;  // [lists, bit_rows_row]: of each partial block, its entry in `bits`
  const uint4* bits;    // [entries, 128]: the keys that a row sees
  int blocks_row, bit_rows_row;
  int batch, head;  // strides between lists; 0: shared
};

struct HopperParams {
  ForwardParams forward;
  WorkParams work;
  SparseParams sparse;
  DropoutParams dropout;
  const float* k_scale;  // [key_heads], of pages of e4m3
  const float* v_scale;
};
