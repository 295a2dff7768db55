// Attention backward for Hopper, head_dim up to 128. One block per SM draws tiles of BLOCK_N keys until none is left, and
// for each walks the tiles of query rows that see them, for all query heads of their key head; each of two consumer
// warpgroups keeps dK and dV of 64 keys in registers (FlashAttention-3's structure, arXiv 2407.08608, section 3). Of the
// first warpgroup, one warp draws, one loads keys and queries, one values and output gradients, and one adds dQ to global
// memory by bulk reductions, in fragment order (flash_bwd_postprocess_sm90.cuh).
//
// All products of scores are transposed (keys are rows), so that P^T and dS^T feed dV and dK from registers. Reads of
// shared memory are what limits the products: those of 64 x 64 scores need as long for their operands as for themselves.
// So slices of K and V stay in registers, and at HEAD_DIM 128 no register is spent on starting the next scores early, which
// costs dK its operand from registers and was slower.
//
// ptxas moves a wait for a product up to the start of its basic block: with OVERLAP 0 that for dP stands in front of nearly
// all exponentials, and nothing of a warpgroup's own runs on the tensor cores meanwhile. OVERLAP 1 puts the wait behind a
// branch, which it does not pass. OVERLAP 2 starts dV's sum in front of it, which holds it back too, and dS is computed
// while that runs. OVERLAP 3 (HEAD_DIM 64) starts the next step's scores there as well, and waits for dK's sum only behind
// them.
//
// Compile-time: BF16, HEAD_DIM and HEAD_DIM_V (tile widths; narrower tensors are padded by the TMA), BLOCK_M (64; 128 for
// HEAD_DIM 64), BLOCK_N (128), STEP_ROWS (64, or BLOCK_M), TILE_SLOTS, Q_STAGES, O_STAGES, DS_STAGES, HANDOVER (2),
// PRODUCER_REGISTERS, CONSUMER_REGISTERS, KEPT_K and KEPT_V (slices of 16 columns of K and V in registers), OVERLAP,
// DETERMINISTIC, PARTS (float32 results of a part of a key head's query heads), KEY_MASK, SOFTCAP, ALIBI, DROPOUT.
#define BIAS 0
#define LARGE 0
#include "parts/backward_handover.cuh"
#include "parts/backward_loads.cuh"
#include "parts/backward_store.cuh"
#include "parts/backward_wgmma.cuh"
#include "parts/mma_sm80.cuh"
#include "parts/uniform.cuh"

constexpr bool kSumsEarly = OVERLAP >= 2, kScoresEarly = OVERLAP == 3;
constexpr bool kLooksForDeadRows = kSumsEarly;          // else every step under a mask is taken to have some
constexpr bool kPacksLate = !kSumsEarly && kRows > 64;  // P, for which there are no registers beside S and dP

