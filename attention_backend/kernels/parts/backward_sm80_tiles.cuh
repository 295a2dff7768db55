// What flash_bwd_sm80 is launched with, what its warps have of a tile's products, and what of the problem a block takes.
//
// Compile-time: BF16, HEAD_DIM, HEAD_DIM_V, EVEN, BLOCK_M, BLOCK_N, NUM_WARPS, SCORE_WARPS_M, SCORE_WARPS_N, KEY_WARPS,
// ROW_WARPS, SPLIT, DETERMINISTIC.
#pragma once

#include "parts/dropout.cuh"
#include "parts/element.cuh"
#include "parts/fresh_indices.cuh"
#include "parts/padded_rows.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"
#include "parts/tile_copy_sm80.cuh"

// The same fields, in the same order, as attention_backend/kernels/backward_params.py: BackwardParams.
struct BackwardParams {
  SequenceParams sequence;
  ScoreParams score;
  const element* q;
  const element* k;
  const element* v;
  const element* grad_out;
  const float* lse2;  // [num_heads, padded_rows], as delta: see flash_bwd_preprocess.cuh
  const float* delta;
  float* dq_sums;  // [num_heads, padded_rows / 16, HEAD_DIM / 8, 128]: see add_tile
  element* dk;     // laid out as dk_*, dv as dv_*
  element* dv;
  float* dk_parts;  // [parts, ...] laid out as dk and dv, or null when there is one part
  float* dv_parts;
  int* turns;  // [num_heads, padded_rows / BLOCK_M] zeros, or null
  int64 q_batch, q_row, q_head;
  int64 k_batch, k_row, k_head;
  int64 v_batch, v_row, v_head;
  int64 grad_out_batch, grad_out_row, grad_out_head;
  int64 dk_batch, dk_row, dk_head, dk_part;
  int64 dv_batch, dv_row, dv_head, dv_part;
  int64 padded_rows;
  int head_dim, head_dim_v;
  int group;  // query heads per key head
  int parts;  // blocks that share them
  int kv_heads;
  int lines;  // of all sequences: see line_of_block
};

constexpr int kThreads = NUM_WARPS * 32;
using KeyCopy = TileCopy<HEAD_DIM, kThreads>;
using ValueCopy = TileCopy<HEAD_DIM_V, kThreads>;
constexpr int kPitch = KeyCopy::kPitch, kPitchV = ValueCopy::kPitch, kPitchP = BLOCK_N * 2 + 16;

// Every warp's part of the products, in tiles of 16.
constexpr int kScoreRows = BLOCK_M / SCORE_WARPS_M / 16, kScoreKeys = BLOCK_N / SCORE_WARPS_N / 16;
constexpr int kScoreWarps = SCORE_WARPS_M * SCORE_WARPS_N;
constexpr int kSumWarps = SPLIT ? NUM_WARPS / 2 : NUM_WARPS;  // that have a part of dK, and of dV
constexpr int kWidthWarps = kSumWarps / KEY_WARPS, kKeys = BLOCK_N / KEY_WARPS / 16;
constexpr int kWidth = HEAD_DIM / kWidthWarps / 16, kWidthV = HEAD_DIM_V / kWidthWarps / 16;
constexpr int kRowsWidthWarps = NUM_WARPS / ROW_WARPS, kRows = BLOCK_M / ROW_WARPS / 16;
constexpr int kRowsWidth = HEAD_DIM / kRowsWidthWarps / 16;
constexpr int kPasses = kRows * kRowsWidth > 6 && kRowsWidth % 2 == 0 ? 2 : 1;  // of dQ, for its registers' sake
static_assert(kScoreRows * SCORE_WARPS_M * 16 == BLOCK_M && kScoreKeys * SCORE_WARPS_N * 16 == BLOCK_N, "score warps");
static_assert(kKeys * KEY_WARPS * 16 == BLOCK_N && kWidth * kWidthWarps * 16 == HEAD_DIM, "key warps");
static_assert(kWidthV * kWidthWarps * 16 == HEAD_DIM_V, "key warps");
static_assert(kRows * ROW_WARPS * 16 == BLOCK_M, "row warps");
static_assert(kRowsWidth * kRowsWidthWarps * 16 == HEAD_DIM, "row warps");
static_assert(kRowPadding % BLOCK_M == 0, "a tile of rows is read whole");

// A stage: Q, dO, lse2 and delta of a tile of rows.
constexpr int kStageGrad = BLOCK_M * kPitch, kStageTerms = kStageGrad + BLOCK_M * kPitchV;
constexpr int kStage = kStageTerms + BLOCK_M * 8;

