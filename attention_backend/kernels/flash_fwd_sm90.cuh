// Attention forward for Hopper: FlashAttention-3's structure (arXiv 2407.08608, sections 3.1 and 3.2) in plain CUDA and
// PTX, made persistent. One block per SM draws tiles of query rows until none is left. Of its first warpgroup, one warp
// draws the tiles (parts/forward_work.cuh) and three keep rings of query, key and value tiles filled by TMA, across tiles
// (parts/forward_loads.cuh).
// Each other warpgroup owns 64 query rows. It starts the product of the next scores before the product of these with the
// values is done; the warpgroups take turns at the tensor cores. Where they walk all steps of a tile together, its
// last product is followed by the next tile's first scores, which are made while it is written.
//
// A short tile runs through the code of all warps once in a few thousand cycles, so how long that is counts as much as what
// it does (docs/kernels.md): what a problem has not is left out when it is compiled, and what several places do is one code.
//
// Key tiles are walked from right to left: those that some row sees only in part first and last, those that all see
// between, in loops of their own. With turns, the softmax of a tile waits for the product with the values of the tile
// before, as another warpgroup has the tensor cores then; with OVERLAP, always so without turns, it runs beside it. Terms
// may be far above one: levels follow a row's scores, and its output is rescaled, only where they would be too large
// (parts/forward_rows.cuh).
//
// Compile-time: BF16, HEAD_DIM and HEAD_DIM_V (tile widths, multiples of 16; narrower tensors are padded by the TMA),
// BLOCK_M, BLOCK_N, STAGES, Q_STAGES, TURNS, OVERLAP, OWN_KEYS (each warpgroup leaves out what none of its own rows sees),
// CLUSTER (blocks that load keys for each other; 1: none do), CLUSTER_HEADS (of neighbouring query heads, else rows),
// PRODUCER_REGISTERS, CONSUMER_REGISTERS, PAGED (PAGE_ROWS keys a copy), FP8_PAGES (of e4m3, PAGED:
// parts/forward_convert.cuh; RAW_STAGES), PACK (rows of all query heads of a key head in one tile), LEFT_BOUNDS (rows may
// see keys from some key on only), SPLIT (partial results), SPARSE (lists of blocks; BLOCK_M 128), KEY_MASK, SOFTCAP, ALIBI,
// BIAS, DROPOUT.
#include "parts/element.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"
#include "parts/softmax.cuh"
#include "parts/tma.cuh"
#include "parts/uniform.cuh"
#include "parts/wgmma_sm90.cuh"

#define DENSE_KEYS (!PAGED)  // of forward_work
#include "parts/forward_loads.cuh"
#if FP8_PAGES
#include "parts/forward_convert.cuh"
#endif
#include "parts/forward_masks.cuh"
#include "parts/forward_rows.cuh"

// Starts s = q k^T of one tile, or of its first keys.
template <int SCORES>
__device__ __forceinline__ void start_scores(float (&s)[SCORES], uint64 a, uint64 b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++)
    Wgmma<SCORES * 2>::shared(s, a + i / 4 * (kSlabQ >> 4) + i % 4 * 2, b + i / 4 * (kSlabKv >> 4) + i % 4 * 2, i != 0);
  wgmma_commit();
}

#if FP8_PAGES
template <int SCORES>
__device__ __forceinline__ void start_scores(float (&s)[SCORES], const Queries& q, uint64 b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++) Wgmma<SCORES * 2>::mixed(s, q.x[i], b + i / 4 * (kSlabKv >> 4) + i % 4 * 2, i != 0);
  wgmma_commit();
}
#endif

// Starts acc += p v of one tile, or acc = p v of a first one.
__device__ __forceinline__ void start_output(float (&acc)[HEAD_DIM_V / 2], const uint32 (&p)[BLOCK_N / 16][4], uint32 v,
                                             bool first) {
  const uint64 b = wgmma_descriptor(v, kSlabKv);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; i++) Wgmma<HEAD_DIM_V>::registers(acc, p[i], b + i * 128, i > 0 || !first);
  wgmma_commit();
}