static_assert(BLOCK_N == 64 * kConsumers && HANDOVER == kConsumers, "a warpgroup has 64 keys and a chunk of dQ");
static_assert(!kScoresEarly || kTileSteps == 2, "the scores of two steps lie in registers of their own");
static_assert(kTileChunks * kSlabsK == 2, "dQ of a tile of rows is two chunks");

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
  };
  struct Sums {
    float dk[HEAD_DIM / 2], dv[HEAD_DIM_V / 2];
  };
  // Slices of 16 columns of this warpgroup's keys and values, as first operands.
  struct KeptKeys {
    uint32 k[KEPT_K > 0 ? KEPT_K : 1][4], v[KEPT_V > 0 ? KEPT_V : 1][4];
  };

  __device__ __forceinline__ void run_tile(const KeyTile& tile, int tiles, Rings& rings) const {
    Sums sums;
    zero(sums.dk);
    zero(sums.dv);
    if (tiles > 0) {
      rings.keys.wait_full(shared.full_k);
      rings.keys.wait_full(shared.full_v);
      if (has_dead_keys(tile)) clear_dead_keys(shared, tile, group * 64);
      KeptKeys kept;
      keep<KEPT_K>(kept.k, shared.k);
      keep<KEPT_V>(kept.v, shared.v);
      Step now(tile);
      float even[kRows / 2], odd[kRows / 2];  // scores
      if (kScoresEarly) {
        rings.q.wait_full(shared.full_q);
        start_product<HEAD_DIM, KEPT_K>(even, kept.k, shared.k, shared.q + rings.q.at * kBytesQ);
        wgmma_wait<0>();
      }
#pragma unroll 1
      for (int left = tiles; left > 0; left--) {
        if (kTileSteps == 2) step<0>(sums, even, odd, kept, left == tiles, false, tile, now, rings);
        step<kTileSteps - 1>(sums, odd, even, kept, left == tiles, left == 1, tile, now, rings);
      }
      if (kScoresEarly) {
        wgmma_wait<0>();  // dK
        if (first_thread()) barrier_arrive(shared.empty_q + 8 * rings.q.before());
      }
      rings.keys.next();
    }
    store_dv(sums.dv, tile, p, lane);
    store_dk(sums.dk, tile, p, lane);
  }

  static __device__ __forceinline__ bool is_masked(const KeyTile& tile, int m) {
    return m < uniform(tile.whole_begin) || m >= uniform(tile.whole_end);
  }
  __device__ __forceinline__ bool first_thread() const { return threadIdx.x % 128 == 0; }

  template <int KEPT, int SIZE>
  __device__ __forceinline__ void keep(uint32 (&kept)[SIZE][4], uint32 keys) const {
    const int row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      ldmatrix_x4(kept[i], keys + i / 4 * kSlabKv + row * 128 + ((i % 4 * 2 + half ^ row & 7) << 4));
  }

  // 64 keys of K or V times kRows rows of Q or dO; what is kept comes from registers.
  template <int WIDTH, int KEPT, int SIZE>
  __device__ __forceinline__ void start_product(float (&s)[kRows / 2], const uint32 (&kept)[SIZE][4], uint32 keys,
                                                uint32 rows) const {
    const uint64 a = wgmma_descriptor(uniform(keys + group * 64 * 128), 16), b = wgmma_descriptor(uniform(rows), 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++) {
      const uint64 columns = b + i / 4 * (kSlabQ >> 4) + i % 4 * 2;
      if (i < KEPT)
        Wgmma<kRows>::mixed(s, kept[i < KEPT ? i : 0], columns, i != 0);
      else
        Wgmma<kRows>::shared(s, a + i / 4 * (kSlabKv >> 4) + i % 4 * 2, columns, i != 0);
    }
    wgmma_commit();
  }

  // dV += P^T dO, dK += dS^T Q.
  template <int WIDTH>
  __device__ __forceinline__ void start_sum(float (&acc)[WIDTH / 2], const uint32 (&x)[kRows / 16][4], uint32 rows) const {
    const uint64 b = wgmma_descriptor(uniform(rows), kSlabQ);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRows / 16; i++) Wgmma<WIDTH>::registers(acc, x[i], b + i * 128);
    wgmma_commit();
  }

  // This warpgroup's chunk of dQ: of 128 rows its 64, else its 64 columns.
  __device__ __forceinline__ void start_dq(float (&dq)[32], uint32 tile_ds) const {
    const uint32 step_ds = tile_ds + (kTileChunks == 2 ? group * kSlabKv : 0);
    const uint64 a = wgmma_descriptor(uniform(step_ds), kSlabKv);
    const uint64 b = wgmma_descriptor(uniform(shared.k + (kTileChunks == 2 ? 0 : group * kSlabKv)), kSlabKv);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; i++) wgmma_transposed(dq, a + i * 128, b + i * 128, i != 0);
    wgmma_commit();
  }

  static __device__ __forceinline__ void clear_dead_rows(uint32 rows_q, uint32 rows_o, uint32 lse2) {
    ::clear_dead_rows(rows_o, kSlabsV, lse2);
    ::clear_dead_rows(rows_q, kSlabsK, lse2);
  }

  // The scores of the step behind step PART. The last one of a tile of keys has none: its own are computed again, as a
  // branch around a product would have ptxas wait for each.
  template <int PART>
  __device__ __forceinline__ void start_next_scores(float (&s)[kRows / 2], const KeptKeys& kept_keys, bool last,
                                                    const Rings& rings) const {
    RingPlace<Q_STAGES> place = rings.q;
    if (PART == kTileSteps - 1 && !last) {
      place.next();
      place.wait_full(shared.full_q);
    }
    const uint32 rows_q = shared.q + place.at * kBytesQ + (PART + 1) % kTileSteps * kRows * 128;
    start_product<HEAD_DIM, KEPT_K>(s, kept_keys.k, shared.k, rows_q);
  }

  // Step PART of a tile of rows, of the last one of the tile of keys with `last`. Where scores are computed early, its own
  // are in `early` before and the next ones in `next` afterwards.
  template <int PART>
  __device__ __forceinline__ void step(Sums& sums, float (&early)[kRows / 2], float (&next)[kRows / 2],
                                       const KeptKeys& kept_keys, bool first, bool last, const KeyTile& tile,
                                       Step& now, Rings& rings) const {
    constexpr bool kEnds = PART == kTileSteps - 1;  // the tile of rows
    constexpr int kOffset = PART * kRows * 128;
    const uint32 lse2 = shared.lse2 + rings.q.at * kBytesTerms + PART * kRows * 4;
    const uint32 delta = shared.delta + rings.o.at * kBytesTerms + PART * kRows * 4;
    const uint32 rows_q = shared.q + rings.q.at * kBytesQ + kOffset, rows_o = shared.o + rings.o.at * kBytesO + kOffset;
    const uint32 tile_ds = shared.ds + rings.ds.at * kBytesDs;
    const bool masked = is_masked(tile, now.m);
    float own[kRows / 2], dp[kRows / 2];
    float(&s)[kRows / 2] = kScoresEarly ? early : own;
    uint32 probs[kRows / 16][4], ds[kRows / 16][4];

    if (!kScoresEarly) {
      if (PART == 0) rings.q.wait_full(shared.full_q);
      start_product<HEAD_DIM, KEPT_K>(s, kept_keys.k, shared.k, rows_q);
    }
    if (PART == 0) rings.o.wait_full(shared.full_o);
    start_product<HEAD_DIM_V, KEPT_V>(dp, kept_keys.v, shared.v, rows_o);
    wgmma_wait<kScoresEarly ? 2 : 1>();  // the scores; dP and, where they were started before it, the last dK go on
    to_probabilities(s, tile, p, lse2, now, masked, lane);
    const bool dead = kLooksForDeadRows ? masked && has_dead_rows(lse2) : masked;
#if DROPOUT
    const Dropout dropout(p.dropout, tile.batch * p.kv_heads * p.group + now.head);
    const Kept kept(dropout, p.dropout.threshold, now.m * (kRows / 16), (tile.first_key + lane.key) / 16);
#else
    const Kept kept;
#endif
    if (!kPacksLate) pack_kept(probs, s, kept);
    if (kSumsEarly) {
      if (dead) clear_dead_rows(rows_q, rows_o, lse2);
      start_sum<HEAD_DIM_V>(sums.dv, probs, rows_o);
      if (kScoresEarly) start_next_scores<PART>(next, kept_keys, last, rings);
      wgmma_wait<kScoresEarly ? 2 : 1>();  // dP
      if (kScoresEarly && PART == 0 && !first && first_thread()) barrier_arrive(shared.empty_q + 8 * rings.q.before());
    } else if (OVERLAP == 1) {
      wgmma_wait_between<0>(p.batch > 0);
    } else {
      wgmma_wait<0>();
    }
    if (kEnds && last && first_thread()) barrier_arrive(shared.empty_v);
    if (!kSumsEarly && dead) clear_dead_rows(rows_q, rows_o, lse2);
    to_score_gradients(dp, s, tile, p, kept, lse2, delta, now, dead, lane);
    pack_tile(ds, dp);
    if (kPacksLate) pack_kept(probs, s, kept);
    if (!kSumsEarly) start_sum<HEAD_DIM_V>(sums.dv, probs, rows_o);
    store_ds(tile_ds + PART * kSlabKv, ds, group * 64);
    fence_async_proxy();
    float dq[32];
    if (kEnds) {
      named_sync(3, 128 * kConsumers);
      start_dq(dq, tile_ds);
    }
    start_sum<HEAD_DIM>(sums.dk, ds, rows_q);
    now.next(1, tile);
    if (!kEnds) return;
    wgmma_wait<2>();  // dV
    if (first_thread()) barrier_arrive(shared.empty_o + 8 * rings.o.at);
    rings.dq.wait_empty(shared.free_space + 8 * group);
    wgmma_wait<1>();  // dQ
    if (last && first_thread()) barrier_arrive(shared.empty_k);
#pragma unroll
    for (int j = 0; j < 8; j++)
      store_shared4(shared.handover + group * (kChunk * 4) + j * 2048 + threadIdx.x % 128 * 16, dq[j * 4], dq[j * 4 + 1],
                    dq[j * 4 + 2], dq[j * 4 + 3]);
    fence_async_proxy();
    named_arrive(4 + group, 160);
    if (!kScoresEarly) {
      wgmma_wait<0>();  // dK
      if (first_thread()) barrier_arrive(shared.empty_q + 8 * rings.q.at);
    }
    rings.q.next();
    rings.o.next();
    rings.ds.next();
    rings.dq.next();
  }
};

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
