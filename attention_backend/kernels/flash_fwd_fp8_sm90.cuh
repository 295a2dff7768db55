// Attention forward for Hopper at 8 bits (e4m3): the structure of flash_fwd_sm90.cuh, on tensor cores twice as fast.
// FlashAttention-3 (arXiv 2407.08608), section 3.3, with its layout problem solved ahead: quantize_fp8.cuh writes query,
// key and value tiles as images of shared memory, values with keys innermost and in the order in which the accumulators
// of the scores are packed, so a tile is one bulk copy and no byte is moved between the two products.
//
// A row's exponent is score * q_scale[row] * k_scale[tile] (softmax scale and log2 e are in q_scale). It is taken
// against a stabiliser that follows the row's maximum only when that has grown by kThreshold: mathematics is the same,
// and most tiles need no rescaling. Probabilities are 2^(exponent + kOffset), which uses e4m3's range up to 448.
//
// The tensor cores add 8-bit products with about 14 bits; FLUSH_TILES bounds how much is added up so, beyond that the
// accumulators go to float32 sums in shared memory, a thread's own.
//
// Compile-time: BF16 (of the output), HEAD_DIM (64, 128, 256), BLOCK_M, BLOCK_N, POLY_EVERY (one exponential in so many
// of a whole tile is a polynomial: the special function unit is as busy as the tensor cores; 0: none), FLUSH_TILES
// (0: never), PRODUCER_REGISTERS and CONSUMER_REGISTERS.
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

constexpr int kStages = 2;
constexpr int kConsumers = BLOCK_M / 64;  // warpgroups
constexpr int kConsumerThreads = 128 * kConsumers;
constexpr int kThreads = kConsumerThreads + 128;
constexpr bool kTurns = kConsumers == 2;
constexpr int kWidth = HEAD_DIM % 128 ? 64 : 128;  // bytes of a row in a slab of queries or keys; 32 of values
constexpr int kBytesQ = BLOCK_M * HEAD_DIM, kBytesKv = BLOCK_N * HEAD_DIM;
constexpr int kSteps = BLOCK_N / 32;  // k-steps of the second product

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

// Starts s = q k^T of one tile.
__device__ __forceinline__ void start_scores(float (&s)[BLOCK_N / 2], uint32 q, uint32 k) {
  const uint64 a = fp8_descriptor<kWidth>(q), b = fp8_descriptor<kWidth>(k);
  fp8_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) {
    const int slab = i * 32 / kWidth, within = i * 32 % kWidth >> 4;
    Fp8Wgmma<BLOCK_N>::shared(s, a + (slab * BLOCK_M * kWidth >> 4) + within,
                              b + (slab * BLOCK_N * kWidth >> 4) + within, i != 0);
  }
  fp8_commit();
}

// Starts acc += p v of one tile.
__device__ __forceinline__ void start_output(float (&acc)[HEAD_DIM / 2], const uint32 (&p)[kSteps][4], uint32 v) {
  const uint64 b = fp8_descriptor<32>(v);
  fp8_fence();
#pragma unroll
  for (int i = 0; i < kSteps; i++) Fp8Wgmma<HEAD_DIM>::registers(acc, p[i], b + i * (HEAD_DIM * 32 >> 4));
  fp8_commit();
}

// 2^(128 z - 112) for z in [0, 1] on the FMA units: 2^round * 2^rest, the latter to 0.2 % (e4m3 rounds to 6 %).
__device__ __forceinline__ float exp2_poly(float z) {
  constexpr float kRound = 12582912.f - 112.f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const float rounded = fmaf(z, 128.f, kRound), rest = fmaf(z, 128.f, -(rounded - kRound));
  const float power = fmaf(fmaf(0.2384289f, rest, 0.7034482f), rest, 1.0004432f);  // minimax on [-1/2, 1/2]
  return __int_as_float(__float_as_int(power) + (__float_as_int(rounded) << 23));
}

struct RowState {
  float max[2], sum[2];  // the stabiliser (log2), the sum of 2^(exponent + kOffset)
  float correction[2];   // what earlier sums are multiplied by
};

