// Attention backward for Hopper, head_dim up to 128. One block per SM draws tiles of BLOCK_N keys until none is left, and
// for each walks the tiles of query rows that see them, for all query heads of their key head; each of two consumer
// warpgroups keeps dK and dV of 64 keys in registers (FlashAttention-3's structure, arXiv 2407.08608, section 3). Of the
// first warpgroup, one warp draws, one loads keys and queries, one values and output gradients, and one adds dQ to global
// memory by bulk reductions, in fragment order (flash_bwd_postprocess_sm90.cuh).
//
// All products of scores are transposed (keys are rows), so that P^T and dS^T feed dV and dK from registers. A step is laid
// out so that the tensor cores have work behind every stretch of arithmetic: the next scores are started as soon as this
// step's probabilities are used up, their exponentials run beside dQ and dK, dS beside dV.
//
// Compile-time: BF16, HEAD_DIM and HEAD_DIM_V (tile widths; narrower tensors are padded by the TMA), BLOCK_M (64; 128 for
// HEAD_DIM 64), BLOCK_N (128), TILE_SLOTS, Q_STAGES, O_STAGES, DS_STAGES, HANDOVER (2), PRODUCER_REGISTERS, CONSUMER_REGISTERS,
// DS_SHARED, DETERMINISTIC, PARTS (float32 results of a part of a key head's query heads), KEY_MASK, SOFTCAP, ALIBI, DROPOUT.
#define BIAS 0
#define LARGE 0
#include "parts/backward_loads.cuh"
#include "parts/backward_store.cuh"
#include "parts/backward_wgmma.cuh"

static_assert(BLOCK_N == 64 * kConsumers && HANDOVER == kConsumers, "a warpgroup has 64 keys and a chunk of dQ");
static_assert(kTileSteps == 2 ? kSlabsK == 1 : kSlabsK == 2, "dQ of a tile of rows is two chunks");

