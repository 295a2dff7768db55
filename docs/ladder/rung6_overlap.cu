// Rung 6: overlap. Two consumer warpgroups of 64 query rows take turns: while the products of one keep the tensor
// cores busy, the other computes the softmax of its own tile. A warpgroup starts the scores of a tile together with the
// output product of the tile before, which goes on during the softmax (FlashAttention-3, arXiv 2407.08608). The
// producer hands registers to the consumers, which hold scores, weights and output at the same time.
//
// Maps of q, k, v and the tensor out: [heads, n, 128] bfloat16. Grid (n / 128, heads), 384 threads. sm_90a only.
#include "parts/element.cuh"
#include "parts/tma.cuh"
#include "parts/wgmma_sm90.cuh"

constexpr int kDim = 128, kRows = 128, kKeys = 128, kStages = 2;
constexpr int kSlabQ = kRows * 128, kSlabKv = kKeys * 128;  // bytes: a tile is two slabs of 64 columns, 128 bytes a row
constexpr int kBytesQ = 2 * kSlabQ, kBytesKv = 2 * kSlabKv;
constexpr float kScaleLog2 = 0.08838834764831845f * kLog2e;  // log2(e) / sqrt(kDim)

// s = q k^T. A step of 16 columns is 32 bytes further in the slab; descriptors count in 16 bytes.
__device__ __forceinline__ void start_scores(float (&s)[kKeys / 2], uint32 q, uint32 k) {
  const uint64 a = wgmma_descriptor(q, 16), b = wgmma_descriptor(k, 16);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDim / 16; i++)
    Wgmma<kKeys>::shared(s, a + i / 4 * (kSlabQ / 16) + i % 4 * 2, b + i / 4 * (kSlabKv / 16) + i % 4 * 2, i != 0);
  wgmma_commit();
}

// acc += p v. A step of 16 keys is 2,048 bytes further.
__device__ __forceinline__ void start_output(float (&acc)[kDim / 2], const uint32 (&p)[kKeys / 16][4], uint32 v) {
  const uint64 b = wgmma_descriptor(v, kSlabKv);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kKeys / 16; i++) Wgmma<kDim>::registers(acc, p[i], b + i * 128);
  wgmma_commit();
}

// Scores -> weights. Thread 4 g + t of a warp holds rows g and g + 8.
__device__ __forceinline__ void softmax_tile(float (&s)[kKeys / 2], float (&maximum)[2], float (&sum)[2],
                                             float (&correction)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float larger = maximum[half];
#pragma unroll
    for (int i = 0; i < kKeys / 8; i++) larger = fmaxf(larger, fmaxf(s[i * 4 + half * 2], s[i * 4 + half * 2 + 1]));
    larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 1));
    larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 2));
    const float shift = larger * kScaleLog2;
    correction[half] = exp2_approx(maximum[half] * kScaleLog2 - shift);
    maximum[half] = larger;
    sum[half] *= correction[half];
#pragma unroll
    for (int i = 0; i < kKeys / 8; i++)
#pragma unroll
      for (int j = i * 4 + half * 2; j < i * 4 + half * 2 + 2; j++)
        sum[half] += s[j] = exp2_approx(fmaf(s[j], kScaleLog2, -shift));
  }
}