// Turns scores into probabilities 2^(exponent + kOffset). Row `half` sees its first `visible[half]` keys of the tile
// (counted from this thread's first column). True when some row of the warp has a new stabiliser.
template <bool MASKED>
__device__ __forceinline__ bool softmax_tile(float (&s)[BLOCK_N / 2], RowState& row, const float (&scale)[2],
                                             const int (&visible)[2]) {
  bool grew = false;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (MASKED) {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
          if (i * 8 + j >= visible[half]) s[i * 4 + half * 2 + j] = -kInfinity;
    }
    float top = fmaxf(s[half * 2], s[half * 2 + 1]);
#pragma unroll
    for (int i = 1; i < BLOCK_N / 8; i++) top = fmaxf(top, fmaxf(s[i * 4 + half * 2], s[i * 4 + half * 2 + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale[half];
    const bool higher = top > row.max[half] + kThreshold;
    row.correction[half] = higher ? exp2_approx(row.max[half] - top) : 1.f;
    if (higher) row.max[half] = top;
    grew |= higher;
    const float shift = kOffset - (MASKED && row.max[half] == -kInfinity ? 0.f : row.max[half]);
    const float scale_poly = scale[half] * (1.f / 128.f), shift_poly = (shift + 112.f) * (1.f / 128.f);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float& x = s[i * 4 + half * 2 + j];
        if (!MASKED && POLY_EVERY && (i * 2 + j) % (POLY_EVERY ? POLY_EVERY : 1) == 0)
          x = exp2_poly(__saturatef(fmaf(x, scale_poly, shift_poly)));
        else
          x = exp2_approx(fmaf(x, scale[half], shift));
        sum += x;
      }
    row.sum[half] = row.sum[half] * row.correction[half] + sum;
  }
  return __any_sync(~0u, grew);
}

// The values exist from here on: their computation is not moved behind what follows.
__device__ __forceinline__ void settle(float (&s)[BLOCK_N / 2]) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; i++) asm volatile("" : "+f"(s[i]));
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

