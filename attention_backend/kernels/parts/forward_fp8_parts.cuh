// How the parts of a tile's keys come together: each warp leaves what its rows have of a part in device memory, and the one
// that comes last at its tile's counter adds all parts up, always in one order, so that the same call gives the same bits
// whoever comes last. The counter wraps to zero as the last one counts itself. Nobody waits.
#pragma once

#include "parts/forward_fp8_rows.cuh"
#include "parts/forward_fp8_work.cuh"

constexpr int kPartFloats = BLOCK_M * (HEAD_DIM + 2);  // part_floats in heuristics/fp8.py
constexpr int kTileWarps = kConsumers * 4;

// Whether this warp has the rows' whole sums now, and is to store them.
__device__ __forceinline__ bool join_parts(float (&acc)[HEAD_DIM / 2], RowState& row, int part, const Fp8Params& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
  // A part's sums of this warp's rows, register after register; behind them shift and sum of each row.
  auto sums_of = [&](int part) { return p.parts + static_cast<int64>(part) * kPartFloats + warp * 16 * (HEAD_DIM + 2); };
  auto row_of = [&](int part, int half) { return sums_of(part) + 16 * HEAD_DIM + (half * 8 + lane / 4) * 2; };
  float4* mine = reinterpret_cast<float4*>(sums_of(part)) + lane;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 8; i++)
    mine[i * 32] = make_float4(acc[i * 4], acc[i * 4 + 1], acc[i * 4 + 2], acc[i * 4 + 3]);
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (lane % 4 == 0) *reinterpret_cast<float2*>(row_of(part, half)) = make_float2(row.shift[half], row.sum[half]);
  __threadfence();
  __syncwarp();
  const int tile = part % p.cut;
  uint32* counter = reinterpret_cast<uint32*>(p.counters) + 2 + tile * kTileWarps + warp;
  const uint32 others = p.splits - 1;
  uint32 before = 0;
  if (lane == 0) before = atomicInc(counter, others);
  if (__shfl_sync(~0u, before, 0) != others) return false;
  __threadfence();
  float least[2] = {kNothingSeen, kNothingSeen};
#pragma unroll 1
  for (int s = 0; s < p.splits; s++)
#pragma unroll
    for (int half = 0; half < 2; half++) least[half] = fminf(least[half], __ldcg(row_of(tile + s * p.cut, half)));
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; i++) acc[i] = 0.f;
  row.sum[0] = row.sum[1] = 0.f;
#pragma unroll 1
  for (int s = 0; s < p.splits; s++) {
    const int at = tile + s * p.cut;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float2 of_part = __ldcg(reinterpret_cast<const float2*>(row_of(at, half)));
      factor[half] = exp2_approx(least[half] - of_part.x);
      row.sum[half] += factor[half] * of_part.y;
    }
    const float4* sums = reinterpret_cast<const float4*>(sums_of(at)) + lane;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) {
      const float4 x = __ldcg(sums + i * 32);
      acc[i * 4] = fmaf(factor[0], x.x, acc[i * 4]);
      acc[i * 4 + 1] = fmaf(factor[0], x.y, acc[i * 4 + 1]);
      acc[i * 4 + 2] = fmaf(factor[1], x.z, acc[i * 4 + 2]);
      acc[i * 4 + 3] = fmaf(factor[1], x.w, acc[i * 4 + 3]);
      if (i % 4 == 3) asm volatile("" ::: "memory");  // more at once would be more registers than there are
    }
  }
  row.shift[0] = least[0], row.shift[1] = least[1];
  return true;
}