// Weights -> the next product's operand.
__device__ __forceinline__ void pack_tile(uint32 (&p)[kKeys / 16][4], const float (&s)[kKeys / 2]) {
#pragma unroll
  for (int i = 0; i < kKeys / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) p[i][j] = pack2(s[i * 8 + j * 2], s[i * 8 + j * 2 + 1]);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    rung6_overlap(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                  const __grid_constant__ TensorMap map_v, element* out, int n) {
  extern __shared__ __align__(1024) char shared[];
  const uint32 tile_q = (shared_address(shared) + 1023) & ~1023u;
  const uint32 ring_k = tile_q + kBytesQ, ring_v = ring_k + kStages * kBytesKv;
  const uint32 full_q = ring_v + kStages * kBytesKv;  // barriers, 8 bytes each
  const uint32 full_k = full_q + 8, empty_k = full_k + 8 * kStages;
  const uint32 full_v = empty_k + 8 * kStages, empty_v = full_v + 8 * kStages;
  const int head = blockIdx.y, first_row = blockIdx.x * kRows, tiles = n / kKeys;

  if (threadIdx.x == 0) {
    barrier_init(full_q, 1);
    for (int i = 0; i < 4 * kStages; i++)  // full when TMA is done, empty when both warpgroups are
      barrier_init(full_k + 8 * i, i / kStages % 2 == 0 ? 1 : 2);
    barrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x < 128) {  // the producer warpgroup; one thread works
    registers_lower<24>();
    if (threadIdx.x != 0) return;
    auto load = [&](const TensorMap* map, uint32 tile, uint32 slab, uint32 full, int row, uint64 policy) {
      barrier_expect(full, 2 * slab);
      tma_load(tile, map, full, 0, row, head, 0, policy);
      tma_load(tile + slab, map, full, 64, row, head, 0, policy);
    };
    load(&map_q, tile_q, kSlabQ, full_q, first_row, kEvictFirst);
#pragma unroll 1
    for (int step = 0; step < tiles; step++) {
      const int stage = step % kStages, parity = step / kStages & 1;
      barrier_wait(empty_k + 8 * stage, parity ^ 1);  // passes at once in the first round
      load(&map_k, ring_k + stage * kBytesKv, kSlabKv, full_k + 8 * stage, step * kKeys, kEvictLast);
      barrier_wait(empty_v + 8 * stage, parity ^ 1);
      load(&map_v, ring_v + stage * kBytesKv, kSlabKv, full_v + 8 * stage, step * kKeys, kEvictLast);
    }
    return;
  }

  registers_raise<240>();
  const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  const uint32 q = tile_q + group * 64 * 128;
  auto take_turn = [&] { named_sync(1 + group, 256); };  // products are started between taking and giving a turn
  auto give_turn = [&] { named_arrive(2 - group, 256); };
  if (group == 1) give_turn();  // group 0 is first
  float acc[kDim / 2] = {}, maximum[2] = {-kInfinity, -kInfinity}, sum[2] = {}, correction[2];
  uint32 probs[kKeys / 16][4];
  barrier_wait(full_q, 0);
  {
    float s[kKeys / 2];
    barrier_wait(full_k, 0);
    take_turn();
    start_scores(s, q, ring_k);
    give_turn();
    wgmma_wait<0>();
    if (thread == 0) barrier_arrive(empty_k);
    softmax_tile(s, maximum, sum, correction);
    pack_tile(probs, s);
  }
#pragma unroll 1
  for (int step = 1; step < tiles; step++) {
    const int stage = step % kStages, before = (step - 1) % kStages;
    float s[kKeys / 2];
    barrier_wait(full_k + 8 * stage, step / kStages & 1);
    take_turn();
    start_scores(s, q, ring_k + stage * kBytesKv);
    barrier_wait(full_v + 8 * before, (step - 1) / kStages & 1);
    start_output(acc, probs, ring_v + before * kBytesKv);
    give_turn();
    wgmma_wait<1>();  // the scores are there, the output of the tile before may not be
    if (thread == 0) barrier_arrive(empty_k + 8 * stage);
    softmax_tile(s, maximum, sum, correction);
    wgmma_wait<0>();  // until here the product reads probs
    if (thread == 0) barrier_arrive(empty_v + 8 * before);
    pack_tile(probs, s);
#pragma unroll
    for (int i = 0; i < kDim / 2; i++) acc[i] *= correction[i / 2 % 2];
  }
  const int last = (tiles - 1) % kStages;
  barrier_wait(full_v + 8 * last, (tiles - 1) / kStages & 1);
  start_output(acc, probs, ring_v + last * kBytesKv);
  wgmma_wait<0>();

  const int row = first_row + group * 64 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    const float factor = 1.f / sum[half];
    element* to = out + (static_cast<int64>(head) * n + row + half * 8) * kDim + thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDim / 8; i++)
      *reinterpret_cast<uint32*>(to + i * 8) =
          pack2(acc[i * 4 + half * 2] * factor, acc[i * 4 + half * 2 + 1] * factor);
  }
}
