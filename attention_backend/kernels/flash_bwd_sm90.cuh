// Attention backward for Hopper, head_dim up to 128. One block per SM draws tiles of BLOCK_N keys until none is left, and
// for each walks the tiles of query rows that see them, for all query heads of their key head; each of two consumer
// warpgroups keeps dK and dV of 64 keys in registers (FlashAttention-3's structure, arXiv 2407.08608, section 3). Of the
// first warpgroup, one warp draws, one loads keys and queries, one values and output gradients, and one adds dQ to global
// memory by bulk reductions, in fragment order (flash_bwd_postprocess_sm90.cuh).
//
// All products of scores are transposed (keys are rows), so that P^T and dS^T feed dV and dK from registers. Reads of
// shared memory are what limits the products: those of 64 x 64 scores need as long for their operands as for themselves.
// So slices of K and V stay in registers as far as there are any.
//
// With APART a third warpgroup computes dQ from what the consumers leave in shared memory: they never wait for each other
// then, and while one of them computes probabilities the tensor cores have the products of the other. At HEAD_DIM 128 there
// are no registers for it, so both consumers compute dQ, and meet in every step, when their sums of dV and dK are on their
// way. Or, with TURNS, one computes all of a tile of rows' dQ, and the other only leaves its dS and goes on: so they are
// never at the same place, and again one computes probabilities while the tensor cores have the other's products.
//
// A warpgroup whose 64 keys none of a step's rows see, the second one in a tile's first step under a causal mask, leaves
// zeros for dS and multiplies for nobody but dQ.
//
// With TERMS_FIRST the products of a step are added to what would be taken from them: scores to -lse, dP to -D.
//
// Compile-time: BF16, HEAD_DIM and HEAD_DIM_V (tile widths; narrower tensors are padded by the TMA), BLOCK_M (64; 128 for
// HEAD_DIM 64), BLOCK_N (128), CLUSTER (1), TILE_SLOTS, KEY_STAGES, Q_STAGES, O_STAGES, DS_STAGES, HANDOVER (2), APART,
// TURNS (BLOCK_M 64), PRODUCER_REGISTERS, CONSUMER_REGISTERS, DQ_REGISTERS (with APART), KEPT_K and KEPT_V (slices of 16
// columns of K and V in registers), FINISHES (dQ on the way: parts/backward_finish.cuh; not with PARTS), TERMS_FIRST (not
// with SOFTCAP, ALIBI or DROPOUT), DETERMINISTIC, PARTS (float32 results of a part of a key head's query heads), KEY_MASK,
// SOFTCAP, ALIBI, DROPOUT, LEFT_BOUNDS (rows may see keys from some key on only). EVERY_STEP, for compute-sanitizer's
// synccheck: warpgroups compute also the steps of which their keys see nothing, as it takes warps that meet at one barrier
// from two places in the code for a mistake.
#define BIAS 0
#include "parts/backward_dq.cuh"
#include "parts/backward_handover.cuh"
#include "parts/backward_loads.cuh"
#include "parts/backward_store.cuh"
#include "parts/backward_wgmma.cuh"
#include "parts/mma_sm80.cuh"
#include "parts/uniform.cuh"

static_assert(BLOCK_N == 64 * kConsumers && HANDOVER == 2, "a warpgroup has 64 keys");
static_assert(kTileChunks * kSlabsK == 2, "dQ of a tile of rows is two chunks");
static_assert(!TURNS || !APART && kTileChunks == 1 && DS_STAGES == kConsumers, "a stage of dS is one warpgroup's turn");

class Consumer {
 public:
  // The maps are of dK and dV, in boxes of 64 keys; there are none with PARTS.
  __device__ __forceinline__ Consumer(const Shared& shared, const TensorMap* map_dk, const TensorMap* map_dv,
                                      const BackwardParams& p)
      : shared(shared),
        map_dk(map_dk),
        map_dv(map_dv),
        p(p),
        group(uniform(threadIdx.x / 128) - 1),
        lane(group * 64),
        per_lse2(-1.f / score_scale_log2(p)) {}