// The tiles of rows that a block walks. In shared memory, behind the stages: registers are what this kernel is short of.
struct Walk {
  int* turn;  // the first thread's: at the rows that were added to last, or null
  int first_tile, end_tile;
  int first_whole, end_whole;  // those of which every row sees all of the block's keys
  int end_head;                // of the block's query heads
  int rows_begin;              // of the sequence, in padded rows
  int batch, kv_head, part;
};

// By one thread: the rows that see keys of the block which begins at first_key.
__device__ __forceinline__ void plan(volatile Walk& walk, const BackwardParams& p, const Sequence& seq, int batch,
                                     int first_key, int end_head) {
  const int reaching = seq.first_row_reaching(first_key);
  // A tile is walked when its last row reaches the block's first key, and its first row begins before its last: all
  // that see any of its keys. Turns are counted by the same rule.
  walk.first_tile = reaching / BLOCK_M;
  walk.end_tile = reaching < seq.seqlen_q ? (seq.end_row_beginning(first_key + BLOCK_N) + BLOCK_M - 1) / BLOCK_M : 0;
  walk.first_whole = (seq.first_row_reaching(first_key + BLOCK_N - 1) + BLOCK_M - 1) / BLOCK_M;
  walk.end_whole = seq.end_row_beginning(first_key + 1) / BLOCK_M;
  walk.turn = nullptr;
  walk.end_head = end_head;
  walk.rows_begin = padded_begin(p.sequence.cu_seqlens_q, p.sequence.seqlen_q, batch);
}

// Where a block's tiles lie in shared memory.
struct Shared {
  char* const memory;
  const uint32 k, v, probs, ds, stages;

  __device__ __forceinline__ explicit Shared(char* memory)
      : memory(memory),
        k(shared_address(memory)),
        v(k + BLOCK_N * kPitch),
        probs(v + BLOCK_N * kPitchV),
        ds(probs + BLOCK_M * kPitchP),
        stages(ds + BLOCK_M * kPitchP) {}

  __device__ __forceinline__ volatile Walk& walk() const {
    return *reinterpret_cast<Walk*>(memory + (stages - k) + STAGES * kStage);
  }
  // lse2 and delta of a stage's rows.
  __device__ __forceinline__ const float* terms(uint32 stage) const {
    return reinterpret_cast<const float*>(memory + (stage - k) + kStageTerms);
  }
};

// The order of work is the grid's, whose blocks start with x first, then y, then z: lines of a section, tiles of keys,
// sections. A line is a part of a key head's query heads in a sequence, whose blocks share Q, dO and the sums of dQ; a
// section is as many lines as have these in the L2 (heuristics/sm80_backward.py). The last section may have fewer.
__device__ __forceinline__ int line_of_block() { return static_cast<int>(block_z() * gridDim.x + block_x()); }

// With a causal mask the first keys have the most rows, and start first, those of a section's lines side by side; where
// blocks take turns, the last keys do.
__device__ __forceinline__ int first_key_of_block() {
  return static_cast<int>(DETERMINISTIC ? gridDim.y - 1 - block_y() : block_y()) * BLOCK_N;
}

// What of the problem a block takes.
struct Block {
  int batch, kv_head, part;
  int first_key, seqlen_k;  // in the sequence
  int64 dense_batch, row;   // of the key tensors

  __device__ __forceinline__ explicit Block(const BackwardParams& p) {
    const int line = line_of_block(), head = line / p.parts;
    batch = head / p.kv_heads;
    kv_head = head - batch * p.kv_heads;
    part = line - head * p.parts;
    find_keys(p);
  }
  __device__ __forceinline__ Block(const BackwardParams& p, const volatile Walk& walk)
      : batch(walk.batch), kv_head(walk.kv_head), part(walk.part) {
    find_keys(p);
  }
  __device__ __forceinline__ void keep(volatile Walk& walk) const {
    walk.batch = batch;
    walk.kv_head = kv_head;
    walk.part = part;
  }
  __device__ __forceinline__ void find_keys(const BackwardParams& p) {
    first_key = first_key_of_block();
    int k_begin = 0;
    seqlen_k = p.sequence.seqlen_k;
    if (p.sequence.cu_seqlens_k) {
      k_begin = p.sequence.cu_seqlens_k[batch];
      seqlen_k = p.sequence.cu_seqlens_k[batch + 1] - k_begin;
    }
    dense_batch = p.sequence.cu_seqlens_k ? 0 : batch;
    row = static_cast<int64>(k_begin) + first_key;
  }

  __device__ __forceinline__ int64 key_offset(int64 batch_stride, int64 head_stride, int64 row_stride) const {
    return dense_batch * batch_stride + kv_head * head_stride + row * row_stride;
  }
};
