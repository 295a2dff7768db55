// Attention forward for Hopper: FlashAttention-3's structure (arXiv 2407.08608, sections 3.1 and 3.2) in plain CUDA and
// PTX. One producer warp fills rings of key and value tiles by TMA; each consumer warpgroup owns 64 query rows, starts
// the product of the next scores before the softmax of this tile, and (with two) takes turns at the tensor cores.
//
// Tiles are walked from right to left: those that some row sees only in part first and last, those that all see between.
//
// Compile-time: BF16, HEAD_DIM (64, 128, 256; keys and values), BLOCK_M, BLOCK_N, PAGED (PAGE_ROWS keys a copy),
// SOFTCAP (at 128), PRODUCER_REGISTERS and CONSUMER_REGISTERS. KEY_MASK, ALIBI and BIAS must be 0.
#include "parts/element.cuh"
#include "parts/forward_params.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"
#include "parts/softmax.cuh"
#include "parts/tma.cuh"
#include "parts/wgmma_sm90.cuh"

constexpr int kStages = 2;
constexpr int kConsumers = BLOCK_M / 64;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr bool kTurns = kConsumers == 2 && HEAD_DIM <= 128;
constexpr int kSlabs = HEAD_DIM / 64;  // a tile is slabs of 64 columns, 128 swizzled bytes a row
constexpr int kSlabQ = BLOCK_M * 128, kSlabKv = BLOCK_N * 128;
constexpr int kBytesQ = kSlabs * kSlabQ, kBytesKv = kSlabs * kSlabKv;

struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};

// Starts s = q k^T of one tile.
__device__ __forceinline__ void start_scores(float (&s)[BLOCK_N / 2], uint32 q, uint32 k) {
  const uint64 a = wgmma_descriptor(q, 16), b = wgmma_descriptor(k, 16);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++)
    Wgmma<BLOCK_N>::shared(s, a + i / 4 * (kSlabQ >> 4) + i % 4 * 2, b + i / 4 * (kSlabKv >> 4) + i % 4 * 2, i != 0);
  wgmma_commit();
}

// Starts acc += p v of one tile.
__device__ __forceinline__ void start_output(float (&acc)[HEAD_DIM / 2], const uint32 (&p)[BLOCK_N / 16][4], uint32 v) {
  const uint64 b = wgmma_descriptor(v, kSlabKv);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; i++) Wgmma<HEAD_DIM>::registers(acc, p[i], b + i * 128);
  wgmma_commit();
}

// Turns scores into unnormalised probabilities; updates a row's maximum and sum; gives the factor of what came before.
template <bool MASKED>
__device__ __forceinline__ void softmax_tile(float (&s)[BLOCK_N / 2], float (&row_max)[2], float (&row_sum)[2],
                                             float (&correction)[2], const Score& score, const Sequence& seq, int row0,
                                             int key0) {
#if SCORE_CHANGES
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; i++)
    s[i] = score(s[i], row0 + i / 2 % 2 * 8, key0 + i / 4 * 8 + i % 2, seq);
#endif
  if (MASKED) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int low = seq.low(row0 + half * 8) - key0;
      const uint32 count = max(seq.high(row0 + half * 8) - key0 - low, 0);
#pragma unroll
      for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
          if (static_cast<uint32>(i * 8 + j - low) >= count) s[i * 4 + half * 2 + j] = -kInfinity;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float m = row_max[half];
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; i++) m = fmaxf(m, fmaxf(s[i * 4 + half * 2], s[i * 4 + half * 2 + 1]));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    const float shift = MASKED && m == -kInfinity ? 0.f : m * score.scale_log2;
    correction[half] = exp2_approx(row_max[half] * score.scale_log2 - shift);
    row_max[half] = m;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float e = exp2_approx(fmaf(s[i * 4 + half * 2 + j], score.scale_log2, -shift));
        s[i * 4 + half * 2 + j] = e;
        sum += e;
      }
    row_sum[half] = row_sum[half] * correction[half] + sum;
  }
}