// acc += sums, which were taken against the stabilisers `max`; with KEEP the result goes back to sums, and acc is zero.
template <bool KEEP>
__device__ __forceinline__ void add_sums(float (&acc)[HEAD_DIM / 2], float4* sums, float (&max)[2],
                                         const RowState& row) {
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    factor[half] = max[half] == row.max[half] ? 1.f : exp2_approx(max[half] - row.max[half]);
    max[half] = row.max[half];
  }
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 8; i++) {
    float4 x = sums[i * kConsumerThreads];
    x = {fmaf(x.x, factor[0], acc[i * 4]), fmaf(x.y, factor[0], acc[i * 4 + 1]),
         fmaf(x.z, factor[1], acc[i * 4 + 2]), fmaf(x.w, factor[1], acc[i * 4 + 3])};
    if (KEEP) {
      sums[i * kConsumerThreads] = x;
      x = {0.f, 0.f, 0.f, 0.f};
    }
    acc[i * 4] = x.x, acc[i * 4 + 1] = x.y, acc[i * 4 + 2] = x.z, acc[i * 4 + 3] = x.w;
  }
}

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
  const uint32 sums_begin = ring_v + kStages * kBytesKv;
  const uint32 full_q = sums_begin + (FLUSH_TILES ? 4 * BLOCK_M * HEAD_DIM : 0), full_k = full_q + 8;
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
    registers_lower<PRODUCER_REGISTERS>();
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

  registers_raise<CONSUMER_REGISTERS>();
  const int consumer = threadIdx.x - 128, group = consumer / 128, thread = consumer % 128, lane = thread % 32;
  const int row0 = first_row + group * 64 + thread / 32 * 16 + lane / 4, column = lane % 4 * 2;

  float acc[HEAD_DIM / 2];
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; i++) acc[i] = 0.f;
  RowState row = {{-kInfinity, -kInfinity}, {0.f, 0.f}, {1.f, 1.f}};
  float4* sums = reinterpret_cast<float4*>(shared + (sums_begin - shared_address(shared))) + consumer;
  float sums_max[2] = {-kInfinity, -kInfinity};
  const bool flushes = FLUSH_TILES != 0 && tiles > FLUSH_TILES;
  if (flushes) {
#pragma unroll 1
    for (int i = 0; i < HEAD_DIM / 8; i++) sums[i * kConsumerThreads] = {0.f, 0.f, 0.f, 0.f};
  }

  if (tiles > 0) {
    const uint32 q = tile_q + group * 64 * kWidth;
    const float* k_scales = p.k_scale + kv * p.k_tiles;
    const float* q_scales = p.q_scale + static_cast<int64>(batch * p.num_heads + head) * p.q_tiles * BLOCK_M + row0;
    const float q_scale[2] = {q_scales[0], q_scales[8]};
    float k_scale = k_scales[tiles - 1];  // read a step ahead
    uint32 probs[kSteps][4];
    auto softmax = [&](auto masked, float (&s)[BLOCK_N / 2], int step) {
      const float scale[2] = {q_scale[0] * k_scale, q_scale[1] * k_scale};
      k_scale = k_scales[max(tiles - 2 - step, 0)];
      const int key0 = (tiles - 1 - step) * BLOCK_N + column;
      const int visible[2] = {high(row0) - key0, high(row0 + 8) - key0};
      return softmax_tile<decltype(masked)::value>(s, row, scale, visible);
    };
    auto wait_keys = [&](int step) { barrier_wait(full_k + 8 * (step % kStages), step / kStages & 1); };
    if (kTurns && group == 0) named_arrive(1, 256);  // the first turn
    {
      float s[BLOCK_N / 2];
      barrier_wait(full_q, 0);
      wait_keys(0);
      if (kTurns) named_sync(1 + group, 256);
      start_scores(s, q, ring_k);
      if (kTurns) named_arrive(1 + (group ^ 1), 256);
      fp8_wait<0>();
      if (thread == 0) barrier_arrive(empty_k);
      softmax(True{}, s, 0);
      pack_tile(probs, s);
      if (tiles > 1) wait_keys(1);
    }
    auto step_tile = [&](auto masked, int step) {
      const int stage = step % kStages, before = (step - 1) % kStages;
      float s[BLOCK_N / 2];
      if (kTurns) named_sync(1 + group, 256);
      start_scores(s, q, ring_k + stage * kBytesKv);
      barrier_wait(full_v + 8 * before, (step - 1) / kStages & 1);
      start_output(acc, probs, ring_v + before * kBytesKv);
      if (kTurns) named_arrive(1 + (group ^ 1), 256);
      fp8_wait<1>();
      if (thread == 0) barrier_arrive(empty_k + 8 * stage);
      const bool grew = softmax(masked, s, step);
      settle(s);
      // A loop ends the block of instructions: without it the compiler waits for the product first, the softmax after.
      if (step + 1 < tiles) wait_keys(step + 1);
      fp8_wait<0>();
      if (thread == 0) barrier_arrive(empty_v + 8 * before);
      pack_tile(probs, s);
      if (grew) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) acc[i] *= row.correction[i / 2 % 2];
      }
      if (FLUSH_TILES && step % (FLUSH_TILES ? FLUSH_TILES : 1) == 0) add_sums<true>(acc, sums, sums_max, row);
    };
    // Tiles that every row sees whole end at the first row's last key.
    const int masked_steps = min(max(tiles - max(high(first_row), 0) / BLOCK_N, 1), tiles);
    int step = 1;
#pragma unroll 1
    for (; step < masked_steps; step++) step_tile(True{}, step);
#pragma unroll 1
    for (; step < tiles; step++) step_tile(False{}, step);
    const int last = (tiles - 1) % kStages;
    barrier_wait(full_v + 8 * last, (tiles - 1) / kStages & 1);
    start_output(acc, probs, ring_v + last * kBytesKv);
    fp8_wait<0>();
    if (flushes) add_sums<false>(acc, sums, sums_max, row);
  }

  const float* v_scale = p.v_scale + kv * HEAD_DIM + column;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float l = row.sum[half];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const bool empty = row.max[half] == -kInfinity;
    const float factor = empty ? 0.f : 1.f / l;
    const int i = row0 + half * 8;
    if (i > last_row) continue;
    if (lane % 4 == 0)
      p.lse[static_cast<int64>(batch * p.num_heads + head) * p.seqlen_q + i] =
          empty ? -kInfinity : (row.max[half] - kOffset + log2f(l)) * kLn2;
    uint32* to = reinterpret_cast<uint32*>(
        p.out + ((static_cast<int64>(batch) * p.seqlen_q + i) * p.num_heads + head) * HEAD_DIM + column);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++) {
      const float2 channel = *reinterpret_cast<const float2*>(v_scale + j * 8);
      to[j * 4] = pack2(acc[j * 4 + half * 2] * (factor * channel.x), acc[j * 4 + half * 2 + 1] * (factor * channel.y));
    }
  }
}
