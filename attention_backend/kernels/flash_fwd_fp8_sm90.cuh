// Attention forward for Hopper at 8 bits (e4m3): the structure of flash_fwd_sm90.cuh, on tensor cores twice as fast.
// FlashAttention-3 (arXiv 2407.08608), section 3.3, with its layout problem solved ahead: quantize_fp8.cuh writes query,
// key and value tiles as images of shared memory, values with keys innermost and in the order in which the accumulators
// of the scores are packed, so a tile is one bulk copy and no byte is moved between the two products.
//
// A row's exponent is score * q_scale[row] * k_scale[tile] (softmax scale and log2 e are in q_scale). It is taken
// against a stabiliser that follows the row's maximum only when that has grown by kThreshold: mathematics is the same,
// and most tiles need no rescaling. Probabilities are 2^(exponent + kOffset), which uses e4m3's range up to 448.
//
// The tensor cores cut the products they add to 13 bits below the largest: a sum over n keys would be short by up to
// n / 50,000. They only ever add up one tile, from zero, and a part of the columns at a time; float32 adds the rest.
// A warpgroup waits for its products: scores and sums need no registers at once, and the other warpgroups keep the
// tensor cores busy meanwhile.
//
// Compile-time: BF16 (of the output), HEAD_DIM (64, 128, 256), BLOCK_M (128, 192), BLOCK_N.
#include "parts/forward_fp8_rows.cuh"

// A thread's first row of queries (the second is 8 further) and first column in a tile.
struct Place {
  int row, column;
};

struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) flash_fwd_fp8_sm90(const __grid_constant__ Fp8Params p) {
  extern __shared__ __align__(1024) char shared[];
  const uint32 tile_q = (shared_address(shared) + 1023) & ~1023u;
  const uint32 ring_k = tile_q + kBytesQ, ring_v = ring_k + kStages * kBytesKv;
  const uint32 full_q = ring_v + kStages * kBytesKv, full_k = full_q + 8;
  const uint32 empty_k = full_k + 8 * kStages, full_v = empty_k + 8 * kStages, empty_v = full_v + 8 * kStages;

  const int section = blockIdx.x / (p.section * p.q_tiles), place = blockIdx.x % (p.section * p.q_tiles);
  const int section_heads = min(p.section, p.num_heads - section * p.section);
  const int head = section * p.section + place % section_heads, batch = blockIdx.y;
  const int q_tile = p.q_tiles - 1 - place / section_heads;  // those with the most keys start first
  const int first_row = q_tile * BLOCK_M, last_row = min(first_row + BLOCK_M, p.seqlen_q) - 1;
  const int64 kv = batch * (p.num_heads / p.group) + head / p.group;

  auto high = [&](int i) { return p.causal ? min(i + p.seqlen_k - p.seqlen_q + 1, p.seqlen_k) : p.seqlen_k; };
  const int tiles = (max(high(last_row), 0) + BLOCK_N - 1) / BLOCK_N;

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
    registers_lower<kProducerRegisters>();
    if (threadIdx.x != 0 || tiles == 0) return;
    auto load = [&](const uint8* images, uint32 ring, uint32 full, uint32 empty, int step) {
      const int stage = step % kStages;
      barrier_wait(empty + 8 * stage, (step / kStages & 1) ^ 1);
      barrier_expect(full + 8 * stage, kBytesKv);
      bulk_load(ring + stage * kBytesKv, images + (kv * p.k_tiles + tiles - 1 - step) * kBytesKv, kBytesKv,
                full + 8 * stage, kEvictLast);
    };
    barrier_expect(full_q, kBytesQ);
    bulk_load(tile_q, p.q + (static_cast<int64>(batch * p.num_heads + head) * p.q_tiles + q_tile) * kBytesQ, kBytesQ,
              full_q, kEvictFirst);
    load(p.k, ring_k, full_k, empty_k, 0);
#pragma unroll 1
    for (int step = 1; step < tiles; step++) {
      load(p.k, ring_k, full_k, empty_k, step);
      load(p.v, ring_v, full_v, empty_v, step - 1);
    }
    load(p.v, ring_v, full_v, empty_v, tiles - 1);
    return;
  }

  registers_raise<kConsumerRegisters>();
  const int group = threadIdx.x / 128 - 1;
  auto thread_place = [&] {
    int thread;  // read anew each time: meanwhile it takes no registers, of which there are none to spare
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return Place{first_row + (thread - 128) / 32 * 16 + thread % 32 / 4, thread % 4 * 2};
  };

  float acc[HEAD_DIM / 2];
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; i++) acc[i] = 0.f;
  RowState row = {{-kInfinity, -kInfinity}, {0.f, 0.f}, {1.f, 1.f}};
  if (tiles > 0) {
    const uint32 q = tile_q + group * 64 * kWidth;
    const float* k_scales = p.k_scale + kv * p.k_tiles;
    const float* q_scales =
        p.q_scale + static_cast<int64>(batch * p.num_heads + head) * p.q_tiles * BLOCK_M + thread_place().row;
    const float q_scale[2] = {q_scales[0], q_scales[8]};
    float k_scale = k_scales[tiles - 1];  // read a step ahead
    uint32 probs[kSteps][4];
    auto softmax = [&](auto masked, float (&s)[BLOCK_N / 2], int step) {
      const float scale[2] = {q_scale[0] * k_scale, q_scale[1] * k_scale};
      k_scale = k_scales[max(tiles - 2 - step, 0)];
      int visible[2] = {};
      if constexpr (decltype(masked)::value) {
        const Place at = thread_place();
        const int key0 = (tiles - 1 - step) * BLOCK_N + at.column;
        visible[0] = high(at.row) - key0, visible[1] = high(at.row + 8) - key0;
      }
      softmax_tile<decltype(masked)::value>(s, row, scale, visible);
    };
    auto wait_keys = [&](int step) { barrier_wait(full_k + 8 * (step % kStages), step / kStages & 1); };
    auto wait_values = [&](int step) { barrier_wait(full_v + 8 * (step % kStages), step / kStages & 1); };
    // Tiles that every row sees whole end at the first row's last key.
    const int masked_steps = min(max(tiles - max(high(first_row), 0) / BLOCK_N, 1), tiles);
    barrier_wait(full_q, 0);
    wait_keys(0);
    auto step_tile = [&](auto masked, int step) {
      const int stage = step % kStages;
      {
        float s[BLOCK_N / 2];
        start_scores(s, q, ring_k + stage * kBytesKv);
        fp8_wait<0>();
        if (threadIdx.x % 128 == 0) barrier_arrive(empty_k + 8 * stage);
        softmax(masked, s, step);
        __syncwarp();  // else the compiler computes and packs probabilities by turns, in more registers
        pack_tile(probs, s);
      }
      wait_values(step);
#pragma unroll
      for (int begin = 0; begin < HEAD_DIM; begin += kSumColumns) {
        float sums[kSumColumns / 2];
        start_sums(sums, probs, ring_v + stage * kBytesKv + begin * 32);
        fp8_wait<0>();
#pragma unroll
        for (int i = 0; i < kSumColumns / 2; i++)
          acc[begin / 2 + i] = fmaf(acc[begin / 2 + i], row.correction[i / 2 % 2], sums[i]);
      }
      if (threadIdx.x % 128 == 0) barrier_arrive(empty_v + 8 * stage);
      if (step + 1 < tiles) wait_keys(step + 1);
    };
    int step = 0;
#pragma unroll 1
    for (; step < masked_steps; step++) step_tile(True{}, step);
#pragma unroll 1
    for (; step < tiles; step++) step_tile(False{}, step);
  }

  const Place at = thread_place();
  const float* v_scale = p.v_scale + kv * HEAD_DIM + at.column;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float l = row.sum[half];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const bool empty = row.max[half] == -kInfinity;
    const float factor = empty ? 0.f : 1.f / l;
    const int i = at.row + half * 8;
    if (i > last_row) continue;
    if (at.column == 0)
      p.lse[static_cast<int64>(batch * p.num_heads + head) * p.seqlen_q + i] =
          empty ? -kInfinity : (row.max[half] - kOffset + log2f(l)) * kLn2;
    uint32* to = reinterpret_cast<uint32*>(
        p.out + ((static_cast<int64>(batch) * p.seqlen_q + i) * p.num_heads + head) * HEAD_DIM + at.column);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++) {
      const float2 channel = *reinterpret_cast<const float2*>(v_scale + j * 8);
      to[j * 4] = pack2(acc[j * 4 + half * 2] * (factor * channel.x), acc[j * 4 + half * 2 + 1] * (factor * channel.y));
    }
  }
}
