// Rung 3: online softmax. One pass over keys and values together. A row's sum and output are kept relative to its
// largest score so far; when a larger one comes, what was summed is scaled down. No score leaves the thread block.
// (Milakov and Gimelshein, arXiv 1805.02867; in attention: Rabe and Staats, 2112.05682, FlashAttention, 2205.14135.)
//
// q, k, v, out: [heads, n, 128] bfloat16. Grid (n / 64, heads), 256 threads. sm_80 and later (85 KB of shared memory).
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
    rung3_online(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, __nv_bfloat16* out, int n) {
  extern __shared__ float4 shared[];
  float* tile_q = reinterpret_cast<float*>(shared);
  float* tile_kv = tile_q + kTile * kPitch;  // keys and values in turn
  float* tile_p = tile_kv + kTile * kPitch;

  // This thread: rows y .. y + 3 of the block; of scores columns x + 16 j, of the output columns 4 x + 64 j and 3 more.
  const int x = threadIdx.x % 16, y = threadIdx.x / 16 * 4;
  const long long head = blockIdx.y;
  const long long first = head * n + static_cast<long long>(blockIdx.x) * kTile;  // row of q and out
  k += head * n * kDim;
  v += head * n * kDim;
  load_tile(tile_q, q + first * kDim);

  float maximum[4], sum[4] = {}, acc[4][8] = {};
  for (int i = 0; i < 4; i++) maximum[i] = __int_as_float(0xff800000);  // -infinity
  for (int key0 = 0; key0 < n; key0 += kTile) {
    __syncthreads();  // all threads are done with the values before
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

    __syncthreads();  // all threads are done with the keys and with the weights before
    load_tile(tile_kv, v + static_cast<long long>(key0) * kDim);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float larger = fmaxf(fmaxf(s[i][0], s[i][1]), fmaxf(s[i][2], s[i][3])) * kScale;
      for (int lanes = 1; lanes < 16; lanes *= 2)  // the sixteen threads that share a row are neighbours in a warp
        larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, lanes));
      larger = fmaxf(larger, maximum[i]);
      const float correction = expf(maximum[i] - larger);
      maximum[i] = larger;
      sum[i] *= correction;
#pragma unroll
      for (int j = 0; j < 8; j++) acc[i][j] *= correction;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float weight = expf(s[i][j] * kScale - larger);
        tile_p[(y + i) * kPitchP + x + 16 * j] = weight;
        sum[i] += weight;
      }
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
