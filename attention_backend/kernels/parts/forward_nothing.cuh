// The Hopper forward's rows that see no key, as padding on the left leaves them under a causal mask: no tile is drawn for
// them. The warp that draws tiles writes theirs, a share for each tile that it has drawn, while that is computed.
#pragma once

#include "parts/cluster.cuh"
#include "parts/element.cuh"
#include "parts/hopper_params.cuh"

// Lanes that write a row, 16 bytes each: whole lines.
constexpr int kRowLanes = HEAD_DIM_V <= 64 ? 8 : HEAD_DIM_V <= 128 ? 16 : 32;
static_assert(BLOCK_M % 32 == 0 && kRowLanes * 8 >= HEAD_DIM_V, "each lane has one place of a row");

// The m-th BLOCK_M rows of a sequence. All 32 lanes of a warp call.
__device__ __forceinline__ void write_nothing(int batch, int head, int m, const HopperParams& p) {
  const ForwardParams& f = p.forward;
  const int lane = threadIdx.x % 32, row = lane / kRowLanes, column = lane % kRowLanes * 8;
  const int* begins = f.sequence.cu_seqlens_q;
  const int first = (begins ? begins[batch] : 0) + m * BLOCK_M;
  float* lse = f.lse + (first + lane) + head * f.lse_head;
  element* out = f.out + (first + row) * f.out_row + head * f.out_head + column;
  if (!begins) lse += batch * f.lse_batch, out += batch * f.out_batch;
#pragma unroll
  for (int r = 0; r < BLOCK_M; r += 32) lse[r] = -kInfinity;
  if (column >= f.head_dim_v) return;
#pragma unroll 4
  for (int r = 0; r < BLOCK_M; r += 32 / kRowLanes) {
    *reinterpret_cast<uint4*>(out) = make_uint4(0, 0, 0, 0);
    out += 32 / kRowLanes * f.out_row;
  }
}
