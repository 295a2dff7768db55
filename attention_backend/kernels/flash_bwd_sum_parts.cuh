// The end of a backward whose blocks share out a key head's query heads: dK and dV are the sums of the parts' float32 ones,
// in their order. One launch for both; a thread takes 8 elements.
//
// Compile-time: BF16.
#include "parts/vectors.cuh"

// The same fields, in the same order, as attention_backend/kernels/flash_bwd_parts.py: SumPartsParams.
struct SumPartsParams {
  const float* parts[2];  // of dK and of dV: [count, vectors * 8]
  element* totals[2];
  int64 vectors[2];
  int count, reserved;
};

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) flash_bwd_sum_parts(const __grid_constant__ SumPartsParams p) {
  const int which = blockIdx.y;
  const int64 i = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x, vectors = p.vectors[which];
  if (i >= vectors) return;
  float sum[kVector] = {};
#pragma unroll 2
  for (int part = 0; part < p.count; part++) {
    const float4* from = reinterpret_cast<const float4*>(p.parts[which]) + (part * vectors + i) * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float4 x = from[half];
      sum[half * 4] += x.x, sum[half * 4 + 1] += x.y, sum[half * 4 + 2] += x.z, sum[half * 4 + 3] += x.w;
    }
  }
  reinterpret_cast<uint4*>(p.totals[which])[i] = pack(sum);
}
