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

// What a warpgroup's rows of a tile have of its keys; `n` and `q`: the tile's first step and its queries among all.
__device__ __forceinline__ void attend(float (&acc)[HEAD_DIM / 2], RowState& row, const Tile& tile, int n, int q,
                                       const Shared& shared, const Fp8Params& p) {
  const int steps = uniform(tile.steps), end = uniform(tile.end);
  const uint32 queries = element_of<kQueryStages>(shared.q, kBytesQ, q) + (uniform(threadIdx.x / 128) - 1) * 64 * kWidth;
  const float* k_scales = p.k_scale + tile.kv * p.k_tiles;
  float k_scale = k_scales[end - 1];  // read a step ahead
  uint32 probs[kSteps][4];
  auto softmax = [&](auto masked, float (&s)[BLOCK_N / 2], int key_tile) {
    const float* q_scale = shared.q_scale + stage<kQueryStages>(q) * BLOCK_M + thread_place(0).row;
    const float scale[2] = {q_scale[0] * k_scale, q_scale[8] * k_scale};
    k_scale = k_scales[max(key_tile - 1, 0)];
    int visible[2] = {};
    if constexpr (decltype(masked)::value) {
      const Place at = thread_place(tile.first_row);
      const int key0 = key_tile * BLOCK_N + at.column;
      visible[0] = end_of_keys(at.row, p) - key0, visible[1] = end_of_keys(at.row + 8, p) - key0;
    }
    softmax_tile<decltype(masked)::value>(s, row, scale, visible);
  };
  auto step_tile = [&](auto masked, int step) {
    wait_full<STAGES>(shared.full_k, n);
    {
      float s[BLOCK_N / 2];
      start_scores(s, queries, element_of<STAGES>(shared.k, kBytesKv, n));
      fp8_wait<0>();
      release(element_of<STAGES>(shared.empty_k, 8, n));
      softmax(masked, s, end - 1 - step);
      __syncwarp();  // else the compiler computes and packs probabilities by turns, in more registers
      pack_tile(probs, s);
    }
    wait_full<STAGES>(shared.full_v, n);
#pragma unroll
    for (int begin = 0; begin < HEAD_DIM; begin += kSumColumns) {
      float sums[kSumColumns / 2];
      start_sums(sums, probs, element_of<STAGES>(shared.v, kBytesKv, n) + begin * 32);
      fp8_wait<0>();
#pragma unroll
      for (int i = 0; i < kSumColumns / 2; i++)
        acc[begin / 2 + i] = fmaf(acc[begin / 2 + i], row.correction[i / 2 % 2], sums[i]);
    }
    release(element_of<STAGES>(shared.empty_v, 8, n));
    n++;
  };
  wait_full<kQueryStages>(shared.full_q, q);
  int step = 0;
#pragma unroll 1
  for (const int masked = uniform(tile.masked); step < masked; step++) step_tile(True{}, step);
#pragma unroll 1
  for (; step < steps; step++) step_tile(False{}, step);
  __syncwarp();  // each warp reads scales of its rows
  if (threadIdx.x % 32 == 0) barrier_arrive(element_of<kQueryStages>(shared.empty_q, 8, q));
}

__device__ __forceinline__ void store(const float (&acc)[HEAD_DIM / 2], const RowState& row, const Tile& tile,
                                      const Fp8Params& p) {
  const Place at = thread_place(tile.first_row);
  const float* v_scale = p.v_scale + static_cast<int64>(tile.kv) * HEAD_DIM + at.column;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float l = row.sum[half];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const bool empty = row.max[half] == -kInfinity;
    const float factor = empty ? 0.f : 1.f / l;
    const int i = at.row + half * 8;
    if (i > tile.last_row) continue;
    if (at.column == 0)
      p.lse[static_cast<int64>(tile.batch * p.num_heads + tile.head) * p.seqlen_q + i] =
          empty ? -kInfinity : (row.max[half] - kOffset + log2f(l)) * kLn2;
    uint32* to = reinterpret_cast<uint32*>(
        p.out + ((static_cast<int64>(tile.batch) * p.seqlen_q + i) * p.num_heads + tile.head) * HEAD_DIM + at.column);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++) {
      const float2 channel = *reinterpret_cast<const float2*>(v_scale + j * 8);
      to[j * 4] = pack2(acc[j * 4 + half * 2] * (factor * channel.x), acc[j * 4 + half * 2 + 1] * (factor * channel.y));
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
    RowState row = {{-kInfinity, -kInfinity}, {0.f, 0.f}, {1.f, 1.f}};
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
  __syncthreads();
  if (threadIdx.x < 128) {  // the producer warpgroup; one thread works
    registers_lower<kProducerRegisters>();
    if (threadIdx.x == 0) load_tiles(shared, p);
  } else {
    registers_raise<kConsumerRegisters>();
    consume(shared, p);
  }
}
