// Rung 2: tiled. 256 threads share 64 query rows and, 64 at a time, the keys and values: what is read from global
// memory is used 64 times from shared memory, and what is read from there at least 4 times from registers. The scores
// still lie in global memory, between a pass over the keys and a pass over the values.
//
// q, k, v, out: [heads, n, 128] bfloat16, scores: [heads, n, n] float. Grid (n / 64, heads), 256 threads.
// sm_80 and later (85 KB of shared memory).
#include <cuda_bf16.h>

constexpr int kDim = 128, kTile = 64, kThreads = 256;
constexpr int kPitch = kDim + 4, kPitchP = kTile + 4;  // floats of a row in shared memory: 4 more shift the banks
constexpr float kScale = 0.08838834764831845f;        // 1 / sqrt(kDim)

// 64 rows of 128 elements, as floats.
__device__ void load_tile(float* tile, const __nv_bfloat16* source) {
  for (int i = threadIdx.x; i < kTile * kDim / 8; i += kThreads) {
    const uint4 chunk = reinterpret_cast<const uint4*>(source)[i];
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&chunk);
    float2* to = reinterpret_cast<float2*>(tile + i / (kDim / 8) * kPitch + i % (kDim / 8) * 8);
#pragma unroll
    for (int j = 0; j < 4; j++) to[j] = __bfloat1622float2(pairs[j]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    rung2_tiled(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, __nv_bfloat16* out,
                float* scores, int n) {
  extern __shared__ float4 shared[];
  float* tile_q = reinterpret_cast<float*>(shared);
  float* tile_kv = tile_q + kTile * kPitch;  // keys first, values later
  float* tile_p = tile_kv + kTile * kPitch;

  // This thread: rows y .. y + 3 of the block; of scores columns x + 16 j, of the output columns 4 x + 64 j and 3 more.
  const int x = threadIdx.x % 16, y = threadIdx.x / 16 * 4;
  const long long head = blockIdx.y;
  const long long first = head * n + static_cast<long long>(blockIdx.x) * kTile;  // row of q and out
  k += head * n * kDim;
  v += head * n * kDim;
  scores += first * n;
  load_tile(tile_q, q + first * kDim);

  float maximum[4], sum[4] = {};
  for (int i = 0; i < 4; i++) maximum[i] = __int_as_float(0xff800000);  // -infinity
  for (int key0 = 0; key0 < n; key0 += kTile) {
    __syncthreads();  // all threads are done with the keys before
    load_tile(tile_kv, k + static_cast<long long>(key0) * kDim);
    __syncthreads();
    float s[4][4] = {};
#pragma unroll 4
    for (int c = 0; c < kDim; c += 4) {
      float4 a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        a[i] = *reinterpret_cast<const float4*>(tile_q + (y + i) * kPitch + c);
        b[i] = *reinterpret_cast<const float4*>(tile_kv + (x + 16 * i) * kPitch + c);
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) s[i][j] += a[i].x * b[j].x + a[i].y * b[j].y + a[i].z * b[j].z + a[i].w * b[j].w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        scores[static_cast<long long>(y + i) * n + key0 + x + 16 * j] = s[i][j] * kScale;
        maximum[i] = fmaxf(maximum[i], s[i][j] * kScale);
      }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)  // the sixteen threads that share a row are neighbours in a warp
    for (int lanes = 1; lanes < 16; lanes *= 2) maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(~0u, maximum[i], lanes));

  float acc[4][8] = {};
  for (int key0 = 0; key0 < n; key0 += kTile) {
    __syncthreads();  // all threads are done with the tiles before
    load_tile(tile_kv, v + static_cast<long long>(key0) * kDim);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {  // the very scores that this thread wrote
        const float weight = expf(scores[static_cast<long long>(y + i) * n + key0 + x + 16 * j] - maximum[i]);
        tile_p[(y + i) * kPitchP + x + 16 * j] = weight;
        sum[i] += weight;
      }
    __syncthreads();
#pragma unroll 4
    for (int key = 0; key < kTile; key++) {
      const float4 b0 = *reinterpret_cast<const float4*>(tile_kv + key * kPitch + x * 4);
      const float4 b1 = *reinterpret_cast<const float4*>(tile_kv + key * kPitch + x * 4 + 64);
      const float b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float weight = tile_p[(y + i) * kPitchP + key];
#pragma unroll
        for (int j = 0; j < 8; j++) acc[i][j] += weight * b[j];
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 4; i++) {
    for (int lanes = 1; lanes < 16; lanes *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], lanes);
    __nv_bfloat162* to = reinterpret_cast<__nv_bfloat162*>(out + (first + y + i) * kDim + x * 4);
#pragma unroll
    for (int j = 0; j < 4; j++)
      to[j / 2 * 32 + j % 2] = __floats2bfloat162_rn(acc[i][2 * j] / sum[i], acc[i][2 * j + 1] / sum[i]);
  }
}
