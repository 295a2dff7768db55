// Attention forward for Hopper at 8 bits (e4m3): the structure of flash_fwd_sm90.cuh, on tensor cores twice as fast.
// FlashAttention-3 (arXiv 2407.08608), section 3.3, with its layout problem solved ahead: quantize_fp8.cuh writes query,
// key and value tiles as images of shared memory, values with keys innermost and in the order in which the accumulators
// of the scores are packed, so tiles are bulk copies and no byte is moved between the two products.
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
// Compile-time: BF16 (of the output), HEAD_DIM (64, 128, 256), BLOCK_M (128, 192), BLOCK_N, STAGES.
#include "parts/forward_fp8_parts.cuh"
#include "parts/forward_fp8_rows.cuh"
#include "parts/forward_fp8_work.cuh"

// A thread's first row of queries (the second is 8 further) and first column in a tile.
struct Place {
  int row, column;
};

__device__ __forceinline__ Place thread_place(int first_row) {
  int thread;  // read anew each time: meanwhile it takes no registers, of which there are none to spare
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return Place{first_row + (thread - 128) / 32 * 16 + thread % 32 / 4, thread % 4 * 2};
}

struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};

// Gives a stage back to whoever fills it.
__device__ __forceinline__ void release(uint32 empty) {
  if (threadIdx.x % 128 == 0) barrier_arrive(empty);
}