__device__ __forceinline__ void pack_tile(uint32 (&p)[BLOCK_N / 16][4], const float (&s)[BLOCK_N / 2]) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) p[i][j] = pack2(s[i * 8 + j * 2], s[i * 8 + j * 2 + 1]);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_fwd_sm90(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                   const __grid_constant__ TensorMap map_v, const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32 tile_q = (shared_address(shared) + 1023) & ~1023u;
  const uint32 ring_k = tile_q + kBytesQ, ring_v = ring_k + kStages * kBytesKv;
  const uint32 full_q = ring_v + kStages * kBytesKv, full_k = full_q + 8, empty_k = full_k + 8 * kStages;
  const uint32 full_v = empty_k + 8 * kStages, empty_v = full_v + 8 * kStages;

  const int head = blockIdx.y, batch = blockIdx.z;
  const Sequence seq(p.sequence, batch);
  // Blocks with the most keys start first.
  const int first_row = (gridDim.x - 1 - blockIdx.x) * BLOCK_M;
  if (first_row >= seq.seqlen_q) return;
  const int last_row = min(first_row + BLOCK_M, seq.seqlen_q) - 1;
  const int any_low = seq.low(first_row), any_high = seq.high(last_row);
  const int all_low = seq.low(last_row), all_high = seq.high(first_row);
  const int first_tile = any_low / BLOCK_N;
  const int end_tile = any_high > any_low ? (any_high + BLOCK_N - 1) / BLOCK_N : first_tile;
  const int tiles = end_tile - first_tile;

  if (threadIdx.x == 0) {
    barrier_init(full_q, 1);
#pragma unroll
    for (int i = 0; i < kStages; i++) {
      barrier_init(full_k + 8 * i, 1);
      barrier_init(full_v + 8 * i, 1);
      barrier_init(empty_k + 8 * i, kConsumers);
      barrier_init(empty_v + 8 * i, kConsumers);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x < 128) {  // the producer warpgroup; one thread works
    registers_lower<PRODUCER_REGISTERS>();
    if (threadIdx.x != 0 || tiles == 0) return;
    const int kv_head = head / p.group;
#if PAGED
    const int* table = p.sequence.block_table + batch * p.sequence.block_table_stride;
    const int last_page = (any_high - 1) / p.sequence.page_size;
#else
    const int kv_batch = p.sequence.cu_seqlens_k ? 0 : batch;
#endif
    auto load = [&](const TensorMap* map, uint32 ring, uint32 full, uint32 empty, int step) {
      const int stage = step % kStages, key = (end_tile - 1 - step) * BLOCK_N;
      barrier_wait(empty + 8 * stage, (step / kStages & 1) ^ 1);
      barrier_expect(full + 8 * stage, kBytesKv);
      const uint32 tile = ring + stage * kBytesKv;
#if PAGED
#pragma unroll 1
      for (int r = 0; r < BLOCK_N; r += PAGE_ROWS) {
        const int page = min((key + r) / p.sequence.page_size, last_page);  // beyond the end: any page, it is masked
        const int row = (key + r) % p.sequence.page_size, block = table[page];
#pragma unroll
        for (int c = 0; c < kSlabs; c++)
          tma_load(tile + c * kSlabKv + r * 128, map, full + 8 * stage, c * 64, row, kv_head, block, kEvictLast);
      }
#else
#pragma unroll
      for (int c = 0; c < kSlabs; c++)
        tma_load(tile + c * kSlabKv, map, full + 8 * stage, c * 64, seq.k_begin + key, kv_head, kv_batch, kEvictLast);
#endif
    };
    barrier_expect(full_q, kBytesQ);
    const int q_batch = p.sequence.cu_seqlens_q ? 0 : batch;
#pragma unroll
    for (int c = 0; c < kSlabs; c++)
      tma_load(tile_q + c * kSlabQ, &map_q, full_q, c * 64, seq.q_begin + first_row, head, q_batch, kEvictFirst);
    load(&map_k, ring_k, full_k, empty_k, 0);
#pragma unroll 1
    for (int step = 1; step < tiles; step++) {
      load(&map_k, ring_k, full_k, empty_k, step);
      load(&map_v, ring_v, full_v, empty_v, step - 1);
    }
    load(&map_v, ring_v, full_v, empty_v, tiles - 1);
    return;
  }

  registers_raise<CONSUMER_REGISTERS>();
  const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32;
  const int row0 = first_row + group * 64 + thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
  const Score score(p.score, batch, head);

  float acc[HEAD_DIM / 2], row_max[2] = {-kInfinity, -kInfinity}, row_sum[2] = {0.f, 0.f}, correction[2];
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; i++) acc[i] = 0.f;

  // Slots that no row of the sequence sees may hold anything, and zero times NaN is NaN: their values become zeros.
  const int held_low = seq.low(0), held_high = seq.high(seq.seqlen_q - 1);
  auto clear_values = [&](int step) {
    const int key = (end_tile - 1 - step) * BLOCK_N;
    const int from = min(max(held_low - key, 0), BLOCK_N), to = min(max(held_high - key, from), BLOCK_N);
    if (from == 0 && to == BLOCK_N) return;
    const uint32 tile = ring_v + step % kStages * kBytesKv;
    barrier_wait(full_v + 8 * (step % kStages), step / kStages & 1);
    for (int i = group * 128 + thread; i < kSlabs * BLOCK_N * 8; i += kConsumers * 128) {
      const int r = i / 8 % BLOCK_N;
      if (r < from || r >= to)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + i / 8 / BLOCK_N * kSlabKv + r * 128 + i % 8 * 16),
                     "r"(0)
                     : "memory");
    }
    fence_async_proxy();
    named_sync(3, kConsumers * 128);
  };

  if (tiles > 0) {
    const uint32 q = tile_q + group * 64 * 128;
    uint32 probs[BLOCK_N / 16][4];
    if (kTurns && group == 0) named_arrive(1, 256);  // the first turn
    {
      float s[BLOCK_N / 2];
      barrier_wait(full_q, 0);
      barrier_wait(full_k, 0);
      if (kTurns) named_sync(1 + group, 256);
      start_scores(s, q, ring_k);
      if (kTurns) named_arrive(1 + (group ^ 1), 256);
      wgmma_wait<0>();
      if (thread == 0) barrier_arrive(empty_k);
      softmax_tile<true>(s, row_max, row_sum, correction, score, seq, row0, (end_tile - 1) * BLOCK_N + column);
      pack_tile(probs, s);
    }
    auto step_tile = [&](auto masked, int step) {
      const int stage = step % kStages, before = (step - 1) % kStages;
      float s[BLOCK_N / 2];
      barrier_wait(full_k + 8 * stage, step / kStages & 1);
      if (kTurns) named_sync(1 + group, 256);
      start_scores(s, q, ring_k + stage * kBytesKv);
      barrier_wait(full_v + 8 * before, (step - 1) / kStages & 1);
      start_output(acc, probs, ring_v + before * kBytesKv);
      if (kTurns) named_arrive(1 + (group ^ 1), 256);
      wgmma_wait<1>();
      if (thread == 0) barrier_arrive(empty_k + 8 * stage);
      softmax_tile<decltype(masked)::value>(s, row_max, row_sum, correction, score, seq, row0,
                                            (end_tile - 1 - step) * BLOCK_N + column);
      wgmma_wait<0>();
      if (thread == 0) barrier_arrive(empty_v + 8 * before);
      pack_tile(probs, s);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i++) acc[i] *= correction[i / 2 % 2];
    };
    clear_values(0);
    // Tiles that every row sees whole: from all_low up to all_high.
    const int whole_end = max(all_high / BLOCK_N, first_tile), whole_first = (all_low + BLOCK_N - 1) / BLOCK_N;
    const int masked_end = min(max(end_tile - whole_end, 1), tiles);               // steps before are masked
    const int whole_steps = min(max(end_tile - whole_first, masked_end), tiles);  // steps before are masked or whole
    int step = 1;