// A value that all lanes hold, as the compiler knows then: descriptors live in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Shared& shared, const BackwardParams& p)
      : shared(shared), p(p), group(uniform(threadIdx.x / 128) - 1), lane(group * 64) {}

  __device__ __forceinline__ void run() {
    RingPlace<TILE_SLOTS> slot;
    Rings rings;
#pragma unroll 1
    for (;; slot.next()) {
      slot.wait_full(shared.full_tile);
      const KeyTile& tile = shared.tiles[uniform(slot.at)];
      const int tiles = uniform(tile.tiles);
      if (tiles < 0) return;
      run_tile(tile, tiles, rings);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_tile + 8 * slot.at);
    }
  }

 private:
  const Shared& shared;
  const BackwardParams& p;
  const int group;
  const Lane lane;

  struct Rings {
    RingPlace<Q_STAGES> q;
    RingPlace<O_STAGES> o;
    RingPlace<DS_STAGES> ds;
    RingPlace<1> dq, keys;
    int released = -1;  // the stage of queries that dK is still read from
  };

  __device__ __forceinline__ void run_tile(const KeyTile& tile, int tiles, Rings& rings) const {
    float dk[HEAD_DIM / 2], dv[HEAD_DIM_V / 2];
    zero(dk);
    zero(dv);
    if (tiles > 0) {
      rings.keys.wait_full(shared.full_k);
      if (has_dead_keys(tile)) {
        rings.keys.wait_full(shared.full_v);
        clear_dead_keys(shared, tile);
      }
      float s[kRows / 2];
      Step now(tile);
      rings.q.wait_full(shared.full_q);
      start_scores(s, shared.q + rings.q.at * kBytesQ);
      wgmma_wait<0>();
      to_probabilities(s, tile, p, shared.lse2 + rings.q.at * kBytesTerms, now, is_masked(tile, now.m), lane);
      rings.keys.wait_full(shared.full_v);
#pragma unroll 1
      for (int t = 1; t < tiles; t++) {
        if (kTileSteps == 2) step<true, 0>(dk, dv, s, tile, now, rings);
        step<true, kTileSteps - 1>(dk, dv, s, tile, now, rings);
      }
      if (kTileSteps == 2) step<true, 0>(dk, dv, s, tile, now, rings);
      step<false, kTileSteps - 1>(dk, dv, s, tile, now, rings);
      rings.keys.next();
    }
    store_dv(dv, tile, p, lane);
    store_dk(dk, tile, p, lane);
  }

  static __device__ __forceinline__ bool is_masked(const KeyTile& tile, int m) {
    return m < uniform(tile.whole_begin) || m >= uniform(tile.whole_end);
  }

  // a (64 keys of K or V) times kRows rows of b (Q or dO).
  template <int WIDTH>
  __device__ __forceinline__ void start_product(float (&s)[kRows / 2], uint32 keys, uint32 rows) const {
    const uint64 a = wgmma_descriptor(uniform(keys + group * 64 * 128), 16), b = wgmma_descriptor(uniform(rows), 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
      Wgmma<kRows>::shared(s, a + i / 4 * (kSlabKv >> 4) + i % 4 * 2, b + i / 4 * (kSlabQ >> 4) + i % 4 * 2, i != 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_scores(float (&s)[kRows / 2], uint32 rows) const {
    start_product<HEAD_DIM>(s, shared.k, rows);
  }

  __device__ __forceinline__ void start_dv(float (&dv)[HEAD_DIM_V / 2], const uint32 (&probs)[kRows / 16][4], uint32 rows) const {
    const uint64 b = wgmma_descriptor(uniform(rows), kSlabQ);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRows / 16; i++) Wgmma<HEAD_DIM_V>::registers(dv, probs[i], b + i * 128);
    wgmma_commit();
  }

  // Where registers are short, dS^T comes from shared memory.
  __device__ __forceinline__ void start_dk(float (&dk)[HEAD_DIM / 2], const uint32 (&ds)[kRows / 16][4], uint32 tile_ds,
                                           uint32 rows) const {
    const uint64 b = wgmma_descriptor(uniform(rows), kSlabQ);
#if DS_SHARED
    const uint64 a = wgmma_descriptor(uniform(tile_ds + group * 64 * 128), 16);
#endif
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRows / 16; i++)
#if DS_SHARED
      WgmmaRows<HEAD_DIM>::add(dk, a + i * 2, b + i * 128);
#else
      Wgmma<HEAD_DIM>::registers(dk, ds[i], b + i * 128);
#endif
    wgmma_commit();
  }

  // This warpgroup's chunk of dQ: of two steps' rows its 64, else its 64 columns.
  __device__ __forceinline__ void start_dq(float (&dq)[32], uint32 tile_ds) const {
    const uint32 step_ds = tile_ds + (kTileSteps == 2 ? group * kSlabKv : 0);
    const uint64 a = wgmma_descriptor(uniform(step_ds), kSlabKv);
    const uint64 b = wgmma_descriptor(uniform(shared.k + (kTileSteps == 2 ? 0 : group * kSlabKv)), kSlabKv);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; i++) wgmma_transposed(dq, a + i * 128, b + i * 128, i != 0);
    wgmma_commit();
  }

  // Step PART of a tile of rows, whose probabilities are in s. With MORE those of the next step are there afterwards.
  template <bool MORE, int PART>
  __device__ __forceinline__ void step(float (&dk)[HEAD_DIM / 2], float (&dv)[HEAD_DIM_V / 2], float (&s)[kRows / 2],
                                       const KeyTile& tile, Step& now, Rings& rings) const {
    constexpr bool kEnds = PART == kTileSteps - 1;  // the tile of rows
    constexpr int kOffset = PART * kRows * 128;
    const uint32 lse2 = shared.lse2 + rings.q.at * kBytesTerms + PART * kRows * 4;
    const uint32 delta = shared.delta + rings.o.at * kBytesTerms + PART * kRows * 4;
    const uint32 rows_q = shared.q + rings.q.at * kBytesQ + kOffset, rows_o = shared.o + rings.o.at * kBytesO + kOffset;
    const uint32 tile_ds = shared.ds + rings.ds.at * kBytesDs;
    const bool masked = is_masked(tile, now.m);
    float dp[kRows / 2];
    uint32 probs[kRows / 16][4], ds[kRows / 16][4];

    if (PART == 0) rings.o.wait_full(shared.full_o);
    start_product<HEAD_DIM_V>(dp, shared.v, rows_o);
    wgmma_wait<1>();  // dK of the step before
    if (PART == 0 && rings.released >= 0 && threadIdx.x % 128 == 0) barrier_arrive(shared.empty_q + 8 * rings.released);
#if DROPOUT
    const Dropout dropout(p.dropout, tile.batch * p.kv_heads * p.group + now.head);
    const Kept kept(dropout, p.dropout.threshold, now.m * (kRows / 16), (tile.first_key + lane.key) / 16);
    pack_kept(probs, s, kept);
#else
    const Kept kept;
    pack_tile(probs, s);
#endif
    if (masked) {
      clear_dead_rows(rows_o, kSlabsV, lse2);
      clear_dead_rows(rows_q, kSlabsK, lse2);
    }
    start_dv(dv, probs, rows_o);
    wgmma_wait<1>();  // dP
    if (!MORE && threadIdx.x % 128 == 0) barrier_arrive(shared.empty_v);
    to_score_gradients(dp, s, tile, p, kept, lse2, delta, now, masked, lane);
    RingPlace<Q_STAGES> next = rings.q;
    if (kEnds) next.next();
    const uint32 next_lse2 = kEnds ? shared.lse2 + next.at * kBytesTerms : lse2 + kRows * 4;
    if (MORE) {
      if (kEnds) next.wait_full(shared.full_q);
      start_scores(s, kEnds ? shared.q + next.at * kBytesQ : rows_q + kRows * 128);
    }
    pack_tile(ds, dp);
    store_ds(tile_ds + PART * kSlabKv, ds, group * 64);
    fence_async_proxy();
    if (kEnds)
      named_sync(3, 128 * kConsumers);
    else if (DS_SHARED)
      named_sync(threadIdx.x / 128, 128);
    wgmma_wait<MORE ? 1 : 0>();  // dV
    if (kEnds && threadIdx.x % 128 == 0) barrier_arrive(shared.empty_o + 8 * rings.o.at);
    float dq[32];
    if (kEnds) start_dq(dq, tile_ds);
    start_dk(dk, ds, tile_ds + PART * kSlabKv, rows_q);
    if (MORE) {
      wgmma_wait<kEnds ? 2 : 1>();  // the next scores
      now.next(1, uniform(tile.m_begin), uniform(tile.m_end));
      to_probabilities(s, tile, p, next_lse2, now, is_masked(tile, now.m), lane);
    }
    if (kEnds) {
      rings.dq.wait_empty(shared.free_space + 8 * group);
      wgmma_wait<1>();  // dQ
      if (!MORE && threadIdx.x % 128 == 0) barrier_arrive(shared.empty_k);
#pragma unroll
      for (int j = 0; j < 8; j++)
        store_shared4(shared.handover + group * (kChunk * 4) + j * 2048 + threadIdx.x % 128 * 16, dq[j * 4], dq[j * 4 + 1],
                      dq[j * 4 + 2], dq[j * 4 + 3]);
      fence_async_proxy();
      named_arrive(4 + group, 160);
      rings.released = rings.q.at;
      rings.q = next;
      rings.o.next();
      rings.ds.next();
      rings.dq.next();
    }
    if (!MORE) {
      wgmma_wait<0>();
      if (threadIdx.x % 128 == 0) barrier_arrive(shared.empty_q + 8 * rings.released);
      rings.released = -1;
    }
  }
};