// Multiplies what has been added up by `correction`, which is 1 for most tiles.
__device__ __forceinline__ void correct(float (&acc)[HEAD_DIM / 2], const float (&correction)[2]) {
  if (!__any_sync(~0u, correction[0] != 1.f || correction[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; i++) acc[i] *= correction[i / 2 % 2];
}

// Adds what a tile's values have of kSumColumns channels, from `begin` on; behind them COLUMNS may have those of ones.
template <int COLUMNS>
__device__ __forceinline__ void add_channels(float (&acc)[HEAD_DIM / 2], float (&sum)[2], const float (&correction)[2],
                                             const uint32 (&probs)[kSteps][4], uint64 values, int begin) {
  float sums[COLUMNS / 2];
  start_sums<COLUMNS>(sums, probs, values + begin * 32 / 16);
  fp8_wait<0>();
#pragma unroll
  for (int i = 0; i < kSumColumns / 2; i++) {
    float& x = acc[begin / 2 + i];
    x = kCorrectFirst ? x + sums[i] : fmaf(x, correction[i / 2 % 2], sums[i]);
  }
  if constexpr (COLUMNS > kSumColumns) sum[0] = sums[kSumColumns / 2], sum[1] = sums[kSumColumns / 2 + 2];
}

// What a warpgroup's rows of a tile have of its keys; `n` and `q`: the tile's first step and its queries among all.
__device__ __forceinline__ void attend(float (&acc)[HEAD_DIM / 2], RowState& row, const Tile& tile, int n, int q,
                                       const Shared& shared, const Fp8Params& p) {
  const int steps = uniform(tile.steps), end = uniform(tile.end);
  const uint64 queries = fp8_descriptor<kWidth>(element_of<kQueryStages>(shared.q, kBytesQ, q) +
                                                (uniform(threadIdx.x / 128) - 1) * 64 * kWidth);
  const uint64 keys = fp8_descriptor<kWidth>(shared.k), values = fp8_descriptor<32>(shared.v);
  const float* k_scales = p.k_scale + tile.kv * p.k_tiles + end - 1;
  wait_full<kQueryStages>(shared.full_q, q);
  float q_scale[2];
#pragma unroll
  for (int half = 0; half < 2; half++)
    q_scale[half] = shared.q_scale[stage<kQueryStages>(q) * BLOCK_M + thread_place(0).row + half * 8];
  auto step_tile = [&](auto masked, int step) {
    const float k_scale = k_scales[-step];
    wait_full<STAGES>(shared.full_k, n);
    uint32 probs[kSteps][4];
    float correction[2], sum[2];
    {
      float s[BLOCK_N / 2];
      start_scores(s, queries, keys + stage<STAGES>(n) * kBytesKv / 16);
      const float scale[2] = {q_scale[0] * k_scale, q_scale[1] * k_scale};
      fp8_wait<0>();
      release(element_of<STAGES>(shared.empty_k, 8, n));
      if constexpr (decltype(masked)::value) {
        const Place at = thread_place(tile.first_row);
        const int key0 = (end - 1 - step) * BLOCK_N + at.column;
        mask_tile(s, {end_of_keys(at.row, p) - key0, end_of_keys(at.row + 8, p) - key0});
      }
      follow(correction, row, s, scale);
      if (kCorrectFirst) correct(acc, correction);
      wait_full<STAGES>(shared.full_v, n);
      probabilities(probs, sum, s, row, scale);
    }
    const uint64 at = values + stage<STAGES>(n) * kStageV / 16;
#pragma unroll
    for (int begin = 0; begin < HEAD_DIM - kSumColumns; begin += kSumColumns)
      add_channels<kSumColumns>(acc, sum, correction, probs, at, begin);
    add_channels<kSumColumns + kOnes>(acc, sum, correction, probs, at, HEAD_DIM - kSumColumns);
    release(element_of<STAGES>(shared.empty_v, 8, n));
#pragma unroll
    for (int half = 0; half < 2; half++) row.sum[half] = fmaf(row.sum[half], correction[half], sum[half]);
    n++;
  };
  int step = 0;
#pragma unroll 1
  for (const int masked = uniform(tile.masked); step < masked; step++) step_tile(True{}, step);
#pragma unroll 1
  for (; step < steps; step++) step_tile(False{}, step);
  if (!kOnes) {
#pragma unroll
    for (float& sum : row.sum) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
    }
  }
  __syncwarp();  // each warp reads scales of its rows
  if (threadIdx.x % 32 == 0) barrier_arrive(element_of<kQueryStages>(shared.empty_q, 8, q));
}

__device__ __forceinline__ void store(const float (&acc)[HEAD_DIM / 2], const RowState& row, const Tile& tile,
                                      const Fp8Params& p) {
  const Place at = thread_place(tile.first_row);
  const float* v_scale = p.v_scale + static_cast<int64>(tile.kv) * HEAD_DIM + at.column;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float l = row.sum[half];
    const bool empty = l == 0.f;
    const float factor = 1.f / l;
    const int i = at.row + half * 8;
    if (i > tile.last_row) continue;
    if (at.column == 0)
      p.lse[static_cast<int64>(tile.batch * p.num_heads + tile.head) * p.seqlen_q + i] =
          empty ? -kInfinity : (log2f(l) - row.shift[half]) * kLn2;
    uint32* to = reinterpret_cast<uint32*>(
        p.out + ((static_cast<int64>(tile.batch) * p.seqlen_q + i) * p.num_heads + tile.head) * HEAD_DIM + at.column);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++) {
      const float2 channel = *reinterpret_cast<const float2*>(v_scale + j * 8);
      const float* x = acc + j * 4 + half * 2;
      to[j * 4] = empty ? 0 : pack2(x[0] * (factor * channel.x), x[1] * (factor * channel.y));  // zeros whatever values are
    }
  }
}

__device__ __forceinline__ void consume(const Shared& shared, const Fp8Params& p) {
  int n = 0, q = 0;  // steps and tiles of queries so far
#pragma unroll 1
  for (int t = 0;; t++) {
    wait_full<kTileSlots>(shared.full_tile, t);
    const Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    const int steps = uniform(tile.steps);
    if (steps < 0) return;
    float acc[HEAD_DIM / 2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) acc[i] = 0.f;
    RowState row;
    if (steps > 0) attend(acc, row, tile, n, uniform(q++), shared, p);
    n = uniform(n + steps);
    const int part = uniform(tile.part);
    if (part < 0 || join_parts(acc, row, part, p)) store(acc, row, tile, p);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(element_of<kTileSlots>(shared.empty_tile, 8, t));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) flash_fwd_fp8_sm90(const __grid_constant__ Fp8Params p) {
  extern __shared__ __align__(1024) char memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) shared.init_barriers();
  shared.write_ones();
  __syncthreads();
  if (threadIdx.x < 128) {  // the producer warpgroup; one thread works
    registers_lower<kProducerRegisters>();
    if (threadIdx.x == 0) load_tiles(shared, p);
  } else {
    registers_raise<kConsumerRegisters>();
    consume(shared, p);
  }
}
