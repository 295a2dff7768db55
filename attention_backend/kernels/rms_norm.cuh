// RMSNorm of rows (Zhang & Sennrich, arXiv 1910.07467), with ADD of x + residual, which is written too: one block a row,
// which stays in registers between its two uses.
//
// Numbers are rounded where Hugging Face's modules round: the sum; the normalised row before its weight (Llama), or with
// UNIT_OFFSET once, after 1 + weight (Gemma).
//
// Compile-time: BF16, ADD, UNIT_OFFSET, VECTORS (of 8 elements, of a thread).
#include "parts/dependent_launch.cuh"
#include "parts/vectors.cuh"

// The same fields, in the same order, as attention_backend/kernels/rms_norm.py: RmsNormParams. Strides are in elements.
struct RmsNormParams {
  const element* x;
  const element* residual;
  const element* weight;
  element* out;  // contiguous rows
  element* sum;
  int64 x_row, residual_row;
  int width;  // a multiple of 8
  float eps;
};

constexpr int kMaxThreads = 512;

// The sum over the block, in every thread.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float of_warps[kMaxThreads / 32];
#pragma unroll
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  x = lane < static_cast<int>(blockDim.x) / 32 ? of_warps[lane] : 0.f;
#pragma unroll
  for (int d = kMaxThreads / 64; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return __shfl_sync(~0u, x, 0);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads) rms_norm(const __grid_constant__ RmsNormParams p) {
  let_next_start();
  const int64 row = blockIdx.x;
  const uint4* const x_row = reinterpret_cast<const uint4*>(p.x + row * p.x_row);
  const uint4* const weights = reinterpret_cast<const uint4*>(p.weight);
  const int vectors = p.width / kVector;
  uint4 x[VECTORS], weight[VECTORS];
#if ADD
  const uint4* const residual_row = reinterpret_cast<const uint4*>(p.residual + row * p.residual_row);
  uint4 residual[VECTORS];
#endif
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) weight[i] = weights[at];
  }
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    x[i] = make_uint4(0, 0, 0, 0);
    if (at < vectors) {
      x[i] = x_row[at];
#if ADD
      residual[i] = residual_row[at];
#endif
    }
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    float a[kVector];
    unpack(x[i], a);
#if ADD
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) {
      float b[kVector];
      unpack(residual[i], b);
#pragma unroll
      for (int j = 0; j < kVector; j++) a[j] += b[j];
      x[i] = pack(a);
      unpack(x[i], a);
      reinterpret_cast<uint4*>(p.sum + row * p.width)[at] = x[i];
    }
#endif
#pragma unroll
    for (int j = 0; j < kVector; j++) squares += a[j] * a[j];
  }
  const float scale = rsqrtf(block_sum(squares) / p.width + p.eps);
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) break;
    float a[kVector], w[kVector];
    unpack(x[i], a);
    unpack(weight[i], w);
#pragma unroll
    for (int j = 0; j < kVector; j++) a[j] *= scale;
#if !UNIT_OFFSET
    round_all(a);
#endif
#pragma unroll
    for (int j = 0; j < kVector; j++) a[j] *= UNIT_OFFSET + w[j];
    reinterpret_cast<uint4*>(p.out + row * p.width)[at] = pack(a);
  }
}
