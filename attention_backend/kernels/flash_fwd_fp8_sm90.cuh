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
#include "parts/e4m3.cuh"
#include "parts/element.cuh"
#include "parts/tma.cuh"
#include "parts/wgmma_fp8_sm90.cuh"

// The same fields, in the same order, as attention_backend/kernels/flash_fwd_fp8_sm90.py: Fp8Params.
struct Fp8Params {
  const uint8* q;        // images [batch, num_heads, q_tiles][BLOCK_M * HEAD_DIM], zeros beyond the last row
  const uint8* k;        // images [batch, num_kv_heads, k_tiles][BLOCK_N * HEAD_DIM], zeros beyond the last key
  const uint8* v;        // as k, transposed
  const float* q_scale;  // [batch, num_heads, q_tiles * BLOCK_M]
  const float* k_scale;  // [batch, num_kv_heads, k_tiles]
  const float* v_scale;  // [batch, num_kv_heads, HEAD_DIM]
  element* out;          // [batch, seqlen_q, num_heads, HEAD_DIM]
  float* lse;            // [batch, num_heads, seqlen_q]
  int seqlen_q, seqlen_k;
  int num_heads, group;
  int q_tiles, k_tiles;
  int section;  // heads whose tiles are worked on together, longest first: their keys and values fit the L2 cache
  int causal;   // bottom-right aligned
};

constexpr int kConsumers = BLOCK_M / 64;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kWidth = HEAD_DIM % 128 ? 64 : 128;  // bytes of a row in a slab of queries or keys; 32 of values
constexpr int kBytesQ = BLOCK_M * HEAD_DIM, kBytesKv = BLOCK_N * HEAD_DIM;
constexpr int kStages = 2;  // of the rings of keys and of values
constexpr int kSteps = BLOCK_N / 32;  // k-steps of the second product
constexpr int kSumColumns = HEAD_DIM == 64 ? 64 : HEAD_DIM / 2;  // of the output, added up at a time
constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32, kConsumerRegisters = kConsumers == 2 ? 240 : 160;
static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536, "registers of a multiprocessor");

// A probability is at most 2^(kOffset + kThreshold) = 430: below e4m3's 448, and normal down to 2^-13 of the largest.
constexpr float kOffset = 7.f, kThreshold = 1.75f;

// One contiguous copy to shared memory; its bytes count on `barrier`.
__device__ __forceinline__ void bulk_load(uint32 destination, const uint8* source, uint32 bytes, uint32 barrier,
                                          uint64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          destination),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// A value that all lanes hold, as the compiler knows then: descriptors are computed in uniform registers, where wgmma
// wants them.
__device__ __forceinline__ uint32 uniform(uint32 x) { return __shfl_sync(~0u, x, 0); }

// Starts s = q k^T of one tile.
__device__ __forceinline__ void start_scores(float (&s)[BLOCK_N / 2], uint32 q, uint32 k) {
  const uint64 a = fp8_descriptor<kWidth>(uniform(q)), b = fp8_descriptor<kWidth>(uniform(k));
  fp8_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) {
    const int slab = i * 32 / kWidth, within = i * 32 % kWidth >> 4;
    Fp8Wgmma<BLOCK_N>::shared(s, a + (slab * BLOCK_M * kWidth >> 4) + within,
                              b + (slab * BLOCK_N * kWidth >> 4) + within, i != 0);
  }
  fp8_commit();
}

// Starts sums = p v of one tile, for the columns that begin at `v`.
__device__ __forceinline__ void start_sums(float (&sums)[kSumColumns / 2], const uint32 (&p)[kSteps][4], uint32 v) {
  const uint64 b = fp8_descriptor<32>(uniform(v));
  fp8_fence();
#pragma unroll
  for (int i = 0; i < kSteps; i++)
    Fp8Wgmma<kSumColumns>::registers(sums, p[i], b + i * (HEAD_DIM * 32 >> 4), i != 0);
  fp8_commit();
}

struct RowState {
  float max[2], sum[2];  // the stabiliser (log2), the sum of 2^(exponent + kOffset)
  float correction[2];   // what earlier sums are multiplied by
};

// The largest score of each of the thread's rows.
__device__ __forceinline__ void largest_scores(float (&largest)[2], const float (&s)[BLOCK_N / 2]) {
  // One instruction takes three integers. As integers, floats without a sign are in order and those with one are
  // negative: a result that is not negative is the largest.
  int top[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int x = max(__float_as_int(s[half * 2]), __float_as_int(s[half * 2 + 1]));
#pragma unroll
    for (int i = 1; i < BLOCK_N / 8; i++)
      x = max(max(x, __float_as_int(s[i * 4 + half * 2])), __float_as_int(s[i * 4 + half * 2 + 1]));
    x = max(x, __shfl_xor_sync(~0u, x, 1));
    top[half] = max(x, __shfl_xor_sync(~0u, x, 2));
    largest[half] = __int_as_float(top[half]);
  }
  if (!__any_sync(~0u, min(top[0], top[1]) < 0)) return;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float x = fmaxf(s[half * 2], s[half * 2 + 1]);
#pragma unroll
    for (int i = 1; i < BLOCK_N / 8; i++) x = fmaxf(x, fmaxf(s[i * 4 + half * 2], s[i * 4 + half * 2 + 1]));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    largest[half] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  }
}

// Turns scores into probabilities 2^(exponent + kOffset). Row `half` sees its first `visible[half]` keys of the tile
// (counted from this thread's first column).
template <bool MASKED>
__device__ __forceinline__ void softmax_tile(float (&s)[BLOCK_N / 2], RowState& row, const float (&scale)[2],
                                             const int (&visible)[2]) {
  if (MASKED) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++)
      if (i / 4 * 8 + i % 2 >= visible[i / 2 % 2]) s[i] = -kInfinity;
  }
  float largest[2];
  largest_scores(largest, s);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float top = largest[half] * scale[half];
    const bool higher = top > row.max[half] + kThreshold;
    row.correction[half] = higher ? exp2_approx(row.max[half] - top) : 1.f;
    if (higher) row.max[half] = top;
    const float shift = kOffset - (MASKED && row.max[half] == -kInfinity ? 0.f : row.max[half]);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float& x = s[i * 4 + half * 2 + j];
        x = exp2_approx(fmaf(x, scale[half], shift));
        sum += x;
      }
    row.sum[half] = row.sum[half] * row.correction[half] + sum;
  }
}

__device__ __forceinline__ void pack_tile(uint32 (&p)[kSteps][4], const float (&s)[BLOCK_N / 2]) {
#pragma unroll
  for (int i = 0; i < kSteps; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int at = i * 16 + j / 2 * 8 + j % 2 * 2;
      p[i][j] = pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
    }
}

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
