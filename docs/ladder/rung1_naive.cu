// Rung 1: naive. One thread computes one row of the output; the row's scores lie in global memory.
//
// q, k, v, out: [heads, n, 128] bfloat16, scores: [heads, n, n] float. Grid (n / 128, heads), 128 threads. Any GPU.
#include <cuda_bf16.h>

constexpr int kDim = 128;
constexpr float kScale = 0.08838834764831845f;  // 1 / sqrt(kDim)

extern "C" __global__ void __launch_bounds__(128)
    rung1_naive(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, __nv_bfloat16* out,
                float* scores, int n) {
  const int row = blockIdx.x * 128 + threadIdx.x;
  const long long head = blockIdx.y;
  q += (head * n + row) * kDim;
  k += head * n * kDim;
  v += head * n * kDim;
  out += (head * n + row) * kDim;
  scores += (head * n + row) * n;

  float maximum = __int_as_float(0xff800000);  // -infinity
  for (int key = 0; key < n; key++) {
    float dot = 0.f;
    for (int c = 0; c < kDim; c++) dot += __bfloat162float(q[c]) * __bfloat162float(k[key * kDim + c]);
    scores[key] = dot * kScale;
    maximum = fmaxf(maximum, dot * kScale);
  }

  float sum = 0.f;
  for (int key = 0; key < n; key++) {
    const float weight = expf(scores[key] - maximum);  // the row's largest score is taken out: no overflow
    scores[key] = weight;
    sum += weight;
  }

  float acc[kDim] = {};
  for (int key = 0; key < n; key++) {
    const float weight = scores[key];
#pragma unroll
    for (int c = 0; c < kDim; c++) acc[c] += weight * __bfloat162float(v[key * kDim + c]);
  }
#pragma unroll
  for (int c = 0; c < kDim; c++) out[c] = __float2bfloat16_rn(acc[c] / sum);
}