// What is known of a step when it is compiled: the code of masks, far longer than what it masks, stays out of the loop
// over tiles that are seen whole.
enum Mask { kWhole, kMasked, kMaybe };

// Whether the end of a tile overlaps the first scores of the next, whose queries must be there then. Not where a warpgroup
// leaves out steps: those that begin with others wait for each other, and the code of all ways is long.
constexpr bool kOverlapsTiles = Q_STAGES > 1 && !FP8_PAGES && !OWN_KEYS;

class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Shared& shared, const HopperParams& p)
      : shared(shared), p(p), group(uniform(threadIdx.x / 128) - 1) {
    local_row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    column = threadIdx.x % 4 * 2;
  }

  __device__ __forceinline__ void run() {
    float acc[HEAD_DIM_V / 2];
    uint32 probs[BLOCK_N / 16][4];
    Rows rows;
    zero(acc);
    clear(probs);
    if (TURNS && group == 0) named_arrive(1, 256);  // the first turn
    int n = 0;  // steps so far, of all tiles
    Steps now = {};
#pragma unroll 1
    for (int t = 0;; t++) {
      if (kOverlapsTiles) {
        finish(acc, probs, rows, now, t - 1, n);  // begins tile t
        if (now.all == 0) return;
      } else {
        now = next_tile(t);
        if (now.all == 0) return;
        pass_over(now, t, n);
        n = uniform(n + now.first);  // the compiler does not find the sum so by itself
        if (now.first == now.all) {
          end_tile(t);
          continue;
        }
        begin(acc, probs, rows, now, t, n);
      }
      n = uniform(n + 1);
      int i = now.first + 1;
#if SPARSE
#pragma unroll 1
      for (; i < now.all; i++, n++) {
        if (sees_mask(now, t, i, n))
          step<true, kMasked>(acc, probs, rows, now, t, i, n);
        else
          step<true, kWhole>(acc, probs, rows, now, t, i, n);
      }
#else
#pragma unroll 1
      for (int masked_end = now.masked_end;; masked_end = all_steps(now, t)) {
#pragma unroll 1
        for (; i < masked_end; i++, n++) step<true, kMasked>(acc, probs, rows, now, t, i, n);
        if (i >= all_steps(now, t)) break;
#pragma unroll 1
        for (; i < now.whole_end; i++, n++) step<true, kWhole>(acc, probs, rows, now, t, i, n);
        if (i >= all_steps(now, t)) break;
      }
#endif
      if (!kOverlapsTiles) finish(acc, probs, rows, now, t, n);
    }
  }

 private:
  const Shared& shared;
  const HopperParams& p;
  const int group;
  int local_row, column;

  static __device__ __forceinline__ void zero(float (&acc)[HEAD_DIM_V / 2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; i++) acc[i] = 0.f;
  }

  static __device__ __forceinline__ void clear(uint32 (&probs)[BLOCK_N / 16][4]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) probs[i / 4][i % 4] = 0;
  }

  __device__ __forceinline__ void take_turn() const {
    if (TURNS) named_sync(1 + group, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (TURNS) named_arrive(1 + (group + 1) % kConsumers, 256);
  }

  // Gives a stage of keys or values back to whoever fills it: all blocks of the cluster.
  __device__ __forceinline__ void release(uint32 empty) const {
#if CLUSTER > 1
    if (threadIdx.x % 128 < CLUSTER) barrier_arrive_at(empty, threadIdx.x % 128);
#else
    if (threadIdx.x % 128 == 0) barrier_arrive(empty);
#endif
  }

  // By each warp for its own rows.
  __device__ __forceinline__ void release_queries(int t) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_q + 8 * stage<Q_STAGES>(t));
  }

  // Where this warpgroup's rows of tile t are.
  __device__ __forceinline__ uint32 my_queries(int t) const {
    return shared.q + stage<Q_STAGES>(t) * kBytesQ + group * 64 * 128;
  }

  __device__ __forceinline__ uint64 queries_of(int t) const { return wgmma_descriptor(uniform(my_queries(t)), 16); }
  __device__ __forceinline__ uint64 keys_of(int n) const {
    return wgmma_descriptor(uniform(shared.k + stage<STAGES>(n) * kBytesK), 16);
  }

  __device__ __forceinline__ void end_tile(int t) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_tile + 8 * stage<kTileSlots>(t));
  }

  // What the loop over a tile's steps needs of it, in uniform registers.
  struct Steps {
    int all, masked_end, whole_end, first, half;
  };

  // Beside queries in registers there is none for this.
  __device__ __forceinline__ int all_steps(const Steps& steps, int t) const {
    return FP8_PAGES ? shared.tiles[stage<kTileSlots>(t)].steps : steps.all;
  }

  __device__ __forceinline__ Steps next_tile(int t) const {
    wait_full<kTileSlots>(shared.full_tile, t);
    const Tile& tile = shared.tiles[stage<kTileSlots>(t)];
#if OWN_KEYS
    const OwnSteps& own = tile.own[group];
    const int first = uniform(own.first), half = uniform(own.half);
#else
    const Tile& own = tile;
    constexpr int first = 0, half = 0;
#endif
    const int all = uniform(tile.steps);
    return {all, uniform(own.masked_end), LEFT_BOUNDS || SPARSE ? uniform(own.whole_end) : all, first, half};
  }

  // Gives back the stages of the steps in front of this warpgroup's first one, of tile t and from the n-th of all on. It
  // waits for them to be full: an arrival before that would count for what the stage held before. All its warps do, before
  // one arrives for them: a stage that is filled again meanwhile looks empty to a warp that is late.
  __device__ __forceinline__ void pass_over(const Steps& steps, int t, int n) const {
#if OWN_KEYS
#pragma unroll 1
    for (const int end = n + steps.first; n < end; n++) {
      take_turn();
      pass_turn();
      wait_full<STAGES>(shared.full_k, n);
      wait_full<STAGES>(shared.full_v, n);
      meet();
      if (threadIdx.x % 128 == 0) {
        barrier_arrive(shared.empty_k + 8 * stage<STAGES>(n));
        barrier_arrive(shared.empty_v + 8 * stage<STAGES>(n));
      }
    }
    if (steps.first < steps.all) return;
    wait_full<Q_STAGES>(shared.full_q, t);
    release_queries(t);
#endif
  }

  // The warps of this warpgroup.
  __device__ __forceinline__ void meet() const { named_sync(1 + kConsumers + threadIdx.x / 128, 128); }

  // Whether step `i` of tile t, the n-th of all, has keys that some row of the tile may not see.
  __device__ __forceinline__ bool sees_mask(const Steps& steps, int t, int i, int n) const {
#if SPARSE
    wait_full<STAGES>(shared.full_k, n);
    if (uniform(shared.listed[stage<STAGES>(n)].key + BLOCK_N > shared.tiles[stage<kTileSlots>(t)].seq.stop)) return true;
#endif
    return i < steps.masked_end || i >= steps.whole_end;
  }

  // Step `i` of tile t, the n-th of all. PENDING (not the first): the values of the step before are added meanwhile. HALF: no
  // row of this warpgroup sees the upper half of its keys; their probabilities are zeros.
  template <bool PENDING, Mask MASK, bool HALF = false>
  __device__ __forceinline__ void step(float (&acc)[HEAD_DIM_V / 2], uint32 (&probs)[BLOCK_N / 16][4], Rows& rows,
                                       const Steps& steps, int t, int i, int n) const {
    float s[HALF ? BLOCK_N / 4 : BLOCK_N / 2];
#if FP8_PAGES
    const Queries& tile_q = rows.queries;
#else
    const uint64 tile_q = queries_of(t);
#endif
    const uint64 tile_k = keys_of(n);
    wait_full<STAGES>(shared.full_k, n);
    take_turn();
    start_scores(s, tile_q, tile_k);
    if (PENDING) {
      const uint32 tile_v = uniform(shared.v + stage<STAGES>(n - 1) * kBytesV);
      wait_full<STAGES>(shared.full_v, n - 1);
      start_output(acc, probs, tile_v, i == steps.first + 1);
    }
    pass_turn();
    to_terms<PENDING, MASK>(s, acc, probs, rows, steps, t, i, n);
  }

  // The scores of step `i` of tile t, the n-th of all, on their way, become terms.
  template <bool PENDING, Mask MASK, int SCORES>
  __device__ __forceinline__ void to_terms(float (&s)[SCORES], float (&acc)[HEAD_DIM_V / 2],
                                           uint32 (&probs)[BLOCK_N / 16][4], Rows& rows, const Steps& steps, int t, int i,
                                           int n) const {
    const Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    float correction[2];
    const Score score(p.forward.score, tile.batch, tile.head);
    int key0 = tile.end_key - (i + 1) * BLOCK_N;
#if SPARSE
    const uint4* bits = nullptr;
    const ListedStep listed = shared.listed[stage<STAGES>(n)];
    key0 = listed.key;
    if (listed.bits >= 0) bits = p.sparse.bits + static_cast<int64>(listed.bits) * 128;
#endif
#if KEY_MASK
    const KeyBits shown(p.forward.score.key_mask + tile.batch * p.forward.score.key_mask_batch, key0 + column, tile.seq.stop);
#endif
    const int row0 = tile.first_row + local_row;
    const bool masked = MASK == kMasked || (MASK == kMaybe && sees_mask(steps, t, i, n));
    wgmma_wait<PENDING ? 1 : 0>();
    if (SPARSE) __syncwarp();
#if CLUSTER > 1
    release(shared.empty_k + 8 * stage<STAGES>(n));
#else
    if (threadIdx.x % (128 * kConsumers / kKeyReaders) == 0) barrier_arrive(shared.empty_k + 8 * stage<STAGES>(n));
#endif
    if (Q_STAGES == 1 && !FP8_PAGES && i == steps.all - 1) release_queries(t);
#if SCORE_CHANGES
#pragma unroll
    for (int x = 0; x < SCORES; x++)
      s[x] = score(s[x], row0 + x / 2 % 2 * 8, key0 + column + x / 4 * 8 + x % 2, tile.seq);
#endif
#if KEY_MASK
#pragma unroll
    for (int x = 0; x < BLOCK_N / 2; x++)
      if (!shown.sees(x / 4, x % 2)) s[x] = -kInfinity;
#endif
    if (masked) mask_scores(s, tile, p, row0, key0, column);
#if SPARSE
    if (masked && bits) mask_listed(s, bits, row0, key0, column);
#endif
    if (PENDING && !OVERLAP) wgmma_wait<0>();
    const bool rescale = softmax_tile<MASK != kWhole || KEY_MASK || BIAS>(s, rows, correction, score);
    if (PENDING) {
      if (OVERLAP) wgmma_wait_behind(p.work.batch > 0);
      release(shared.empty_v + 8 * stage<STAGES>(n - 1));
      if (rescale) {
#pragma unroll
        for (int x = 0; x < HEAD_DIM_V / 2; x++) acc[x] *= correction[x / 2 % 2];
      }
    }
    pack_tile(probs, s);
#if DROPOUT
    const Dropout dropout(p.dropout, tile.batch * p.work.heads + tile.head);
    dropout(probs, row0 / 16, key0 / 16);
#endif
    if (KEY_MASK || (masked && ((LEFT_BOUNDS && key0 < tile.held_low) || key0 + BLOCK_N > tile.held_high))) {
      wait_full<STAGES>(shared.full_v, n);
      clear_values(shared.v + stage<STAGES>(n) * kBytesV, key0, tile, p);
    }
  }

  // Step `first` of tile t, the n-th of all, with nothing before it.
  __device__ __forceinline__ void begin(float (&acc)[HEAD_DIM_V / 2], uint32 (&probs)[BLOCK_N / 16][4], Rows& rows,
                                        const Steps& steps, int t, int n) const {
    rows.clear();
    wait_full<Q_STAGES>(shared.full_q, t);
#if FP8_PAGES
    rows.queries.convert(my_queries(t), shared.tiles[stage<kTileSlots>(t)], p);
    release_queries(t);
#endif
    if (kHalfSteps && steps.half)
      step<false, kMaybe, kHalfSteps>(acc, probs, rows, steps, t, steps.first, n);
    else
      step<false, kMaybe>(acc, probs, rows, steps, t, steps.first, n);
  }

  // Adds the last values of tile t, of step n - 1, and writes it. Where tiles overlap, the next one's first scores are made
  // meanwhile, and are terms at the end; `now` becomes its steps. No product is in a branch, nor the wait for one, as the
  // compiler would let each wait for the others: in front of the first tile (t is -1) and behind the last they are of
  // whatever there is, and nobody reads them.
  __device__ __forceinline__ void finish(float (&acc)[HEAD_DIM_V / 2], uint32 (&probs)[BLOCK_N / 16][4], Rows& rows,
                                         Steps& now, int t, int n) const {
    const Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    const bool real = !kOverlapsTiles || t >= 0;
    float s[BLOCK_N / 2], factor[2] = {0.f, 0.f};
    const uint32 tile_v = uniform(shared.v + stage<STAGES>(n - 1) * kBytesV);
    if (real) wait_full<STAGES>(shared.full_v, n - 1);
    if (kOverlapsTiles) take_turn();
    start_output(acc, probs, tile_v, all_steps(now, t) == now.first + 1);
    if (kOverlapsTiles) {
      now = next_tile(t + 1);
      if (now.all > 0) {
        wait_full<Q_STAGES>(shared.full_q, t + 1);
        wait_full<STAGES>(shared.full_k, n);
      }
      start_scores(s, queries_of(t + 1), keys_of(n));
      pass_turn();
    }
    if (real) end_rows(factor, rows, tile, p, Score(p.forward.score, tile.batch, tile.head), local_row);
    wgmma_wait<kOverlapsTiles ? 1 : 0>();
    if (real) {
      release(shared.empty_v + 8 * stage<STAGES>(n - 1));
      int row = local_row;
      asm volatile("" : "+r"(row));  // else which rows are real is kept from above, in a register that some tiles lack
      if (kStoresByQueries) {
        if (!kOverlapsTiles || !TURNS) meet();  // no warp's scores are made any more; the turn has said so
        store_by_queries(acc, factor, tile, p, row / 16 * 16, my_queries(t) + threadIdx.x % 128 / 32 * 16 * 128);
      } else {
        store_rows(acc, factor, tile, p, row);
      }
      if (Q_STAGES > 1) release_queries(t);
      end_tile(t);
    }
    if (!kOverlapsTiles) return;
    if (now.all == 0) {
      wgmma_wait<0>();
      return;
    }
    rows.clear();
    to_terms<false, kMaybe>(s, acc, probs, rows, now, t + 1, 0, n);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    flash_fwd_sm90(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                   const __grid_constant__ TensorMap map_v, const __grid_constant__ HopperParams p) {
  extern __shared__ __align__(1024) char memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) shared.init_barriers();
#if CLUSTER > 1
  cluster_sync();
#else
  __syncthreads();
#endif
  if (threadIdx.x < 128) {
    registers_lower<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < 2) load_tiles(shared, warp == 0 ? &map_k : &map_v, warp == 0, p);
    if (warp == 2) load_queries(shared, &map_q, p);
    if (warp == 3) draw_tiles(shared, p);
#if FP8_PAGES
  } else if (threadIdx.x >= kThreads - 128) {
    registers_lower<PRODUCER_REGISTERS>();
    if (__shfl_sync(~0u, threadIdx.x % 128 / kConverters, 0) == 0)
      convert_tiles<true>(shared);
    else
      convert_tiles<false>(shared);
#endif
  } else {
    registers_raise<CONSUMER_REGISTERS>();
    Consumer(shared, p).run();
  }
#if CLUSTER > 1
  cluster_sync();  // others may still arrive here, and write
#endif
}
