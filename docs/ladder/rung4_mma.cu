// Rung 4: tensor cores. Four warps take 16 query rows each; a product of 16 x 8 x 16 elements is one instruction of a
// warp (mma.sync), its operands fetched from shared memory four 8 x 8 matrices at a time (ldmatrix). The softmax works
// on the accumulators where they lie; packed, they are the next product's operand. cp.async brings the values during
// the scores and the next keys during the softmax. This is FlashAttention-2's loop (arXiv 2307.08691).
//
// q, k, v, out: [heads, n, 128] bfloat16. Grid (n / 64, heads), 128 threads. sm_80 and later.
#include <cuda_bf16.h>

typedef unsigned int uint32;
constexpr int kDim = 128, kTile = 64, kThreads = 128;
constexpr int kPitch = kDim * 2 + 16;  // bytes of a row in shared memory; 16 more shift the banks
constexpr float kScaleLog2 = 0.08838834764831845f * 1.4426950408889634f;  // log2(e) / sqrt(kDim), for exp2

__device__ __forceinline__ void ldmatrix(uint32 (&r)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(uint32 (&r)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// c += a * b, 16 x 16 times 16 x 8. Thread 4 g + t holds rows g (c[0], c[1]) and g + 8, columns 2 t and 2 t + 1.
__device__ __forceinline__ void mma(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Starts the copy of 64 rows of 128 elements.
__device__ __forceinline__ void start_copy(uint32 tile, const __nv_bfloat16* source) {
#pragma unroll
  for (int i = 0; i < kTile * kDim / 8 / kThreads; i++) {
    const int chunk = i * kThreads + threadIdx.x;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(tile + chunk / 16 * kPitch + chunk % 16 * 16),
                 "l"(source + chunk * 8) : "memory");
  }
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    rung4_mma(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, __nv_bfloat16* out, int n) {
  extern __shared__ uint4 shared[];
  const uint32 tile_q = static_cast<uint32>(__cvta_generic_to_shared(shared));
  const uint32 tile_k = tile_q + kTile * kPitch, tile_v = tile_k + kTile * kPitch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long head = blockIdx.y;
  const long long first = head * n + static_cast<long long>(blockIdx.x) * kTile;  // row of q and out
  k += head * n * kDim;
  v += head * n * kDim;

  // Where this thread's row of ldmatrix lies: queries are the left operand, keys and values the right one.
  const uint32 address_q = tile_q + (warp * 16 + lane % 16) * kPitch + lane / 16 * 16;
  const uint32 address_k = tile_k + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
  const uint32 address_v = tile_v + lane % 16 * kPitch + lane / 16 * 16;

  start_copy(tile_q, q + first * kDim);
  start_copy(tile_k, k);
  float acc[kDim / 8][4] = {}, maximum[2], sum[2] = {};  // of rows g and g + 8
  maximum[0] = maximum[1] = __int_as_float(0xff800000);  // -infinity
#pragma unroll 1
  for (int key0 = 0; key0 < n; key0 += kTile) {
    wait_for_copies();
    __syncthreads();  // the keys are there, and all warps are done with the values before
    start_copy(tile_v, v + static_cast<long long>(key0) * kDim);
    float s[kTile / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; step++) {
      uint32 a[4], b[4];
      ldmatrix(a, address_q + step * 32);
#pragma unroll
      for (int i = 0; i < kTile / 16; i++) {
        ldmatrix(b, address_k + i * 16 * kPitch + step * 32);
        mma(s[2 * i], a, b[0], b[1]);
        mma(s[2 * i + 1], a, b[2], b[3]);
      }
    }
    wait_for_copies();
    __syncthreads();  // the values are there, and all warps are done with the keys
    if (key0 + kTile < n) start_copy(tile_k, k + static_cast<long long>(key0 + kTile) * kDim);

#pragma unroll
    for (int half = 0; half < 2; half++) {
      float larger = maximum[half];
#pragma unroll
      for (int i = 0; i < kTile / 8; i++) larger = fmaxf(larger, fmaxf(s[i][half * 2], s[i][half * 2 + 1]));
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 1));  // four threads share a row
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 2));
      const float correction = exp2_approx((maximum[half] - larger) * kScaleLog2);
      maximum[half] = larger;
      sum[half] *= correction;
#pragma unroll
      for (int i = 0; i < kTile / 8; i++)
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; j++)
          sum[half] += s[i][j] = exp2_approx((s[i][j] - larger) * kScaleLog2);
#pragma unroll
      for (int i = 0; i < kDim / 8; i++) acc[i][half * 2] *= correction, acc[i][half * 2 + 1] *= correction;
    }
#pragma unroll
    for (int step = 0; step < kTile / 16; step++) {
      const uint32 a[4] = {pack(s[2 * step][0], s[2 * step][1]), pack(s[2 * step][2], s[2 * step][3]),
                           pack(s[2 * step + 1][0], s[2 * step + 1][1]), pack(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
      for (int i = 0; i < kDim / 16; i++) {
        uint32 b[4];
        ldmatrix_transposed(b, address_v + step * 16 * kPitch + i * 32);
        mma(acc[2 * i], a, b[0], b[1]);
        mma(acc[2 * i + 1], a, b[2], b[3]);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    uint32* to = reinterpret_cast<uint32*>(out + (first + warp * 16 + lane / 4 + half * 8) * kDim) + lane % 4;
#pragma unroll
    for (int i = 0; i < kDim / 8; i++) to[i * 4] = pack(acc[i][half * 2] / sum[half], acc[i][half * 2 + 1] / sum[half]);
  }
}