  __device__ __forceinline__ void run() {
    Rings rings;
#pragma unroll 1
    for (uint32 done = 0;; done++) {
      const uint32 slot = done % TILE_SLOTS;
      barrier_wait(shared.full_tile + 8 * slot, done / TILE_SLOTS % 2);
      const SeenKeyTile& tile = shared.tiles[uniform(slot)];
      const int tiles = uniform(tile.tiles);
      if (tiles < 0) break;
      run_tile(tile, tiles, done, rings);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_tile + 8 * slot);
    }
    if (first_thread()) bulk_wait_read();
  }

 private:
  const Shared& shared;
  const TensorMap *const map_dk, *const map_dv;
  const BackwardParams& p;
  const int group;
  const Lane lane;
  const float per_lse2;  // what -lse2 is in scores

  struct Rings {
    RingPlace<Q_STAGES> q;
    RingPlace<O_STAGES> o;
    RingPlace<DS_STAGES> ds;
    RingPlace<1> dq;
    RingPlace<KEY_STAGES> keys;
  };
  // Steps in which every row sees every key.
  struct Whole {
    int begin, end;
    __device__ __forceinline__ bool has(int m) const { return m >= begin && m < end; }
  };
  struct Sums {
    float dk[HEAD_DIM / 2], dv[HEAD_DIM_V / 2];
  };
  // Slices of 16 columns of this warpgroup's keys and values, as first operands.
  struct KeptKeys {
    uint32 k[KEPT_K > 0 ? KEPT_K : 1][4], v[KEPT_V > 0 ? KEPT_V : 1][4];
  };

  // `done`: how many the block had before.
  __device__ __forceinline__ void run_tile(const SeenKeyTile& tile, int tiles, uint32 done, Rings& rings) const {
    Sums sums;
    if (tiles > 0) {
      zero(sums.dk);
      zero(sums.dv);
      rings.keys.wait_full(shared.full_k);
      rings.keys.wait_full(shared.full_v);
      const uint32 k = shared.k + rings.keys.at * kBytesK, v = shared.v + rings.keys.at * kBytesV;
      if (has_dead_keys(tile)) clear_dead_keys(k, v, tile, group * 64);
      KeptKeys kept;
      keep<KEPT_K>(kept.k, k);
      keep<KEPT_V>(kept.v, v);
      if (!APART) {  // where dS and dQ are about to be written gradients may be on their way yet
        if (first_thread()) bulk_wait_read();
        meet();
      }
      Step now(tile);
      const Whole whole = {uniform(tile.whole_begin), uniform(tile.whole_end)};
#pragma unroll 1
      for (int left = tiles; left > 0; left--) {
        if (kTileSteps == 2) step<0>(sums, kept, false, tile, whole, now, rings);
        step<kTileSteps - 1>(sums, kept, left == 1, tile, whole, now, rings);
      }
    }
#if FINISHES
    Pieces pieces(p, tile);
    barrier_wait(shared.full_share, done % 2);
    pieces.load();
#endif
    if (tiles > 0) {
      store(sums, tile, rings);
      rings.keys.next();
    } else {
      zero_keys<HEAD_DIM>(dk_of(tile, p), p.dk_row, group * 64, tile.seqlen_k - tile.first_key, p.head_dim);
      zero_keys<HEAD_DIM_V>(dv_of(tile, p), p.dv_row, group * 64, tile.seqlen_k - tile.first_key, p.head_dim_v);
    }
#if FINISHES
    pieces.finish(shared);
#endif
  }

  // The tile's gradients of keys and values. Stores by threads would wait behind each other; so they go by the TMA, where
  // it writes no other sequence's keys, from shared memory that nobody reads anymore: these keys' values with APART, else
  // where their dS was and what has been added to dQ. (In deterministic mode that would be to wait for others.)
  __device__ __forceinline__ void store(const Sums& sums, const SeenKeyTile& tile, const Rings& rings) const {
    if (!APART) named_sync(kConsumersMeet, 128 * kConsumers);  // nobody reads dS
#if !PARTS
    const bool whole = !p.sequence.cu_seqlens_k || tile.seqlen_k - tile.first_key >= group * 64 + 64;
    if (uniform(whole)) {
#if APART || DETERMINISTIC
      const uint32 space = (APART ? shared.v + rings.keys.at * kBytesV : shared.ds) + group * 64 * 128;
      stage_keys<HEAD_DIM_V, kSlabKv>(sums.dv, space, dv_factor(p));
      meet();
      if (first_thread()) {
        send_keys<kSlabsV, kSlabKv>(map_dv, space, tile, group * 64, p);
        bulk_wait_read();
      }
      meet();
      stage_keys<HEAD_DIM, kSlabKv>(sums.dk, space, dk_factor(p));
      meet();
      if (first_thread()) {
        send_keys<kSlabsK, kSlabKv>(map_dk, space, tile, group * 64, p);
        if (APART) {
          bulk_wait_read();
          barrier_arrive(shared.empty_v + 8 * rings.keys.at);
        }
      }
#else
      constexpr int kSlabHere = 64 * 128;
      static_assert(kSlabsK * kSlabHere <= kChunk * 4, "dK of a warpgroup's keys takes the place of a chunk of dQ");
      const uint32 space_v = shared.ds + group * kSlabHere, space_k = shared.handover + group * (kChunk * 4);
      stage_keys<HEAD_DIM_V, kSlabKv>(sums.dv, space_v, dv_factor(p));
      rings.dq.wait_empty(shared.free_space + 8 * group);
      stage_keys<HEAD_DIM, kSlabHere>(sums.dk, space_k, dk_factor(p));
      meet();
      if (first_thread()) {
        send_keys<kSlabsV, kSlabKv>(map_dv, space_v, tile, group * 64, p);
        send_keys<kSlabsK, kSlabHere>(map_dk, space_k, tile, group * 64, p);
      }
#endif
      return;
    }
#endif
    if (APART && first_thread()) barrier_arrive(shared.empty_v + 8 * rings.keys.at);
    store_dv(sums.dv, tile, p, lane);
    store_dk(sums.dk, tile, p, lane);
  }

  // The warps of this warpgroup.
  __device__ __forceinline__ void meet() const { named_sync(1 + group, 128); }

  __device__ __forceinline__ bool first_thread() const { return threadIdx.x % 128 == 0; }

  template <int KEPT, int SIZE>
  __device__ __forceinline__ void keep(uint32 (&kept)[SIZE][4], uint32 keys) const {
    const uint32 first = keys + group * 64 * 128 + place_of_key();
#pragma unroll
    for (int i = 0; i < KEPT; i++) ldmatrix_x4(kept[i], columns_of_key(first, i % 4) + i / 4 * kSlabKv);
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
        Wgmma<kRows>::mixed(s, kept[i < KEPT ? i : 0], columns, TERMS_FIRST || i != 0);
      else
        Wgmma<kRows>::shared(s, a + i / 4 * (kSlabKv >> 4) + i % 4 * 2, columns, TERMS_FIRST || i != 0);
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

  static __device__ __forceinline__ void clear_dead_rows(uint32 rows_q, uint32 rows_o, uint32 lse2) {
    ::clear_dead_rows(rows_o, kSlabsV, lse2);
    ::clear_dead_rows(rows_q, kSlabsK, lse2);
  }

  // Whether a step's rows come before all that see this warpgroup's keys.
  __device__ __forceinline__ bool sees_nothing(const SeenKeyTile& tile, int m) const {
#ifdef EVERY_STEP
    return false;
#else
    return (m + 1) * kRows <= tile.rows[group * 64].first;
#endif
  }

  // A tile of rows has been read: its places in both rings are free.
  __device__ __forceinline__ void release(const Rings& rings) const {
    barrier_arrive(shared.empty_q + 8 * rings.q.at);
    barrier_arrive(shared.empty_o + 8 * rings.o.at);
  }

  // Leaves a step's dS to the sum of dQ, starts those of dK and dV, and waits until what they read may be overwritten.
  template <int PART, class StartSums>
  __device__ __forceinline__ void hand_on(const uint32 (&ds)[kRows / 16][4], bool last, Rings& rings,
                                          StartSums start_sums) const {
#if APART
    rings.ds.wait_empty(shared.empty_ds);
    store_ds(shared.ds + rings.ds.at * kBytesDs, ds, group * 64);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.full_ds + 8 * rings.ds.at);
    rings.ds.next();
    start_sums();
    wgmma_wait<0>();
    if (PART == kTileSteps - 1 && first_thread()) release(rings);
#else
    const uint32 tile_ds = shared.ds + rings.ds.at * kBytesDs, keys = shared.k + rings.keys.at * kBytesK;
    store_ds(tile_ds + PART * kSlabKv, ds, group * 64);
#if TURNS
    if (const int turn = uniform(rings.ds.at); turn != group) {
      named_arrive(kDsWhole + turn, 128 * kConsumers);
      start_sums();
      wgmma_wait<0>();
      if (first_thread()) release(rings);
    } else {
      start_sums();
      named_sync(kDsWhole + turn, 128 * kConsumers);
      fence_async_proxy();
      wgmma_wait<1>();  // dV: what it read leaves registers for dQ
      float dq[kSlabsK * 32];
      start_dq<kSlabsK>(dq, tile_ds, keys);
      wgmma_wait<1>();  // dK
      if (first_thread()) release(rings);
      for (int c = 0; c < kSlabsK; c++) rings.dq.wait_empty(shared.free_space + 8 * c);
      wgmma_wait<0>();
#pragma unroll
      for (int c = 0; c < kSlabsK; c++) hand_over_dq(dq + c * 32, shared, c, rings.dq.parity);
    }
    if (last && first_thread()) barrier_arrive(shared.empty_k + 8 * rings.keys.at);
#else
    start_sums();
    if (PART < kTileSteps - 1) return;
    float dq[32];
    named_sync(kConsumersMeet, 128 * kConsumers);
    fence_async_proxy();
    // Of 128 rows the group's 64, else of 64 rows its columns.
    constexpr bool kRowsEach = kTileChunks == 2;
    start_dq<1>(dq, tile_ds + (kRowsEach ? group * kSlabKv : 0), keys + (kRowsEach ? 0 : group * kSlabKv));
    wgmma_wait<1>();  // dV and dK
    if (first_thread()) release(rings);
    rings.dq.wait_empty(shared.free_space + 8 * group);
    wgmma_wait<0>();
    if (last && first_thread()) barrier_arrive(shared.empty_k + 8 * rings.keys.at);
    hand_over_dq(dq, shared, group, rings.dq.parity);
#endif
    rings.ds.next();
    rings.dq.next();
#endif
  }

  // After the last product that needs a tile's keys (where dQ is another's), or (VALUES, where no results go there) values.
  template <bool VALUES>
  __device__ __forceinline__ void leave(bool last, const Rings& rings) const {
    const uint32 empty = VALUES ? shared.empty_v : shared.empty_k;
    if (APART != VALUES && last && first_thread()) barrier_arrive(empty + 8 * rings.keys.at);
  }

  // Step PART of a tile of rows, of the last one of the tile of keys with `last`.
  template <int PART>
  __device__ __forceinline__ void step(Sums& sums, const KeptKeys& kept_keys, bool last, const SeenKeyTile& tile,
                                       const Whole& whole, Step& now, Rings& rings) const {
    constexpr bool kEnds = PART == kTileSteps - 1;  // the tile of rows
    constexpr int kOffset = PART * kRows * 128;
    const uint32 rows_q = shared.q + rings.q.at * kBytesQ + kOffset, rows_o = shared.o + rings.o.at * kBytesO + kOffset;
    const bool masked = !whole.has(now.m);

    if (PART == 0) rings.q.wait_full(shared.full_q);
    if (masked && uniform(sees_nothing(tile, now.m))) {
      const uint32 nothing[kRows / 16][4] = {};
      if (PART == 0) rings.o.wait_full(shared.full_o);
      leave<false>(kEnds && last, rings);
      leave<true>(kEnds && last, rings);
      now.next(1, tile);
      hand_on<PART>(nothing, last, rings, [] {});
    } else {
      const uint32 lse2 = shared.lse2 + rings.q.at * kBytesTerms + PART * kRows * 4;
      const uint32 delta = shared.delta + rings.o.at * kBytesTerms + PART * kRows * 4;
      const bool dead = masked && has_dead_rows(lse2);
      float s[kRows / 2], dp[kRows / 2];
      uint32 probs[kRows / 16][4], ds[kRows / 16][4];
      if (TERMS_FIRST) {
        if (PART == 0) rings.o.wait_full(shared.full_o);
        begin_with_terms(s, lse2, per_lse2, lane);
        begin_with_terms(dp, delta, -1.f, lane);
      }
      start_product<HEAD_DIM, KEPT_K>(s, kept_keys.k, shared.k + rings.keys.at * kBytesK, rows_q);
      if (!TERMS_FIRST && PART == 0) rings.o.wait_full(shared.full_o);
      start_product<HEAD_DIM_V, KEPT_V>(dp, kept_keys.v, shared.v + rings.keys.at * kBytesV, rows_o);
      Terms terms;
      if (APART) terms.load(lse2, lane);  // without, there are no registers for them yet
      wgmma_wait<1>();                    // the scores
      if (!APART) terms.load(lse2, lane);
      leave<false>(kEnds && last, rings);
      to_probabilities(s, tile, tile.rows, p, lse2, terms, now, masked, dead, lane);
#if DROPOUT
      const Dropout dropout(p.dropout, tile.batch * p.kv_heads * p.group + now.head);
      const Kept kept(dropout, p.dropout.threshold, now.m * (kRows / 16), (tile.first_key + lane.key) / 16);
#else
      const Kept kept;
#endif
      pack_kept(probs, s, kept);
      wgmma_wait_between<0>(p.batch > 0);
      leave<true>(kEnds && last, rings);
      if (dead) clear_dead_rows(rows_q, rows_o, lse2);
      to_score_gradients(dp, s, tile, p, kept, lse2, delta, now, dead, lane);
      pack_tile(ds, dp);
      now.next(1, tile);
      hand_on<PART>(ds, last, rings, [&] {
        start_sum<HEAD_DIM_V>(sums.dv, probs, rows_o);
        start_sum<HEAD_DIM>(sums.dk, ds, rows_q);
      });
    }
    if (kEnds) {
      rings.q.next();
      rings.o.next();
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_bwd_sm90(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                   const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o,
                   const __grid_constant__ TensorMap map_lse2, const __grid_constant__ TensorMap map_delta,
#if !PARTS
                   const __grid_constant__ TensorMap map_dk, const __grid_constant__ TensorMap map_dv,
#endif
                   const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) char memory[];
  const Shared shared(memory);
  start(shared, p);
  if (threadIdx.x < 128) {
    registers_lower<PRODUCER_REGISTERS>();
    const Loads<true> of_keys(shared, p, &map_k, &map_q, &map_lse2);
    const Loads<false> of_values(shared, p, &map_v, &map_o, &map_delta);
    switch (uniform(threadIdx.x / 32)) {
      case 0:
        load_tiles<true, kAdders == 2>(shared, p, of_keys, of_values);
        break;
      case 1:
        add_dq<0>(shared, p);
        break;
      case 2:
        if (kAdders == 2)
          add_dq<1>(shared, p);
        else
          load_tiles<false, true>(shared, p, of_keys, of_values);
        break;
      case 3:
        draw_tiles(shared, p);
        break;
    }
    return;
  }
#if APART
  if (threadIdx.x >= kThreads - 128) {
    registers_lower<DQ_REGISTERS>();
    sum_dq(shared);
    return;
  }
#endif
  registers_raise<CONSUMER_REGISTERS>();
#if PARTS
  Consumer(shared, nullptr, nullptr, p).run();
#else
  Consumer(shared, &map_dk, &map_dv, p).run();
#endif
}
