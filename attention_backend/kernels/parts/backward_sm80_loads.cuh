// The tiles of rows of the generic backward on their way into shared memory.
//
// Compile-time: KEY_MASK.
#pragma once

#include "parts/backward_sm80_tiles.cuh"

// Starts the copies of Q, dO, lse2 and delta of tile m of rows to `stage`.
__device__ __forceinline__ void load_rows(const BackwardParams& p, volatile Walk& walk, uint32 stage, int head, int m) {
  const int first_row = m * BLOCK_M;
  const uint32 thread = thread_index();
  const KeyCopy copy_k(thread);
  const ValueCopy copy_v(thread);
  const int64 terms = head * p.padded_rows + walk.rows_begin + first_row;
  const float* lse2 = p.lse2 + terms;
  const int b = walk.batch, dense_b = p.sequence.cu_seqlens_q ? 0 : b;
  const int64 row = (p.sequence.cu_seqlens_q ? p.sequence.cu_seqlens_q[b] : 0) + first_row;
  const element* q_tile = p.q + dense_b * p.q_batch + head * p.q_head + row * p.q_row;
  const element* grad_tile = p.grad_out + dense_b * p.grad_out_batch + head * p.grad_out_head + row * p.grad_out_row;
  if (!KEY_MASK && m >= walk.first_whole && m < walk.end_whole) {
    auto ok = [](int) { return true; };
    copy_k.template strided<BLOCK_M>(stage, q_tile, p.head_dim, p.q_row, ok);
    copy_v.template strided<BLOCK_M>(stage + kStageGrad, grad_tile, p.head_dim_v, p.grad_out_row, ok);
  } else {  // rows that see nothing may be NaN, too
    auto ok = [&](int r) { return lse2[r] != kInfinity; };
    copy_k.template strided<BLOCK_M>(stage, q_tile, p.head_dim, p.q_row, ok);
    copy_v.template strided<BLOCK_M>(stage + kStageGrad, grad_tile, p.head_dim_v, p.grad_out_row, ok);
  }
  for (uint32 i = thread; i < BLOCK_M / 2; i += kThreads) {
    const bool second = i >= BLOCK_M / 4;
    const uint32 at = second ? i - BLOCK_M / 4 : i;
    copy16(stage + kStageTerms + i * 16, (second ? p.delta + terms : lse2) + at * 4, true);
  }
}