// Adds what the consumers hand over to dQ, in one warp.
__device__ __forceinline__ void add_dq(const Shared& shared, const BackwardParams& p) {
  RingPlace<TILE_SLOTS> slot;
#pragma unroll 1
  for (;; slot.next()) {
    slot.wait_full(shared.full_tile);
    const KeyTile& tile = shared.tiles[slot.at];
    const int tiles = tile.tiles;
    if (tiles < 0) break;
    Step step(tile);
#pragma unroll 1
    for (int n = 0; n < tiles; n++) {
      const int64 rows = (step.head * p.padded_rows + tile.padded_row) / kRows + step.m;
      float* to = p.dq + rows * (kSlabsK * kChunk);
#if DETERMINISTIC
      if (threadIdx.x % 32 == 0) await_turn(p.turns + rows * 2, turn_of(tile, step.m));
      __syncwarp();
#endif
#pragma unroll 1
      for (int w = 0; w < kConsumers; w++) {
        named_sync(4 + w, 160);
        if (threadIdx.x % 32 == 0) {
          bulk_add(to + w * kChunk, shared.handover + w * (kChunk * 4), kChunk * 4);
#if !DETERMINISTIC
          bulk_wait_read();
          barrier_arrive(shared.free_space + 8 * w);
#endif
        }
        __syncwarp();
      }
#if DETERMINISTIC
      if (threadIdx.x % 32 == 0) {  // one wait for both chunks: others wait for this block's turn to end
        bulk_wait_done();
        pass_turn(p.turns + rows * 2);
        for (int w = 0; w < kConsumers; w++) barrier_arrive(shared.free_space + 8 * w);
      }
#endif
      step.next(kTileSteps, tile.m_begin, tile.m_end);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_tile + 8 * slot.at);
  }
  if (threadIdx.x % 32 == 0) bulk_wait_done();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_bwd_sm90(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                   const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o,
                   const __grid_constant__ TensorMap map_lse2, const __grid_constant__ TensorMap map_delta,
                   const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) char memory[];
  const Shared shared(memory);
  start(shared, p);
  if (threadIdx.x < 128) {
    registers_lower<PRODUCER_REGISTERS>();
    switch (uniform(threadIdx.x / 32)) {
      case 0:
        load_tiles<true>(shared, &map_k, &map_q, &map_lse2, p);
        break;
      case 1:
        add_dq(shared, p);
        break;
      case 2:
        load_tiles<false>(shared, &map_v, &map_o, &map_delta, p);
        break;
      case 3:
        draw_tiles(shared, p);
        break;
    }
  } else {
    registers_raise<CONSUMER_REGISTERS>();
    Consumer(shared, p).run();
  }
}