#pragma unroll 1
    for (; step < masked_end; step++) step_tile(True{}, step);
#pragma unroll 1
    for (; step < whole_steps; step++) step_tile(False{}, step);
#pragma unroll 1
    for (; step < tiles; step++) step_tile(True{}, step);
    const int last = (tiles - 1) % kStages;
    if (tiles > 1) clear_values(tiles - 1);
    barrier_wait(full_v + 8 * last, (tiles - 1) / kStages & 1);
    start_output(acc, probs, ring_v + last * kBytesKv);
    wgmma_wait<0>();
  }

  const bool packed = p.sequence.cu_seqlens_q != nullptr;
  element* out = p.out + (packed ? 0 : batch * p.out_batch) + head * p.out_head + column;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float l = row_sum[half];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const RowEnd end = end_row(row_max[half] * score.scale_log2, l, p.sinks ? p.sinks + head : nullptr);
    const int row = row0 + half * 8;
    if (row > last_row) continue;
    if (lane % 4 == 0)
      p.lse[(packed ? seq.q_begin : batch * p.lse_batch) + head * p.lse_head + row] = end.lse * kLn2;
    uint32* to = reinterpret_cast<uint32*>(out + (seq.q_begin + static_cast<int64>(row)) * p.out_row);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++)
      to[i * 4] = pack2(acc[i * 4 + half * 2] * end.factor, acc[i * 4 + half * 2 + 1] * end.factor);
  }
}
